// The source's side of a write: what is offered to a peer, and how slices go out.
#include <algorithm>

#include <fmt/format.h>

#include "src/data/stream/engine.h"

namespace kvferry::data::stream {
namespace {

std::atomic<std::uint64_t>& epoch_word(const Mapping& epochs, std::uint32_t slot) {
  static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
  return reinterpret_cast<std::atomic<std::uint64_t>*>(epochs.data())[slot];
}

}  // namespace

// A ring of its own for each peer, and our memory files, where the peer is on this host.
Status Engine::make_offer(Connection& c, Hello& hello) {
  if (!links_->one_host()) return {};
  // What small writes need is not more than a few of them.
  const std::uint64_t bytes = c.express
                                  ? std::min(settings_.shm_ring_bytes, 16 * settings_.express_bytes)
                                  : settings_.shm_ring_bytes;
  auto file = create_memory_file("kvferry-ring", bytes);
  if (!file.ok()) return file.status();
  auto mapping = Mapping::of(file->get(), bytes, true);
  if (!mapping.ok()) return mapping.status();
  c.ring.memory = std::move(*mapping);
  c.ring_file = std::move(*file);
  hello.ring_bytes = bytes;
  c.out_fds = {c.ring_file.get()};
  if (settings_.shm_pipe_bytes > 0) {
    const std::uint64_t size = Pipe::file_bytes(settings_.shm_pipe_bytes);
    auto pipe_file = create_memory_file("kvferry-pipe", size);
    if (!pipe_file.ok()) return pipe_file.status();
    auto pipe = Mapping::of(pipe_file->get(), size, true);
    if (!pipe.ok()) return pipe.status();
    c.pipe = Pipe(std::move(*pipe), settings_.shm_pipe_bytes, Pipe::End::kSource);
    c.pipe_file = std::move(*pipe_file);
    hello.pipe_bytes = settings_.shm_pipe_bytes;
    c.out_fds.push_back(c.pipe_file.get());
  }
  hello.epoch_slots = settings_.shm_pulls_max;
  c.out_fds.push_back(epoch_file_.get());
  for (const OfferedRegion& offered : offered_) {
    hello.regions.push_back(offered.region);
    c.out_fds.push_back(offered.file.get());
  }
  c.regions = offered_.size();
  return {};
}

// Every lane lies within one region that the peer was offered.
bool Engine::may_be_pulled(const Connection& c, const Outgoing& write) const {
  if (c.regions == 0 || write.total == 0 || free_epoch_slots_.empty()) return false;
  for (const CopyGroup& group : write.spec.plan) {
    for (const Lane& lane : group.lanes) {
      bool inside = false;
      for (std::size_t i = 0; i < c.regions && !inside; ++i) {
        const SharedRegion& region = offered_[i].region;
        // Where the lane ends is the target's to check; a base inside is enough to choose the way.
        inside = lane.source >= region.base && lane.source - region.base < region.bytes;
      }
      if (!inside) return false;
    }
  }
  return true;
}

void Engine::begin_write(Connection& c, Outgoing& write) {
  write.begun = true;
  const auto id = static_cast<std::uint64_t>(write.spec.id);
  if (!may_be_pulled(c, write)) {
    append_frame(c, {Kind::kBegin, 0, id}, encode_begin(write.spec.authority, write.spec.plan));
    return;
  }
  write.pulled = true;
  write.epoch_slot = free_epoch_slots_.back();
  free_epoch_slots_.pop_back();
  Begin begin;
  begin.authority = write.spec.authority;
  begin.plan = write.spec.plan;
  begin.flow = write.spec.flow;
  begin.epoch_slot = write.epoch_slot;
  begin.epoch = epoch_word(epochs_, write.epoch_slot).load(std::memory_order_relaxed);
  append_frame(c, {Kind::kPull, 0, id}, encode_pull(begin));
}

// From here on the write does not count, whatever the target still copies. Sequentially consistent:
// the word is changed before any byte of the source is.
void Engine::advance_epoch(const Outgoing& write) {
  if (!write.pulled) return;
  epoch_word(epochs_, write.epoch_slot).fetch_add(1, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void Engine::gather(Connection& c, Outgoing& write, std::uint64_t bytes) {
  const auto id = static_cast<std::uint64_t>(write.spec.id);
  const auto length = static_cast<std::uint32_t>(bytes);
  if (c.ring) {
    copier_.gather(write.cursor, bytes,
                   c.ring.memory.data() + c.ring.written % c.ring.memory.size());
    c.ring.written += bytes;
    append_frame(c, {Kind::kSlice, length, id}, {});  // the kernel orders it behind the bytes
    return;
  }
  char* const at = c.extend_slice(bytes);
  store_header(at, {Kind::kSlice, length, id});
  copier_.gather(write.cursor, bytes, at + kHeaderBytes);
}

void Engine::on_answer(Connection& c, std::string_view payload) {
  const WriteId id{c.header.write};
  switch (c.header.kind) {
    case Kind::kDone: {
      if (!c.writes.contains(id)) return;  // cancelled and completed meanwhile
      Status status = decode_done(payload);
      Outgoing& write = *writes_.at(id);
      if (status.ok() && !write.pulled && write.cursor.left() > 0)
        status = Status(Code::kProtocol, "the target says done before all was sent");
      // The rest is never sent: the target need not wait for it.
      if (!status.ok() && !write.pulled && write.cursor.left() > 0 && !write.cancelled)
        append_frame(c, {Kind::kCancel, 0, c.header.write}, {});
      return finish(id, std::move(status), true);
    }
    case Kind::kCancelDone:
      if (c.writes.contains(id)) finish(id, Status(Code::kAborted, "cancelled"), true);
      return;
    case Kind::kCredit: {
      if (c.header.write > c.ring.written - c.ring.taken)
        return break_off(c, fmt::format("credit for {} bytes, {} are in the ring", c.header.write,
                                        c.ring.written - c.ring.taken));
      c.ring.taken += c.header.write;
      return;
    }
    case Kind::kRefused:
      return break_off(c, std::string(payload.substr(0, 200)));
    case Kind::kHello:
    case Kind::kBegin:
    case Kind::kSlice:
    case Kind::kPull:
    case Kind::kCancel:
    case Kind::kSwitch:
      return;  // parse() lets none of them come here
  }
}

}  // namespace kvferry::data::stream
