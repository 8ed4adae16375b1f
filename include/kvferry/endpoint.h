// The endpoints of kvferry: one for each prefill rank and one for each decode rank of an inference
// engine.
//
//   prefill rank                                         decode rank
//   auto p = PrefillEndpoint::create(options)            auto d = DecodeEndpoint::create(options)
//   auto s = p->open(room)                               auto r = d->open(room, bootstrap)
//   s->init(pages, aux_row)                              r->init()
//   s->send(pages of a chunk) ...                        r->send_metadata(pages that take the KV,
//   aux_row) s->poll() == kSuccess                                r->poll() == kSuccess s->clear();
//   pages_reusable() -> pages may go         r->clear(); pages_reusable() -> pages may go
//
// Threads: every method may be called from any thread and none blocks, except create(), stop() and
// the destructors, which are the owner's. A Sender or Receiver is a handle: cheap to copy, good
// after its endpoint is gone (then it has failed).
//
// Memory: the layouts' slabs belong to the engine and outlive the endpoint. Pages of a room may be
// given to others once pages_reusable() is true, not before, whatever the state is.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvferry/config.h"
#include "kvferry/data_plane.h"
#include "kvferry/export.h"
#include "kvferry/layout.h"
#include "kvferry/status.h"
#include "kvferry/types.h"

namespace kvferry {

namespace runtime {
struct RoomCell;
class Endpoint;
}  // namespace runtime

// What loopback endpoints of one process meet in. Hand the same one to both sides; it lives as long
// as they do.
namespace data {
class LoopbackFabric;
}
KVF_API std::shared_ptr<data::LoopbackFabric> make_loopback_fabric();

// Which way the bytes take. kAuto: shared memory to every peer on this host that can be reached so,
// else TCP; chosen anew for each pair of ranks. kShm reaches native ranks of this host only,
// kLoopback endpoints with the same fabric.
enum class PlaneKind : std::uint8_t { kAuto, kTcp, kShm, kLoopback };

enum class LogLevel : std::uint8_t { kDebug, kInfo, kWarning, kError, kOff };

// What prefill and decode ranks have in common.
struct EndpointOptions {
  RankPlace place;
  Layout layout;  // slabs with the addresses of this process; checked by validate()
  // Kinds of state of the model, in the order of the reference's lists; empty: those of the layout,
  // in its order. A pipeline stage without a layer of some kind must name them.
  std::vector<StateKind> state_kinds;
  bool mla = false;                     // the KV is the same on every TP rank
  bool hybrid_mla = false;              // MLA beside layers with sharded state
  std::uint32_t total_kv_heads = 0;     // of the model; not needed for MLA
  std::string kv_cache_dtype = "auto";  // compared with the other side as text
  std::string listen_host = "127.0.0.1";
  std::string public_host;  // what others connect to; listen_host if empty. Never a wildcard.
  PlaneKind plane = PlaneKind::kAuto;
  std::shared_ptr<data::LoopbackFabric> loopback;  // for kLoopback
  // For kAuto and kShm: where this host's ranks meet. Containers that share it reach each other.
  std::string shared_directory = "/dev/shm";
  // SharedMemory that slabs lie in (memory.h): peers on this host copy straight out of it.
  std::vector<Region> shared;
  bool native = true;  // false: speak and register as a rank of the reference
  LogLevel log_level = LogLevel::kWarning;
  Settings settings;
};

struct PrefillOptions : EndpointOptions {
  Address bootstrap;  // the instance's bootstrap server
  std::uint32_t system_dp_rank = 0, system_dp_size = 1;
  std::string load_balance_method = "follow_bootstrap_room";
  // First layer and number of layers of this pipeline stage.
  std::uint32_t stage_begin = 0, stage_layers = 0;
  // Compressed MLA: of each layer of the model how many tokens share a row of its pages (4 or 128),
  // 0 for one without pages; empty for other models. Needed by decode ranks of the reference.
  std::vector<std::uint32_t> compression_ratios;
};

struct DecodeOptions : EndpointOptions {};

// Why a room failed: the first cause, and whether it came from another rank.
struct RoomFailure {
  Status status;
  bool from_other = false;
};

// What a sender's pages are counted from.
enum class PageBase : std::uint8_t {
  kAfterPrefix,   // the engine sends only what the decode side does not hold
  kWholeRequest,  // it sends all; pages that the decode side holds are passed over here
};

// One room on the prefill side.
class KVF_API Sender {
 public:
  // Announces how many pages will be sent and which aux row goes with the last chunk.
  Status init(std::uint64_t pages, std::uint32_t aux_row, PageBase base = PageBase::kAfterPrefix);
  // The next pages of the request; the chunk that reaches the announced number is the last.
  // `ready_fd`: an eventfd (or any descriptor) that becomes readable when the pages are filled; no
  // source byte is read before. It is watched, not consumed, and must stay open until the room has
  // ended. -1: they are filled.
  Status send(std::span<const PageIndex> pages, int ready_fd = -1);
  // The same for the last chunk of a room that owns state: which items of each kind.
  Status send(std::span<const PageIndex> pages, std::span<const StateItems> states,
              int ready_fd = -1);
  [[nodiscard]] RoomState poll() const;
  void abort(std::string reason = "aborted by the engine");
  // The handle is over; its room number is free. A room that has not ended is aborted.
  void clear();
  [[nodiscard]] bool pages_reusable() const;
  // Tokens that the decode side holds already; nothing until a decode rank has spoken.
  [[nodiscard]] std::optional<std::uint64_t> decode_prefix_length() const;
  // Whether a chunk of `pages` pages is worth a send.
  [[nodiscard]] static bool should_send(std::size_t pages, bool last) { return pages > 0 || last; }
  [[nodiscard]] std::uint64_t bytes_moved() const;
  [[nodiscard]] RoomFailure failure() const;
  [[nodiscard]] RoomId room() const;

 private:
  friend class PrefillEndpoint;
  std::shared_ptr<runtime::RoomCell> cell_;
};

// One room on the decode side.
class KVF_API Receiver {
 public:
  // `prefill_dp_rank`: of the request, where it carries one.
  Status init(std::optional<std::uint32_t> prefill_dp_rank = std::nullopt);
  // Lends the pages, the aux row and the items of state. May be called before the state is
  // WaitingForInput; then it is sent as soon as it can be.
  Status send_metadata(std::span<const PageIndex> pages, std::optional<std::uint32_t> aux_row,
                       std::uint64_t prefix_tokens = 0, std::span<const StateItems> states = {});
  [[nodiscard]] RoomState poll() const;
  void abort(std::string reason = "aborted by the engine");
  void clear();
  [[nodiscard]] bool pages_reusable() const;
  [[nodiscard]] RoomFailure failure() const;
  [[nodiscard]] RoomId room() const;

 private:
  friend class DecodeEndpoint;
  std::shared_ptr<runtime::RoomCell> cell_;
};

class KVF_API PrefillEndpoint {
 public:
  // Starts the endpoint's threads and begins to register with the bootstrap server.
  static Result<std::unique_ptr<PrefillEndpoint>> create(PrefillOptions options);
  ~PrefillEndpoint();
  PrefillEndpoint(const PrefillEndpoint&) = delete;
  PrefillEndpoint& operator=(const PrefillEndpoint&) = delete;

  // kAlreadyExists while the number is open here (until clear()); kExhausted at rooms_max or when
  // the inbox is full. `carries_dp_rank`: the request names its dp rank itself.
  Result<Sender> open(RoomId room, bool carries_dp_rank = false);
  [[nodiscard]] bool registered() const;
  // Where the rank's control socket listens.
  [[nodiscard]] Address address() const;
  // Fails what is open, tells the others, waits until nothing is in flight or `patience` is over,
  // and ends. Idempotent.
  void stop(Duration patience = std::chrono::seconds(2));
  // Gauges and counters in Prometheus' text format.
  [[nodiscard]] std::string metrics() const;

 private:
  explicit PrefillEndpoint(std::shared_ptr<runtime::Endpoint> endpoint);
  std::shared_ptr<runtime::Endpoint> endpoint_;
};

class KVF_API DecodeEndpoint {
 public:
  static Result<std::unique_ptr<DecodeEndpoint>> create(DecodeOptions options);
  ~DecodeEndpoint();
  DecodeEndpoint(const DecodeEndpoint&) = delete;
  DecodeEndpoint& operator=(const DecodeEndpoint&) = delete;

  Result<Receiver> open(RoomId room, const Address& bootstrap);
  [[nodiscard]] Address address() const;
  void stop(Duration patience = std::chrono::seconds(2));
  [[nodiscard]] std::string metrics() const;

 private:
  explicit DecodeEndpoint(std::shared_ptr<runtime::Endpoint> endpoint);
  std::shared_ptr<runtime::Endpoint> endpoint_;
};

}  // namespace kvferry
