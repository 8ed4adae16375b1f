// The installed API over the loop: handles that push commands and read cells.
#include <fmt/format.h>

#include "kvferry/bootstrap_server.h"
#include "kvferry/endpoint.h"
#include "src/data/loopback/loopback_plane.h"
#include "src/plan/components.h"
#include "src/runtime/endpoint.h"

namespace kvferry {
namespace {

using runtime::Endpoint;
using runtime::RoomCell;

std::string counters_text(const char* role, const proto::Counters& c, std::size_t rooms,
                          std::size_t sessions) {
  std::string out;
  const auto line = [&](const char* name, const char* type, std::uint64_t value) {
    out += fmt::format("# TYPE kvferry_{}_{} {}\nkvferry_{}_{} {}\n", role, name, type, role, name,
                       value);
  };
  line("rooms_open", "gauge", rooms);
  line("sessions_open", "gauge", sessions);
  line("rooms_opened_total", "counter", c.rooms_opened);
  line("rooms_succeeded_total", "counter", c.rooms_succeeded);
  line("rooms_failed_total", "counter", c.rooms_failed);
  line("rooms_aborted_total", "counter", c.rooms_aborted);
  line("bytes_moved_total", "counter", c.bytes_moved);
  line("writes_failed_total", "counter", c.writes_failed);
  line("malformed_messages_total", "counter", c.malformed_messages);
  line("unexpected_messages_total", "counter", c.unexpected_messages);
  line("refused_aux_total", "counter", c.refused_aux);
  line("sessions_opened_total", "counter", c.sessions_opened);
  line("sessions_ended_total", "counter", c.sessions_ended);
  line("reuse_unproven_total", "counter", c.reuse_unproven);
  return out;
}

class PrefillAdapter final : public runtime::Manager {
 public:
  PrefillAdapter(proto::PrefillSelf self, Endpoint& endpoint)
      : endpoint_(endpoint),
        manager(std::move(self), endpoint.options.settings, endpoint.ports()) {}
  void on_frames(const wire::Frames& frames, Time now) override { manager.on_frames(frames, now); }
  void on_completion(const Completion& completion, Time now) override {
    manager.on_completion(completion, now);
  }
  void on_http(proto::CallId call, const proto::HttpResponse& response, Time now) override {
    manager.on_http(call, response, now);
    endpoint_.registered.store(manager.is_registered(), std::memory_order_release);
  }
  void on_ready(proto::ReadyId ready, Time now) override { manager.on_ready(ready, now); }
  void advance(Time now) override { manager.advance(now); }
  Time next_deadline() const override { return manager.next_deadline(); }
  void stop(Time now) override { manager.stop(now); }
  bool is_quiet() const override { return manager.is_quiet(); }
  std::string metrics() const override {
    return counters_text("prefill", manager.counters(), manager.open_rooms(), manager.sessions()) +
           fmt::format(
               "# TYPE kvferry_prefill_pending_rooms gauge\nkvferry_prefill_pending_rooms {}\n",
               manager.pending_rooms());
  }

 private:
  Endpoint& endpoint_;

 public:
  proto::PrefillManager manager;
};

class DecodeAdapter final : public runtime::Manager {
 public:
  DecodeAdapter(proto::DecodeSelf self, Endpoint& endpoint)
      : manager(std::move(self), endpoint.options.settings, endpoint.ports()) {}
  void on_frames(const wire::Frames& frames, Time now) override { manager.on_frames(frames, now); }
  void on_completion(const Completion& completion, Time now) override {
    manager.on_completion(completion, now);
  }
  void on_http(proto::CallId call, const proto::HttpResponse& response, Time now) override {
    manager.on_http(call, response, now);
  }
  void on_ready(proto::ReadyId, Time) override {}
  void advance(Time now) override { manager.advance(now); }
  Time next_deadline() const override { return manager.next_deadline(); }
  void stop(Time now) override { manager.stop(now); }
  bool is_quiet() const override { return manager.is_quiet(); }
  std::string metrics() const override {
    return counters_text("decode", manager.counters(), manager.open_rooms(), manager.sessions()) +
           fmt::format(
               "# TYPE kvferry_decode_leases gauge\nkvferry_decode_leases {}\n# TYPE "
               "kvferry_decode_leases_quarantined gauge\nkvferry_decode_leases_quarantined {}\n",
               manager.open_leases(), manager.quarantined());
  }

  proto::DecodeManager manager;
};

proto::PrefillManager& prefill(Endpoint& endpoint) {
  return static_cast<PrefillAdapter&>(endpoint.manager()).manager;
}
proto::DecodeManager& decode(Endpoint& endpoint) {
  return static_cast<DecodeAdapter&>(endpoint.manager()).manager;
}
proto::UseId use_of(const RoomCell& cell) {
  return proto::UseId{cell.use.load(std::memory_order_acquire)};
}

RoomFailure failure_of(const RoomCell& cell) {
  const std::lock_guard lock(cell.mutex);
  return cell.failure;
}

// Runs `act(endpoint, now)` on the loop, while the handle is good.
template <class Act>
Status post_to(const std::shared_ptr<RoomCell>& cell, Act act) {
  if (cell == nullptr) return Status(Code::kInvalidArgument, "an empty handle");
  if (cell->cleared.load(std::memory_order_acquire))
    return Status(Code::kNotFound, fmt::format("room {} was cleared", value_of(cell->room)));
  const auto endpoint = cell->endpoint.lock();
  if (endpoint == nullptr) return Status(Code::kAborted, "the endpoint is gone");
  return endpoint->post([raw = endpoint.get(), act = std::move(act)](Time now) { act(*raw, now); });
}

Status check_pages(const RoomCell& cell, std::span<const PageIndex> pages) {
  for (const PageIndex page : pages) {
    if (page < 0 || static_cast<std::uint32_t>(page) >= cell.pool_pages) {
      return Status(Code::kInvalidArgument,
                    fmt::format("room {}: page {} outside pool of {}", value_of(cell.room), page,
                                cell.pool_pages));
    }
  }
  return {};
}

// clear() of either handle. `act` clears the room on the loop.
template <class Act>
void clear_cell(const std::shared_ptr<RoomCell>& cell, Act act) {
  if (cell == nullptr || cell->cleared.exchange(true, std::memory_order_acq_rel)) return;
  const auto endpoint = cell->endpoint.lock();
  if (endpoint == nullptr) return;
  // The number is free when the loop has heard of it, so that a new open() cannot overtake the
  // clear. A full inbox must not lose it: it is the call that makes room.
  endpoint->post_always([raw = endpoint.get(), cell, act](Time now) {
    act(*raw, now);
    raw->drop_cell(use_of(*cell));
    raw->close_cell(*cell);
  });
}

}  // namespace

std::shared_ptr<data::LoopbackFabric> make_loopback_fabric() {
  return std::make_shared<data::LoopbackFabric>();
}

// --- Sender
// -------------------------------------------------------------------------------------------------------

Status Sender::init(std::uint64_t pages, std::uint32_t aux_row, PageBase base) {
  const bool whole = base == PageBase::kWholeRequest;
  return post_to(cell_, [cell = cell_, pages, aux_row, whole](Endpoint& endpoint, Time now) {
    if (const Status status = prefill(endpoint).init(use_of(*cell), pages, aux_row, now, whole);
        !status.ok())
      prefill(endpoint).abort(use_of(*cell), status, now);
  });
}

Status Sender::send(std::span<const PageIndex> pages, int ready_fd) {
  return send(pages, {}, ready_fd);
}

Status Sender::send(std::span<const PageIndex> pages, std::span<const StateItems> states,
                    int ready_fd) {
  if (cell_ == nullptr) return Status(Code::kInvalidArgument, "an empty handle");
  KVF_RETURN_IF_ERROR(check_pages(*cell_, pages));
  return post_to(cell_, [cell = cell_, list = std::vector<PageIndex>(pages.begin(), pages.end()),
                         owned = std::vector<StateItems>(states.begin(), states.end()),
                         ready_fd](Endpoint& endpoint, Time now) {
    const proto::ReadyId ready = ready_fd >= 0 ? endpoint.next_ready() : proto::ReadyId{};
    const Status status = prefill(endpoint).send(use_of(*cell), list, ready, now, owned);
    if (!status.ok()) {
      prefill(endpoint).abort(use_of(*cell), status, now);
    } else if (ready_fd >= 0) {
      endpoint.watch_ready(ready, ready_fd);
    }
  });
}

RoomState Sender::poll() const {
  return cell_ == nullptr ? RoomState::kFailed : cell_->get();
}

void Sender::abort(std::string reason) {
  (void)post_to(cell_, [cell = cell_, reason = std::move(reason)](Endpoint& endpoint, Time now) {
    prefill(endpoint).abort(use_of(*cell), Status(Code::kAborted, reason), now);
  });
}

void Sender::clear() {
  clear_cell(cell_, [cell = cell_](Endpoint& endpoint, Time now) {
    prefill(endpoint).clear(use_of(*cell), now);
  });
}

bool Sender::pages_reusable() const {
  return cell_ == nullptr || cell_->pages_reusable.load(std::memory_order_acquire);
}

std::optional<std::uint64_t> Sender::decode_prefix_length() const {
  const std::int64_t tokens =
      cell_ == nullptr ? -1 : cell_->prefix_tokens.load(std::memory_order_relaxed);
  return tokens < 0 ? std::nullopt
                    : std::optional<std::uint64_t>(static_cast<std::uint64_t>(tokens));
}

std::uint64_t Sender::bytes_moved() const {
  return cell_ == nullptr ? 0 : cell_->bytes.load(std::memory_order_relaxed);
}
RoomFailure Sender::failure() const {
  return cell_ == nullptr ? RoomFailure{} : failure_of(*cell_);
}
RoomId Sender::room() const {
  return cell_ == nullptr ? RoomId{} : cell_->room;
}

// --- Receiver
// -----------------------------------------------------------------------------------------------------

Status Receiver::init(std::optional<std::uint32_t> prefill_dp_rank) {
  return post_to(cell_, [cell = cell_, prefill_dp_rank](Endpoint& endpoint, Time now) {
    if (const Status status = decode(endpoint).init(use_of(*cell), prefill_dp_rank, now);
        !status.ok())
      decode(endpoint).abort(use_of(*cell), status, now);
  });
}

Status Receiver::send_metadata(std::span<const PageIndex> pages,
                               std::optional<std::uint32_t> aux_row, std::uint64_t prefix_tokens,
                               std::span<const StateItems> states) {
  if (cell_ == nullptr) return Status(Code::kInvalidArgument, "an empty handle");
  KVF_RETURN_IF_ERROR(check_pages(*cell_, pages));
  return post_to(
      cell_, [cell = cell_, metadata = proto::RoomMetadata{{pages.begin(), pages.end()},
                                                           aux_row,
                                                           prefix_tokens,
                                                           {states.begin(), states.end()}}](
                 Endpoint& endpoint, Time now) {
        if (const Status status = decode(endpoint).send_metadata(use_of(*cell), metadata, now);
            !status.ok())
          decode(endpoint).abort(use_of(*cell), status, now);
      });
}

RoomState Receiver::poll() const {
  return cell_ == nullptr ? RoomState::kFailed : cell_->get();
}

void Receiver::abort(std::string reason) {
  (void)post_to(cell_, [cell = cell_, reason = std::move(reason)](Endpoint& endpoint, Time now) {
    decode(endpoint).abort(use_of(*cell), Status(Code::kAborted, reason), now);
  });
}

void Receiver::clear() {
  clear_cell(cell_, [cell = cell_](Endpoint& endpoint, Time now) {
    decode(endpoint).clear(use_of(*cell), now);
  });
}

bool Receiver::pages_reusable() const {
  return cell_ == nullptr || cell_->pages_reusable.load(std::memory_order_acquire);
}
RoomFailure Receiver::failure() const {
  return cell_ == nullptr ? RoomFailure{} : failure_of(*cell_);
}
RoomId Receiver::room() const {
  return cell_ == nullptr ? RoomId{} : cell_->room;
}

// --- endpoints
// ----------------------------------------------------------------------------------------------------

namespace {

Status check_ratios(const PrefillOptions& options, const std::string& name) {
  const auto& ratios = options.compression_ratios;
  const auto bad = [&](const std::string& why) {
    return Status(Code::kInvalidArgument, fmt::format("{}: compression ratios: {}", name, why));
  };
  if (ratios.empty()) return {};
  if (!options.mla) return bad("only MLA models are compressed");
  if (options.stage_begin + std::uint64_t{options.stage_layers} > ratios.size()) {
    return bad(fmt::format("they are of {} layers, the stage holds {}..{}", ratios.size(),
                           options.stage_begin,
                           options.stage_begin + std::uint64_t{options.stage_layers}));
  }
  for (const std::uint32_t ratio : ratios) {
    if (ratio != 0 && ratio != plan::kIndexedRatio && ratio != plan::kCoarseRatio)
      return bad(fmt::format("{} is none of 0, {} and {}", ratio, plan::kIndexedRatio,
                             plan::kCoarseRatio));
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<PrefillEndpoint>> PrefillEndpoint::create(PrefillOptions options) {
  const std::string name = fmt::format("prefill tp{} pp{} dp{}", options.place.tp_rank,
                                       options.place.pp_rank, options.place.dp_rank);
  KVF_RETURN_IF_ERROR(check_ratios(options, name));
  auto endpoint = Endpoint::create(name, options);
  if (!endpoint.ok()) return endpoint.status();
  Endpoint& e = **endpoint;
  proto::PrefillSelf self;
  self.place = options.place;
  self.system_dp_rank = options.system_dp_rank;
  self.system_dp_size = options.system_dp_size;
  self.control = e.address();
  self.bootstrap = options.bootstrap;
  self.life = e.life();
  self.layout = options.layout;
  self.state_kinds = options.state_kinds;
  self.attention = {options.mla, options.hybrid_mla};
  self.total_kv_heads = options.total_kv_heads;
  self.stage_begin = options.stage_begin;
  self.stage_layers = options.stage_layers;
  self.compression_ratios = options.compression_ratios;
  self.kv_cache_dtype = options.kv_cache_dtype;
  self.load_balance_method = options.load_balance_method;
  self.native = options.native;
  auto adapter = std::make_unique<PrefillAdapter>(std::move(self), e);
  adapter->manager.start(std::chrono::steady_clock::now());
  e.start(std::move(adapter));
  return std::unique_ptr<PrefillEndpoint>(new PrefillEndpoint(std::move(*endpoint)));
}

PrefillEndpoint::PrefillEndpoint(std::shared_ptr<Endpoint> endpoint)
    : endpoint_(std::move(endpoint)) {}
PrefillEndpoint::~PrefillEndpoint() {
  stop();
}

Result<Sender> PrefillEndpoint::open(RoomId room, bool carries_dp_rank) {
  auto cell = endpoint_->open_cell(room);
  if (!cell.ok()) return cell.status();
  const Status posted =
      endpoint_->post([raw = endpoint_.get(), cell = *cell, carries_dp_rank](Time now) {
        const auto use = prefill(*raw).open(cell->room, {carries_dp_rank}, now);
        if (use.ok()) {
          raw->bind_cell(*use, cell);
        } else {
          cell->fail(use.status(), false);
          cell->pages_reusable.store(true, std::memory_order_release);
        }
      });
  if (!posted.ok()) {
    endpoint_->close_cell(**cell);
    return posted;
  }
  Sender sender;
  sender.cell_ = std::move(*cell);
  return sender;
}

bool PrefillEndpoint::registered() const {
  return endpoint_->registered.load(std::memory_order_acquire);
}
Address PrefillEndpoint::address() const {
  return endpoint_->address();
}
void PrefillEndpoint::stop(Duration patience) {
  endpoint_->stop(patience);
}
std::string PrefillEndpoint::metrics() const {
  return endpoint_->metrics();
}

Result<std::unique_ptr<DecodeEndpoint>> DecodeEndpoint::create(DecodeOptions options) {
  const std::string name =
      fmt::format("decode tp{} pp{}", options.place.tp_rank, options.place.pp_rank);
  auto endpoint = Endpoint::create(name, options);
  if (!endpoint.ok()) return endpoint.status();
  Endpoint& e = **endpoint;
  proto::DecodeSelf self;
  self.place = options.place;
  self.control = e.address();
  self.life = e.life();
  self.layout = options.layout;
  self.state_kinds = options.state_kinds;
  self.attention = {options.mla, options.hybrid_mla};
  self.total_kv_heads = options.total_kv_heads;
  self.kv_cache_dtype = options.kv_cache_dtype;
  self.session_name = e.session_name();
  e.start(std::make_unique<DecodeAdapter>(std::move(self), e));
  return std::unique_ptr<DecodeEndpoint>(new DecodeEndpoint(std::move(*endpoint)));
}

DecodeEndpoint::DecodeEndpoint(std::shared_ptr<Endpoint> endpoint)
    : endpoint_(std::move(endpoint)) {}
DecodeEndpoint::~DecodeEndpoint() {
  stop();
}

Result<Receiver> DecodeEndpoint::open(RoomId room, const Address& bootstrap) {
  auto cell = endpoint_->open_cell(room);
  if (!cell.ok()) return cell.status();
  const Status posted = endpoint_->post([raw = endpoint_.get(), cell = *cell, bootstrap](Time now) {
    const auto use = decode(*raw).open(cell->room, bootstrap, now);
    if (use.ok()) {
      raw->bind_cell(*use, cell);
    } else {
      cell->fail(use.status(), false);
      cell->pages_reusable.store(true, std::memory_order_release);
    }
  });
  if (!posted.ok()) {
    endpoint_->close_cell(**cell);
    return posted;
  }
  Receiver receiver;
  receiver.cell_ = std::move(*cell);
  return receiver;
}

Address DecodeEndpoint::address() const {
  return endpoint_->address();
}
void DecodeEndpoint::stop(Duration patience) {
  endpoint_->stop(patience);
}
std::string DecodeEndpoint::metrics() const {
  return endpoint_->metrics();
}

}  // namespace kvferry
