// What every data plane promises, as one suite. A plane joins by giving a factory of two planes
// that can reach each other.
#pragma once

#include <functional>
#include <memory>
#include <ostream>
#include <string>

#include "kvferry/data_plane.h"

namespace kvferry::conformance {

// Two planes and the means to let time pass. `source` writes, `target` lends.
class PlanePair {
 public:
  virtual ~PlanePair() = default;
  virtual DataPlane& source() = 0;
  virtual DataPlane& target() = 0;
  // Waits until something may have happened; returns at the latest after a moment.
  virtual void step() = 0;
  // The target's process is replaced by another one at the same host and port, if the plane has
  // such a thing.
  virtual void replace_target() = 0;
};

struct PlaneCase {
  std::string name;
  std::function<std::unique_ptr<PlanePair>()> make;
  bool shared_source = false;  // the source's memory may be mapped by the target
  friend std::ostream& operator<<(std::ostream& out, const PlaneCase& c) { return out << c.name; }
};

}  // namespace kvferry::conformance
