// Pairs of whole instances that somebody could run: any cut, any page size, any order of axes, with
// real memory on every rank; and three judges of a plan between them that know nothing of each
// other.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "src/base/random.h"
#include "src/plan/instance_plan.h"
#include "src/plan/proof.h"

namespace kvferry::topologies {

// A number of [low, high].
using Choose = std::function<std::uint64_t(std::uint64_t low, std::uint64_t high)>;

struct Rank {
  plan::PlannedRank planned;
  plan::RequestItems items;
  std::vector<std::uint8_t> memory;  // every pool of the layout lies in it
};

struct World {
  plan::InstanceRules rules;
  std::vector<Rank> sources, targets;
  std::string text;  // what a person needs to know of it

  [[nodiscard]] Result<std::vector<plan::Delivery>> plan() const;
  [[nodiscard]] plan::Proof prove(const std::vector<plan::Delivery>& deliveries) const;
  // Does what the plan says with a map of what every byte means. Empty: each byte that a target
  // waits for came once, and none else.
  [[nodiscard]] std::string follow(const std::vector<plan::Delivery>& deliveries) const;
  // Fills the memory of the sources, lends the request's items and moves the bytes through the
  // loopback plane. Empty: all is as it should be. `right`: every byte has come, and else only
  // bytes of lent items may have changed.
  [[nodiscard]] std::string copy(const std::vector<plan::Delivery>& deliveries, bool right);

 private:
  // Whether a byte of the request must come. Draft layers that only one side has need not.
  [[nodiscard]] bool waited_for(std::uint64_t meaning, std::uint64_t token, bool came) const;
};

// Sizes and shapes come from `choose`, what does not need to be small to be understood from
// `random`.
World make_world(const Choose& choose, Random& random);

// Gives the deliveries one defect, such as a planner could have.
void spoil(Random& random, std::vector<plan::Delivery>& deliveries);

}  // namespace kvferry::topologies
