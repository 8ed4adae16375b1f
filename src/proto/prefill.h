// The protocol of a prefill rank, without threads, clocks, sockets or logs: every input is a call
// that carries `now`, every output goes to a port.
//
// A room here: opened by the engine and announced by decode ranks, in either order. When all of
// them have spoken it waits for input; every chunk is planned and written for each of them; when
// the last write has landed all are told Done.
//
//   Bootstrapping ── all decode ranks spoke ─► WaitingForInput ── first write ─► Transferring ──
//   all landed ─► Success
//        └────────────────────────────── first cause of failure
//        ──────────────────────────────────────────► Failed
//
// Owned by one thread. Uses (rooms) stay until the engine clears them and their writes have ended.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "kvferry/config.h"
#include "kvferry/layout.h"
#include "src/base/deadlines.h"
#include "src/plan/planner.h"
#include "src/plan/ranks.h"
#include "src/proto/ports.h"
#include "src/proto/session.h"
#include "src/wire/bodies.h"
#include "src/wire/sglang_codec.h"

namespace kvferry::proto {

// What a prefill rank knows of itself. Constant for the life of the manager.
struct PrefillSelf {
  RankPlace place;  // dp: the group that the bootstrap server files it under
  std::uint32_t system_dp_rank = 0, system_dp_size = 1;
  Address control;    // where its control socket listens, as others reach it
  Address bootstrap;  // of its instance
  Token life;
  Layout layout;
  plan::AttentionKind attention;
  std::uint32_t total_kv_heads = 0;  // of the model; not needed for MLA
  std::uint32_t stage_begin = 0, stage_layers = 0;
  std::vector<StateKind> state_kinds;             // of the model; empty: those of the layout
  std::vector<std::uint32_t> compression_ratios;  // of each layer of the model; compressed MLA only
  std::string kv_cache_dtype = "auto";
  std::string load_balance_method = "follow_bootstrap_room";
  bool layer_split = false;  // the prefill side splits one cache over its CP ranks by layer
  std::optional<std::int64_t> http_port;
  bool native = true;  // register as native; false: a pure reference peer
};

struct SenderOptions {
  bool carries_dp_rank = false;  // the request names its dp rank itself
};

class PrefillManager {
 public:
  PrefillManager(PrefillSelf self, const Settings& settings, Ports ports);

  // Begins registering with the bootstrap server; goes on until it answers, then repeats now and
  // then.
  void start(Time now);

  // --- the engine's calls. A Status other than ok: nothing was done.
  Result<UseId> open(RoomId room, const SenderOptions& options, Time now);
  // Announces how many pages will be sent and which aux row goes with the last of them. Pages of a
  // whole request begin at its first token; those that a decode rank holds are not sent to it.
  Status init(UseId use, std::uint64_t pages, std::uint32_t aux_row, Time now,
              bool whole_request = false);
  // Adds the next pages. The chunk that reaches the announced number is the last, and the one that
  // state goes with. Sending more fails the room.
  Status send(UseId use, std::vector<PageIndex> pages, ReadyId ready, Time now,
              const std::vector<StateItems>& states = {});
  void abort(UseId use, Status reason, Time now);
  // The engine has no more interest. A room that has not ended is aborted. The number is free at
  // once.
  void clear(UseId use, Time now);
  // Fails every room and refuses new ones. is_quiet() turns true when no write is in flight and
  // everybody was told.
  void stop(Time now);
  [[nodiscard]] bool is_quiet() const;

  // --- the world's
  void on_frames(const wire::Frames& frames, Time now);
  void on_completion(const Completion& completion, Time now);
  void on_ready(ReadyId ready, Time now);
  void on_http(CallId call, const HttpResponse& response, Time now);
  void advance(Time now);
  [[nodiscard]] Time next_deadline() const;

  [[nodiscard]] bool is_registered() const { return registered_; }
  [[nodiscard]] const Status& registration_status() const { return registration_status_; }
  [[nodiscard]] bool is_dummy_cp_rank() const;
  [[nodiscard]] bool all_cp_ranks() const;
  [[nodiscard]] const Counters& counters() const { return counters_; }
  [[nodiscard]] std::size_t open_rooms() const { return uses_.size(); }
  [[nodiscard]] std::size_t pending_rooms() const { return pending_.size(); }
  [[nodiscard]] std::size_t sessions() const { return sessions_.size() + foreign_.size(); }
  [[nodiscard]] const RoomView* view(UseId use) const;
  // Newest (round, tail) that a foreign decode rank announced for its staging ring, by session
  // name.
  [[nodiscard]] const std::map<std::string, std::pair<std::uint64_t, std::uint64_t>>& watermarks()
      const {
    return watermarks_;
  }

 private:
  struct Destination {
    wire::Metadata metadata;
    bool registered = true;  // whoever spoke was registered here when it spoke
    Address reply;
    std::uint64_t in_flight = 0;
    bool told = false;       // Done or AbortAck went out, or there is nobody to tell
    bool unsettled = false;  // some write ended without the target's word: no drained answer
    bool abort_asked = false;
    std::optional<std::uint64_t> abort_generation;
  };
  struct Chunk {
    std::uint64_t begin = 0;
    std::vector<PageIndex> pages;
    bool last = false;
    ReadyId ready{};
    bool is_ready = true;
  };
  struct Use {
    RoomId room{};
    RoomView view;
    std::map<PeerKey, Destination> destinations;
    std::set<WriteId> writes;  // in flight
    std::optional<std::uint64_t> pages_total;
    std::uint32_t aux_row = 0;
    bool whole_request = false;
    plan::StateLists states;  // of the last chunk
    std::uint64_t pages_queued = 0;
    std::deque<Chunk> chunks;
    bool last_queued = false, last_dispatched = false;
    bool dummy = false;  // this rank sends nothing for any room
    bool cleared = false;
  };
  // What decode ranks said of a room that the engine has not opened yet.
  struct Word {
    wire::Metadata metadata;
    bool registered = true;
  };
  struct Pending {
    std::map<PeerKey, Word> metadata;
    std::set<PeerKey> aborted;
  };
  struct NativeSession {
    Address reply;
    std::string name;
    PlaneAddress plane;
    plan::PairLanes lanes;
    Time opened_at{}, permitted_until{};
  };
  struct ForeignSession {
    Address reply;
    plan::PairLanes lanes;
    plan::Shares writes = plan::kAllShares;
    wire::Dialect dialect = wire::Dialect::kUnknown;
    Status refusal;  // not ok: the pair does not fit; its rooms fail with this
  };
  struct WriteOwner {
    UseId use{};
    PeerKey peer;
  };

  void register_self(Time now);
  void on_native(const wire::NativeFrame& frame, Time now);
  void on_register_native(const wire::NativeFrame& frame, const wire::Register& message, Time now);
  void on_register_foreign(const wire::Register& message, Time now);
  void on_metadata(const PeerKey& peer, wire::Metadata metadata, Time now);
  void on_abort(const PeerKey& peer, const Address& reply, const wire::Abort& message, Time now);
  void end_session(Token session, Status reason, bool tell, Time now);
  void adopt(UseId id, Use& use, const PeerKey& peer, Word word, Time now);
  void dispatch(UseId id, Use& use, Time now);
  bool dispatch_chunk(UseId id, Use& use, const Chunk& chunk, Time now);
  void dispatch_peer_rooms(const PeerKey& peer, Time now);
  Status plan_for(const Use& use, const PeerKey& peer, const Destination& to, const Chunk& chunk,
                  CopyPlan& plan) const;
  void send_aux_data(const Use& use, const Destination& to);
  void fail(UseId id, Use& use, Status reason, bool from_other, Time now);
  void settle(UseId id, Use& use, Time now);
  void touch(UseId id, Use& use, Time now);
  void tell(Use& use, const PeerKey& peer, Destination& to);
  void publish(UseId id, Use& use);
  void drop_if_done(UseId id);
  void reply_unknown(const wire::NativeFrame& frame, std::string reason);
  [[nodiscard]] bool may_write(const PeerKey& peer, Time now) const;
  [[nodiscard]] std::string describe_peer(const PeerKey& peer) const;
  [[nodiscard]] const plan::PairLanes* lanes_of(const PeerKey& peer) const;
  [[nodiscard]] Result<plan::StateLists> states_of(const PeerKey& peer,
                                                   const wire::Metadata& metadata) const;
  Use* find(UseId id);

  const PrefillSelf self_;
  const std::uint32_t pool_pages_;
  const std::uint64_t layout_hash_;
  Time started_{};
  const std::vector<StateKind> kinds_;  // of our state, in the reference's order
  const Settings& settings_;
  Ports ports_;
  Counters counters_;
  std::map<UseId, Use> uses_;
  std::map<RoomId, UseId> live_;               // the use that new messages about the room belong to
  std::map<RoomId, std::set<UseId>> by_room_;  // every use of the number that still exists
  std::map<RoomId, Pending> pending_;
  std::map<Token, NativeSession> sessions_;
  std::map<std::string, ForeignSession> foreign_;
  std::map<WriteId, WriteOwner> writes_;
  // Rooms whose writes to a peer ended unsettled: no drained answer is given for them, also when
  // the room is forgotten, until the hold time is over.
  Deadlines<std::pair<RoomId, PeerKey>> unsettled_;
  std::map<std::string, std::pair<std::uint64_t, std::uint64_t>> watermarks_;
  std::map<ReadyId, UseId> ready_;
  Deadlines<UseId> room_deadlines_;
  Deadlines<RoomId> pending_deadlines_;
  Deadlines<Token> ping_deadlines_;
  Time next_registration_ = Time::max();
  std::set<CallId> registration_calls_;
  bool registered_ = false, stopping_ = false;
  Status registration_status_{Code::kUnavailable, "not registered yet"};
  std::uint64_t next_id_ = 1;
};

}  // namespace kvferry::proto
