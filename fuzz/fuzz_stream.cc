// The frames of the stream planes, and the check of a plan against a grant: whatever passes the
// check lies inside lent items.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "src/data/grant_table.h"
#include "src/data/plan_cursor.h"
#include "src/data/stream/frames.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  (void)data::stream::decode_hello(bytes);
  (void)data::stream::decode_done(bytes);
  (void)data::stream::decode_pull(bytes);
  const auto begin = data::stream::decode_begin(bytes);
  if (!begin.ok()) return 0;
  data::GrantTable table;
  const auto slabs =
      std::make_shared<const std::vector<GrantSlab>>(std::vector<GrantSlab>{{0x1000, 64, 48, 16}});
  (void)table.add({GrantId{1},
                   begin->authority.token.is_zero() ? Token{1, 1} : begin->authority.token,
                   begin->authority.foreign,
                   {GrantGroup{slabs, {1, 2, 5}}}});
  if (!table.check(begin->authority, begin->plan).ok()) return 0;
  data::PlanCursor cursor(begin->plan);
  cursor.advance(1 << 16, [](std::uint64_t, std::uint64_t target, std::uint64_t bytes) {
    for (std::uint64_t at = target; at < target + bytes; ++at) {
      const std::uint64_t item = (at - 0x1000) / 64, inside = (at - 0x1000) % 64;
      if (at < 0x1000 || (item != 1 && item != 2 && item != 5) || inside >= 48) std::abort();
    }
  });
  return 0;
}
