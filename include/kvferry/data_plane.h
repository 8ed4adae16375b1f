// The contract of a data plane: how bytes move from the pages of one process to lent pages of
// another.
//
// A plane knows addresses, grants and plans. It never learns what a room is.
// A plan is a product, not a list: every lane (pool to pool) times every run (pages to pages).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvferry/export.h"
#include "kvferry/layout.h"
#include "kvferry/status.h"
#include "kvferry/types.h"

namespace kvferry {

// `rows` pieces of `bytes` inside each item; row 0 of item i starts at base + i * item.
struct Lane {
  std::uint64_t source = 0, target = 0;            // address of row 0 in item 0
  std::uint64_t source_item = 0, target_item = 0;  // item strides
  std::uint32_t rows = 1, bytes = 0;
  std::uint32_t source_row = 0, target_row = 0;  // row strides; unused when rows == 1
  friend auto operator<=>(const Lane&, const Lane&) = default;
};

// `count` items that follow each other on both sides.
struct Run {
  std::uint32_t source_first = 0, target_first = 0, count = 0;
  friend auto operator<=>(const Run&, const Run&) = default;
};

struct CopyGroup {
  std::vector<Lane> lanes;
  std::vector<Run> runs;
  friend bool operator==(const CopyGroup&, const CopyGroup&) = default;
};
using CopyPlan = std::vector<CopyGroup>;  // KV, each state, aux

KVF_API std::uint64_t bytes_of(const CopyPlan& plan);

enum class WriteId : std::uint64_t {};
enum class FenceId : std::uint64_t {};
enum class GrantId : std::uint64_t {};
enum class RegionId : std::uint64_t {};

// Names the memory of one life of one process: a later process at the same host and port never
// answers to it.
using PlaneAddress = std::string;

struct Region {
  std::uint64_t base = 0, bytes = 0;
  Memory memory;
  // The file that it is a mapping of, from its first byte on, where peers on this host may map it
  // too (SharedMemory in memory.h); -1: private. Not owned, open until the region is registered.
  int file = -1;
};

// Pools whose items a grant lends. One list serves every grant of an endpoint.
struct GrantSlab {
  std::uint64_t base = 0, item_stride = 0, item_bytes = 0;
  std::uint32_t item_count = 0;
};
using GrantSlabs =
    std::shared_ptr<const std::vector<GrantSlab>>;  // sorted by base, not overlapping

// The items of `slabs` that are lent.
struct GrantGroup {
  GrantSlabs slabs;
  std::vector<std::uint32_t> items;  // any order; duplicates are harmless
};

struct GrantSpec {
  GrantId id{};
  Token token;           // what a native writer must show; random, unguessable
  bool foreign = false;  // lent to peers that know no token: writes without one are checked against
                         // all such grants
  std::vector<GrantGroup> groups;
};

// By what right a write happens: the token of one grant, or none (peers that know no tokens).
struct Authority {
  Token token;
  bool foreign = false;
};

struct WriteSpec {
  WriteId id{};
  PlaneAddress to;
  Authority authority;
  std::uint64_t flow =
      0;  // writes of one flow share one turn among the flows of a peer (fairness by room)
  CopyPlan plan;
};

struct Completion {
  enum class Kind : std::uint8_t { kWrite, kFence } kind = Kind::kWrite;
  std::uint64_t id = 0;  // WriteId or FenceId
  Status status;         // writes: ok means that every byte landed
  // False: the source is read no more, but nobody can say whether the target still lands bytes that
  // were already on their way. They land only while the grant lives.
  bool settled = true;
  std::uint64_t bytes = 0;  // of a write that is ok
};

// Bytes of writes that landed, by the way they took, as the source counts them.
struct PlaneCounters {
  std::uint64_t bytes_inline = 0;  // through a socket, or a plane within one process
  std::uint64_t bytes_ring = 0;    // through shared memory
  std::uint64_t bytes_pulled = 0;  // copied by the target out of the source's own memory
};

// All calls come from the endpoint's loop thread and never block. Nothing fails on the spot: a
// write that cannot be made completes with its error. Exactly one completion per WriteId and per
// FenceId.
class KVF_API DataPlane {
 public:
  virtual ~DataPlane() = default;

  [[nodiscard]] virtual PlaneAddress address() const = 0;
  virtual Result<RegionId> register_memory(std::span<const Region> regions) = 0;
  virtual Status deregister_memory(RegionId region) = 0;

  // Target side. After a fence's completion not one byte lands under its grant, whatever the writer
  // does. Fence 0: its writer is known to be quiet; the grant goes, and no completion follows.
  virtual Status grant(GrantSpec spec) = 0;
  virtual void revoke(GrantId grant, FenceId fence) = 0;

  // Source side. `cancel` brings a write to its completion within a second, `forget` every write to
  // that address. After a completion the source is read no more.
  virtual void write(WriteSpec spec) = 0;
  virtual void cancel(WriteId write) = 0;
  virtual void forget(const PlaneAddress& peer, FenceId fence) = 0;

  // Appends completions; returns how many. ready_fd() becomes readable when poll() may have
  // something (-1: poll often).
  virtual std::size_t poll(std::vector<Completion>& out) = 0;
  [[nodiscard]] virtual int ready_fd() const = 0;
  // How long writes of a dead or deaf writer may go on landing after a revoke's fence. 0 where
  // revoke is a fence.
  [[nodiscard]] virtual Duration orphan_write_bound() const = 0;
  // May be called from any thread.
  [[nodiscard]] virtual PlaneCounters counters() const = 0;
};

}  // namespace kvferry
