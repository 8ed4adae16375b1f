#include "src/runtime/endpoint.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <future>

#include <fmt/format.h>

#include "src/base/check.h"
#include "src/base/parse.h"
#include "src/base/turns.h"
#include "src/data/choice/choice_plane.h"
#include "src/data/loopback/loopback_plane.h"
#include "src/data/shm/shm_plane.h"
#include "src/data/tcp/tcp_plane.h"
#include "src/plan/geometry.h"
#include "src/runtime/log.h"

namespace kvferry::runtime {
namespace {

constexpr int kInboxBatch = 1024;    // commands of one turn
constexpr int kMessageBatch = 1024;  // control messages of one turn

Time now() {
  return std::chrono::steady_clock::now();
}

}  // namespace

void RoomCell::fail(Status status, bool from_other) {
  {
    const std::lock_guard lock(mutex);
    failure = {std::move(status), from_other};
  }
  state.store(static_cast<std::uint8_t>(RoomState::kFailed), std::memory_order_release);
}

Endpoint::Endpoint(std::string name, const EndpointOptions& endpoint_options)
    : options(endpoint_options), name_(std::move(name)) {}

Result<std::shared_ptr<Endpoint>> Endpoint::create(std::string name,
                                                   const EndpointOptions& endpoint_options) {
  KVF_RETURN_IF_ERROR(validate(endpoint_options.layout));
  if (!endpoint_options.state_kinds.empty()) {
    KVF_RETURN_IF_ERROR(plan::check_kinds(endpoint_options.layout, endpoint_options.state_kinds));
  }
  std::shared_ptr<Endpoint> endpoint(new Endpoint(std::move(name), endpoint_options));
  Endpoint& e = *endpoint;
  e.pool_pages_ = plan::page_limit(e.options.layout);
  e.life_ = e.entropy_.token();
  auto control = [&] {
    const ShortTurns turns(kLoopTurn);  // ZeroMQ's own thread starts here and inherits them
    return net::ZmqControl::create({e.options.listen_host, 0, e.options.public_host},
                                   e.options.settings);
  }();
  if (!control.ok()) return control.status();
  e.control_ = std::move(*control);
  switch (e.options.plane) {
    case PlaneKind::kAuto:
    case PlaneKind::kTcp: {
      auto tcp = data::create_tcp_plane(
          {std::string(without_brackets(e.options.listen_host)), 0, e.options.public_host},
          e.options.settings, e.entropy_);
      if (!tcp.ok()) return tcp.status();
      e.session_name_ = (*tcp)->session_name();
      e.plane_ = std::move(*tcp);
      if (e.options.plane == PlaneKind::kTcp) break;
      auto shm = data::create_shm_plane(e.options.shared_directory, e.options.settings, e.entropy_);
      if (!shm.ok()) {
        e.trace(proto::Severity::kWarning, "tcp only: " + shm.status().message());
        break;
      }
      auto both =
          data::ChoicePlane::create(std::move(*shm), std::move(e.plane_), data::shm_plane_in_reach);
      if (!both.ok()) return both.status();
      e.plane_ = std::move(*both);
      break;
    }
    case PlaneKind::kShm: {
      if (!e.options.native)
        return Status(Code::kInvalidArgument,
                      "the shm plane reaches native ranks only; a rank of the reference needs tcp");
      auto shm = data::create_shm_plane(e.options.shared_directory, e.options.settings, e.entropy_);
      if (!shm.ok()) return shm.status();
      e.plane_ = std::move(*shm);
      break;
    }
    case PlaneKind::kLoopback:
      if (e.options.loopback == nullptr)
        return Status(Code::kInvalidArgument,
                      "the loopback plane needs a fabric (make_loopback_fabric)");
      e.plane_ = std::make_unique<data::LoopbackPlane>(*e.options.loopback, e.options.settings);
      e.session_name_ =
          e.plane_
              ->address();  // "loopback:N" looks like host:port, as foreign registrations want it
      break;
  }
  for (const auto& regions : {plan::regions_of(e.options.layout), e.options.shared}) {
    if (const auto region = e.plane_->register_memory(regions); !region.ok())
      return region.status();
  }
  e.http_ = std::make_unique<net::HttpClient>();
  e.epoll_ = epoll_create1(EPOLL_CLOEXEC);
  e.inbox_event_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (e.epoll_ < 0 || e.inbox_event_ < 0)
    return Status(Code::kExhausted,
                  fmt::format("no descriptor for the loop: {}", std::strerror(errno)));
  for (const int fd : {e.inbox_event_, e.control_->fd(), e.plane_->ready_fd()}) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = fd;
    if (epoll_ctl(e.epoll_, EPOLL_CTL_ADD, fd, &event) != 0)
      return Status(Code::kInternal, fmt::format("epoll: {}", std::strerror(errno)));
  }
  return endpoint;
}

proto::Ports Endpoint::ports() {
  return {*control_, *this, *plane_, *this, *this, *this, entropy_};
}

void Endpoint::start(std::unique_ptr<Manager> manager) {
  manager_ = std::move(manager);
  thread_ = std::thread([this] { run(); });
}

Endpoint::~Endpoint() {
  stop(Duration::zero());
  http_.reset();
  if (inbox_event_ >= 0) close(inbox_event_);
  if (epoll_ >= 0) close(epoll_);
}

// --- the application's side
// ---------------------------------------------------------------------------------------

Status Endpoint::post(std::function<void(Time)> act) {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return Status(Code::kAborted, fmt::format("{} has stopped", name_));
    if (inbox_.size() >= options.settings.inbox_max)
      return Status(Code::kExhausted,
                    fmt::format("{}: {} calls wait (inbox_max)", name_, inbox_.size()));
    inbox_.push_back(std::move(act));
    if (!std::exchange(sleeping_, false)) return {};  // it looks before it sleeps
  }
  const std::uint64_t one = 1;
  (void)!::write(inbox_event_, &one, sizeof one);
  return {};
}

void Endpoint::post_always(std::function<void(Time)> act) {
  {
    const std::lock_guard lock(mutex_);
    if (closed_ && !stop_asked_) return;
    inbox_.push_back(std::move(act));
    if (!std::exchange(sleeping_, false)) return;
  }
  const std::uint64_t one = 1;
  (void)!::write(inbox_event_, &one, sizeof one);
}

Result<std::shared_ptr<RoomCell>> Endpoint::open_cell(RoomId room) {
  if (value_of(room) > kRoomMax)
    return Status(Code::kInvalidArgument, fmt::format("room {} is above 2^63-1", value_of(room)));
  const std::lock_guard lock(mutex_);
  if (closed_) return Status(Code::kAborted, fmt::format("{} has stopped", name_));
  if (open_.contains(room))
    return Status(Code::kAlreadyExists,
                  fmt::format("room {} is open on {}", value_of(room), name_));
  if (open_.size() >= options.settings.rooms_max)
    return Status(Code::kExhausted,
                  fmt::format("{}: {} rooms are open (rooms_max)", name_, open_.size()));
  auto cell = std::make_shared<RoomCell>();
  cell->room = room;
  cell->pool_pages = pool_pages_;
  cell->endpoint = weak_from_this();
  open_[room] = cell;
  return cell;
}

void Endpoint::close_cell(RoomCell& cell) {
  const std::lock_guard lock(mutex_);
  open_.erase(cell.room);
}

void Endpoint::stop(Duration patience) {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    if (!stop_asked_) patience_ = patience;
    stop_asked_ = true;
  }
  const std::uint64_t one = 1;
  (void)!::write(inbox_event_, &one, sizeof one);
  const std::lock_guard joining(join_mutex_);
  if (thread_.joinable()) thread_.join();
}

std::string Endpoint::metrics() {
  auto promise = std::make_shared<std::promise<std::string>>();
  auto text = promise->get_future();
  const Status posted = post([this, promise](Time) {
    const PlaneCounters bytes = plane_->counters();
    promise->set_value(manager_->metrics() +
                       fmt::format("# TYPE kvferry_plane_bytes_total counter\n"
                                   "kvferry_plane_bytes_total{{way=\"inline\"}} {}\n"
                                   "kvferry_plane_bytes_total{{way=\"ring\"}} {}\n"
                                   "kvferry_plane_bytes_total{{way=\"pulled\"}} {}\n",
                                   bytes.bytes_inline, bytes.bytes_ring, bytes.bytes_pulled));
  });
  if (!posted.ok()) return "";
  try {
    return text.get();
  } catch (const std::future_error&) {
    return "";  // the loop ended before it came to this
  }
}

// --- the loop
// -----------------------------------------------------------------------------------------------------

void Endpoint::run() {
  const ShortTurns turns(kLoopTurn);
  try {
    bool stopping = false;
    Time give_up = Time::max();
    for (;;) {
      const Time deadline = std::min(manager_->next_deadline(), give_up);
      int timeout = -1;
      if (deadline != Time::max()) {
        const auto wait = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - now());
        timeout = static_cast<int>(std::clamp<std::int64_t>(wait.count() + 1, 0, 60000));
      }
      turn(timeout);
      bool ask = false;
      {
        const std::lock_guard lock(mutex_);
        ask = stop_asked_;
      }
      if (ask && !stopping) {
        stopping = true;
        give_up = now() + patience_;
        manager_->stop(now());
      }
      if (stopping && (manager_->is_quiet() || now() >= give_up)) {
        manager_->stop(now());  // the last words to peers, now that nothing is in flight
        break;
      }
    }
    end("the endpoint stopped");
  } catch (const std::exception& error) {
    // A defect of ours: the endpoint ends and every room in it with that reason, the process goes
    // on.
    trace(proto::Severity::kError, fmt::format("{} ends: {}", name_, error.what()));
    end(error.what());
  }
}

void Endpoint::end(const std::string& why) {
  std::vector<std::shared_ptr<RoomCell>> opened;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    inbox_.clear();
    for (const auto& [room, cell] : open_)
      opened.push_back(cell);  // some may not have reached the loop
  }
  // Rooms whose last change has not been published yet, then the rest.
  for (const auto& [use, view] : std::exchange(changed_, {})) {
    if (const auto it = cells_.find(use); it != cells_.end() && view.state == RoomState::kSuccess)
      it->second->state.store(static_cast<std::uint8_t>(view.state), std::memory_order_release);
  }
  for (const auto& [use, cell] : cells_) {
    if (!is_terminal(cell->get())) cell->fail(Status(Code::kAborted, why), false);
  }
  for (const auto& cell : opened) {
    if (!is_terminal(cell->get())) cell->fail(Status(Code::kAborted, why), false);
  }
  // Nothing lands any more once the plane is gone.
  plane_.reset();
  for (const auto& [use, cell] : cells_)
    cell->pages_reusable.store(true, std::memory_order_release);
  for (const auto& cell : opened) cell->pages_reusable.store(true, std::memory_order_release);
}

void Endpoint::turn(int timeout_ms) {
  epoll_event events[64];
  {
    const std::lock_guard lock(mutex_);
    sleeping_ = inbox_.empty();
    if (!sleeping_) timeout_ms = 0;
  }
  const int n = epoll_wait(epoll_, events, 64, timeout_ms);
  // Before the commands: what was readable is what the engine had filled until then, not what a
  // command adds under the same number.
  for (int i = 0; i < n; ++i) {
    if (events[i].data.fd == inbox_event_) {
      std::uint64_t drained = 0;
      (void)!::read(inbox_event_, &drained, sizeof drained);
      continue;
    }
    const auto ready = ready_.find(events[i].data.fd);
    if (ready == ready_.end()) continue;
    const std::vector<proto::ReadyId> ids = std::move(ready->second);
    epoll_ctl(epoll_, EPOLL_CTL_DEL, ready->first, nullptr);
    ready_.erase(ready);
    for (const proto::ReadyId id : ids) manager_->on_ready(id, now());
  }

  std::vector<std::function<void(Time)>> commands;
  {
    const std::lock_guard lock(mutex_);
    sleeping_ = false;
    if (inbox_.size() <= kInboxBatch) {
      commands.swap(inbox_);
    } else {
      commands.assign(std::make_move_iterator(inbox_.begin()),
                      std::make_move_iterator(inbox_.begin() + kInboxBatch));
      inbox_.erase(inbox_.begin(), inbox_.begin() + kInboxBatch);
    }
  }
  for (const auto& command : commands) command(now());

  // The control socket's descriptor is edge-triggered: stop only when there is nothing left, or
  // come back without waiting.
  wire::Frames frames;
  int messages = 0;
  while (messages < kMessageBatch && control_->receive(frames)) {
    manager_->on_frames(frames, now());
    ++messages;
  }
  if (messages == kMessageBatch) {
    const std::uint64_t one = 1;
    (void)!::write(inbox_event_, &one, sizeof one);
  }

  completions_.clear();
  plane_->poll(completions_);
  for (const Completion& completion : completions_) manager_->on_completion(completion, now());
  manager_->advance(now());

  while (!changed_.empty()) {
    for (const auto& [use, view] : std::exchange(changed_, {})) {
      const auto it = cells_.find(use);
      if (it == cells_.end()) continue;
      RoomCell& cell = *it->second;
      cell.bytes.store(view.bytes, std::memory_order_relaxed);
      if (view.prefix_tokens)
        cell.prefix_tokens.store(static_cast<std::int64_t>(*view.prefix_tokens),
                                 std::memory_order_relaxed);
      if (!is_terminal(cell.get())) {
        if (view.state == RoomState::kFailed) {
          cell.fail(view.failure.status, view.failure.from_other);
        } else {
          cell.state.store(static_cast<std::uint8_t>(view.state), std::memory_order_release);
        }
      }
      if (view.pages_reusable) {
        cell.pages_reusable.store(true, std::memory_order_release);
        if (cell.cleared.load(std::memory_order_acquire)) cells_.erase(it);
      }
    }
  }
}

void Endpoint::drop_cell(proto::UseId use) {
  const auto it = cells_.find(use);
  if (it != cells_.end() && it->second->pages_reusable.load(std::memory_order_acquire))
    cells_.erase(it);
}

void Endpoint::bind_cell(proto::UseId use, std::shared_ptr<RoomCell> cell) {
  cell->use.store(static_cast<std::uint64_t>(use), std::memory_order_release);
  cells_[use] = std::move(cell);
}

void Endpoint::watch_ready(proto::ReadyId ready, int fd) {
  ready_[fd].push_back(ready);  // ids of rooms that have ended are ignored by the manager
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = fd;
  // A number may be of a new descriptor although an older one was watched under it: the kernel
  // knows.
  if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) != 0 && errno != EEXIST) {
    // Not a descriptor that can be waited for: reading early would be wrong, so the chunk never
    // becomes ready and its room fails at its deadline.
    trace(proto::Severity::kError,
          fmt::format("ready descriptor {}: {}", fd, std::strerror(errno)));
    ready_.erase(fd);
  }
}

// --- ports
// --------------------------------------------------------------------------------------------------------

void Endpoint::call(proto::CallId id, proto::HttpRequest request) {
  http_->call(std::move(request), [this, id](proto::HttpResponse response) {
    // Calls are few, and one whose answer is lost would never end.
    post_always(
        [this, id, response = std::move(response)](Time t) { manager_->on_http(id, response, t); });
  });
}

std::string Endpoint::load(std::uint64_t address, std::size_t bytes) {
  return {reinterpret_cast<const char*>(address), bytes};
}
void Endpoint::store(std::uint64_t address, const std::string& bytes) {
  std::memcpy(reinterpret_cast<void*>(address), bytes.data(), bytes.size());
}
void Endpoint::on_room(proto::UseId use, const proto::RoomView& view) {
  changed_[use] = view;
}

void Endpoint::trace(proto::Severity severity, const std::string& line) {
  if (static_cast<int>(severity) >= static_cast<int>(options.log_level))
    log_line(severity, name_, line);
}

}  // namespace kvferry::runtime
