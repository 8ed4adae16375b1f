// One peer behind a line of 1 MB/s, in either direction; the others do not notice.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "src/base/random.h"
#include "src/data/tcp/tcp_plane.h"

namespace kvferry::conformance {
namespace {

constexpr int kPatienceMs = 5000;
constexpr std::uint64_t kLineBytesPerSecond = 1'000'000;

// Carries bytes between whoever connects to it and `port`, towards the port no faster than the
// line.
class SlowLine {
 public:
  explicit SlowLine(std::uint16_t port) : to_(port), listener_(socket(AF_INET, SOCK_STREAM, 0)) {
    // As little as the kernel allows waits on the line itself.
    const int small = 4096;
    setsockopt(listener_, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
    sockaddr_in at = local(0);
    socklen_t size = sizeof at;
    EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&at), sizeof at), 0);
    EXPECT_EQ(listen(listener_, 4), 0);
    getsockname(listener_, reinterpret_cast<sockaddr*>(&at), &size);
    port_ = ntohs(at.sin_port);
    thread_ = std::thread([this] { run(); });
  }
  ~SlowLine() {
    stop_ = true;
    thread_.join();
    for (const auto& pair : pairs_) {
      close(pair.near);
      close(pair.far);
    }
    close(listener_);
  }
  [[nodiscard]] std::uint16_t port() const { return port_; }
  [[nodiscard]] std::uint64_t carried() const { return carried_; }

 private:
  struct Pair {
    int near, far;
  };
  static sockaddr_in local(std::uint16_t port) {
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_port = htons(port);
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return at;
  }
  void run() {
    const auto begin = std::chrono::steady_clock::now();
    while (!stop_) {
      pollfd fd{listener_, POLLIN, 0};
      if (::poll(&fd, 1, 2) > 0) {
        const int near = accept(listener_, nullptr, nullptr), far = socket(AF_INET, SOCK_STREAM, 0);
        const sockaddr_in at = local(to_);
        EXPECT_EQ(connect(far, reinterpret_cast<const sockaddr*>(&at), sizeof at), 0);
        pairs_.push_back({near, far});
      }
      const auto allowed = static_cast<std::uint64_t>(
          std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() *
          static_cast<double>(kLineBytesPerSecond));
      char bytes[1500];
      for (const auto& pair : pairs_) {
        for (ssize_t n = 1; n > 0;) {
          n = carried_ < allowed ? recv(pair.near, bytes, sizeof bytes, MSG_DONTWAIT) : 0;
          if (n > 0)
            carried_ += static_cast<std::uint64_t>(
                send(pair.far, bytes, static_cast<std::size_t>(n), MSG_NOSIGNAL));
        }
        const ssize_t n = recv(pair.far, bytes, sizeof bytes, MSG_DONTWAIT);
        if (n > 0) (void)!send(pair.near, bytes, static_cast<std::size_t>(n), MSG_NOSIGNAL);
      }
    }
  }

  const std::uint16_t to_;
  const int listener_;
  std::uint16_t port_ = 0;
  std::vector<Pair> pairs_;
  std::atomic<bool> stop_{false};
  std::atomic<std::uint64_t> carried_{0};
  std::thread thread_;
};

class SlowPeer : public testing::Test {
 protected:
  static constexpr std::uint32_t kItems = 64, kItemBytes = 32 << 10;
  static constexpr Token kToken{3, 4};
  // 2 GB: at the line's speed more than half an hour.
  static constexpr int kLargeRuns = 1000;
  static constexpr std::uint64_t kSmallWrites = 50;

  std::unique_ptr<data::StreamPlane> make() {
    auto plane = data::create_tcp_plane(
        {.listen_host = "127.0.0.1", .listen_port = 0, .public_host = {}}, settings_, entropy_);
    EXPECT_TRUE(plane.ok()) << plane.status().to_string();
    return std::move(*plane);
  }
  void lend(DataPlane& plane, const std::vector<std::uint8_t>& memory) const {
    std::vector<std::uint32_t> all(kItems);
    for (std::uint32_t i = 0; i < kItems; ++i) all[i] = i;
    const auto slabs = std::make_shared<const std::vector<GrantSlab>>(std::vector<GrantSlab>{
        {reinterpret_cast<std::uint64_t>(memory.data()), kItemBytes, kItemBytes, kItems}});
    ASSERT_TRUE(plane.grant({GrantId{1}, kToken, false, {GrantGroup{slabs, all}}}).ok());
  }
  CopyPlan plan(const std::vector<std::uint8_t>& to, int runs, std::uint32_t count) const {
    CopyPlan plan{CopyGroup{{Lane{.source = reinterpret_cast<std::uint64_t>(from_.data()),
                                  .target = reinterpret_cast<std::uint64_t>(to.data()),
                                  .source_item = kItemBytes,
                                  .target_item = kItemBytes,
                                  .rows = 1,
                                  .bytes = kItemBytes}},
                            {}}};
    for (int i = 0; i < runs; ++i) plan[0].runs.push_back(kvferry::Run{0, 0, count});
    return plan;
  }
  // The plane's address with the line's port in place of its own.
  static PlaneAddress through(const SlowLine& line, const data::StreamPlane& plane) {
    PlaneAddress address = plane.address();
    const std::string own = ":" + std::to_string(port_of(plane));
    return address.replace(address.find(own), own.size(), ":" + std::to_string(line.port()));
  }
  static std::uint16_t port_of(const data::StreamPlane& plane) {
    const std::string name = plane.session_name();
    return static_cast<std::uint16_t>(std::stoi(name.substr(name.rfind(':') + 1)));
  }
  // One small write after the other, each of which must complete; nothing else may.
  void small_writes(data::StreamPlane& source, const PlaneAddress& to,
                    const std::vector<std::uint8_t>& memory) {
    for (std::uint64_t id = 100; id < 100 + kSmallWrites; ++id) {
      source.write({WriteId{id}, to, {kToken, false}, id, plan(memory, 1, 1)});
      std::vector<Completion> done;
      pollfd fd{source.ready_fd(), POLLIN, 0};
      while (done.empty() && ::poll(&fd, 1, kPatienceMs) > 0) source.poll(done);
      ASSERT_EQ(done.size(), 1U);
      ASSERT_EQ(done[0].id, id);
      ASSERT_TRUE(done[0].status.ok()) << done[0].status.to_string();
    }
  }

  Settings settings_;
  KernelEntropy entropy_;
  std::vector<std::uint8_t> from_ = std::vector<std::uint8_t>(kItems * kItemBytes, 0x5A),
                            slow_memory_ = from_, fast_memory_ = from_;
};

TEST_F(SlowPeer, ASlowTargetHoldsUpNoOtherTarget) {
  auto source = make(), slow = make(), fast = make();
  lend(*slow, slow_memory_);
  lend(*fast, fast_memory_);
  const SlowLine line(port_of(*slow));
  source->write({WriteId{1},
                 through(line, *slow),
                 {kToken, false},
                 1,
                 plan(slow_memory_, kLargeRuns, kItems)});
  small_writes(*source, fast->address(), fast_memory_);
  const std::uint64_t before = line.carried();
  for (int i = 0; i < kPatienceMs && line.carried() == before; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_GT(line.carried(), before) << "the slow write stands still";
}

TEST_F(SlowPeer, ASlowSourceHoldsUpNoOtherSource) {
  auto target = make(), slow = make(), fast = make();
  lend(*target, fast_memory_);
  const SlowLine line(port_of(*target));
  slow->write({WriteId{1},
               through(line, *target),
               {kToken, false},
               1,
               plan(fast_memory_, kLargeRuns, kItems)});
  small_writes(*fast, target->address(), fast_memory_);
  const std::uint64_t before = line.carried();
  for (int i = 0; i < kPatienceMs && line.carried() == before; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_GT(line.carried(), before) << "the slow write stands still";
}

}  // namespace
}  // namespace kvferry::conformance
