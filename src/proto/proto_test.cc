#include <gtest/gtest.h>

#include <map>

#include "src/proto/directory.h"
#include "src/proto/lease.h"

namespace kvferry::proto {
namespace {

Time at(int ms) {
  return Time(std::chrono::milliseconds(ms));
}

// A plane that only remembers; `bound` makes it one-sided.
class RecordingPlane final : public DataPlane {
 public:
  explicit RecordingPlane(Duration bound) : bound_(bound) {}
  std::map<GrantId, GrantSpec> grants;
  std::vector<FenceId> fences;

  [[nodiscard]] PlaneAddress address() const override { return "recording"; }
  Result<RegionId> register_memory(std::span<const Region>) override { return RegionId{1}; }
  Status deregister_memory(RegionId) override { return {}; }
  Status grant(GrantSpec spec) override {
    grants[spec.id] = spec;
    return {};
  }
  void revoke(GrantId grant, FenceId fence) override {
    grants.erase(grant);
    fences.push_back(fence);
  }
  void write(WriteSpec) override {}
  void cancel(WriteId) override {}
  void forget(const PlaneAddress&, FenceId) override {}
  std::size_t poll(std::vector<Completion>&) override { return 0; }
  [[nodiscard]] int ready_fd() const override { return -1; }
  [[nodiscard]] Duration orphan_write_bound() const override { return bound_; }
  [[nodiscard]] PlaneCounters counters() const override { return {}; }

 private:
  Duration bound_;
};

class Leases : public testing::Test {
 protected:
  LeaseId lend(LeaseBook& book, bool foreign) {
    return *book.lend(UseId{7}, foreign ? Token{} : Token{1, 2}, foreign, {});
  }
  Settings settings_;
  Counters counters_;
};

TEST_F(Leases, ASourceThatSaidItIsQuietBringsItsPagesHomeAtOnce) {
  RecordingPlane plane(Duration::zero());
  LeaseBook book(plane, settings_, counters_);
  const LeaseId lease = lend(book, false);
  EXPECT_FALSE(book.is_home(lease));
  book.said_quiet(lease);
  EXPECT_TRUE(book.is_home(lease));
  EXPECT_TRUE(plane.grants.empty()) << "the grant is taken out of the plane";
}

TEST_F(Leases, PagesOfAGivenUpRoomComeHomeWithTheFenceAndNotBefore) {
  RecordingPlane plane(Duration::zero());
  LeaseBook book(plane, settings_, counters_);
  const LeaseId lease = lend(book, false);
  book.take_back(lease, at(0), at(0));
  EXPECT_FALSE(book.is_home(lease));
  EXPECT_TRUE(book.on_fence(plane.fences[0], at(1)));
  EXPECT_TRUE(book.is_home(lease));
  EXPECT_EQ(book.take_returned(), std::vector<UseId>{UseId{7}});
}

TEST_F(Leases, AOneSidedPlaneWaitsForThePermissionAndTheOrphansToo) {
  RecordingPlane plane(std::chrono::milliseconds(500));
  LeaseBook book(plane, settings_, counters_);
  const LeaseId lease = lend(book, false);
  book.take_back(lease, at(0), at(2000));  // the writer may believe until then that it may write
  book.on_fence(plane.fences[0], at(1));
  EXPECT_FALSE(book.is_home(lease));
  EXPECT_EQ(book.next_deadline(), at(2500));
  book.advance(at(2499));
  EXPECT_FALSE(book.is_home(lease));
  book.advance(at(2500));
  EXPECT_TRUE(book.is_home(lease));
}

TEST_F(Leases, PagesOfAForeignWriterRestForTheHoldTimeUnlessItsAnswerIsDrained) {
  RecordingPlane plane(Duration::zero());
  LeaseBook book(plane, settings_, counters_);
  const LeaseId silent = lend(book, true), drained = lend(book, true);
  book.take_back(silent, at(0), at(0));
  book.take_back(drained, at(0), at(0));
  for (const FenceId fence : plane.fences) book.on_fence(fence, at(1));
  EXPECT_EQ(book.quarantined(), 2U);
  book.said_quiet(drained);
  EXPECT_TRUE(book.is_home(drained));
  EXPECT_FALSE(book.is_home(silent));
  book.advance(Time(settings_.hold_time));
  EXPECT_TRUE(book.is_home(silent));
  EXPECT_EQ(counters_.reuse_unproven, 1U);
}

class Registry : public testing::Test {
 protected:
  Registry() : random_(1), directory_(settings_, random_) {}
  static std::string rank(std::uint32_t tp_rank, std::uint32_t tp_size, std::uint16_t port,
                          const std::function<void(wire::RankRegistration&)>& change = {}) {
    wire::RankRegistration r;
    r.place.tp_rank = tp_rank;
    r.place.tp_size = tp_size;
    r.address = {"10.0.0.1", port};
    r.page_size = 16;
    r.kv_cache_dtype = "auto";
    if (change) change(r);
    return wire::to_json(r);
  }
  // A registration; `alive` says which old ranks answer when the registry wants to know.
  DirectoryResponse put(const std::string& body, bool alive = true) {
    auto answer = directory_.handle("PUT", "/route", body, at(0));
    if (const auto* probe = std::get_if<DirectoryProbe>(&answer)) {
      return directory_.finish(probe->ticket, alive ? probe->addresses : std::vector<Address>{},
                               at(0));
    }
    return std::get<DirectoryResponse>(answer);
  }
  DirectoryResponse get(const std::string& target, Time now = at(0)) {
    return std::get<DirectoryResponse>(directory_.handle("GET", target, "", now));
  }
  static constexpr const char* kTopology =
      "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1";

  Settings settings_;
  Random random_;
  Directory directory_;
};

TEST_F(Registry, DistinctRanksAreCounted) {
  for (int i = 0; i < 4; ++i) EXPECT_EQ(put(rank(0, 2, 5000)).status, 200);
  EXPECT_EQ(get(kTopology).status, 503);
  EXPECT_EQ(put(rank(1, 2, 5001)).status, 200);
  EXPECT_EQ(get(kTopology).status, 200);
}

TEST_F(Registry, AConflictIsRefusedWithBothValuesWhileTheOldInstanceLives) {
  put(rank(0, 2, 5000));
  const auto sizes = put(rank(0, 4, 6000));
  EXPECT_EQ(sizes.status, 409);
  EXPECT_NE(sizes.body.find("attn_tp_size: registered 2, this rank says 4"), std::string::npos)
      << sizes.body;
  const auto page = put(rank(1, 2, 6000, [](auto& r) { r.page_size = 64; }));
  EXPECT_EQ(page.status, 409);
  const auto layout = put(rank(1, 2, 6000, [](auto& r) { r.kv_layout = "other"; }));
  EXPECT_EQ(layout.status, 400);
  EXPECT_NE(layout.body.find("kv_layout: registered null, this rank says other"), std::string::npos)
      << layout.body;
  EXPECT_EQ(directory_.registered_ranks(), 1U);
}

TEST_F(Registry, ANewInstanceTakesOverWhenNoOldRankAnswers) {
  put(rank(0, 2, 5000));
  put(rank(1, 2, 5001));
  EXPECT_EQ(put(rank(0, 1, 6000), /*alive=*/false).status, 200);
  EXPECT_EQ(directory_.registered_ranks(), 1U);
  EXPECT_NE(get(kTopology).body.find("\"attn_tp_size\":1"), std::string::npos);
  EXPECT_NE(get("/metrics").body.find("kvferry_bootstrap_tables_replaced_total 1\n"),
            std::string::npos);
}

TEST_F(Registry, AWildcardAddressIsNeverPublished) {
  for (const char* host : {"0.0.0.0", "::", "[::]"})
    EXPECT_EQ(put(rank(0, 1, 5000, [&](auto& r) { r.address.host = host; })).status, 400) << host;
}

TEST_F(Registry, DpRanksExpireAndAreBounded) {
  settings_.dp_rank_entries_max = 2;
  const auto post = [&](int room, Time now) {
    return std::get<DirectoryResponse>(
               directory_.handle(
                   "POST", "/register_dp_rank",
                   "{\"bootstrap_room\": " + std::to_string(room) + ", \"dp_rank\": 1}", now))
        .status;
  };
  EXPECT_EQ(post(1, at(0)), 200);
  EXPECT_EQ(post(2, at(0)), 200);
  EXPECT_EQ(post(3, at(0)), 503);
  EXPECT_EQ(post(1, at(1)), 200) << "a known room is renewed";
  const Time later = at(0) + settings_.dp_rank_expiry;
  EXPECT_EQ(post(3, later), 200);
  EXPECT_EQ(directory_.dp_rank_entries(), 2U) << "room 2 has expired, room 1 was renewed";
}

TEST_F(Registry, TheInstanceTellsNativeRanksFromForeignOnes) {
  put(rank(0, 2, 5000, [](auto& r) {
    r.native = wire::NativeRank{.life = {1, 2},
                                .version_min = 1,
                                .version_max = 1,
                                .capabilities = {"tcp"},
                                .plane = "tcp/x",
                                .layout = {}};
  }));
  put(rank(1, 2, 5001));
  const auto instance = wire::parse_instance(get("/kvferry/v1/instance").body);
  ASSERT_TRUE(instance.ok()) << instance.status().to_string();
  ASSERT_EQ(instance->ranks.size(), 1U);
  ASSERT_EQ(instance->foreign.size(), 1U);
  EXPECT_EQ(instance->ranks[0].native.life, (Token{1, 2}));
  EXPECT_EQ(instance->foreign[0].address.port, 5001);
}

}  // namespace
}  // namespace kvferry::proto
