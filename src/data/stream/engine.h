// Writes between planes that are connected by byte streams: the tcp plane, and the shm plane, whose
// payload does not go through the stream. The *target* places every byte, after checking it against
// what is lent at that moment, so revoke is a fence and orphan_write_bound is 0.
//
//   inline   source: plan cursor ─ gather a slice into a buffer ─ send
//            target: receive into a buffer ─ is the grant alive? ─ scatter by its own plan cursor
//   ring     the same, but the slice is gathered into a ring that both map, and only its header is
//            sent; the target says when it has emptied it (Credit)
//   pulled   the target copies out of the source's mapped memory by itself, slice by slice; after
//   each
//            it looks whether the write still counts (the epoch that the source owns)
//
// For each pair of planes and direction there is one connection, and a second one for small writes,
// so that a page does not wait behind the megabytes that a large room has put on its way. Opened by
// the source and kept. One thread of its own does everything; it owns the grants and all
// connections, so that nothing is locked while bytes move. The public methods only queue commands
// for it.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <variant>
#include <vector>

#include "kvferry/config.h"
#include "kvferry/data_plane.h"
#include "src/base/deadlines.h"
#include "src/base/spin.h"
#include "src/data/copier/copier.h"
#include "src/data/flow_queue.h"
#include "src/data/grant_table.h"
#include "src/data/plan_cursor.h"
#include "src/data/stream/frames.h"
#include "src/data/stream/links.h"
#include "src/data/stream/memory_file.h"
#include "src/data/stream/pipe.h"

namespace kvferry::data::stream {

class Engine {
 public:
  // `life`: what a peer must know to be served.
  Engine(std::unique_ptr<Links> links, const Settings& settings, Token life);
  // Closes every connection, then joins the thread. Writes that have not ended never complete.
  ~Engine();
  // Once. kExhausted when the kernel has no descriptors or memory for it.
  Status start();

  // Before the first write. Memory with a file may be mapped by peers on this host. The first
  // region of all says near which memory the copying threads shall run.
  void offer(const Region& region);
  void grant(GrantSpec spec);
  void revoke(GrantId grant, FenceId fence);
  void write(WriteSpec spec);
  void cancel(WriteId write);
  void forget(const PlaneAddress& peer, FenceId fence);
  std::size_t poll(std::vector<Completion>& out);
  [[nodiscard]] int ready_fd() const { return ready_event_; }
  [[nodiscard]] PlaneCounters counters() const;

 private:
  // Read, checked and scattered while it is in the first-level caches.
  static constexpr std::size_t kReceiveBytes = 64 << 10;
  // A write of ours.
  struct Connection;
  struct Outgoing {
    explicit Outgoing(WriteSpec s) : spec(std::move(s)), cursor(spec.plan), total(cursor.left()) {}
    WriteSpec spec;
    PlanCursor cursor;
    std::uint64_t total;
    Connection* connection = nullptr;
    bool begun = false;      // the target has heard of it
    bool cancelled = false;  // the completion waits for the target's word
    bool pulled = false;
    std::uint32_t epoch_slot = 0;  // pulled
  };
  // A write of a peer, landing here.
  struct Incoming {
    Incoming(std::uint64_t number, Begin b)
        : id(number), begin(std::move(b)), cursor(begin.plan), total(cursor.left()) {}
    std::uint64_t id = 0;  // the source's
    Begin begin;
    PlanCursor cursor;
    std::uint64_t total;
    GrantTable::Ticket ticket;
    bool pulled = false;
    bool over = false;            // answered; what still comes is read and dropped
    std::uint64_t drop_left = 0;  // of a write that is over; its plan is gone
  };
  // The ring of a connection, on either side: bytes put in so far and bytes taken out so far.
  struct Ring {
    Mapping memory;
    std::uint64_t written = 0, taken = 0;
    explicit operator bool() const { return static_cast<bool>(memory); }
    [[nodiscard]] std::uint64_t free() const { return memory.size() - (written - taken); }
    // How much lies together from position `at` on.
    [[nodiscard]] std::uint64_t to_end(std::uint64_t at) const {
      return memory.size() - at % memory.size();
    }
  };
  struct MappedRegion {
    SharedRegion theirs;
    Mapping memory;
  };
  struct Connection {
    int fd = -1;
    bool outgoing = false, connecting = false, dead = false;
    bool express = false;  // outgoing: for small writes
    PlaneAddress peer;     // outgoing
    std::string peer_text;
    std::uint32_t interest = 0;
    bool greeted = false;  // incoming: Hello was good
    // Bytes that go before anything else; private, so no source is read through it. The vector only
    // grows: out[out_done, out_end) is what waits.
    std::vector<char> out;
    std::size_t out_done = 0, out_end = 0;
    std::vector<int> out_fds;  // go with the first byte; not owned
    [[nodiscard]] std::size_t waiting() const { return out_end - out_done; }
    // Room for so many more bytes at the end.
    char* extend(std::size_t bytes);
    // The same for a header and so many bytes, which begin a line of memory where nothing waits
    // before them: kernels copy whole lines, and rows that straddle lines cost more.
    char* extend_slice(std::size_t bytes);
    Ring ring;
    // What goes through the socket where both ends share memory, once each end has said Switch.
    Pipe pipe;
    bool pipe_out = false, pipe_in = false;
    Time together_since = Time::max();  // that both ends run on one processor
    std::size_t socket_left = 0;        // of what waits, goes before the pipe: up to our Switch
    [[nodiscard]] bool pipe_ready() const;
    // Outgoing.
    OwnedFd ring_file, pipe_file;
    bool has_turn = false;      // a turn ended before what it had to send
    std::size_t regions = 0;    // how many of ours it was offered
    FlowQueue<Outgoing> turns;  // writes with bytes left to gather
    std::set<WriteId> writes;   // not completed
    // Incoming.
    std::map<std::uint64_t, Incoming> incoming;
    FlowQueue<Incoming> pulls;
    Mapping epochs;
    std::vector<MappedRegion> mapped;
    std::vector<OwnedFd> in_fds;  // came with the stream, not taken yet
    // Parser.
    std::vector<char> head;     // a header that is not whole yet
    std::vector<char> payload;  // of a frame other than Slice
    Header header;
    std::uint64_t payload_left = 0;
    bool in_payload = false;
    std::uint64_t landed = 0;  // bytes that this turn has placed
    // How many bytes to read at once.
    [[nodiscard]] std::size_t wanted() const;
  };
  // Our own memory that peers may map.
  struct OfferedRegion {
    SharedRegion region;
    OwnedFd file;
  };

  struct Stop {};
  struct NearCommand {
    int node = 0;
  };
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
  using Command = std::variant<Stop, NearCommand, OfferedRegion, GrantSpec, RevokeCommand,
                               WriteSpec, CancelCommand, ForgetCommand>;
  // `waits`: whether somebody waits for what it does; else it is done when the thread wakes next.
  void command(Command command, bool waits = true);
  void complete(Completion completion);

  // The thread (engine.cc).
  void run();
  [[nodiscard]] bool may_sleep();
  [[nodiscard]] bool is_under_way() const;
  [[nodiscard]] int timeout() const;
  void expire();
  void give_way();
  void drain_commands();
  void handle(Stop&);
  void handle(NearCommand& c);
  void handle(OfferedRegion& region);
  void handle(GrantSpec& spec);
  void handle(RevokeCommand& c);
  void handle(WriteSpec& spec);
  void handle(CancelCommand& c);
  void handle(ForgetCommand& c);
  void lose(WriteId id, const std::string& why);
  [[nodiscard]] std::uint64_t slice_limit() const;
  void watch(int fd, std::uint32_t interest, void* what);
  void set_interest(Connection& c, std::uint32_t interest);
  Result<Connection*> connection_to(const PlaneAddress& peer, bool express);
  void accept_all();
  void break_off(Connection& c, const std::string& why);
  void serve(Connection& c, std::uint32_t events);
  static void append_frame(Connection& c, Header header, std::string_view payload);
  static void append_switch(Connection& c);
  static void ring_bell(const Connection& c);
  enum class Pipes { kNone, kIdle, kReady };
  [[nodiscard]] Pipes look_at_pipes();
  bool may_sleep_by_pipes();
  void serve_pipe(Connection& c);
  void keep_apart(Connection& c);
  void pump(Connection& c);
  bool send_out(Connection& c, std::size_t& moved);
  bool send_piped(Connection& c, std::size_t& moved);
  void finish(WriteId id, Status status, bool settled);

  // The source (engine_source.cc).
  Status make_offer(Connection& c, Hello& hello);
  void begin_write(Connection& c, Outgoing& write);
  void gather(Connection& c, Outgoing& write, std::uint64_t bytes);
  [[nodiscard]] bool may_be_pulled(const Connection& c, const Outgoing& write) const;
  void advance_epoch(const Outgoing& write);
  void on_answer(Connection& c, std::string_view payload);

  // The target (engine_target.cc).
  void receive(Connection& c);
  std::size_t receive_piped(Connection& c);
  void on_switch(Connection& c);
  void parse(Connection& c, std::string_view& bytes);
  void frame(Connection& c, std::string_view payload);
  void on_hello(Connection& c, std::string_view payload);
  void on_begin(Connection& c, Result<Begin> decoded);
  void on_cancel(Connection& c);
  void answer(Connection& c, std::uint64_t id, Incoming& write, const Status& status);
  void land(Connection& c, std::string_view bytes);
  void land_from_ring(Connection& c);
  Status map_sources(const Connection& c, Begin& begin) const;
  void pull(Connection& c);

  const std::unique_ptr<Links> links_;
  const Settings& settings_;
  const Token life_;
  int epoll_ = -1, command_event_ = -1, ready_event_ = -1;
  std::thread thread_;

  std::mutex mutex_;  // the two queues between the endpoint's loop and the thread, and sleeping_
  bool sleeping_ = false;
  std::vector<Command> commands_;
  std::vector<Completion> completions_;
  std::atomic<std::uint64_t> bytes_inline_{0}, bytes_ring_{0}, bytes_pulled_{0};

  // The thread's own.
  bool stopping_ = false, busy_ = false;
  std::optional<int> node_;  // whose processors it runs on
  Time last_small_{};        // when a small write last began, here or there
  Time no_way_before_{};
  int kept_for_long_ = 0;
  Time no_move_before_{};
  int looks_ = 0;  // at pipes, since the sockets were looked at
  Spinner spinner_;
  Copier copier_;
  GrantTable grants_;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::map<WriteId, std::unique_ptr<Outgoing>> writes_;
  Deadlines<int> connect_deadlines_;
  Deadlines<WriteId> cancel_deadlines_;
  std::vector<char> receive_buffer_;
  char* receive_line_ = nullptr;  // its first byte that begins a line of memory
  std::vector<OfferedRegion> offered_;
  // One word for each pulled write under way, mapped by every peer: the write counts while the word
  // is what its Pull said.
  OwnedFd epoch_file_;
  Mapping epochs_;
  std::vector<std::uint32_t> free_epoch_slots_;
};

}  // namespace kvferry::data::stream
