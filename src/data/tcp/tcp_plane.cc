#include "src/data/tcp/tcp_plane.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <variant>

#include <fmt/format.h>

#include "src/base/check.h"
#include "src/base/deadlines.h"
#include "src/base/parse.h"
#include "src/data/copier.h"
#include "src/data/flow_queue.h"
#include "src/data/grant_table.h"
#include "src/data/plan_cursor.h"
#include "src/data/tcp/frames.h"

namespace kvferry::data {
namespace {

using tcp::Header;
using tcp::Kind;

// Bytes that one connection may move before the others and the commands have their turn.
constexpr std::size_t kTurnBytes = 1 << 20;
constexpr std::size_t kReceiveBytes =
    64 << 10;  // read, checked and scattered while it is in the first-level caches
constexpr int kLoopbackSocketBytes = 500000;
constexpr std::size_t kAnswerBytesMax = 8 << 20;  // answers that a source leaves unread
constexpr int kBacklog = 1024;

std::string error_text(int error) {
  return std::strerror(error);
}  // NOLINT: the I/O thread and create() only

struct AddressList {
  addrinfo* list = nullptr;
  AddressList() = default;
  AddressList(const AddressList&) = delete;
  AddressList& operator=(const AddressList&) = delete;
  ~AddressList() {
    if (list != nullptr) freeaddrinfo(list);
  }
};

Status resolve(const std::string& host, std::uint16_t port, bool passive, AddressList& out) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  // Peers' addresses are literals: asking a name server would stop everything that this thread
  // serves.
  hints.ai_flags = AI_NUMERICSERV | (passive ? AI_PASSIVE : AI_NUMERICHOST);
  const int rc = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &out.list);
  if (rc != 0)
    return Status(Code::kUnavailable, fmt::format("host '{}': {}", host, gai_strerror(rc)));
  return {};
}

bool is_loopback(const sockaddr* address) {
  if (address->sa_family == AF_INET)
    return (ntohl(reinterpret_cast<const sockaddr_in*>(address)->sin_addr.s_addr) >> 24) == 127;
  return address->sa_family == AF_INET6 &&
         IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

void tune(int fd, const sockaddr* peer) {
  const int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
  // On one host a bounded flight stays in the cache: rows of 256 B go from about 65 % to 80 % of a
  // raw stream, of 64 KiB from 85 % to 95 % (docs/PERFORMANCE.md). Across hosts the kernel must be
  // free to open the window.
  if (is_loopback(peer)) {
    const int bytes = kLoopbackSocketBytes;
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
  }
}

}  // namespace

class TcpPlane::Engine {
 public:
  Engine(const Settings& settings, Token life) : settings_(settings), life_(life) {}

  Status listen(const TcpPlaneOptions& options) {
    AddressList addresses;
    KVF_RETURN_IF_ERROR(resolve(options.listen_host, options.listen_port, true, addresses));
    const std::string where = Address{options.listen_host, options.listen_port}.host_port();
    listener_ = socket(addresses.list->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    const int one = 1;
    setsockopt(listener_, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (listener_ < 0 ||
        bind(listener_, addresses.list->ai_addr, addresses.list->ai_addrlen) != 0 ||
        ::listen(listener_, kBacklog) != 0) {
      return Status(Code::kUnavailable,
                    fmt::format("tcp plane cannot listen on {}: {}", where, error_text(errno)));
    }
    sockaddr_storage bound{};
    socklen_t size = sizeof bound;
    getsockname(listener_, reinterpret_cast<sockaddr*>(&bound), &size);
    const std::uint16_t port =
        ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                                          : reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
    const std::string host =
        options.public_host.empty() ? options.listen_host : options.public_host;
    if (is_wildcard(host))
      return Status(Code::kInvalidArgument,
                    fmt::format("tcp plane: {} is a wildcard; set the public host", host));
    AddressList published;
    KVF_RETURN_IF_ERROR(resolve(host, port, true, published));
    char literal[NI_MAXHOST] = "";
    getnameinfo(published.list->ai_addr, published.list->ai_addrlen, literal, sizeof literal,
                nullptr, 0, NI_NUMERICHOST);
    session_name_ = Address{literal, port}.host_port();
    address_ = "tcp/" + session_name_ + "/" + life_.to_string();

    epoll_ = epoll_create1(EPOLL_CLOEXEC);
    command_event_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    ready_event_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    KVF_CHECK(epoll_ >= 0 && command_event_ >= 0 && ready_event_ >= 0, "epoll and eventfd");
    watch(listener_, EPOLLIN, nullptr);
    watch(command_event_, EPOLLIN, &command_event_);
    thread_ = std::thread([this] { run(); });
    return {};
  }

  ~Engine() {
    if (thread_.joinable()) {
      command(Stop{});
      thread_.join();
    }
    for (const int fd : {listener_, epoll_, command_event_, ready_event_}) {
      if (fd >= 0) close(fd);
    }
  }

  struct Stop {};
  struct RevokeCommand {
    GrantId grant{};
    FenceId fence{};
  };
  struct CancelCommand {
    WriteId write{};
  };
  struct ForgetCommand {
    PlaneAddress peer;
    FenceId fence{};
  };
  using Command =
      std::variant<Stop, GrantSpec, RevokeCommand, WriteSpec, CancelCommand, ForgetCommand>;

  void command(Command command) {
    {
      const std::lock_guard lock(mutex_);
      commands_.push_back(std::move(command));
      if (commands_.size() > 1) return;  // the thread was told already
    }
    signal(command_event_);
  }

  std::size_t poll(std::vector<Completion>& out) {
    std::uint64_t drained = 0;
    (void)!read(ready_event_, &drained, sizeof drained);
    const std::lock_guard lock(mutex_);
    const std::size_t count = completions_.size();
    for (Completion& completion : completions_) out.push_back(std::move(completion));
    completions_.clear();
    return count;
  }

  [[nodiscard]] const PlaneAddress& address() const { return address_; }
  [[nodiscard]] const std::string& session_name() const { return session_name_; }
  [[nodiscard]] int ready_event() const { return ready_event_; }

 private:
  struct Connection;
  // A write of ours.
  struct Outgoing {
    explicit Outgoing(WriteSpec s) : spec(std::move(s)), cursor(spec.plan), total(cursor.left()) {}
    WriteSpec spec;
    PlanCursor cursor;
    std::uint64_t total;
    Connection* connection = nullptr;
    bool begun = false;      // the target has heard of it
    bool cancelled = false;  // the completion waits for the target's word
  };
  // A write of a peer, landing here.
  struct Incoming {
    explicit Incoming(tcp::Begin b)
        : begin(std::move(b)), cursor(begin.plan), total(cursor.left()) {}
    tcp::Begin begin;
    PlanCursor cursor;
    std::uint64_t total;
    GrantTable::Ticket ticket;
    bool over = false;            // answered; what still comes is read and dropped
    std::uint64_t drop_left = 0;  // of a write that is over; its plan is gone
  };
  struct Connection {
    int fd = -1;
    bool outgoing = false, connecting = false, dead = false;
    PlaneAddress peer;  // outgoing
    std::string peer_text;
    std::uint32_t interest = 0;
    bool greeted = false;  // incoming: Hello was good
    // Bytes that go before anything else; private, so no source is read through it. The vector only
    // grows: out[out_done, out_end) is what waits.
    std::vector<char> out;
    std::size_t out_done = 0, out_end = 0;
    [[nodiscard]] std::size_t waiting() const { return out_end - out_done; }
    // Room for so many more bytes at the end.
    char* extend(std::size_t bytes) {
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
    FlowQueue<Outgoing> turns;  // outgoing writes with bytes left to gather
    std::set<WriteId> writes;   // outgoing, not completed
    std::map<std::uint64_t, Incoming> incoming;
    // Parser.
    std::vector<char> head;     // a header that is not whole yet
    std::vector<char> payload;  // of a frame other than Slice
    Header header;
    std::uint64_t payload_left = 0;
    bool in_payload = false;
  };

  // --- the thread
  // -------------------------------------------------------------------------------------------------
  void run() {
    std::vector<epoll_event> events(256);
    receive_buffer_.resize(kReceiveBytes);
    while (!stopping_) {
      const int n =
          epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), busy_ ? 0 : timeout());
      busy_ = false;
      drain_commands();
      for (int i = 0; i < n && !stopping_; ++i) {
        void* what = events[static_cast<std::size_t>(i)].data.ptr;
        if (what == nullptr) {
          accept_all();
        } else if (what != &command_event_) {
          Connection& c = *static_cast<Connection*>(what);
          try {
            serve(c, events[static_cast<std::size_t>(i)].events);
          } catch (const std::exception& error) {
            break_off(
                c,
                error.what());  // one connection's trouble, memory above all, is not the process's
          }
        }
      }
      expire();
      std::erase_if(connections_, [](const auto& c) { return c->dead; });
    }
    for (const auto& connection : connections_) {
      if (connection->fd >= 0) close(connection->fd);
    }
    connections_.clear();
  }

  int timeout() const {
    const Time next = std::min(connect_deadlines_.next(), cancel_deadlines_.next());
    if (next == Time::max()) return -1;
    const auto wait = std::chrono::duration_cast<std::chrono::milliseconds>(
        next - std::chrono::steady_clock::now());
    return static_cast<int>(std::clamp<std::int64_t>(wait.count() + 1, 0, 1000));
  }

  void expire() {
    const Time now = std::chrono::steady_clock::now();
    while (const auto id = cancel_deadlines_.pop_due(now)) {
      // The target has not answered. The source is read no more; what is under way lands only while
      // its grant lives.
      finish(*id, Status(Code::kAborted, "cancelled; the target did not answer"), false);
    }
    while (const auto fd = connect_deadlines_.pop_due(now)) {
      if (*fd == listener_) watch(listener_, EPOLLIN, nullptr);
      for (const auto& connection : connections_) {
        const bool waits =
            connection->connecting || (!connection->outgoing && !connection->greeted);
        if (connection->fd == *fd && waits)
          break_off(*connection, "no connection within connect_timeout");
      }
    }
  }

  void drain_commands() {
    std::uint64_t drained = 0;
    (void)!read(command_event_, &drained, sizeof drained);
    std::vector<Command> commands;
    {
      const std::lock_guard lock(mutex_);
      commands.swap(commands_);
    }
    for (Command& command : commands) {
      try {
        std::visit([this](auto& c) { handle(c); }, command);
      } catch (const std::exception& error) {
        // Memory above all. The write that asked for it fails; a grant that is not there refuses
        // its writes.
        if (const auto* spec = std::get_if<WriteSpec>(&command)) lose(spec->id, error.what());
      }
    }
  }

  void handle(Stop&) { stopping_ = true; }

  void handle(GrantSpec& spec) {
    const Status status = grants_.add(std::move(spec));
    KVF_CHECK(status.ok(),
              status.message());  // checked by grant(): ids and tokens are never given twice
  }

  void handle(RevokeCommand& c) {
    // Bytes land on this thread only: after this line none does under that grant.
    grants_.remove(c.grant);
    complete({Completion::Kind::kFence, static_cast<std::uint64_t>(c.fence), {}, true, 0});
  }

  void handle(WriteSpec& spec) {
    const WriteId id = spec.id;
    auto& write = writes_[id] = std::make_unique<Outgoing>(std::move(spec));
    if (!is_walkable(write->spec.plan))
      return finish(id, Status(Code::kInvalidArgument, "a lane or run of size 0"), true);
    auto connection = connection_to(write->spec.to);
    if (!connection.ok()) return finish(id, connection.status(), true);
    write->connection = *connection;
    (*connection)->writes.insert(id);
    (*connection)->turns.push(write->spec.flow, write.get());
    if (!(*connection)->connecting) pump(**connection);
  }

  // A write that could not even be queued.
  void lose(WriteId id, const std::string& why) {
    const Status status(Code::kExhausted, why);
    if (writes_.contains(id) && writes_.at(id) != nullptr)
      return finish(id, status, !writes_.at(id)->begun);
    writes_.erase(id);
    complete({Completion::Kind::kWrite, static_cast<std::uint64_t>(id), status, true, 0});
  }

  void handle(CancelCommand& c) {
    const auto it = writes_.find(c.write);
    if (it == writes_.end() || it->second->cancelled) return;
    Outgoing& write = *it->second;
    if (!write.begun) return finish(c.write, Status(Code::kAborted, "cancelled"), true);
    write.cancelled = true;
    write.connection->turns.remove(write.spec.flow, &write);
    // A slice of it that is partly sent lies in the connection's own buffer and goes on from there.
    append_frame(*write.connection, {Kind::kCancel, 0, static_cast<std::uint64_t>(c.write)}, {});
    cancel_deadlines_.set(c.write, std::chrono::steady_clock::now() + settings_.cancel_patience);
    pump(*write.connection);
  }

  void handle(ForgetCommand& c) {
    for (const auto& connection : connections_) {
      if (connection->outgoing && !connection->dead && connection->peer == c.peer)
        break_off(*connection, "peer forgotten");
    }
    complete({Completion::Kind::kFence, static_cast<std::uint64_t>(c.fence), {}, true, 0});
  }

  // --- connections
  // ------------------------------------------------------------------------------------------------
  void watch(int fd, std::uint32_t interest, void* what) {
    epoll_event event{};
    event.events = interest;
    event.data.ptr = what;
    KVF_CHECK(epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) == 0, "epoll_ctl add");
  }

  void set_interest(Connection& c, std::uint32_t interest) {
    if (c.interest == interest || c.dead) return;
    epoll_event event{};
    event.events = interest;
    event.data.ptr = &c;
    epoll_ctl(epoll_, EPOLL_CTL_MOD, c.fd, &event);
    c.interest = interest;
  }

  Result<Connection*> connection_to(const PlaneAddress& peer) {
    for (const auto& connection : connections_) {
      if (connection->outgoing && !connection->dead && connection->peer == peer)
        return connection.get();
    }
    // "tcp/host:port/life", or "host:port" of a peer whose life is not known.
    std::string where = peer;
    Token life;
    if (peer.starts_with("tcp/")) {
      const auto slash = peer.rfind('/');
      where = peer.substr(4, slash - 4);
      life = token_from_string(peer.substr(slash + 1));
      if (slash <= 4 || life.is_zero())
        return Status(Code::kInvalidArgument,
                      fmt::format("'{}' is no address of a tcp plane", peer));
    }
    const auto address = parse_address(where);
    if (!address.ok()) return address.status();
    AddressList addresses;
    KVF_RETURN_IF_ERROR(resolve(address->host, address->port, false, addresses));
    const int fd = socket(addresses.list->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
      return Status(Code::kExhausted, fmt::format("socket for {}: {}", where, error_text(errno)));
    tune(fd, addresses.list->ai_addr);
    if (connect(fd, addresses.list->ai_addr, addresses.list->ai_addrlen) != 0 &&
        errno != EINPROGRESS) {
      const int error = errno;
      close(fd);
      return Status(Code::kPeerLost, fmt::format("{}: {}", where, error_text(error)));
    }
    auto& c = *connections_.emplace_back(std::make_unique<Connection>());
    c.fd = fd;
    c.outgoing = c.connecting = true;
    c.peer = peer;
    c.peer_text = where;
    c.interest = EPOLLOUT | EPOLLIN;
    watch(fd, c.interest, &c);
    connect_deadlines_.set(fd, std::chrono::steady_clock::now() + settings_.connect_timeout);
    append_frame(c, {Kind::kHello, 0, 0}, tcp::encode_hello(life));
    return &c;
  }

  void accept_all() {
    for (;;) {
      sockaddr_storage from{};
      socklen_t size = sizeof from;
      const int fd = accept4(listener_, reinterpret_cast<sockaddr*>(&from), &size,
                             SOCK_NONBLOCK | SOCK_CLOEXEC);
      if (fd < 0 && (errno == EMFILE || errno == ENFILE)) {
        // No descriptor is free: stop listening for a moment instead of waking at once again.
        epoll_ctl(epoll_, EPOLL_CTL_DEL, listener_, nullptr);
        connect_deadlines_.set(listener_,
                               std::chrono::steady_clock::now() + std::chrono::milliseconds(100));
        return;
      }
      if (fd < 0) return;
      const auto incoming = std::count_if(connections_.begin(), connections_.end(),
                                          [](const auto& c) { return !c->outgoing; });
      if (static_cast<std::uint64_t>(incoming) >= settings_.sessions_max) {
        close(fd);
        continue;
      }
      tune(fd, reinterpret_cast<const sockaddr*>(&from));
      auto& c = *connections_.emplace_back(std::make_unique<Connection>());
      c.fd = fd;
      char host[NI_MAXHOST] = "?", port[NI_MAXSERV] = "?";
      getnameinfo(reinterpret_cast<sockaddr*>(&from), size, host, sizeof host, port, sizeof port,
                  NI_NUMERICHOST | NI_NUMERICSERV);
      c.peer_text = fmt::format("{}:{}", host, port);
      c.interest = EPOLLIN;
      watch(fd, c.interest, &c);
      connect_deadlines_.set(
          fd, std::chrono::steady_clock::now() + settings_.connect_timeout);  // until its hello
    }
  }

  void break_off(Connection& c, const std::string& why) {
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
    c.incoming.clear();
  }

  void serve(Connection& c, std::uint32_t events) {
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

  // --- sending
  // ----------------------------------------------------------------------------------------------------
  static void append_frame(Connection& c, Header header, std::string_view payload) {
    header.length = static_cast<std::uint32_t>(payload.size());
    tcp::store_header(c.extend(tcp::kHeaderBytes), header);
    if (!payload.empty()) std::memcpy(c.extend(payload.size()), payload.data(), payload.size());
  }

  // Puts the next slice of the flow whose turn it is into the out buffer, which is empty.
  void gather(Connection& c) {
    Outgoing& write = *c.turns.front();
    const auto id = static_cast<std::uint64_t>(write.spec.id);
    if (!write.begun) {
      write.begun = true;
      append_frame(c, {Kind::kBegin, 0, id},
                   tcp::encode_begin(write.spec.authority, write.spec.plan));
    }
    const auto slice = static_cast<std::uint32_t>(
        std::min<std::uint64_t>(settings_.slice_bytes, write.cursor.left()));
    if (slice > 0) {
      tcp::store_header(c.extend(tcp::kHeaderBytes), {Kind::kSlice, slice, id});
      char* to = c.extend(slice);
      write.cursor.advance(slice, [&to](std::uint64_t source, std::uint64_t, std::uint64_t bytes) {
        std::memcpy(to, reinterpret_cast<const void*>(source), bytes);
        to += bytes;
      });
    }
    c.turns.rotate();
    if (write.cursor.left() == 0) c.turns.remove(write.spec.flow, &write);
  }

  void pump(Connection& c) {
    if (c.dead || c.connecting) return;
    std::size_t moved = 0;
    for (;;) {
      if (c.waiting() == 0) {
        if (c.turns.empty()) break;
        if (moved >= kTurnBytes) {
          busy_ = true;
          set_interest(c, EPOLLIN | EPOLLOUT);
          return;
        }
        gather(c);
      }
      const ssize_t n = ::send(c.fd, c.out.data() + c.out_done, c.waiting(), MSG_NOSIGNAL);
      if (n < 0) {
        if (errno == EAGAIN || errno == EWOULDBLOCK) {
          set_interest(c, EPOLLIN | EPOLLOUT);
          return;
        }
        if (errno == EINTR) continue;
        return break_off(c, error_text(errno));
      }
      c.out_done += static_cast<std::size_t>(n);
      moved += static_cast<std::size_t>(n);
    }
    set_interest(c, EPOLLIN);
  }

  // --- receiving
  // --------------------------------------------------------------------------------------------------
  void receive(Connection& c) {
    std::size_t moved = 0;
    while (!c.dead && moved < kTurnBytes) {
      const ssize_t n = recv(c.fd, receive_buffer_.data(), receive_buffer_.size(), 0);
      if (n == 0) return break_off(c, "connection closed by the peer");
      if (n < 0) {
        if (errno == EAGAIN || errno == EWOULDBLOCK) return;
        if (errno == EINTR) continue;
        return break_off(c, error_text(errno));
      }
      moved += static_cast<std::size_t>(n);
      std::string_view bytes(receive_buffer_.data(), static_cast<std::size_t>(n));
      while (!bytes.empty() && !c.dead) parse(c, bytes);
      if (static_cast<std::size_t>(n) < receive_buffer_.size())
        return;  // level-triggered: more wakes us again
    }
  }

  // Consumes some of `bytes`.
  void parse(Connection& c, std::string_view& bytes) {
    if (!c.in_payload) {
      const std::size_t need = tcp::kHeaderBytes - c.head.size();
      const std::size_t n = std::min(need, bytes.size());
      c.head.insert(c.head.end(), bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(n));
      bytes.remove_prefix(n);
      if (c.head.size() < tcp::kHeaderBytes) return;
      const bool known = tcp::parse_header(c.head.data(), c.header);
      c.head.clear();
      c.payload.clear();
      if (!known) return break_off(c, "a frame of unknown kind");
      if (c.header.kind != Kind::kSlice && c.header.length > settings_.plan_bytes_max) {
        return break_off(
            c, fmt::format("a frame of {} bytes is above plan_bytes_max", c.header.length));
      }
      const bool from_source = c.header.kind <= Kind::kCancel;
      if (from_source == c.outgoing) return break_off(c, "a frame of the other direction");
      if (!c.outgoing && !c.greeted && c.header.kind != Kind::kHello)
        return break_off(c, "no hello");
      if (!c.outgoing && c.waiting() > kAnswerBytesMax)
        return break_off(c, "the peer does not read its answers");
      c.in_payload = true;
      c.payload_left = c.header.length;
    }
    const std::size_t n = std::min<std::uint64_t>(c.payload_left, bytes.size());
    if (c.header.kind == Kind::kSlice) {
      if (n > 0) land(c, bytes.substr(0, n));
    } else {
      c.payload.insert(c.payload.end(), bytes.begin(),
                       bytes.begin() + static_cast<std::ptrdiff_t>(n));
    }
    bytes.remove_prefix(n);
    c.payload_left -= n;
    if (c.payload_left > 0 || c.dead) return;
    c.in_payload = false;
    if (c.header.kind != Kind::kSlice) frame(c, {c.payload.data(), c.payload.size()});
  }

  void frame(Connection& c, std::string_view payload) {
    const WriteId id{c.header.write};
    switch (c.header.kind) {
      case Kind::kHello: {
        const auto life = tcp::decode_hello(payload);
        if (!life.ok()) return break_off(c, life.status().message());
        if (!life->is_zero() && *life != life_) {
          append_frame(c, {Kind::kRefused, 0, 0}, "another process lives at this address now");
          pump(c);
          return break_off(c, "hello for another life");
        }
        c.greeted = true;
        connect_deadlines_.clear(c.fd);
        return;
      }
      case Kind::kBegin:
        return begin(c, payload);
      case Kind::kCancel: {
        // Not there: it was answered for good already, and that answer ends it.
        if (c.incoming.erase(c.header.write) > 0)
          append_frame(c, {Kind::kCancelDone, 0, c.header.write}, {});
        return;
      }
      case Kind::kDone: {
        if (!c.outgoing || !c.writes.contains(id)) return;  // cancelled and completed meanwhile
        Status status = tcp::decode_done(payload);
        const Outgoing& write = *writes_.at(id);
        if (status.ok() && write.cursor.left() > 0)
          status = Status(Code::kProtocol, "the target says done before all was sent");
        // The rest is never sent: the target need not wait for it.
        if (!status.ok() && write.cursor.left() > 0 && !write.cancelled) {
          append_frame(c, {Kind::kCancel, 0, c.header.write}, {});
        }
        return finish(id, std::move(status), true);
      }
      case Kind::kCancelDone:
        if (c.outgoing && c.writes.contains(id))
          finish(id, Status(Code::kAborted, "cancelled"), true);
        return;
      case Kind::kRefused:
        return break_off(c, std::string(payload.substr(0, 200)));
      case Kind::kSlice:
        return;
    }
  }

  void begin(Connection& c, std::string_view payload) {
    auto decoded = tcp::decode_begin(payload);
    if (!decoded.ok()) return break_off(c, decoded.status().message());
    if (c.incoming.size() >= settings_.writes_per_peer_max || c.incoming.contains(c.header.write)) {
      return break_off(c, fmt::format("write {} is under way, or {} are (writes_per_peer_max)",
                                      c.header.write, c.incoming.size()));
    }
    Incoming& write = c.incoming.emplace(c.header.write, std::move(*decoded)).first->second;
    Status lent = grants_.recheck(write.ticket, write.begin.authority, write.begin.plan);
    if (!lent.ok()) {
      // The word of the grant may have overtaken the command that gives it: what was said first is
      // done first.
      drain_commands();
      lent = grants_.recheck(write.ticket, write.begin.authority, write.begin.plan);
    }
    if (!lent.ok()) return answer(c, c.header.write, write, lent);
    if (write.total == 0) answer(c, c.header.write, write, Status());
  }

  void answer(Connection& c, std::uint64_t id, Incoming& write, const Status& status) {
    append_frame(c, {Kind::kDone, 0, id}, tcp::encode_done(status));
    write.over = true;
    write.drop_left = write.cursor.left();
    write.begin.plan.clear();  // a refused plan costs nothing; the cursor is not used again
    if (write.drop_left == 0) c.incoming.erase(id);
  }

  void land(Connection& c, std::string_view bytes) {
    const auto it = c.incoming.find(c.header.write);
    if (it == c.incoming.end()) return;  // cancelled
    Incoming& write = it->second;
    if (bytes.size() > (write.over ? write.drop_left : write.cursor.left())) {
      return break_off(c, fmt::format("write {} sends more than its plan", c.header.write));
    }
    if (!write.over) {
      const Status alive = grants_.recheck(write.ticket, write.begin.authority, write.begin.plan);
      if (!alive.ok()) answer(c, c.header.write, write, alive);
    }
    if (write.over) {
      write.drop_left -= bytes.size();
      if (write.drop_left == 0) c.incoming.erase(it);
      return;
    }
    const char* from = bytes.data();
    write.cursor.advance(bytes.size(), [&](std::uint64_t, std::uint64_t target, std::uint64_t n) {
      copy_(reinterpret_cast<void*>(target), from, n);
      from += n;
    });
    landing_fence();  // before anybody is told that bytes are there
    if (write.cursor.left() == 0) answer(c, c.header.write, write, Status());
  }

  // --- completions
  // ------------------------------------------------------------------------------------------------
  void finish(WriteId id, Status status, bool settled) {
    const auto it = writes_.find(id);
    if (it == writes_.end()) return;
    Outgoing& write = *it->second;
    if (write.connection != nullptr) {
      write.connection->turns.remove(write.spec.flow, &write);
      write.connection->writes.erase(id);
    }
    cancel_deadlines_.clear(id);
    const std::uint64_t bytes = status.ok() ? write.total : 0;
    writes_.erase(it);
    complete({Completion::Kind::kWrite, static_cast<std::uint64_t>(id), std::move(status), settled,
              bytes});
  }

  void complete(Completion completion) {
    {
      const std::lock_guard lock(mutex_);
      completions_.push_back(std::move(completion));
      if (completions_.size() > 1) return;
    }
    signal(ready_event_);
  }

  static void signal(int event) {
    const std::uint64_t one = 1;
    (void)!::write(event, &one, sizeof one);
  }

  const Settings& settings_;
  const Token life_;
  PlaneAddress address_;
  std::string session_name_;
  int listener_ = -1, epoll_ = -1, command_event_ = -1, ready_event_ = -1;
  std::thread thread_;

  std::mutex mutex_;  // the two queues between the endpoint's loop and the thread
  std::vector<Command> commands_;
  std::vector<Completion> completions_;

  // The thread's own.
  bool stopping_ = false, busy_ = false;
  GrantTable grants_;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::map<WriteId, std::unique_ptr<Outgoing>> writes_;
  Deadlines<int> connect_deadlines_;
  Deadlines<WriteId> cancel_deadlines_;
  std::vector<char> receive_buffer_;
  const CopyFunction copy_ = landing_copy();
};

Result<std::unique_ptr<TcpPlane>> TcpPlane::create(const TcpPlaneOptions& options,
                                                   const Settings& settings, Entropy& entropy) {
  auto engine = std::make_unique<Engine>(settings, entropy.token());
  KVF_RETURN_IF_ERROR(engine->listen(options));
  return std::unique_ptr<TcpPlane>(new TcpPlane(std::move(engine)));
}

TcpPlane::TcpPlane(std::unique_ptr<Engine> engine) : engine_(std::move(engine)) {}
TcpPlane::~TcpPlane() = default;

PlaneAddress TcpPlane::address() const {
  return engine_->address();
}
std::string TcpPlane::session_name() const {
  return engine_->session_name();
}

Result<RegionId> TcpPlane::register_memory(std::span<const Region> regions) {
  for (const Region& region : regions) {
    if (region.memory.kind != Memory::Kind::kHost)
      return Status(Code::kInvalidArgument, "the tcp plane reaches host memory only");
  }
  return RegionId{next_region_++};
}
Status TcpPlane::deregister_memory(RegionId) {
  return {};
}

Status TcpPlane::grant(GrantSpec spec) {
  if (!spec.foreign && spec.token.is_zero())
    return Status(Code::kInvalidArgument, "a grant for native writers needs a token");
  engine_->command(std::move(spec));
  return {};
}
void TcpPlane::revoke(GrantId grant, FenceId fence) {
  engine_->command(Engine::RevokeCommand{grant, fence});
}
void TcpPlane::write(WriteSpec spec) {
  engine_->command(std::move(spec));
}
void TcpPlane::cancel(WriteId write) {
  engine_->command(Engine::CancelCommand{write});
}
void TcpPlane::forget(const PlaneAddress& peer, FenceId fence) {
  engine_->command(Engine::ForgetCommand{peer, fence});
}
std::size_t TcpPlane::poll(std::vector<Completion>& out) {
  return engine_->poll(out);
}
int TcpPlane::ready_fd() const {
  return engine_->ready_event();
}

}  // namespace kvferry::data
