#include "src/data/stream/engine.h"

#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include "src/base/check.h"
#include "src/base/numa.h"
#include "src/base/turns.h"

namespace kvferry::data::stream {
namespace {

// Bytes that one connection may move before the others and the commands have their turn.
constexpr std::size_t kTurnBytes = 128 << 10;
constexpr std::size_t kEvents = 256;
// Whatever a target says of its processor, its source moves no more often than so.
constexpr auto kMovePause = std::chrono::milliseconds(5);
constexpr int kPipeLooksMax = 8;                   // at pipes, for one at the sockets
constexpr std::size_t kPatientCommandsMax = 1024;  // that wait for the next waking
constexpr auto kSmallMemory = std::chrono::milliseconds(10);
constexpr auto kKeptForLong = std::chrono::microseconds(1000);
constexpr auto kNoWayPause = std::chrono::milliseconds(8);
constexpr int kKeptTimes = 3;
constexpr auto kNoDescriptorPause = std::chrono::milliseconds(100);

// From there to the next line of memory.
std::size_t to_line(const char* at) {
  return -reinterpret_cast<std::uintptr_t>(at) % kLine;
}

std::string error_text(int error) {
  return std::strerror(error);
}  // NOLINT: the engine's thread and start() only

void signal(int event) {
  const std::uint64_t one = 1;
  (void)!::write(event, &one, sizeof one);
}

Time now() {
  return std::chrono::steady_clock::now();
}

}  // namespace

Engine::Engine(std::unique_ptr<Links> links, const Settings& settings, Token life)
    : links_(std::move(links)),
      settings_(settings),
      life_(life),
      spinner_(settings.spin),
      copier_(settings) {}

Status Engine::start() {
  if (links_->one_host()) {
    const std::uint64_t bytes = settings_.shm_pulls_max * sizeof(std::uint64_t);
    auto file = create_memory_file("kvferry-epochs", bytes);
    if (!file.ok()) return file.status();
    auto mapping = Mapping::of(file->get(), bytes, true);
    if (!mapping.ok()) return mapping.status();
    epoch_file_ = std::move(*file);
    epochs_ = std::move(*mapping);
    for (std::uint64_t slot = settings_.shm_pulls_max; slot > 0; --slot)
      free_epoch_slots_.push_back(static_cast<std::uint32_t>(slot - 1));
  }
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  command_event_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  ready_event_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (epoll_ < 0 || command_event_ < 0 || ready_event_ < 0)
    return Status(Code::kExhausted, "no descriptor for a data plane: " + error_text(errno));
  watch(links_->listener(), EPOLLIN, nullptr);
  watch(command_event_, EPOLLIN, &command_event_);
  receive_buffer_.resize(kReceiveBytes + 2 * kLine);
  receive_line_ = receive_buffer_.data() + to_line(receive_buffer_.data());
  thread_ = std::thread([this] { run(); });
  return {};
}

Engine::~Engine() {
  if (thread_.joinable()) {
    command(Stop{});
    thread_.join();
  }
  for (const int fd : {epoll_, command_event_, ready_event_}) {
    if (fd >= 0) close(fd);
  }
}

// --- the endpoint's side

void Engine::command(Command command, bool waits) {
  {
    const std::lock_guard lock(mutex_);
    commands_.push_back(std::move(command));
    if (!sleeping_ || (!waits && commands_.size() < kPatientCommandsMax)) return;
    sleeping_ = false;  // one signal is enough; while awake it looks before it sleeps
  }
  signal(command_event_);
}

void Engine::offer(const Region& region) {
  if (const auto node = numa_node_of(reinterpret_cast<const void*>(region.base));
      node && settings_.numa_local != 0)
    command(NearCommand{*node}, false);
  if (region.file < 0 || !links_->one_host()) return;
  OwnedFd file(dup(region.file));
  if (file) command(OfferedRegion{{region.base, region.bytes}, std::move(file)});
}
void Engine::grant(GrantSpec spec) {
  // Whoever writes under it comes by a connection, and commands are done before bytes are looked
  // at.
  command(std::move(spec), false);
}
void Engine::revoke(GrantId grant, FenceId fence) {
  command(RevokeCommand{grant, fence}, fence != FenceId{0});
}
void Engine::write(WriteSpec spec) {
  command(std::move(spec));
}
void Engine::cancel(WriteId write) {
  command(CancelCommand{write});
}
void Engine::forget(const PlaneAddress& peer, FenceId fence) {
  command(ForgetCommand{peer, fence});
}

std::size_t Engine::poll(std::vector<Completion>& out) {
  std::uint64_t drained = 0;
  (void)!read(ready_event_, &drained, sizeof drained);
  const std::lock_guard lock(mutex_);
  const std::size_t count = completions_.size();
  for (Completion& completion : completions_) out.push_back(std::move(completion));
  completions_.clear();
  return count;
}

PlaneCounters Engine::counters() const {
  return {bytes_inline_.load(std::memory_order_relaxed),
          bytes_ring_.load(std::memory_order_relaxed),
          bytes_pulled_.load(std::memory_order_relaxed)};
}

void Engine::complete(Completion completion) {
  {
    const std::lock_guard lock(mutex_);
    completions_.push_back(std::move(completion));
    if (completions_.size() > 1) return;
  }
  signal(ready_event_);
}

// --- the thread

void Engine::run() {
  const ShortTurns turns(kCopyTurn);
  std::vector<epoll_event> events(kEvents);
  while (!stopping_) {
    int n = 0;
    const auto look = [&](int wait) {
      n = epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), wait);
      looks_ = 0;
      return n > 0;
    };
    const auto look_at_all = [&] {
      const Pipes pipes = look_at_pipes();
      if (pipes != Pipes::kNone && ++looks_ < kPipeLooksMax) return pipes == Pipes::kReady;
      return look(0) || pipes == Pipes::kReady;
    };
    if (!look_at_all() && !busy_) {
      // While something is under way the next slice or credit is near.
      const bool found = is_under_way() && spinner_.look([&] {
        give_way();
        return look_at_all();
      });
      if (!found && may_sleep()) look(may_sleep_by_pipes() ? timeout() : 0);
      for (const auto& c : connections_) c->pipe.wake_up();
    }
    busy_ = false;
    give_way();
    drain_commands();
    const auto with = [this](Connection& c, auto&& act) {
      try {
        act();
      } catch (const std::exception& error) {
        break_off(c, error.what());  // one connection's trouble, memory above all
      }
    };
    for (int i = 0; i < n && !stopping_; ++i) {
      void* what = events[static_cast<std::size_t>(i)].data.ptr;
      if (what == nullptr) {
        accept_all();
      } else if (what == &command_event_) {
        std::uint64_t drained = 0;
        (void)!read(command_event_, &drained, sizeof drained);
      } else {
        Connection& c = *static_cast<Connection*>(what);
        with(c, [&] { serve(c, events[static_cast<std::size_t>(i)].events); });
      }
    }
    for (const auto& c : connections_) {
      if (c->pipe_ready()) with(*c, [&] { serve_pipe(*c); });
      if (!c->dead && !c->pulls.empty()) with(*c, [&] { pull(*c); });
    }
    expire();
    std::erase_if(connections_, [](const auto& c) { return c->dead; });
  }
  for (const auto& connection : connections_) {
    if (connection->fd >= 0) close(connection->fd);
  }
  connections_.clear();
}

// False: commands wait. From here on to the next drain_commands() they are signalled.
bool Engine::may_sleep() {
  const std::lock_guard lock(mutex_);
  sleeping_ = commands_.empty();
  return sleeping_;
}

Engine::Pipes Engine::look_at_pipes() {
  Pipes pipes = Pipes::kNone;
  for (const auto& c : connections_) {
    if (c->pipe && !c->dead) {
      keep_apart(*c);
      pipes = std::max(pipes, Pipes::kIdle);
    }
    if (c->pipe_ready()) pipes = Pipes::kReady;
  }
  return pipes;
}

// From here on peers ring. False: something has come meanwhile.
bool Engine::may_sleep_by_pipes() {
  for (const auto& c : connections_) {
    if (!c->dead && c->pipe) c->pipe.fall_asleep(c->waiting() > 0);
  }
  return look_at_pipes() != Pipes::kReady;
}

bool Engine::is_under_way() const {
  return !writes_.empty() || std::any_of(connections_.begin(), connections_.end(),
                                         [](const auto& c) { return !c->incoming.empty(); });
}

// Where small writes come and go between slices of large ones, the loops that they need get the
// core between two slices; on few cores they would wait for the end of this thread's turn. Who
// keeps the core for long several times running is no loop and no plane of ours: then not, for a
// while that is shorter than those times, so that two planes cannot go on keeping it from each
// other.
void Engine::give_way() {
  const Time before = now();
  if (before - last_small_ > kSmallMemory || before < no_way_before_ || !is_under_way()) return;
  sched_yield();
  const Time after = now();
  kept_for_long_ = after - before > kKeptForLong ? kept_for_long_ + 1 : 0;
  if (kept_for_long_ < kKeptTimes) return;
  kept_for_long_ = 0;
  no_way_before_ = after + kNoWayPause;
}

int Engine::timeout() const {
  const Time next = std::min(connect_deadlines_.next(), cancel_deadlines_.next());
  if (next == Time::max()) return -1;
  const auto wait = std::chrono::duration_cast<std::chrono::milliseconds>(next - now());
  return static_cast<int>(std::clamp<std::int64_t>(wait.count() + 1, 0, 1000));
}

void Engine::expire() {
  const Time at = now();
  while (const auto id = cancel_deadlines_.pop_due(at)) {
    // The target has not answered. The source is read no more; what is under way lands only while
    // its grant lives.
    finish(*id, Status(Code::kAborted, "cancelled; the target did not answer"), false);
  }
  while (const auto fd = connect_deadlines_.pop_due(at)) {
    if (*fd == links_->listener()) watch(*fd, EPOLLIN, nullptr);
    for (const auto& connection : connections_) {
      const bool waits = connection->connecting || (!connection->outgoing && !connection->greeted);
      if (connection->fd == *fd && waits)
        break_off(*connection, "no connection within connect_timeout");
    }
  }
}

void Engine::drain_commands() {
  std::vector<Command> commands;
  {
    const std::lock_guard lock(mutex_);
    sleeping_ = false;
    commands.swap(commands_);
  }
  for (Command& command : commands) {
    try {
      std::visit([this](auto& c) { handle(c); }, command);
    } catch (const std::exception& error) {
      // Memory above all. The write that asked for it fails; a grant that is not there refuses its
      // writes.
      if (const auto* spec = std::get_if<WriteSpec>(&command)) lose(spec->id, error.what());
    }
  }
}

void Engine::handle(Stop&) {
  stopping_ = true;
}

void Engine::handle(NearCommand& c) {
  if (node_) return;
  node_ = c.node;
  if (run_near(c.node)) copier_.run_near(c.node);
}

void Engine::handle(OfferedRegion& region) {
  if (offered_.size() < kRegionsMax) offered_.push_back(std::move(region));
}

void Engine::handle(GrantSpec& spec) {
  const Status status = grants_.add(std::move(spec));
  KVF_CHECK(status.ok(), status.message());  // ids and tokens are never given twice
}

void Engine::handle(RevokeCommand& c) {
  // Bytes land on this thread only: after this line none does under that grant.
  grants_.remove(c.grant);
  if (c.fence == FenceId{0}) return;
  complete({Completion::Kind::kFence, static_cast<std::uint64_t>(c.fence), {}, true, 0});
}

void Engine::handle(WriteSpec& spec) {
  const WriteId id = spec.id;
  auto& write = writes_[id] = std::make_unique<Outgoing>(std::move(spec));
  if (!is_walkable(write->spec.plan))
    return finish(id, Status(Code::kInvalidArgument, "a lane or run of size 0"), true);
  auto connection = connection_to(write->spec.to, write->total <= settings_.express_bytes);
  if (!connection.ok()) return finish(id, connection.status(), true);
  if ((*connection)->express) last_small_ = now();
  write->connection = *connection;
  (*connection)->writes.insert(id);
  (*connection)->turns.push(write->spec.flow, write.get());
  if (!(*connection)->connecting) pump(**connection);
}

// Large slices are faster, short ones let others come in between: where small writes come and go,
// those count.
std::uint64_t Engine::slice_limit() const {
  return now() - last_small_ < kSmallMemory ? settings_.slice_bytes / 4 : settings_.slice_bytes;
}

// A write that could not even be queued.
void Engine::lose(WriteId id, const std::string& why) {
  const Status status(Code::kExhausted, why);
  if (writes_.contains(id) && writes_.at(id) != nullptr)
    return finish(id, status, !writes_.at(id)->begun);
  writes_.erase(id);
  complete({Completion::Kind::kWrite, static_cast<std::uint64_t>(id), status, true, 0});
}

void Engine::handle(CancelCommand& c) {
  const auto it = writes_.find(c.write);
  if (it == writes_.end() || it->second->cancelled) return;
  Outgoing& write = *it->second;
  if (!write.begun) return finish(c.write, Status(Code::kAborted, "cancelled"), true);
  write.cancelled = true;
  write.connection->turns.remove(write.spec.flow, &write);
  advance_epoch(write);
  // A slice of it that is partly sent lies in the connection's own buffer and goes on from there.
  append_frame(*write.connection, {Kind::kCancel, 0, static_cast<std::uint64_t>(c.write)}, {});
  cancel_deadlines_.set(c.write, now() + settings_.cancel_patience);
  pump(*write.connection);
}

void Engine::handle(ForgetCommand& c) {
  for (const auto& connection : connections_) {
    if (connection->outgoing && !connection->dead && connection->peer == c.peer)
      break_off(*connection, "peer forgotten");
  }
  complete({Completion::Kind::kFence, static_cast<std::uint64_t>(c.fence), {}, true, 0});
}

// --- connections

void Engine::watch(int fd, std::uint32_t interest, void* what) {
  epoll_event event{};
  event.events = interest;
  event.data.ptr = what;
  KVF_CHECK(epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) == 0, "epoll_ctl add");
}

void Engine::set_interest(Connection& c, std::uint32_t interest) {
  if (c.interest == interest || c.dead) return;
  epoll_event event{};
  event.events = interest;
  event.data.ptr = &c;
  epoll_ctl(epoll_, EPOLL_CTL_MOD, c.fd, &event);
  c.interest = interest;
}

Result<Engine::Connection*> Engine::connection_to(const PlaneAddress& peer, bool express) {
  for (const auto& connection : connections_) {
    if (connection->outgoing && !connection->dead && connection->peer == peer &&
        connection->express == express)
      return connection.get();
  }
  auto dialed = links_->dial(peer);
  if (!dialed.ok()) return dialed.status();
  auto connection = std::make_unique<Connection>();
  connection->fd = dialed->fd;
  connection->outgoing = connection->connecting = true;
  connection->express = express;
  connection->peer = peer;
  connection->peer_text = dialed->text;
  connection->interest = EPOLLOUT | EPOLLIN;
  Hello hello;
  hello.life = dialed->life;
  if (const Status status = make_offer(*connection, hello); !status.ok()) {
    close(dialed->fd);
    return status;
  }
  append_frame(*connection, {Kind::kHello, 0, 0}, encode_hello(hello));
  auto& c = *connections_.emplace_back(std::move(connection));
  watch(c.fd, c.interest, &c);
  connect_deadlines_.set(c.fd, now() + settings_.connect_timeout);
  return &c;
}

void Engine::accept_all() {
  const int listener = links_->listener();
  for (;;) {
    sockaddr_storage from{};
    socklen_t size = sizeof from;
    const int fd =
        accept4(listener, reinterpret_cast<sockaddr*>(&from), &size, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0 && (errno == EMFILE || errno == ENFILE)) {
      // No descriptor is free: stop listening for a moment instead of waking at once again.
      epoll_ctl(epoll_, EPOLL_CTL_DEL, listener, nullptr);
      connect_deadlines_.set(listener, now() + kNoDescriptorPause);
      return;
    }
    if (fd < 0) return;
    const auto incoming = std::count_if(connections_.begin(), connections_.end(),
                                        [](const auto& c) { return !c->outgoing; });
    if (static_cast<std::uint64_t>(incoming) >= settings_.sessions_max) {
      close(fd);
      continue;
    }
    auto& c = *connections_.emplace_back(std::make_unique<Connection>());
    c.fd = fd;
    c.peer_text = links_->welcome(fd, from, size);
    c.interest = EPOLLIN;
    watch(fd, c.interest, &c);
    connect_deadlines_.set(fd, now() + settings_.connect_timeout);  // until its hello
  }
}

void Engine::break_off(Connection& c, const std::string& why) {
  if (c.dead) return;
  c.dead = true;
  connect_deadlines_.clear(c.fd);
  epoll_ctl(epoll_, EPOLL_CTL_DEL, c.fd, nullptr);
  close(c.fd);
  c.fd = -1;
  const std::set<WriteId> writes = c.writes;
  for (const WriteId id : writes) {
    const bool begun = writes_.at(id)->begun;
    finish(id, Status(Code::kPeerLost, fmt::format("{}: {}", c.peer_text, why)), !begun);
  }
  c.pulls = {};
  c.incoming.clear();
}

void Engine::serve(Connection& c, std::uint32_t events) {
  if (c.dead) return;
  if (c.connecting) {
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(c.fd, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) return break_off(c, error_text(error));
    if ((events & EPOLLOUT) == 0) return;
    c.connecting = false;
    connect_deadlines_.clear(c.fd);
  }
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) receive(c);
  if (!c.dead) pump(c);
}

bool Engine::Connection::pipe_ready() const {
  if (dead) return false;
  return has_turn || (pipe_in && pipe.has_bytes()) ||
         (pipe_out && socket_left == 0 && waiting() > 0 && pipe.has_room());
}

void Engine::serve_pipe(Connection& c) {
  if (c.pipe_in) receive_piped(c);
  if (!c.dead) pump(c);
}

// Schedulers like to run a thread beside the one that woke it. Two ends on one processor wait for
// each other's time slices, and it may take the scheduler many milliseconds, a whole room's, to see
// that another processor is idle. So the source moves: for a moment it may not run here.
void Engine::keep_apart(Connection& c) {
  const int here = sched_getcpu();
  c.pipe.say_processor(here);
  if (!c.outgoing || settings_.shm_apart_after == Duration::zero()) return;
  if (here < 0 || c.pipe.other_processor() != here) {
    c.together_since = Time::max();
    return;
  }
  const Time at = now();
  c.together_since = std::min(c.together_since, at);
  if (at - c.together_since < settings_.shm_apart_after || at < no_move_before_) return;
  no_move_before_ = at + kMovePause;
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  cpu_set_t others = allowed;
  CPU_CLR(here, &others);
  if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof others, &others) != 0) return;
  (void)sched_setaffinity(0, sizeof allowed, &allowed);
}

// --- what both ends send

char* Engine::Connection::extend_slice(std::size_t bytes) {
  if (waiting() > 0) return extend(kHeaderBytes + bytes);
  if (out.size() < kLine + kHeaderBytes + bytes) out.resize(kLine + kHeaderBytes + bytes);
  out_done = to_line(out.data() + kHeaderBytes);
  out_end = out_done + kHeaderBytes + bytes;
  return out.data() + out_done;
}

char* Engine::Connection::extend(std::size_t bytes) {
  if (out_done == out_end) out_done = out_end = 0;
  if (out_done > 0 && out_end + bytes > out.size()) {  // what went out makes room first
    std::memmove(out.data(), out.data() + out_done, waiting());
    out_end -= out_done;
    out_done = 0;
  }
  if (out.size() < out_end + bytes) out.resize(std::max(out_end + bytes, out.size() * 2));
  out_end += bytes;
  return out.data() + out_end - bytes;
}

void Engine::append_frame(Connection& c, Header header, std::string_view payload) {
  header.length = payload.empty() ? header.length : static_cast<std::uint32_t>(payload.size());
  store_header(c.extend(kHeaderBytes), header);
  if (!payload.empty()) std::memcpy(c.extend(payload.size()), payload.data(), payload.size());
}

void Engine::append_switch(Connection& c) {
  append_frame(c, {Kind::kSwitch, 0, 0}, {});
  c.socket_left = c.waiting();
  c.pipe_out = true;
}

// Any byte is a bell. Where the socket is full, or still has frames to take, it wakes the peer by
// itself.
void Engine::ring_bell(const Connection& c) {
  const char bell = 0;
  if (c.socket_left == 0) (void)!send(c.fd, &bell, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
}

// The same as send_out(), for what goes through the pipe.
bool Engine::send_piped(Connection& c, std::size_t& moved) {
  std::string_view left(c.out.data() + c.out_done, c.waiting());
  if (!c.pipe.put(left)) {
    break_off(c, "it has taken more out of the pipe than was put in");
    return false;
  }
  const std::size_t n = c.waiting() - left.size();
  c.out_done += n;
  moved += n;
  if (n > 0 && c.pipe.must_ring_for_bytes()) ring_bell(c);
  return left.empty();
}

// Sends what waits. False: the connection takes no more for now, or is dead.
bool Engine::send_out(Connection& c, std::size_t& moved) {
  while (c.waiting() > 0) {
    if (c.pipe_out && c.socket_left == 0) return send_piped(c, moved);
    iovec bytes{c.out.data() + c.out_done, c.pipe_out ? c.socket_left : c.waiting()};
    msghdr message{};
    message.msg_iov = &bytes;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kDescriptorsMax)];
    if (!c.out_fds.empty()) {
      const std::size_t size = sizeof(int) * c.out_fds.size();
      message.msg_control = control;
      message.msg_controllen = CMSG_SPACE(size);
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(size);
      std::memcpy(CMSG_DATA(header), c.out_fds.data(), size);
    }
    const ssize_t n = sendmsg(c.fd, &message, MSG_NOSIGNAL);
    if (n < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) {
        set_interest(c, EPOLLIN | EPOLLOUT);
      } else {
        break_off(c, error_text(errno));
      }
      return false;
    }
    c.out_fds.clear();
    if (c.pipe_out) c.socket_left -= static_cast<std::size_t>(n);
    c.out_done += static_cast<std::size_t>(n);
    moved += static_cast<std::size_t>(n);
  }
  return true;
}

// Sends what waits, then slices of the flows in turn, as long as the connection takes them.
void Engine::pump(Connection& c) {
  if (c.dead || c.connecting) return;
  std::size_t moved = 0;
  c.has_turn = false;
  for (;;) {
    if (!send_out(c, moved)) return;
    if (c.turns.empty()) break;
    if (moved >= kTurnBytes) {
      busy_ = true;
      c.has_turn = c.pipe_out;
      if (!c.pipe_out) set_interest(c, EPOLLIN | EPOLLOUT);
      return;
    }
    Outgoing& write = *c.turns.front();
    if (!write.begun) {
      begin_write(c, write);
      if (write.pulled) {
        c.turns.rotate();
        c.turns.remove(write.spec.flow, &write);
        continue;
      }
    }
    std::uint64_t slice = std::min<std::uint64_t>(slice_limit(), write.cursor.left());
    if (c.ring && slice > 0) {
      slice =
          std::min({slice, c.ring.free(), c.ring.to_end(c.ring.written), c.ring.memory.size() / 4});
      if (slice == 0) {  // the target gives credit when it has emptied some of it
        if (c.waiting() > 0) continue;
        break;
      }
      moved += slice;
    }
    if (slice > 0) gather(c, write, slice);
    c.turns.rotate();
    if (write.cursor.left() == 0) c.turns.remove(write.spec.flow, &write);
  }
  set_interest(c, EPOLLIN);
}

// --- completions

void Engine::finish(WriteId id, Status status, bool settled) {
  const auto it = writes_.find(id);
  if (it == writes_.end()) return;
  Outgoing& write = *it->second;
  if (write.connection != nullptr) {
    write.connection->turns.remove(write.spec.flow, &write);
    write.connection->writes.erase(id);
  }
  cancel_deadlines_.clear(id);
  if (write.pulled) {
    if (!write.cancelled) advance_epoch(write);
    free_epoch_slots_.push_back(write.epoch_slot);
  }
  const std::uint64_t bytes = status.ok() ? write.total : 0;
  if (bytes > 0) {
    auto& way = write.pulled                                            ? bytes_pulled_
                : write.connection != nullptr && write.connection->ring ? bytes_ring_
                                                                        : bytes_inline_;
    way.fetch_add(bytes, std::memory_order_relaxed);
  }
  writes_.erase(it);
  complete({Completion::Kind::kWrite, static_cast<std::uint64_t>(id), std::move(status), settled,
            bytes});
}

}  // namespace kvferry::data::stream
