// The prefill process of `kvferry bench rooms`.
#include <unistd.h>
#include <zmq.h>

#include <map>
#include <stdexcept>

#include "cli/bench/common.h"
#include "cli/bench/rooms.h"
#include "src/plan/geometry.h"

namespace kvferry::cli {
namespace {

using Json = nlohmann::json;

constexpr int kPingBytes = 64;

}  // namespace

Layout room_layout(std::uint8_t*& memory) {
  const plan::Geometry geometry{.name = "rooms",
                                .layers = kRoomLayers,
                                .attention = {},
                                .kv_heads = 1,
                                .key_head_bytes = 256,
                                .value_head_bytes = 256,
                                .dtype = DType::kBFloat16,
                                .aux_bytes = {64}};
  Layout layout = plan::layout_of_rank(geometry, {}, 16, kRoomPages, kRoomAuxRows);
  memory = big_memory(plan::place_slabs(layout, 0, 4096));
  plan::place_slabs(layout, reinterpret_cast<std::uint64_t>(memory), 4096);
  return layout;
}

void fill_options(EndpointOptions& options, const Layout& layout) {
  options.layout = layout;
  options.total_kv_heads = 1;
  options.log_level = LogLevel::kError;
  options.settings = settings_here();
}

PingPong::PingPong() : context_(zmq_ctx_new()) {
  pull_ = zmq_socket(context_, ZMQ_PULL);
  push_ = zmq_socket(context_, ZMQ_PUSH);
  char where[64] = "";
  std::size_t size = sizeof where;
  if (zmq_bind(pull_, "tcp://127.0.0.1:*") != 0 ||
      zmq_getsockopt(pull_, ZMQ_LAST_ENDPOINT, where, &size) != 0)
    throw std::runtime_error("ping-pong: cannot listen");
  const std::string text(where);
  port_ = std::stoi(text.substr(text.rfind(':') + 1));
}
PingPong::~PingPong() {
  const int none = 0;
  zmq_setsockopt(push_, ZMQ_LINGER, &none, sizeof none);
  zmq_close(push_);
  zmq_close(pull_);
  zmq_ctx_term(context_);
}
void PingPong::connect(int port) {
  if (zmq_connect(push_, ("tcp://127.0.0.1:" + std::to_string(port)).c_str()) != 0)
    throw std::runtime_error("ping-pong: cannot connect");
}
void PingPong::ping() {
  const char bytes[kPingBytes] = {};
  if (zmq_send(push_, bytes, sizeof bytes, 0) < 0) throw std::runtime_error("ping-pong: no send");
}
void PingPong::await() {
  char bytes[kPingBytes];
  if (zmq_recv(pull_, bytes, sizeof bytes, 0) < 0) throw std::runtime_error("ping-pong: no answer");
}

int run_rooms_target(const Json& config) {
  std::uint8_t* memory = nullptr;
  const Layout layout = room_layout(memory);
  PrefillOptions options;
  fill_options(options, layout);
  options.bootstrap = {"127.0.0.1", config["bootstrap_port"].get<std::uint16_t>()};
  options.stage_layers = kRoomLayers;
  auto endpoint = PrefillEndpoint::create(options);
  if (!endpoint.ok()) return 1;
  while (!(*endpoint)->registered()) usleep(1000);
  PingPong pong;
  const auto say = [](const Json& json) {
    const std::string text = json.dump() + "\n";
    (void)!write(1, text.data(), text.size());
  };
  say({{"ping_port", pong.port()}});
  // What a page holds is a function of the page: the other side checks it after the last room.
  for (const Slab& slab : layout.slabs) {
    for (std::uint32_t item = 0; item < slab.item_count; ++item)
      fill_pattern(reinterpret_cast<std::uint8_t*>(slab.base + item * slab.item_stride),
                   slab.item_bytes,
                   {item, static_cast<std::uint32_t>(slab.component), slab.layer, 0, 0});
  }
  std::vector<Sender> senders;
  std::string line;
  for (char c = 0; read(0, &c, 1) == 1;) {
    if (c != '\n') {
      line += c;
      continue;
    }
    const Json question = Json::parse(line);
    line.clear();
    if (question.contains("ping")) {
      pong.connect(question["ping"]);
      say({{"ready", true}});
      for (int i = question["count"]; i > 0; --i) {
        pong.await();
        pong.ping();
      }
      continue;
    }
    if (question.contains("open")) {
      const std::uint64_t first = question["open"];
      const std::uint32_t count = question["count"], pages = question["pages"];
      for (std::uint32_t i = 0; i < count; ++i) {
        auto sender = (*endpoint)->open(RoomId{first + i});
        std::vector<PageIndex> list(pages);
        for (std::uint32_t p = 0; p < pages; ++p)
          list[p] = static_cast<PageIndex>((std::uint64_t{i} * pages + p) % kRoomPages);
        if (!sender.ok() || !sender->init(pages, i % kRoomAuxRows).ok() || !sender->send(list).ok())
          return 1;
        senders.push_back(*sender);
      }
    }
    if (question.contains("clear")) {
      for (Sender& sender : senders) sender.clear();
      senders.clear();
    }
    say({{"cpu", process_cpu_seconds()}});
  }
  return 0;
}

}  // namespace kvferry::cli
