// The target's side of a write: frames taken apart, every byte checked against what is lent, placed
// here.
#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include "src/data/stream/engine.h"

namespace kvferry::data::stream {
namespace {

constexpr std::size_t kTurnBytes = 128 << 10;
constexpr std::size_t kRingHeaders = 4;           // of slices in a ring, read at once
constexpr std::size_t kAnswerBytesMax = 8 << 20;  // answers that a source leaves unread

std::uint64_t read_epoch(const Mapping& epochs, std::uint32_t slot) {
  return reinterpret_cast<const std::atomic<std::uint64_t>*>(epochs.data())[slot].load(
      std::memory_order_seq_cst);
}

}  // namespace

void Engine::receive(Connection& c) {
  std::size_t moved = 0;
  c.landed = 0;
  while (!c.dead && moved + c.landed < kTurnBytes) {
    const std::size_t want = c.wanted();
    // A slice's bytes lie to the lines of memory as they lay where they were gathered.
    const std::size_t in_slice = c.in_payload ? c.header.length - c.payload_left
                                              : kLine - (kHeaderBytes - c.head.size()) % kLine;
    char* const at = receive_line_ + in_slice % kLine;
    iovec into{at, want};
    msghdr message{};
    message.msg_iov = &into;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kDescriptorsMax)];
    const bool may_bring = links_->one_host() && !c.outgoing && !c.greeted;
    if (may_bring) {
      message.msg_control = control;
      message.msg_controllen = sizeof control;
    }
    const ssize_t n = recvmsg(c.fd, &message, MSG_CMSG_CLOEXEC);
    if (n == 0) {
      // What it put into the pipe before counts; not what it goes on putting there.
      std::size_t left = settings_.shm_pipe_bytes;
      for (std::size_t taken = 1; c.pipe_in && !c.dead && taken > 0 && left > 0;) {
        taken = receive_piped(c);
        left -= std::min(left, taken);
      }
      return break_off(c, "connection closed by the peer");
    }
    if (n < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) return;
      if (errno == EINTR) continue;
      return break_off(c, std::strerror(errno));
    }
    if (may_bring) {
      for (cmsghdr* h = CMSG_FIRSTHDR(&message); h != nullptr; h = CMSG_NXTHDR(&message, h)) {
        if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS) continue;
        const std::size_t count = (h->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (std::size_t i = 0; i < count; ++i) {
          int fd = -1;
          std::memcpy(&fd, CMSG_DATA(h) + i * sizeof(int), sizeof fd);
          c.in_fds.emplace_back(fd);
        }
      }
      if (c.in_fds.size() > kDescriptorsMax) return break_off(c, "too many descriptors");
    }
    moved += static_cast<std::size_t>(n);
    std::string_view bytes(at, static_cast<std::size_t>(n));
    while (!bytes.empty() && !c.dead && !c.pipe_in) parse(c, bytes);  // after Switch: bells
    if (static_cast<std::size_t>(n) < want) return;  // level-triggered: more wakes us again
  }
}

std::size_t Engine::Connection::wanted() const {
  // A header of a slice in a ring stands for many bytes: few of them are a turn.
  if (!ring || outgoing) return kReceiveBytes;
  return std::min<std::uint64_t>(kReceiveBytes,
                                 (in_payload ? payload_left : 0) + kRingHeaders * kHeaderBytes);
}

// The same as receive(), from the pipe; says how much it took.
std::size_t Engine::receive_piped(Connection& c) {
  std::size_t moved = 0;
  c.landed = 0;
  while (!c.dead && moved + c.landed < kTurnBytes) {
    std::size_t n = 0;
    if (!c.pipe.take(receive_line_, c.wanted(), n)) {
      break_off(c, "it says that more is in the pipe than the pipe holds");
      break;
    }
    if (n == 0) break;
    moved += n;
    std::string_view bytes(receive_line_, n);
    while (!bytes.empty() && !c.dead) parse(c, bytes);
  }
  if (moved > 0 && !c.dead && c.pipe.must_ring_for_room()) ring_bell(c);
  return moved;
}

// The last frame in the socket.
void Engine::on_switch(Connection& c) {
  if (!c.pipe || c.pipe_in) return break_off(c, "a switch to a pipe that is not there");
  c.pipe_in = true;
  if (c.outgoing) append_switch(c);
}

// Consumes some of `bytes`.
void Engine::parse(Connection& c, std::string_view& bytes) {
  if (!c.in_payload) {
    const std::size_t need = kHeaderBytes - c.head.size();
    const std::size_t n = std::min(need, bytes.size());
    c.head.insert(c.head.end(), bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(n));
    bytes.remove_prefix(n);
    if (c.head.size() < kHeaderBytes) return;
    const bool known = parse_header(c.head.data(), c.header);
    c.head.clear();
    c.payload.clear();
    if (!known) return break_off(c, "a frame of unknown kind");
    if (c.header.kind != Kind::kSlice && c.header.length > settings_.plan_bytes_max) {
      return break_off(c,
                       fmt::format("a frame of {} bytes is above plan_bytes_max", c.header.length));
    }
    if (!may_come_from(!c.outgoing, c.header.kind))
      return break_off(c, "a frame of the other direction");
    if (!c.outgoing && c.greeted == (c.header.kind == Kind::kHello))
      return break_off(c, c.greeted ? "a second hello" : "no hello");
    if (!c.outgoing && c.waiting() > kAnswerBytesMax)
      return break_off(c, "the peer does not read its answers");
    if (c.header.kind == Kind::kSlice && c.ring) return land_from_ring(c);
    if (c.header.kind == Kind::kSwitch) return on_switch(c);
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

void Engine::frame(Connection& c, std::string_view payload) {
  if (c.outgoing) return on_answer(c, payload);
  switch (c.header.kind) {
    case Kind::kHello:
      return on_hello(c, payload);
    case Kind::kBegin:
      return on_begin(c, decode_begin(payload));
    case Kind::kPull:
      return on_begin(c, decode_pull(payload));
    case Kind::kCancel:
      return on_cancel(c);
    case Kind::kSlice:
    case Kind::kDone:
    case Kind::kCancelDone:
    case Kind::kRefused:
    case Kind::kCredit:
    case Kind::kSwitch:
      return;  // parse() lets none of them come here
  }
}

void Engine::on_hello(Connection& c, std::string_view payload) {
  const auto hello = decode_hello(payload);
  if (!hello.ok()) return break_off(c, hello.status().message());
  const auto refuse = [&](const std::string& to_peer, const std::string& why) {
    append_frame(c, {Kind::kRefused, 0, 0}, to_peer);
    pump(c);
    break_off(c, why);
  };
  if (!hello->life.is_zero() && hello->life != life_)
    return refuse("another process lives at this address now", "hello for another life");
  const std::size_t offered = (hello->ring_bytes > 0 ? 1 : 0) + (hello->pipe_bytes > 0 ? 1 : 0) +
                              (hello->epoch_slots > 0 ? 1 : 0) + hello->regions.size();
  if (offered != c.in_fds.size() || hello->ring_bytes > kRingBytesMax ||
      hello->pipe_bytes > kPipeBytesMax || hello->epoch_slots > kEpochSlotsMax ||
      hello->regions.size() > kRegionsMax) {
    return refuse(
        "the offer of shared memory is not understood",
        fmt::format("hello offers {} pieces of memory, {} came", offered, c.in_fds.size()));
  }
  std::size_t next = 0;
  const auto map = [&](std::uint64_t bytes, Mapping& into, bool writable = false) {
    auto mapping = Mapping::of(c.in_fds[next++].get(), bytes, writable);
    if (mapping.ok()) into = std::move(*mapping);
    return mapping.status();
  };
  Status mapped;
  if (hello->ring_bytes > 0) mapped = map(hello->ring_bytes, c.ring.memory);
  Mapping pipe;
  if (mapped.ok() && hello->pipe_bytes > 0)
    mapped = map(Pipe::file_bytes(hello->pipe_bytes), pipe, true);
  if (mapped.ok() && hello->epoch_slots > 0)
    mapped = map(hello->epoch_slots * sizeof(std::uint64_t), c.epochs);
  for (const SharedRegion& region : hello->regions) {
    if (!mapped.ok()) break;
    c.mapped.push_back({region, {}});
    mapped = map(region.bytes, c.mapped.back().memory);
  }
  c.in_fds.clear();
  if (!mapped.ok()) return refuse(mapped.message(), mapped.message());
  c.greeted = true;
  connect_deadlines_.clear(c.fd);
  if (!pipe) return;
  c.pipe = Pipe(std::move(pipe), hello->pipe_bytes, Pipe::End::kTarget);
  append_switch(c);
}

// Turns the source's addresses into where its memory is mapped here. Whatever the source says, no
// lane may leave the region that it begins in.
Status Engine::map_sources(const Connection& c, Begin& begin) const {
  using Wide = unsigned __int128;
  if (begin.epoch_slot >= c.epochs.size() / sizeof(std::uint64_t))
    return Status(Code::kProtocol, fmt::format("epoch slot {} was not offered", begin.epoch_slot));
  for (CopyGroup& group : begin.plan) {
    Wide items = 0;
    for (const Run& run : group.runs) items = std::max(items, Wide{run.source_first} + run.count);
    for (Lane& lane : group.lanes) {
      const Wide last = items == 0 ? 0 : (items - 1) * lane.source_item;
      const Wide extent =
          last + Wide{lane.rows - 1} * (lane.rows > 1 ? lane.source_row : 0) + lane.bytes;
      bool found = false;
      for (const MappedRegion& region : c.mapped) {
        if (lane.source < region.theirs.base ||
            lane.source - region.theirs.base >= region.theirs.bytes)
          continue;
        const std::uint64_t offset = lane.source - region.theirs.base;
        if (Wide{offset} + extent > region.theirs.bytes) break;
        lane.source = reinterpret_cast<std::uint64_t>(region.memory.data()) + offset;
        found = true;
        break;
      }
      if (!found)
        return Status(
            Code::kRefused,
            fmt::format("a lane of the source at {:#x} leaves its shared memory", lane.source));
    }
  }
  return {};
}

void Engine::on_begin(Connection& c, Result<Begin> decoded) {
  if (!decoded.ok()) return break_off(c, decoded.status().message());
  const std::uint64_t id = c.header.write;
  if (c.incoming.size() >= settings_.writes_per_peer_max || c.incoming.contains(id)) {
    return break_off(c, fmt::format("write {} is under way, or {} are (writes_per_peer_max)", id,
                                    c.incoming.size()));
  }
  const bool pulled = c.header.kind == Kind::kPull;
  const Status mapped = pulled ? map_sources(c, *decoded) : Status();
  Incoming& write = c.incoming.try_emplace(id, id, std::move(*decoded)).first->second;
  write.pulled = pulled;
  if (!mapped.ok()) return answer(c, id, write, mapped);
  Status lent = grants_.recheck(write.ticket, write.begin.authority, write.begin.plan);
  if (!lent.ok()) {
    // The word of the grant may have overtaken the command that gives it: what was said first is
    // done first.
    drain_commands();
    lent = grants_.recheck(write.ticket, write.begin.authority, write.begin.plan);
  }
  if (!lent.ok()) return answer(c, id, write, lent);
  if (write.total == 0) return answer(c, id, write, Status());
  if (write.total <= settings_.express_bytes) last_small_ = std::chrono::steady_clock::now();
  if (pulled) {
    c.pulls.push(write.begin.flow, &write);
    busy_ = true;
  }
}

void Engine::on_cancel(Connection& c) {
  const auto it = c.incoming.find(c.header.write);
  // Not there: it was answered for good already, and that answer ends it.
  if (it == c.incoming.end()) return;
  if (it->second.pulled) c.pulls.remove(it->second.begin.flow, &it->second);
  c.incoming.erase(it);
  append_frame(c, {Kind::kCancelDone, 0, c.header.write}, {});
}

void Engine::answer(Connection& c, std::uint64_t id, Incoming& write, const Status& status) {
  append_frame(c, {Kind::kDone, 0, id}, encode_done(status));
  if (write.pulled) c.pulls.remove(write.begin.flow, &write);
  write.over = true;
  write.drop_left = write.pulled ? 0 : write.cursor.left();
  write.begin.plan.clear();  // a refused plan costs nothing; the cursor is not used again
  if (write.drop_left == 0) c.incoming.erase(id);
}

void Engine::land(Connection& c, std::string_view bytes) {
  const auto it = c.incoming.find(c.header.write);
  if (it == c.incoming.end()) return;  // cancelled
  Incoming& write = it->second;
  if (write.pulled || bytes.size() > (write.over ? write.drop_left : write.cursor.left()))
    return break_off(c, fmt::format("write {} sends more than its plan", c.header.write));
  if (!write.over) {
    const Status alive = grants_.recheck(write.ticket, write.begin.authority, write.begin.plan);
    if (!alive.ok()) answer(c, c.header.write, write, alive);
  }
  if (write.over) {
    write.drop_left -= bytes.size();
    if (write.drop_left == 0) c.incoming.erase(it);
    return;
  }
  copier_.scatter(write.cursor, bytes.size(), bytes.data());
  if (write.cursor.left() == 0) answer(c, c.header.write, write, Status());
}

// What the source does to the ring meanwhile spoils nothing but its own bytes.
void Engine::land_from_ring(Connection& c) {
  const std::uint64_t length = c.header.length;
  if (length == 0 || length > c.ring.to_end(c.ring.taken))
    return break_off(c, fmt::format("a slice of {} bytes leaves the ring", length));
  const char* at = c.ring.memory.data() + c.ring.taken % c.ring.memory.size();
  c.ring.taken += length;
  c.landed += length;
  land(c, {at, length});
  if (c.dead) return;
  append_frame(c, {Kind::kCredit, 0, length}, {});
  pump(c);  // now: the source may be waiting for it
}

// One slice of the pulled write whose turn it is.
void Engine::pull(Connection& c) {
  Incoming& write = *c.pulls.front();
  c.pulls.rotate();
  const std::uint64_t id = write.id;
  const Status alive = grants_.recheck(write.ticket, write.begin.authority, write.begin.plan);
  if (!alive.ok()) {
    answer(c, id, write, alive);
  } else {
    copier_.direct(write.cursor, slice_limit());
    // What was copied counts only if the source had not gone on when it was copied.
    std::atomic_thread_fence(std::memory_order_acquire);
    if (read_epoch(c.epochs, write.begin.epoch_slot) != write.begin.epoch) {
      c.pulls.remove(write.begin.flow, &write);
      c.incoming.erase(id);
      append_frame(c, {Kind::kCancelDone, 0, id}, {});
    } else if (write.cursor.left() == 0) {
      answer(c, id, write, Status());
    }
  }
  pump(c);
  if (!c.pulls.empty()) busy_ = true;
}

}  // namespace kvferry::data::stream
