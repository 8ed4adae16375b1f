// Whole instance pairs: the planner's copies, the proof's verdict, a map of every byte and real
// copies agree.
#include <algorithm>
#include <cstdlib>
#include <string>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include "tests/topologies/world.h"

namespace kvferry::topologies {
namespace {

int cases() {
  const char* text = std::getenv("KVFERRY_PLAN_CASES");
  return text != nullptr ? std::max(1, std::atoi(text)) : 5000;
}

// What the cases were, so that the property is not one of easy worlds only.
struct Seen {
  int worlds = 0, odd_sizes = 0, odd_pages = 0, caught = 0, harmless = 0;
};

void check_world(World& world, Random& random, Seen& seen) {
  const auto says = [&](const std::string& text) { return text + "\n" + world.text; };
  auto deliveries = world.plan();
  if (!deliveries.ok()) RC_FAIL(says(deliveries.status().to_string()));
  plan::Proof proof = world.prove(*deliveries);
  if (!proof.proved) RC_FAIL(says("not proved: " + proof.problems.front()));
  if (const auto wrong = world.follow(*deliveries); !wrong.empty()) RC_FAIL(says(wrong));
  if (const auto wrong = world.copy(*deliveries, true); !wrong.empty()) RC_FAIL(says(wrong));
  RC_ASSERT(proof.promised_bytes == proof.written_bytes);
  const auto p = world.sources.front().planned, d = world.targets.front().planned;
  ++seen.worlds;
  seen.odd_sizes +=
      std::max(p.place.tp_size, d.place.tp_size) % std::min(p.place.tp_size, d.place.tp_size) != 0
          ? 1
          : 0;
  seen.odd_pages += p.layout.page_tokens != d.layout.page_tokens ? 1 : 0;
  if (deliveries->empty()) return;
  // The proof must not be one that says yes to everything.
  spoil(random, *deliveries);
  const std::string wrong = world.follow(*deliveries);
  proof = world.prove(*deliveries);
  if (proof.proved != wrong.empty())
    RC_FAIL(says(fmt::format("spoilt; the proof says '{}', the map '{}'",
                             proof.problems.empty() ? "" : proof.problems.front(), wrong)));
  if (const auto harm = world.copy(*deliveries, false); !harm.empty()) RC_FAIL(says(harm));
  (wrong.empty() ? seen.harmless : seen.caught) += 1;
}

TEST(Topologies, PlanProofMapAndCopiesAgreeAndDefectsAreFound) {
  ::setenv("RC_PARAMS",
           fmt::format("seed=20261207 max_success={} verbose_progress=0", cases()).c_str(),
           0);  // whoever looks for a failure may set another
  Seen seen;
  const bool held = rc::check("worlds", [&] {
    const Choose choose = [](std::uint64_t low, std::uint64_t high) {
      return *rc::gen::resize(rc::kNominalSize, rc::gen::inRange(low, high + 1));
    };
    Random random(*rc::gen::arbitrary<std::uint64_t>());
    World world = make_world(choose, random);
    check_world(world, random, seen);
  });
  ASSERT_TRUE(held);
  EXPECT_GT(seen.odd_sizes, seen.worlds / 10)
      << "sizes that do not divide each other are hardly tested";
  EXPECT_GT(seen.odd_pages, seen.worlds / 10) << "pages of other sizes are hardly tested";
  EXPECT_GT(seen.caught, seen.worlds * 7 / 10) << seen.harmless << " defects changed nothing";
}

}  // namespace
}  // namespace kvferry::topologies
