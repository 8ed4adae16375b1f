// The one class that can free what was lent.
//
//   Memory lent to a writer is taken back only when that writer is quiet.
//
// A lease is the right of one source to write one room's pages: a grant of the data plane plus what
// must be known before the pages may go to somebody else. The managers cannot free anything by
// themselves; they report facts (the source said it has nothing in flight, the room was given up,
// time passed), and the book decides (rules 3 and 6 of docs/PROTOCOL.md).
//
//   lent ── said_quiet ───────────────────────────────► home
//     └── take_back ─► returning ─ fence, and the rule ─► home
//                                  of the source's kind
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "kvferry/config.h"
#include "kvferry/data_plane.h"
#include "src/base/deadlines.h"
#include "src/proto/ports.h"

namespace kvferry::proto {

enum class LeaseId : std::uint64_t {};

class LeaseBook {
 public:
  LeaseBook(DataPlane& plane, const Settings& settings, Counters& counters)
      : plane_(plane), settings_(settings), counters_(counters) {}

  // Lends the items of `groups` to one source of `owner`'s room. `foreign`: the source knows no
  // tokens.
  Result<LeaseId> lend(UseId owner, Token token, bool foreign, std::vector<GrantGroup> groups);

  // The source has no write in flight and starts none: Done or AbortAck of a native session,
  // Success of a whole room or a drained answer of a foreign one. The pages are home at once.
  void said_quiet(LeaseId lease);

  // The room is given up; the source may still be writing. `last_permission`: until when it may
  // have believed that it may write (native; now for foreign).
  void take_back(LeaseId lease, Time now, Time last_permission);

  // A fence of the plane has completed. False: not one of ours.
  bool on_fence(FenceId fence, Time now);
  void advance(Time now);
  [[nodiscard]] Time next_deadline() const { return resting_.next(); }

  [[nodiscard]] bool is_home(LeaseId lease) const;
  // Forgets a lease that is home.
  void forget(LeaseId lease);
  // Owners of leases that came home by a fence or by time since the last call. (Who reports that a
  // source is quiet knows its owner already.)
  std::vector<UseId> take_returned();

  [[nodiscard]] std::size_t open_leases() const { return leases_.size(); }
  // Leases taken back whose pages rest because nothing proves that the writer is quiet.
  [[nodiscard]] std::size_t quarantined() const;

 private:
  struct Lease {
    UseId owner{};
    bool foreign = false;
    bool returning = false, fenced = false, home = false;
    Time rests_until{};  // returning: not home before this
  };
  void revoke(LeaseId id);
  void settle(LeaseId id, Lease& lease, Time now);
  void come_home(Lease& lease);

  DataPlane& plane_;
  const Settings& settings_;
  Counters& counters_;
  std::map<LeaseId, Lease> leases_;
  std::map<FenceId, LeaseId> fences_;
  Deadlines<LeaseId> resting_;
  std::vector<UseId> returned_;
  std::uint64_t next_ = 1;
};

}  // namespace kvferry::proto
