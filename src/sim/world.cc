#include "src/sim/world.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <numeric>

#include <fmt/format.h>

#include "src/plan/components.h"
#include "src/plan/planner.h"
#include "src/plan/ranks.h"

namespace kvferry::sim {
namespace {

constexpr std::uint64_t kEventsPerInstantMax = 100000;
constexpr std::uint32_t kFreshRooms = 4;  // that fit into the pools of a rank together, at least
constexpr std::uint8_t kPoison = 0xEE;
const Address kServer{"boot", 8998};

std::string brief(const wire::Frames& frames) {
  if (wire::is_native(frames)) {
    const auto frame = wire::decode_native(frames);
    return frame.ok() ? fmt::format("{} in {}", wire::name_of(frame->message),
                                    frame->session.to_string().substr(0, 6))
                      : "malformed native frame";
  }
  std::string text;
  for (std::size_t i = 0; i < frames.size() && i < 3; ++i) text += frames[i] + " ";
  return fmt::format("{}({} frames)", text, frames.size());
}

}  // namespace

struct World::Ports final : proto::ControlPort,
                            proto::HttpPort,
                            proto::MemoryPort,
                            proto::RoomListener,
                            proto::TracePort {
  Ports(World& w, std::uint32_t n, std::uint64_t l)
      : world(w), node(n), life(l), entropy(w.random_.next64()) {}
  void send(const Address& to, wire::Frames frames) override {
    world.deliver(node, to, std::move(frames));
  }
  void call(proto::CallId call, proto::HttpRequest request) override {
    world.http(node, call, std::move(request));
  }
  std::string load(std::uint64_t address, std::size_t bytes) override {
    return {reinterpret_cast<const char*>(address), bytes};
  }
  void store(std::uint64_t address, const std::string& bytes) override {
    std::memcpy(reinterpret_cast<void*>(address), bytes.data(), bytes.size());
  }
  void on_room(proto::UseId use, const proto::RoomView& view) override { changed[use] = view; }
  void trace(proto::Severity severity, const std::string& line) override;

  World& world;
  std::uint32_t node;
  std::uint64_t life;
  Random entropy;
  std::map<proto::UseId, proto::RoomView> changed;
};

struct World::Node {
  std::uint32_t number = 0;
  std::string host;
  bool prefill = false;
  std::uint32_t instance = 0;  // decode: which one
  RankPlace place;
  Address control;
  bool alive = false;
  std::uint64_t life = 0;
  Time frozen_until{};
  std::vector<wire::Frames> held;  // arrived while it was frozen

  // Of the present life. Declared so that the manager goes before what it uses.
  std::vector<std::vector<std::uint8_t>> memories;  // of all lives: an address never names two
  Layout layout;
  std::unique_ptr<SimPlane> plane;
  std::unique_ptr<Ports> ports;
  std::unique_ptr<proto::PrefillManager> prefill_manager;
  std::unique_ptr<proto::DecodeManager> decode_manager;
  Time wake_at = Time::max();
  std::vector<PageIndex> free_pages;
  std::vector<std::uint32_t> free_rows;
  std::map<PageIndex, std::uint64_t> page_owner;
  std::map<std::uint32_t, std::uint64_t> row_owner;
  std::map<proto::UseId, Part> parts;
};

struct World::Room {
  std::uint64_t sequence = 0;
  RoomId number{};
  std::uint32_t instance = 0, dp = 0;
  std::uint64_t tokens = 0, prefix_tokens = 0;
  bool fresh = false, must_succeed = false;
  std::uint32_t decode_parts = 0, decode_succeeded = 0;
};

void World::Ports::trace(proto::Severity severity, const std::string& line) {
  world.log(fmt::format("{} {}{}", world.nodes_[node]->host,
                        severity == proto::Severity::kError ? "! " : "", line));
}

World::World(std::uint64_t seed, bool print)
    : seed_(seed),
      print_(print),
      random_(seed * 0x9E3779B97F4A7C15ULL + 17),
      queue_(random_),
      fabric_(queue_, random_) {
  report_.seed = seed;
  fabric_.linked = [this](const std::string& a, const std::string& b) { return linked(a, b); };
  fabric_.frozen_until = [this](const std::string& host) {
    const auto it = by_host_.find(host);
    return it == by_host_.end() ? Time{} : nodes_[it->second]->frozen_until;
  };
  fabric_.on_land = [this](const std::string& from, std::uint64_t life, std::uint64_t flow,
                           const std::string& to, std::uint64_t address,
                           std::uint64_t bytes) { on_land(from, life, flow, to, address, bytes); };
}
World::~World() {
  current_marks = nullptr;
  fabric_.on_land = nullptr;
}

void World::violation(std::string text) {
  log("VIOLATION " + text);
  if (report_.violations.size() < 20)
    report_.violations.push_back(fmt::format("seed {}: {}", seed_, text));
}

void World::log(const std::string& line) {
  const auto now = static_cast<std::uint64_t>(queue_.now().time_since_epoch().count());
  digest_.add(now);
  digest_.add(line);
  if (print_) std::printf("%12.6f %s\n", static_cast<double>(now) / 1e9, line.c_str());
}

std::uint8_t World::pattern(std::uint64_t room, Component component, std::uint32_t layer,
                            std::uint32_t head, std::uint64_t token, std::uint32_t byte) const {
  Random hash(room * 0x100000001B3ULL + token * 1315423911ULL + head * 2654435761ULL + layer * 97 +
              static_cast<std::uint64_t>(component) * 7919 + byte * 31);
  const auto value = static_cast<std::uint8_t>(hash.next64());
  return value == kPoison ? static_cast<std::uint8_t>(value + 1) : value;
}

// --- the draw
// -----------------------------------------------------------------------------------------------------

void World::draw() {
  native_ = !random_.chance(35);
  const auto pick = [&](std::initializer_list<std::uint32_t> values) {
    return *(values.begin() + random_.below(values.size()));
  };
  p_tp_ = pick({1, 1, 2, 2, 4});
  d_tp_ = pick({1, 1, 2, 2, 4});
  p_pp_ = pick({1, 1, 2});
  if (native_) {  // sizes that do not divide each other, pipelines on both sides, empty stages
    if (random_.chance(20)) p_tp_ = 3;
    if (random_.chance(20)) d_tp_ = 3;
    if (random_.chance(15)) p_pp_ = 3;
    if (random_.chance(25)) d_pp_ = 2;
  }
  p_dp_ = pick({1, 1, 1, 2});
  d_instances_ = pick({1, 2});
  geometry_.name = "sim";
  geometry_.layers = pick({2, 3});
  geometry_.attention.mla = random_.chance(25);
  geometry_.kv_heads = geometry_.attention.mla ? 1 : native_ ? pick({1, 2, 3, 4}) : pick({1, 2, 4});
  geometry_.key_head_bytes = pick({4, 6});
  geometry_.value_head_bytes = geometry_.attention.mla ? 0 : pick({4, 6});
  // Reference peers know one item length for all pools: K and V must agree there.
  if (!native_ && !geometry_.attention.mla) geometry_.value_head_bytes = geometry_.key_head_bytes;
  geometry_.aux_bytes = {8, 16};
  page_tokens_ = pick({1, 2, 4});
  if (geometry_.attention.mla && random_.chance(30)) {
    draw_compressed();
  } else {
    draw_state();
  }
  pool_pages_ = pick({12, 24});
  their_page_tokens_ = page_tokens_;
  const bool windows = std::any_of(
      geometry_.states.begin(), geometry_.states.end(),
      [](const auto& state) { return state_of(state.component) == StateKind::kSlidingWindow; });
  if (native_ && !windows && random_.chance(25)) {
    their_page_tokens_ = pick({1, 2, 3, 4, 6});
    if (their_page_tokens_ != page_tokens_) KVF_REACHED("pages of two sizes were brought together");
  }
  aux_rows_ = 6;
  load_balance_ = random_.chance(50) ? "follow_bootstrap_room" : "round_robin";

  settings_.bootstrap_timeout = ms(1500, 4000);
  settings_.waiting_timeout = ms(1500, 4000);
  settings_.hold_time = ms(3000, 5000);
  settings_.http_timeout = ms(200, 400);
  settings_.heartbeat_interval = ms(300, 600);
  settings_.heartbeat_misses = random_.between(1, 3);
  settings_.lookup_retry = ms(20, 100);
  settings_.register_retry = ms(50, 200);
  settings_.reregister_interval = ms(300, 800);
  settings_.ping_interval = ms(50, 120);
  settings_.ping_silence = ms(300, 450);
  settings_.write_lease = ms(450, 600);
  settings_.session_open_timeout = ms(500, 900);
  settings_.dp_rank_expiry = std::chrono::seconds(20);
  settings_.aux_over_control = random_.chance(20);
  settings_.model_layers = geometry_.layers;
  if (random_.chance(20)) {
    KVF_REACHED("the prefill side had CP ranks");
    p_cp_ = pick({2, 2, 3});
    settings_.all_cp_ranks = random_.chance(50);
  }

  const auto some = [&](std::uint64_t percent) { return random_.chance(percent); };
  crashes_ = some(50);
  partitions_ = some(40);
  freezes_ = some(40);
  server_faults_ = some(40);
  ready_events_ = some(40);
  lose_percent_ = some(30) ? random_.between(1, 4) : 0;
  slow_http_percent_ = some(40) ? random_.between(5, 40) : 0;
  abort_percent_ = some(60) ? random_.between(5, 30) : 0;
  fabric_.faults.fail_percent = some(30) ? random_.between(1, 10) : 0;
  fabric_.faults.slow_percent = some(50) ? random_.between(1, 20) : 0;
  fabric_.faults.slow = ms(50, 1200);
  fabric_.faults.unsettled_percent = some(30) ? 30 : 0;
  if (!native_ && settings_.aux_over_control) {
    // The reference's aux messages are not acknowledged: one that is lost is noticed by its engines
    // alone, from the room number in the row. (docs/SIMULATION.md, "what is not simulated")
    lose_percent_ = 0;
    partitions_ = false;
  }
  act_one_ = ms(3000, 5000);
  rooms_wanted_ = static_cast<std::uint32_t>(random_.between(24, 48));
  log(
      fmt::format("draw codec={} prefill tp={} pp={} cp={} dp={} decode tp={} pp={} x{} heads={} "
                  "mla={} states={} "
                  "pages={}x{} to {}",
                  native_ ? "native" : "sglang", p_tp_, p_pp_, p_cp_, p_dp_, d_tp_, d_pp_,
                  d_instances_, geometry_.kv_heads, geometry_.attention.mla,
                  geometry_.states.size(), pool_pages_, page_tokens_, their_page_tokens_));
}

// Hybrid models. Reference peers send no layer numbers here: one stage only.
void World::draw_state() {
  if (!random_.chance(35) || (!native_ && p_pp_ > 1)) return;
  KVF_REACHED("a model had state");
  const auto bytes = [&] { return static_cast<std::uint32_t>(random_.between(2, 5)); };
  if (random_.chance(60)) {
    geometry_.states.push_back({Component::kMambaConv, {0}, {4, 4, 8}, bytes(), DType::kUnknown});
    geometry_.states.push_back({Component::kMambaTemporal, {0}, {4}, bytes(), DType::kUnknown});
    geometry_.attention.hybrid_mla = geometry_.attention.mla;
  }
  if (geometry_.attention.mla && random_.chance(60))
    geometry_.states.push_back({Component::kIndex, {0, 1}, {}, bytes(), DType::kUnknown});
  // Heads of a window are cut as those of the cache are; reference peers need equal sizes for that.
  if (!geometry_.attention.mla && random_.chance(60) && (native_ || p_tp_ == d_tp_)) {
    for (const Component component : {Component::kSlidingKey, Component::kSlidingValue})
      geometry_.states.push_back({component, {1}, {geometry_.kv_heads}, bytes(), DType::kUnknown});
  }
}

// Reference peers know a compressed model's layers by section, with any number of stages.
void World::draw_compressed() {
  KVF_REACHED("a model was compressed");
  const auto bytes = [&] { return static_cast<std::uint32_t>(random_.between(1, 3)); };
  page_tokens_ = plan::kCoarseRatio;
  geometry_.index_bytes = bytes();
  std::vector<std::uint32_t> all, indexed, coarse;
  for (std::uint32_t layer = 0; layer < geometry_.layers; ++layer) {
    const std::uint32_t ratios[] = {0, plan::kIndexedRatio, plan::kCoarseRatio};
    // The first layer has pages: a model without any has nothing to send before its last chunk.
    const std::uint32_t ratio = ratios[random_.between(layer == 0 ? 1 : 0, 2)];
    geometry_.compression_ratios.push_back(ratio);
    all.push_back(layer);
    if (ratio == plan::kIndexedRatio) indexed.push_back(layer);
    if (ratio == plan::kCoarseRatio) coarse.push_back(layer);
  }
  const auto add = [&](Component component, const std::vector<std::uint32_t>& layers) {
    if (!layers.empty())
      geometry_.states.push_back({component, layers, {}, bytes(), DType::kUnknown});
  };
  add(Component::kSlidingKey, all);
  add(Component::kSlidingCompressed, indexed);
  add(Component::kSlidingCompressedIndex, indexed);
  add(Component::kCompressedState, coarse);
}

void World::build() {
  directory_ = std::make_unique<proto::Directory>(settings_, random_);
  const auto add = [&](Node node) {
    node.number = static_cast<std::uint32_t>(nodes_.size());
    node.control = {node.host, static_cast<std::uint16_t>(5000 + node.number)};
    by_address_[node.control] = node.number;
    by_host_[node.host] = node.number;
    nodes_.push_back(std::make_unique<Node>(std::move(node)));
  };
  for (std::uint32_t dp = 0; dp < p_dp_; ++dp) {
    for (std::uint32_t tp = 0; tp < p_tp_; ++tp) {
      for (std::uint32_t pp = 0; pp < p_pp_; ++pp) {
        for (std::uint32_t cp = 0; cp < p_cp_; ++cp) {
          Node node;
          node.host = fmt::format("p{}{}{}{}", dp, tp, pp, cp > 0 ? fmt::format("c{}", cp) : "");
          node.prefill = true;
          node.place = {.tp_rank = tp,
                        .tp_size = p_tp_,
                        .pp_rank = pp,
                        .pp_size = p_pp_,
                        .cp_rank = cp,
                        .cp_size = p_cp_,
                        .dp_rank = dp,
                        .dp_size = p_dp_};
          add(std::move(node));
        }
      }
    }
  }
  for (std::uint32_t instance = 0; instance < d_instances_; ++instance) {
    for (std::uint32_t tp = 0; tp < d_tp_; ++tp) {
      for (std::uint32_t pp = 0; pp < d_pp_; ++pp) {
        Node node;
        node.host = fmt::format("d{}{}{}", instance, tp, pp);
        node.instance = instance;
        node.place = {.tp_rank = tp, .tp_size = d_tp_, .pp_rank = pp, .pp_size = d_pp_};
        add(std::move(node));
      }
    }
  }
  for (const auto& node : nodes_) start_node(*node);
}

void World::start_node(Node& node) {
  node.alive = true;
  ++node.life;
  node.frozen_until = {};
  node.held.clear();
  log(fmt::format("{} starts life {}", node.host, node.life));
  node.layout =
      plan::layout_of_rank(geometry_, node.place, node.prefill ? page_tokens_ : their_page_tokens_,
                           pool_of(node), aux_rows_);
  Layout sizes = node.layout;
  const std::uint64_t bytes = plan::place_slabs(sizes, 0, 16);
  node.memories.emplace_back(bytes, kPoison);
  plan::place_slabs(node.layout, reinterpret_cast<std::uint64_t>(node.memories.back().data()), 16);
  node.plane = std::make_unique<SimPlane>(fabric_, node.host);
  node.ports = std::make_unique<Ports>(*this, node.number, node.life);
  node.free_pages.clear();
  for (std::uint32_t i = 0; i < pool_of(node); ++i)
    node.free_pages.push_back(static_cast<PageIndex>(i));
  node.free_rows.clear();
  for (std::uint32_t i = 0; i < aux_rows_; ++i) node.free_rows.push_back(i);
  node.page_owner.clear();
  node.row_owner.clear();
  node.parts.clear();
  node.wake_at = Time::max();
  const proto::Ports ports{*node.ports, *node.ports, *node.plane,        *node.ports,
                           *node.ports, *node.ports, node.ports->entropy};
  node.plane->on_ready = [this, number = node.number, life = node.life] {
    queue_.after(Duration(1000), [this, number, life] {
      Node& n = *nodes_[number];
      if (n.alive && n.life == life) after_input(n);
    });
  };
  if (node.prefill) {
    const plan::LayerRange layers =
        plan::layers_of_stage(geometry_.layers, node.place.pp_size, node.place.pp_rank);
    proto::PrefillSelf self;
    self.place = node.place;
    self.control = node.control;
    self.bootstrap = kServer;
    self.life = node.ports->entropy.token();
    self.layout = node.layout;
    self.state_kinds = plan::kinds_of(geometry_);
    self.attention = geometry_.attention;
    self.total_kv_heads = geometry_.kv_heads;
    self.stage_begin = layers.begin;
    self.stage_layers = layers.count;
    self.compression_ratios = geometry_.compression_ratios;
    self.load_balance_method = load_balance_;
    self.native = native_;
    node.prefill_manager =
        std::make_unique<proto::PrefillManager>(std::move(self), settings_, ports);
    node.prefill_manager->start(queue_.now());
  } else {
    proto::DecodeSelf self;
    self.place = node.place;
    self.control = node.control;
    self.life = node.ports->entropy.token();
    self.layout = node.layout;
    self.state_kinds = plan::kinds_of(geometry_);
    self.attention = geometry_.attention;
    self.total_kv_heads = geometry_.kv_heads;
    self.session_name = fmt::format("{}:{}", node.host, node.control.port);
    node.decode_manager = std::make_unique<proto::DecodeManager>(std::move(self), settings_, ports);
  }
  // Foreign writers know the plane by the session name.
  after_input(node);
}

void World::crash(Node& node, Duration down) {
  if (!node.alive) return;
  log(fmt::format("{} crashes", node.host));
  node.alive = false;
  for (auto& [use, part] : node.parts) {
    if (!part.ended && !node.prefill) part.ended = true;
  }
  node.prefill_manager.reset();
  node.decode_manager.reset();
  node.plane.reset();
  queue_.after(down, [this, number = node.number] {
    if (!nodes_[number]->alive) start_node(*nodes_[number]);
  });
}

// --- the network
// --------------------------------------------------------------------------------------------------

bool World::linked(const std::string& a, const std::string& b) const {
  const auto it = cut_.find(std::minmax(a, b));
  return it == cut_.end() || it->second <= queue_.now();
}

void World::deliver(std::uint32_t from, const Address& to, wire::Frames frames) {
  const auto target = by_address_.find(to);
  if (target == by_address_.end()) return;
  Node& receiver = *nodes_[target->second];
  if (!receiver.alive || !linked(nodes_[from]->host, receiver.host)) return;
  if (random_.chance(lose_percent_)) {
    KVF_REACHED("a control message was lost");
    return;
  }
  Time& last = last_arrival_[{from, to}];
  const Duration delay =
      random_.chance(5) ? ms(1, 60) : Duration(std::chrono::microseconds(30 + random_.below(800)));
  last = std::max(last + Duration(1), queue_.now() + delay);
  queue_.at(last, [this, number = receiver.number, life = receiver.life,
                   frames = std::move(frames)] { arrive(number, life, frames); });
}

void World::arrive(std::uint32_t number, std::uint64_t life, const wire::Frames& frames) {
  Node& node = *nodes_[number];
  if (!node.alive || node.life != life) return;  // messages die with the life they were sent to
  // The thaw delivers what was held, and what comes before it has done so, in their order.
  if (node.frozen_until > queue_.now() || !node.held.empty()) {
    node.held.push_back(frames);
    return;
  }
  log(fmt::format("{} <- {}", node.host, brief(frames)));
  if (node.prefill) node.prefill_manager->on_frames(frames, queue_.now());
  if (!node.prefill) node.decode_manager->on_frames(frames, queue_.now());
  after_input(node);
}

void World::thaw(Node& node) {
  const auto held = std::exchange(node.held, {});
  for (const wire::Frames& frames : held) arrive(node.number, node.life, frames);
  wake(node);
}

void World::http(std::uint32_t from, proto::CallId call, proto::HttpRequest request) {
  const std::uint64_t life = nodes_[from]->life;
  const Duration timeout = request.timeout;
  if (directory_down_until_ > queue_.now() || (request.server != kServer)) {
    return answer(from, life, call, {0, "connection refused"}, ms(0, 5));
  }
  if (random_.chance(slow_http_percent_)) {
    KVF_REACHED("a call to the bootstrap server ran out of time");
    return answer(from, life, call, {0, "timed out"}, timeout);
  }
  queue_.after(std::chrono::microseconds(50 + random_.below(3000)),
               [this, from, life, call, request = std::move(request)] {
                 if (directory_down_until_ > queue_.now())
                   return answer(from, life, call, {0, "connection reset"}, Duration(1000));
                 const auto result =
                     directory_->handle(request.method, request.path, request.body, queue_.now());
                 proto::HttpResponse response;
                 if (const auto* ready = std::get_if<proto::DirectoryResponse>(&result)) {
                   response = {ready->status, ready->body};
                 } else {
                   const auto& probe = std::get<proto::DirectoryProbe>(result);
                   std::vector<Address> alive;
                   for (const Address& address : probe.addresses) {
                     if (nodes_[by_address_.at(address)]->alive) alive.push_back(address);
                   }
                   const auto finished = directory_->finish(probe.ticket, alive, queue_.now());
                   response = {finished.status, finished.body};
                 }
                 answer(from, life, call, std::move(response),
                        std::chrono::microseconds(50 + random_.below(2000)));
               });
}

void World::answer(std::uint32_t number, std::uint64_t life, proto::CallId call,
                   proto::HttpResponse response, Duration delay) {
  queue_.after(delay, [this, number, life, call, response = std::move(response)] {
    Node& node = *nodes_[number];
    if (!node.alive || node.life != life) return;
    if (node.frozen_until > queue_.now())
      return answer(number, life, call, response,
                    node.frozen_until - queue_.now() + Duration(1000));
    if (node.prefill) node.prefill_manager->on_http(call, response, queue_.now());
    if (!node.prefill) node.decode_manager->on_http(call, response, queue_.now());
    after_input(node);
  });
}

// --- nodes
// --------------------------------------------------------------------------------------------------------

void World::after_input(Node& node) {
  if (!node.alive || node.frozen_until > queue_.now()) return;
  std::vector<Completion> completions;
  node.plane->poll(completions);
  for (const Completion& completion : completions) {
    if (node.prefill) node.prefill_manager->on_completion(completion, queue_.now());
    if (!node.prefill) node.decode_manager->on_completion(completion, queue_.now());
  }
  while (!node.ports->changed.empty()) {
    const auto changed = std::exchange(node.ports->changed, {});
    for (const auto& [use, view] : changed) on_room(node.number, node.life, use, view);
  }
  const Time due =
      node.prefill ? node.prefill_manager->next_deadline() : node.decode_manager->next_deadline();
  if (due < node.wake_at) {
    node.wake_at = due;
    queue_.at(due, [this, number = node.number, life = node.life, due] {
      Node& n = *nodes_[number];
      if (!n.alive || n.life != life || n.wake_at != due) return;
      wake(n);
    });
  }
}

void World::wake(Node& node) {
  if (node.frozen_until > queue_.now()) {
    queue_.at(node.frozen_until + Duration(1000), [this, number = node.number, life = node.life] {
      Node& n = *nodes_[number];
      if (n.alive && n.life == life) wake(n);
    });
    return;
  }
  node.wake_at = Time::max();
  if (node.prefill) node.prefill_manager->advance(queue_.now());
  if (!node.prefill) node.decode_manager->advance(queue_.now());
  after_input(node);
}

// --- the applications
// ---------------------------------------------------------------------------------------------

// Runs `act` on the node's present life, when it is not frozen.
void World::on_node(std::uint32_t number, std::uint64_t life, Duration delay,
                    std::function<void(Node&)> act) {
  queue_.after(delay, [this, number, life, act = std::move(act)] {
    Node& node = *nodes_[number];
    if (!node.alive || node.life != life) return;
    if (node.frozen_until > queue_.now())
      return on_node(number, life, node.frozen_until - queue_.now() + Duration(3000000), act);
    act(node);
  });
}

void World::open_room(bool fresh, std::uint32_t pair) {
  auto room = std::make_unique<Room>();
  room->sequence = next_room_++;
  // Numbers come back: a router may use one again when its room is over.
  const auto in_use = [&](RoomId number) {
    return std::any_of(nodes_.begin(), nodes_.end(), [&](const auto& node) {
      return std::any_of(node->parts.begin(), node->parts.end(), [&](const auto& part) {
        return !part.second.ended && node->alive && rooms_.at(part.second.room)->number == number;
      });
    });
  };
  room->number = RoomId{random_.between(1, 40)};
  room->instance = static_cast<std::uint32_t>(random_.below(d_instances_));
  room->dp = load_balance_ == "follow_bootstrap_room"
                 ? static_cast<std::uint32_t>(value_of(room->number) % p_dp_)
                 : static_cast<std::uint32_t>(random_.below(p_dp_));
  if (fresh) {
    // Every decode instance with every prefill group, in turn.
    room->instance = pair % d_instances_;
    room->dp = pair / d_instances_ % p_dp_;
    room->number = RoomId{(1000 + room->sequence) * p_dp_ + room->dp};
  }
  if (in_use(room->number) || opening_.contains(room->number))
    room->number = RoomId{(500 + room->sequence) * p_dp_ + room->dp};
  // Fresh rooms fit into the pools together: two sides that wait for each other's pages would be
  // the applications' deadlock.
  room->tokens = random_.between(random_.chance(10) ? 0 : 1,
                                 page_tokens_ * pool_pages_ / (fresh ? kFreshRooms : 3));
  room->prefix_tokens =  // whole pages on both sides
      random_.chance(20) ? random_.below(3) * std::lcm(page_tokens_, their_page_tokens_) : 0;
  room->fresh = fresh;
  const std::uint64_t sequence = room->sequence;
  for (const auto& node : nodes_) {
    const bool mine =
        node->prefill ? node->place.dp_rank == room->dp : node->instance == room->instance;
    if (!mine) continue;
    if (!node->prefill) ++room->decode_parts;
    ++opening_[room->number];
    on_node(node->number, node->life, ms(0, random_.chance(10) ? 300 : 20),
            [this, sequence, number = room->number](Node& n) {
              if (--opening_[number] == 0) opening_.erase(number);
              if (n.prefill) {
                prefill_side(sequence, n.number);
              } else {
                decode_side(sequence, n.number);
              }
            });
  }
  ++report_.rooms;
  rooms_[sequence] = std::move(room);
}

void World::decode_side(std::uint64_t sequence, std::uint32_t number) {
  Node& node = *nodes_[number];
  const Room& room = *rooms_.at(sequence);
  const auto use = node.decode_manager->open(room.number, kServer, queue_.now());
  if (!use.ok())
    return log(fmt::format("{} open {} refused: {}", node.host, sequence, use.status().message()));
  log(fmt::format("{} opens room {} (number {})", node.host, sequence, value_of(room.number)));
  Part& part = node.parts[*use];
  part.room = sequence;
  part.node = number;
  // Under round robin the request carries its group, or the server is asked for it.
  std::optional<std::uint32_t> dp;
  if (load_balance_ != "follow_bootstrap_room" && random_.chance(50)) dp = room.dp;
  (void)node.decode_manager->init(*use, dp, queue_.now());
  lend_pages(sequence, number, *use, 0);
  const std::uint64_t life = node.life;
  if (!room.fresh && random_.chance(abort_percent_)) {
    on_node(number, life, ms(0, 200), [this, use = *use](Node& n) {
      n.decode_manager->abort(use, Status(Code::kAborted, "the client went away"), queue_.now());
      after_input(n);
    });
  }
  // No room outlives its deadlines by more than a moment.
  queue_.after(
      settings_.bootstrap_timeout + 2 * settings_.waiting_timeout + std::chrono::seconds(1),
      [this, number, life, use = *use, sequence] {
        Node& n = *nodes_[number];
        if (!n.alive || n.life != life ||
            n.frozen_until > queue_.now() - 2 * settings_.waiting_timeout)
          return;
        const auto it = n.parts.find(use);
        if (it != n.parts.end() && !it->second.ended)
          violation(fmt::format("{}: room {} outlived its deadlines in state {}", n.host, sequence,
                                to_string(it->second.state)));
      });
  after_input(node);
}

void World::lend_pages(std::uint64_t sequence, std::uint32_t number, proto::UseId use, int tries) {
  Node& node = *nodes_[number];
  const Room& room = *rooms_.at(sequence);
  const auto it = node.parts.find(use);
  if (it == node.parts.end() || it->second.ended) return;
  Part& part = it->second;
  const std::uint64_t pages = pages_of(room, node);
  if (node.free_pages.size() < pages || node.free_rows.empty()) {
    if (tries > 200) return;
    on_node(number, node.life, ms(5, 40), [this, sequence, use, tries](Node& n) {
      lend_pages(sequence, n.number, use, tries + 1);
    });
    return;
  }
  for (std::uint64_t i = 0; i < pages;
       ++i) {  // last in, first out: what came home is used again at once
    part.pages.push_back(node.free_pages.back());
    node.free_pages.pop_back();
    node.page_owner[part.pages.back()] = sequence;
  }
  part.aux_row = node.free_rows.back();
  node.free_rows.pop_back();
  node.row_owner[part.aux_row] = sequence;
  part.holds = true;
  overwrite(node, part, kPoison);
  const Status sent = node.decode_manager->send_metadata(
      use, {part.pages, part.aux_row, room.prefix_tokens, states_of(node, part)}, queue_.now());
  if (!sent.ok()) release(node, part);
  after_input(node);
}

void World::prefill_side(std::uint64_t sequence, std::uint32_t number) {
  Node& node = *nodes_[number];
  const Room& room = *rooms_.at(sequence);
  const auto use = node.prefill_manager->open(room.number, {}, queue_.now());
  if (!use.ok())
    return log(fmt::format("{} open {} refused: {}", node.host, sequence, use.status().message()));
  log(fmt::format("{} opens room {} (number {})", node.host, sequence, value_of(room.number)));
  Part& part = node.parts[*use];
  part.room = sequence;
  part.node = number;
  const std::uint64_t life = node.life;
  on_node(number, life, ms(0, 30),
          [this, sequence, use = *use](Node& n) { send_next(sequence, n.number, use); });
  if (!room.fresh && random_.chance(abort_percent_)) {
    on_node(number, life, ms(0, 200), [this, use = *use](Node& n) {
      n.prefill_manager->abort(use, Status(Code::kAborted, "the engine ran out of memory"),
                               queue_.now());
      after_input(n);
    });
  }
  after_input(node);
}

void World::send_next(std::uint64_t sequence, std::uint32_t number, proto::UseId use) {
  Node& node = *nodes_[number];
  const Room& room = *rooms_.at(sequence);
  const auto it = node.parts.find(use);
  if (it == node.parts.end() || it->second.ended) return;
  Part& part = it->second;
  const std::uint64_t all = pages_of(room, node);
  const auto later = [&](Duration delay) {
    on_node(number, node.life, delay,
            [this, sequence, use](Node& n) { send_next(sequence, n.number, use); });
  };
  if (!part.holds) {
    if (node.free_pages.size() < all || node.free_rows.empty()) return later(ms(5, 40));
    for (std::uint64_t i = 0; i < all; ++i) {
      part.pages.push_back(node.free_pages.back());
      node.free_pages.pop_back();
    }
    part.aux_row = node.free_rows.back();
    node.free_rows.pop_back();
    part.holds = true;
    if (!node.prefill_manager->init(use, all, part.aux_row, queue_.now()).ok()) return;
  }
  const std::uint64_t left = all - part.sent;
  const std::uint64_t count = random_.chance(50) ? left : random_.between(left == 0 ? 0 : 1, left);
  const std::vector<PageIndex> pages(
      part.pages.begin() + static_cast<std::ptrdiff_t>(part.sent),
      part.pages.begin() + static_cast<std::ptrdiff_t>(part.sent + count));
  const std::uint64_t begin = part.sent;
  part.sent += count;
  const bool last = part.sent == all;
  const std::vector<StateItems> states = last ? states_of(node, part) : std::vector<StateItems>{};
  if (ready_events_ && random_.chance(40)) {
    // The producer is late: what lies in the pages before its event must not be sent.
    KVF_REACHED("a chunk waited for its producer");
    const proto::ReadyId ready{(static_cast<std::uint64_t>(use) << 16) + begin + 1};
    (void)node.prefill_manager->send(use, pages, ready, queue_.now(), states);
    on_node(number, node.life, ms(1, 30), [this, use, begin, count, ready](Node& n) {
      const auto p = n.parts.find(use);
      if (p != n.parts.end() && p->second.holds) fill_source(n, p->second, begin, count);
      n.prefill_manager->on_ready(ready, queue_.now());
      after_input(n);
    });
  } else {
    fill_source(node, part, begin, count);
    (void)node.prefill_manager->send(use, pages, proto::ReadyId{}, queue_.now(), states);
  }
  after_input(node);
  if (!last) later(ms(0, 25));
}

// Pages of one rank: as many tokens on either side, and a last page that is not full for each of
// the rooms that must fit together.
std::uint32_t World::pool_of(const Node& node) const {
  const std::uint32_t page = node.prefill ? page_tokens_ : their_page_tokens_;
  return (pool_pages_ * page_tokens_ + page - 1) / page + kFreshRooms;
}

std::uint64_t World::pages_of(const Room& room, const Node& node) {
  return (room.tokens + node.layout.page_tokens - 1) / node.layout.page_tokens;
}

// The items that a room owns of a pool: its pages, or the row or slot that it was given.
bool World::is_one(const Slab& slab) {
  const auto kind = state_of(slab.component);
  return slab.component == Component::kAux ||
         (kind && plan::row_of(*kind).pairing != plan::Pairing::kPages);
}

std::vector<PageIndex> World::items_of(const Slab& slab, const Part& part) {
  return is_one(slab) ? std::vector<PageIndex>{static_cast<PageIndex>(part.aux_row)} : part.pages;
}

// Its state, as the engines name it.
std::vector<StateItems> World::states_of(const Node& node, const Part& part) {
  std::vector<StateItems> states;
  for (const StateKind kind : plan::kinds_of(node.layout)) {
    for (const Slab& slab : node.layout.slabs) {
      if (state_of(slab.component) != kind) continue;
      states.push_back({kind, items_of(slab, part)});
      break;
    }
  }
  return states;
}

// Every byte that a room owns of pages [begin, end) and of what has no pages, and what belongs
// there.
void World::for_bytes(const Node& node, const Part& part, std::uint64_t begin, std::uint64_t end,
                      std::uint64_t end_token,
                      const std::function<void(std::uint8_t&, std::uint8_t)>& visit) const {
  const std::uint64_t page = node.layout.page_tokens;
  for (const Slab& slab : node.layout.slabs) {
    const std::vector<PageIndex> items = items_of(slab, part);
    const bool paged = !is_one(slab);
    for (std::uint64_t i = paged ? begin : 0; i < (paged ? end : items.size()); ++i) {
      for (std::uint32_t t = 0; t < slab.rows_per_item; ++t) {
        if (paged && i * page + t >= end_token) break;
        for (std::uint32_t h = 0; h < slab.head_count; ++h) {
          auto* at = reinterpret_cast<std::uint8_t*>(
              slab.base + static_cast<std::uint64_t>(items[i]) * slab.item_stride +
              t * slab.row_stride + h * slab.head_stride);
          for (std::uint32_t b = 0; b < slab.head_bytes; ++b)
            visit(at[b], pattern(part.room, slab.component, slab.layer, slab.head_begin + h,
                                 i * page + t, b));
        }
      }
    }
  }
}

void World::overwrite(const Node& node, const Part& part, int value) {
  for (const Slab& slab : node.layout.slabs) {
    for (const PageIndex item : items_of(slab, part))
      std::memset(
          reinterpret_cast<void*>(slab.base + static_cast<std::uint64_t>(item) * slab.item_stride),
          value, slab.item_bytes);
  }
}

void World::fill_source(Node& node, const Part& part, std::uint64_t begin, std::uint64_t count) {
  for_bytes(node, part, begin, begin + count, ~std::uint64_t{0},
            [](std::uint8_t& at, std::uint8_t value) { at = value; });
}

void World::verify_target(Node& node, const Part& part) {
  std::uint64_t wrong = 0, bytes = 0;
  // Behind the last page of either side nothing is sent.
  const std::uint64_t tokens = rooms_.at(part.room)->tokens;
  const auto whole = [&](std::uint32_t page) { return (tokens + page - 1) / page * page; };
  const std::uint64_t end = std::min(whole(page_tokens_), whole(their_page_tokens_));
  for_bytes(node, part, 0, part.pages.size(), end, [&](std::uint8_t& at, std::uint8_t value) {
    wrong += at != value ? 1 : 0;
    ++bytes;
  });
  report_.bytes += bytes;
  if (wrong > 0)
    violation(fmt::format("{}: room {} says Success with {} of {} bytes wrong", node.host,
                          part.room, wrong, bytes));
}

void World::release(Node& node, Part& part) {
  if (!part.holds) return;
  part.holds = false;
  for (const PageIndex page : part.pages) {
    node.free_pages.push_back(page);
    node.page_owner.erase(page);
  }
  node.free_rows.push_back(part.aux_row);
  node.row_owner.erase(part.aux_row);
  // Whoever gets them writes at once: a late reader would see it.
  if (!node.prefill) return;
  overwrite(node, part, 0xDD);
}

void World::on_room(std::uint32_t number, std::uint64_t life, proto::UseId use,
                    const proto::RoomView& view) {
  Node& node = *nodes_[number];
  const auto it = node.parts.find(use);
  if (it == node.parts.end() || node.life != life) return;
  Part& part = it->second;
  if (part.ended && view.state != part.state)
    violation(fmt::format("{}: room {} went from {} to {}", node.host, part.room,
                          to_string(part.state), to_string(view.state)));
  if (!is_terminal(view.state) && static_cast<int>(view.state) < static_cast<int>(part.state)) {
    violation(fmt::format("{}: room {} moved back from {} to {}", node.host, part.room,
                          to_string(part.state), to_string(view.state)));
  }
  part.state = view.state;
  if (is_terminal(view.state) && !part.ended) {
    part.ended = true;
    log(fmt::format("{} room {} {} {}", node.host, part.room, to_string(view.state),
                    view.failure.status.message()));
    if (!node.prefill && view.state == RoomState::kSuccess) {
      verify_target(node, part);
      Room& room = *rooms_.at(part.room);
      if (++room.decode_succeeded == room.decode_parts) ++report_.succeeded;
    }
    on_node(number, life, ms(0, 10), [this, use](Node& n) {
      const auto p = n.parts.find(use);
      if (p == n.parts.end() || p->second.cleared) return;
      p->second.cleared = true;
      if (n.prefill) n.prefill_manager->clear(use, queue_.now());
      if (!n.prefill) n.decode_manager->clear(use, queue_.now());
      after_input(n);
    });
  }
  if (part.ended && view.pages_reusable) release(node, part);
}

void World::on_land(const std::string& from_host, std::uint64_t from_life, std::uint64_t flow,
                    const std::string& to_host, std::uint64_t address, std::uint64_t bytes) {
  Node& from = *nodes_[by_host_.at(from_host)];
  Node& to = *nodes_[by_host_.at(to_host)];
  // The planes count lives of their own; a writer that is gone has left its name in its rooms only
  // while its node lives.
  std::optional<std::uint64_t> room;
  if (from.alive && from.plane != nullptr && from.plane->life() == from_life) {
    const auto part = from.parts.find(proto::UseId{flow});
    if (part != from.parts.end()) room = part->second.room;
  }
  for (const Slab& slab : to.layout.slabs) {
    const std::uint64_t end =
        slab.base + slab.item_stride * (slab.item_count - 1) + slab.item_bytes;
    if (address < slab.base || address >= end) continue;
    const std::uint64_t item = (address - slab.base) / slab.item_stride;
    if ((address + bytes - 1 - slab.base) / slab.item_stride != item && is_one(slab))
      violation("a piece crosses rows");
    for (std::uint64_t i = item; i <= (address + bytes - 1 - slab.base) / slab.item_stride; ++i) {
      std::optional<std::uint64_t> owner;
      if (is_one(slab)) {
        const auto it = to.row_owner.find(static_cast<std::uint32_t>(i));
        if (it != to.row_owner.end()) owner = it->second;
      } else {
        const auto it = to.page_owner.find(static_cast<PageIndex>(i));
        if (it != to.page_owner.end()) owner = it->second;
      }
      if (!owner)
        return violation(fmt::format("{}: a byte of {} landed in item {} that nobody owns", to.host,
                                     from_host, i));
      if (room && *room != *owner)
        return violation(fmt::format("{}: a byte of room {} landed in item {} of room {}", to.host,
                                     *room, i, *owner));
    }
    return;
  }
  violation(fmt::format("{}: a byte landed outside every pool", to.host));
}

// --- the two acts
// -------------------------------------------------------------------------------------------------

void World::schedule_faults() {
  const auto at = [&](Duration limit) {
    return Duration(
        static_cast<std::int64_t>(random_.below(static_cast<std::uint64_t>(limit.count()))));
  };
  if (crashes_) {
    for (std::uint64_t i = random_.between(1, 4); i > 0; --i) {
      queue_.after(at(act_one_), [this] {
        if (healed_) return;
        // Drawn one after the other: the order in which arguments are evaluated differs between
        // compilers.
        Node& node = *nodes_[random_.below(nodes_.size())];
        const Duration down = random_.chance(50) ? ms(1, 30) : ms(30, 1500);
        crash(node, down);
      });
    }
  }
  if (partitions_) {
    for (std::uint64_t i = random_.between(1, 4); i > 0; --i) {
      queue_.after(at(act_one_), [this] {
        if (healed_) return;
        const std::string a = nodes_[random_.below(nodes_.size())]->host,
                          b = nodes_[random_.below(nodes_.size())]->host;
        if (a == b) return;
        cut_[std::minmax(a, b)] = queue_.now() + ms(50, 1200);
        log(fmt::format("link {} - {} is cut", a, b));
      });
    }
  }
  if (freezes_) {
    for (std::uint64_t i = random_.between(1, 3); i > 0; --i) {
      queue_.after(at(act_one_), [this] {
        Node& node = *nodes_[random_.below(nodes_.size())];
        if (healed_ || !node.alive) return;
        node.frozen_until = queue_.now() + ms(50, 1500);
        log(fmt::format("{} freezes", node.host));
        queue_.at(node.frozen_until + Duration(2000000),
                  [this, number = node.number, life = node.life] {
                    Node& n = *nodes_[number];
                    if (n.alive && n.life == life && n.frozen_until <= queue_.now()) thaw(n);
                  });
      });
    }
  }
  if (server_faults_) {
    for (std::uint64_t i = random_.between(1, 3); i > 0; --i) {
      queue_.after(at(act_one_), [this] {
        if (healed_) return;
        directory_down_until_ = queue_.now() + ms(20, 1500);
        log("bootstrap server down");
        if (random_.chance(60))
          directory_ = std::make_unique<proto::Directory>(settings_, random_);  // and it forgets
      });
    }
  }
}

void World::heal() {
  healed_ = true;
  log("heal");
  cut_.clear();
  directory_down_until_ = {};
  lose_percent_ = slow_http_percent_ = abort_percent_ = 0;
  fabric_.faults = {};
}

void World::check_end() {
  for (const auto& node : nodes_) {
    if (!node->alive) {
      violation(node->host + " is still down");
      continue;
    }
    for (const auto& [use, part] : node->parts) {
      if (!part.ended)
        violation(fmt::format("{}: room {} never ended, state {}", node->host, part.room,
                              to_string(part.state)));
      if (part.holds)
        violation(fmt::format("{}: the pages of room {} never came home", node->host, part.room));
    }
    if (node->free_pages.size() != pool_of(*node))
      violation(fmt::format("{}: {} of {} pages are free", node->host, node->free_pages.size(),
                            pool_of(*node)));
    const std::size_t open =
        node->prefill ? node->prefill_manager->open_rooms() : node->decode_manager->open_rooms();
    if (open != 0) violation(fmt::format("{}: {} rooms are left in the table", node->host, open));
    if (!node->prefill && node->decode_manager->open_leases() != 0)
      violation(
          fmt::format("{}: {} leases are left", node->host, node->decode_manager->open_leases()));
    if (node->plane->grants() != 0)
      violation(
          fmt::format("{}: {} grants are left in the plane", node->host, node->plane->grants()));
  }
}

Report World::run() {
  current_marks = &report_.marks;
  draw();
  build();
  schedule_faults();
  for (std::uint32_t i = 0; i < rooms_wanted_; ++i) {
    queue_.after(Duration(static_cast<std::int64_t>(
                     random_.below(static_cast<std::uint64_t>(act_one_.count())))),
                 [this] { open_room(false, 0); });
  }
  const auto run_until = [&](Time end) {
    while (queue_.next_time() <= end) {
      queue_.step();
      if (queue_.in_this_instant() > kEventsPerInstantMax) {
        violation("an instant has no end: some deadline lies in the past");
        return false;
      }
      if (report_.violations.size() >= 20) return false;
    }
    return true;
  };
  bool go = run_until(Time{} + act_one_ + ms(100, 200));
  heal();
  // Everything has deadlines: after the longest of them nothing is left.
  const Duration settle = settings_.bootstrap_timeout + 2 * settings_.waiting_timeout +
                          settings_.hold_time + std::chrono::seconds(4);
  go = go && run_until(queue_.now() + settle);
  if (go) check_end();
  // A first round lets foreign peers find out that ranks are new; rooms after it must succeed.
  for (int round = 0; go && round < 2; ++round) {
    const std::uint64_t first = next_room_;
    for (std::uint32_t i = 0; i < 4; ++i) {
      queue_.after(ms(0, 100), [this, i] { open_room(true, i); });
    }
    go = run_until(queue_.now() + settle);
    if (!go || round == 0) continue;
    for (std::uint64_t sequence = first; sequence < next_room_; ++sequence) {
      const Room& room = *rooms_.at(sequence);
      if (room.decode_succeeded != room.decode_parts)
        violation(
            fmt::format("fresh room {} did not succeed after the heal ({} of {} decode ranks)",
                        sequence, room.decode_succeeded, room.decode_parts));
    }
    check_end();
  }
  report_.digest = digest_.value();
  return report_;
}

}  // namespace kvferry::sim
