// The bootstrap server under many idle connections and requests at once; endpoints over very many
// rooms.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "kvferry/bootstrap_server.h"
#include "kvferry/endpoint.h"
#include "src/plan/geometry.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define KVF_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define KVF_SANITIZED 1
#endif
#endif
#ifndef KVF_SANITIZED
#define KVF_SANITIZED 0
#endif

namespace kvferry {
namespace {

using Clock = std::chrono::steady_clock;

class Connection {
 public:
  explicit Connection(std::uint16_t port) : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(port);
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ = fd_ >= 0 && connect(fd_, reinterpret_cast<sockaddr*>(&to), sizeof to) == 0;
  }
  Connection(Connection&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)), connected_(other.connected_) {}
  ~Connection() {
    if (fd_ >= 0) close(fd_);
  }
  [[nodiscard]] bool connected() const { return connected_; }
  // One request on the open connection; the whole answer, or nothing.
  std::string ask(const std::string& request) {
    if (send(fd_, request.data(), request.size(), MSG_NOSIGNAL) !=
        static_cast<ssize_t>(request.size()))
      return "";
    std::string answer;
    char chunk[4096];
    for (;;) {
      const auto head = answer.find("\r\n\r\n");
      if (head != std::string::npos) {
        const auto length = answer.find("Content-Length: ");
        if (length != std::string::npos &&
            answer.size() >= head + 4 + std::stoul(answer.substr(length + 16)))
          return answer;
      }
      const ssize_t n = recv(fd_, chunk, sizeof chunk, 0);
      if (n <= 0) return "";
      answer.append(chunk, static_cast<std::size_t>(n));
    }
  }

 private:
  int fd_;
  bool connected_ = false;
};

const std::string kHealth = "GET /health HTTP/1.1\r\nHost: x\r\n\r\n";

TEST(BootstrapLoad, IdleConnectionsAndRequestsAtOnceLoseNothing) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  ASSERT_GT(limit.rlim_cur, 4200U) << "this machine allows too few descriptors";
  auto server = BootstrapServer::create("127.0.0.1", 0, Settings{});
  ASSERT_TRUE(server.ok());
  std::vector<Connection> idle;
  for (int i = 0; i < 2000; ++i) {
    idle.emplace_back((*server)->port());
    ASSERT_TRUE(idle.back().connected()) << i;
    ASSERT_NE(idle.back().ask(kHealth).find("200 OK"), std::string::npos) << i;
  }
  const int requests = KVF_SANITIZED ? 400 : 2000;
  std::vector<std::thread> clients;
  std::atomic<int> answered{0};
  const auto begin = Clock::now();
  for (int c = 0; c < 4; ++c) {
    clients.emplace_back([&] {
      Connection connection((*server)->port());
      const std::string body = "{\"bootstrap_room\": 7, \"dp_rank\": 1}";
      const std::string post = "POST /register_dp_rank HTTP/1.1\r\nHost: x\r\nContent-Length: " +
                               std::to_string(body.size()) + "\r\n\r\n" + body;
      for (int i = 0; i < requests; ++i)
        answered +=
            connection.ask(i % 2 == 0 ? post : kHealth).find(" 200 ") != std::string::npos ? 1 : 0;
    });
  }
  for (std::thread& client : clients) client.join();
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  EXPECT_EQ(answered, 4 * requests);
  for (Connection& connection : idle)
    ASSERT_NE(connection.ask(kHealth).find("200 OK"), std::string::npos);
  std::cout << "[ load     ] 2000 idle connections, " << 4 * requests / seconds << " requests/s\n";
}

TEST(BootstrapServerErrors, APortInUseIsNamedAndALargeBodyIsRefused) {
  auto server = BootstrapServer::create("127.0.0.1", 0, Settings{});
  ASSERT_TRUE(server.ok());
  const auto second = BootstrapServer::create("127.0.0.1", (*server)->port(), Settings{});
  ASSERT_FALSE(second.ok());
  EXPECT_NE(second.status().message().find("127.0.0.1:" + std::to_string((*server)->port())),
            std::string::npos)
      << second.status().message();
  Connection connection((*server)->port());
  const std::string body(3 << 20, 'x');
  EXPECT_NE(connection
                .ask("PUT /route HTTP/1.1\r\nHost: x\r\nContent-Length: " +
                     std::to_string(body.size()) + "\r\n\r\n" + body)
                .find(" 413 "),
            std::string::npos);
  auto v6 = BootstrapServer::create("[::1]", 0, Settings{});
  EXPECT_TRUE(v6.ok()) << v6.status().to_string();
}

std::size_t resident_kib() {
  std::ifstream statm("/proc/self/statm");
  std::size_t size = 0, resident = 0;
  statm >> size >> resident;
  return resident * 4;
}
std::size_t entries(const char* folder) {
  return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(folder), {}));
}

TEST(Soak, OpeningAndClearingManyRoomsLeavesNothingBehind) {
  const std::uint64_t rooms = KVF_SANITIZED ? 4000 : 200000, warm_up = rooms / 10;
  const plan::Geometry geometry{.name = "t",
                                .layers = 1,
                                .attention = {},
                                .kv_heads = 1,
                                .key_head_bytes = 16,
                                .value_head_bytes = 16,
                                .dtype = DType::kBFloat16,
                                .aux_bytes = {16}};
  Layout source = plan::layout_of_rank(geometry, {}, 1, 8, 4), target = source;
  std::vector<std::uint8_t> source_memory(plan::place_slabs(source, 0, 64), 7),
      target_memory(source_memory.size(), 0xEE);
  plan::place_slabs(source, reinterpret_cast<std::uint64_t>(source_memory.data()), 64);
  plan::place_slabs(target, reinterpret_cast<std::uint64_t>(target_memory.data()), 64);
  auto server = BootstrapServer::create("127.0.0.1", 0, Settings{});
  const Address bootstrap{"127.0.0.1", (*server)->port()};
  PrefillOptions p;
  p.layout = source;
  p.total_kv_heads = 1;
  p.stage_layers = 1;
  p.bootstrap = bootstrap;
  p.log_level = LogLevel::kOff;
  DecodeOptions d;
  d.layout = target;
  d.total_kv_heads = 1;
  d.log_level = LogLevel::kOff;
  auto prefill = PrefillEndpoint::create(p);
  auto decode = DecodeEndpoint::create(d);
  ASSERT_TRUE(prefill.ok() && decode.ok());
  while (!(*prefill)->registered()) std::this_thread::yield();

  const auto must = [](const auto& act) {  // a full inbox is back-pressure: try again
    for (;;) {
      auto result = act();
      if (result.ok()) return result;
      EXPECT_EQ(result.status().code(), Code::kExhausted) << result.status().to_string();
      std::this_thread::yield();
    }
  };
  std::uint64_t succeeded = 0;
  std::size_t kib = 0, descriptors = 0, threads = 0;
  for (std::uint64_t room = 1; room <= rooms; ++room) {
    if (room == warm_up) {
      kib = resident_kib();
      descriptors = entries("/proc/self/fd");
      threads = entries("/proc/self/task");
    }
    auto sender = must([&] { return (*prefill)->open(RoomId{room}); });
    auto receiver = must([&] { return (*decode)->open(RoomId{room}, bootstrap); });
    if (room % 50 == 0) {  // one in fifty is moved to its end
      ASSERT_TRUE(receiver->init().ok() &&
                  receiver->send_metadata(std::vector<PageIndex>{1}, 0).ok());
      ASSERT_TRUE(sender->init(1, 0).ok() && sender->send(std::vector<PageIndex>{2}).ok());
      while (!is_terminal(receiver->poll()) || !is_terminal(sender->poll()))
        std::this_thread::yield();
      succeeded += receiver->poll() == RoomState::kSuccess ? 1 : 0;
    }
    sender->clear();
    receiver->clear();
  }
  EXPECT_EQ(succeeded, rooms / 50);
  // Everything that was posted has been served when an answer comes back.
  EXPECT_NE((*prefill)->metrics().find("kvferry_prefill_rooms_open 0\n"), std::string::npos)
      << (*prefill)->metrics();
  EXPECT_NE((*decode)->metrics().find("kvferry_decode_rooms_open 0\n"), std::string::npos)
      << (*decode)->metrics();
  EXPECT_NE((*decode)->metrics().find("kvferry_decode_leases 0\n"), std::string::npos);
  EXPECT_LE(entries("/proc/self/fd"),
            descriptors + 2);  // a call to the bootstrap server may be under way
  EXPECT_EQ(entries("/proc/self/task"), threads);
  if (!KVF_SANITIZED) {
    EXPECT_LE(resident_kib(), kib + 8192) << "resident size grew from " << kib << " KiB";
  }
}

}  // namespace
}  // namespace kvferry
