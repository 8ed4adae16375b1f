// The protocol of a decode rank, without threads, clocks, sockets or logs (see prefill.h for the
// manner).
//
//   Bootstrapping ── instance looked up, ranks mapped, registered with each ─► WaitingForInput
//   ── send_metadata: pages lent, room message to each source ─► Transferring ── every real source
//   said Done ─► Success
//        └──────────────────────────── first cause of failure: pages taken back
//        ─────────────────────► Failed
//
// Whom to talk to comes from the instance's bootstrap server. A source is native when it registered
// itself as native there; then everything is said in a session that this side opens. Pages come
// home through the LeaseBook alone.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "kvferry/config.h"
#include "kvferry/layout.h"
#include "src/base/deadlines.h"
#include "src/plan/ranks.h"
#include "src/plan/writers.h"
#include "src/proto/lease.h"
#include "src/proto/ports.h"
#include "src/proto/session.h"
#include "src/wire/bodies.h"
#include "src/wire/sglang_codec.h"

namespace kvferry::proto {

// What a decode rank knows of itself. Constant for the life of the manager.
struct DecodeSelf {
  RankPlace place;
  Address control;
  Token life;
  Layout layout;
  std::vector<StateKind> state_kinds;  // of the model; empty: those of the layout
  plan::AttentionKind attention;
  std::uint32_t total_kv_heads = 0;
  std::string kv_cache_dtype = "auto";
  std::string session_name;  // data plane address as "host:port", by which foreign prefill ranks
                             // know this one
  wire::Dialect foreign_dialect =
      wire::Dialect::kUnknown;  // of foreign prefill instances, where it is configured
};

struct RoomMetadata {
  std::vector<PageIndex> pages;
  std::optional<std::uint32_t> aux_row;
  std::uint64_t prefix_tokens = 0;  // held already; a multiple of the page size
  std::vector<StateItems> states = {};
};

// The prefill ranks of one room, as the tests and tools see them.
struct SourceView {
  RankPlace place;
  Address address;
  bool native = false, dummy = false, writes_aux = false;
  plan::Shares writes = 0;
};

class DecodeManager {
 public:
  DecodeManager(DecodeSelf self, const Settings& settings, Ports ports);

  // --- the engine's calls
  Result<UseId> open(RoomId room, const Address& bootstrap, Time now);
  // Chooses the prefill DP group. Without it: the room's own when the instance follows the room,
  // else the server is asked.
  Status init(UseId use, std::optional<std::uint32_t> prefill_dp_rank, Time now);
  Status send_metadata(UseId use, RoomMetadata metadata, Time now);
  void abort(UseId use, Status reason, Time now);
  void clear(UseId use, Time now);
  void stop(Time now);
  [[nodiscard]] bool is_quiet() const;

  // --- the world's
  void on_frames(const wire::Frames& frames, Time now);
  void on_completion(const Completion& completion, Time now);
  void on_http(CallId call, const HttpResponse& response, Time now);
  void advance(Time now);
  [[nodiscard]] Time next_deadline() const;

  [[nodiscard]] const Counters& counters() const { return counters_; }
  [[nodiscard]] std::size_t open_rooms() const { return uses_.size(); }
  [[nodiscard]] std::size_t sessions() const { return sessions_.size(); }
  [[nodiscard]] std::size_t open_leases() const { return leases_.open_leases(); }
  [[nodiscard]] std::size_t quarantined() const { return leases_.quarantined(); }
  [[nodiscard]] const RoomView* view(UseId use) const;
  [[nodiscard]] std::vector<SourceView> sources(UseId use) const;

 private:
  using PlaceKey = std::array<std::uint32_t, 4>;  // dp, cp, tp, pp
  struct Link {
    Address address;
    bool native = false;
    wire::NativeRank info;    // native
    Token session;            // native: the open one, zero if none
    bool registered = false;  // foreign
  };
  struct Instance {
    std::optional<wire::Topology> topology;
    bool fetching = false, stale = false;
    bool ours = false;  // the server is one of ours: it says which ranks are native
    bool all_native = false;
    // Who writes to this rank, by prefill DP group, in the order in which they are contacted; from
    // the layouts of native ranks, so the same for every room until one of them changes.
    std::map<std::uint32_t, Result<std::vector<plan::Shares>>> writers;
    std::string last_error;
    std::map<PlaceKey, Link> links;
    std::map<PlaceKey, CallId> lookups;
    std::set<UseId> uses;
    std::uint64_t misses = 0;
    bool beating = false;
  };
  struct Source {
    PlaceKey place{};
    Address address;
    std::uint32_t unique_rank = 0;
    std::uint32_t required_destinations = 1;  // that this rank hears from for the room
    bool native = false, dummy = false, writes_aux = false;
    plan::Shares writes = plan::kAllShares;
    Token session;  // native
    Token grant;    // native
    std::optional<LeaseId> lease;
    bool done = false, said_failed = false;
  };
  struct Use {
    RoomId room{};
    Address bootstrap;
    RoomView view;
    bool initialised = false, cleared = false, resolved = false;
    std::optional<std::uint32_t> dp_rank;
    bool asked_dp_rank = false;
    plan::RankMapping mapping;
    std::vector<PlaceKey> order;  // sources in the order in which they are contacted
    // As they were when the room was connected: what is learned of the instance later concerns
    // later rooms.
    plan::InstanceShape shape;
    std::vector<Source> connected;
    std::optional<RoomMetadata> waiting_metadata;
    std::vector<Source> sources;
    std::uint32_t aux_row = 0;
    bool has_aux_row = false;
    std::set<std::uint32_t> responded;  // distinct ranks that said Success
    std::uint32_t required = 0;
    std::uint64_t abort_generation = 0;
  };
  struct Session {
    Address peer;
    Address bootstrap;
    PlaceKey place{};
    std::uint64_t layout_hash = 0;  // of the prefill rank's layout, as it was looked up
    std::string name;
    bool open = false;
    Time opened_at{}, last_heard{}, last_permission{}, next_register{};
    std::set<UseId> uses;
  };
  enum class Call : std::uint8_t { kInstance, kTopology, kRank, kDpRank, kHealth };
  struct Pending {
    Call kind{};
    Address bootstrap;
    PlaceKey place{};
    UseId use{};
  };

  void fetch_instance(const Address& bootstrap, Instance& instance, Time now);
  void http(Call kind, const Address& bootstrap, std::string method, std::string path,
            std::string body, PlaceKey place, UseId use);
  void on_instance(const Address& bootstrap, Instance& instance, const HttpResponse& response,
                   Time now);
  void on_topology(const Address& bootstrap, Instance& instance, const HttpResponse& response,
                   Time now);
  void on_rank(const Address& bootstrap, Instance& instance, PlaceKey place,
               const HttpResponse& response, Time now);
  void on_dp_rank(UseId id, const HttpResponse& response, Time now);
  void on_health(const Address& bootstrap, Instance& instance, const HttpResponse& response,
                 Time now);
  void lose_instance(const Address& bootstrap, Time now);
  Status check_fit(const wire::Topology& topology, const Address& bootstrap,
                   const Instance& instance) const;
  [[nodiscard]] Result<bool> all_cp_ranks(const wire::Topology& topology,
                                          const Instance& instance) const;
  [[nodiscard]] Result<plan::RankMapping> map_to(const wire::Topology& topology,
                                                 const Instance& instance) const;
  void resolve(UseId id, Use& use, Time now);
  void connect(Use& use, Instance& instance, UseId id, Time now);
  void lend_and_announce(UseId id, Use& use, Time now);
  Status elect(Use& use, Instance& instance) const;
  [[nodiscard]] Result<std::vector<plan::Shares>> writers_of(const Use& use,
                                                             const Instance& instance) const;
  void on_native(const wire::NativeFrame& frame, Time now);
  void on_done(UseId id, Use& use, Source* source, const wire::Done& done, Time now);
  void on_abort_ack(UseId id, Use& use, Source& source, const wire::AbortAck& ack, Time now);
  void on_aux_data(const wire::AuxData& m);
  void send_register(Session& session, Token token, const Address& peer, bool native, Time now);
  void end_session(Token token, Status reason, bool tell, Time now);
  void fail(UseId id, Use& use, Status reason, bool from_other, Time now);
  void settle(UseId id, Use& use);
  void forget_link(const Use& use, PlaceKey place);
  void publish(UseId id, Use& use);
  void drop_if_done(UseId id);
  Use* find(UseId id);
  std::pair<UseId, Source*> find_grant(Token grant, Token session);
  [[nodiscard]] std::vector<GrantGroup> groups_for(const Source& source,
                                                   const RoomMetadata& metadata,
                                                   const plan::StateLists& states) const;

  const DecodeSelf self_;
  const Settings& settings_;
  Ports ports_;
  Counters counters_;
  LeaseBook leases_;
  GrantSlabs kv_slabs_, aux_slabs_;
  std::array<GrantSlabs, kStateKinds> state_slabs_;
  std::uint32_t pool_pages_ = 0, aux_rows_ = 0;
  std::vector<StateKind> kinds_;  // of our state, in the reference's order
  std::map<UseId, Use> uses_;
  std::map<RoomId, UseId> live_;
  std::map<RoomId, std::set<UseId>> by_room_;
  std::map<Address, Instance> instances_;
  std::map<Token, Session> sessions_;
  std::map<Token, UseId> grants_;
  std::map<CallId, Pending> calls_;
  Deadlines<UseId> room_deadlines_;
  Deadlines<Address> lookup_deadlines_, beat_deadlines_;
  Deadlines<Token> session_deadlines_;
  Deadlines<UseId> retry_deadlines_;
  bool stopping_ = false;
  std::uint64_t next_id_ = 1;
};

}  // namespace kvferry::proto
