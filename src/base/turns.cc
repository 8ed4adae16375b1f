#include "src/base/turns.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace kvferry {
namespace {

// The kernel's struct sched_attr in its first version; the C library here has none.
struct Attributes {
  std::uint32_t size = sizeof(Attributes), policy = 0;
  std::uint64_t flags = 0;
  std::int32_t nice = 0;
  std::uint32_t priority = 0;
  std::uint64_t runtime = 0, deadline = 0, period = 0;
};
static_assert(sizeof(Attributes) == 48);

// Only of threads with the ordinary policy, whose other attributes stay as they are. Returns the
// length before; zero: this kernel does not say.
std::uint64_t set_turn(std::uint64_t ns) {
  Attributes attributes;
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) != 0 ||
      attributes.policy != SCHED_OTHER)
    return 0;
  const std::uint64_t before = attributes.runtime;
  attributes.size = sizeof attributes;
  attributes.runtime = ns;
  (void)syscall(SYS_sched_setattr, 0, &attributes, 0);
  return before;
}

}  // namespace

ShortTurns::ShortTurns(std::chrono::nanoseconds turn)
    : before_(set_turn(static_cast<std::uint64_t>(turn.count()))) {}
ShortTurns::~ShortTurns() {
  set_turn(before_);
}

}  // namespace kvferry
