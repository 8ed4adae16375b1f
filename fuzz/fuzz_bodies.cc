// The bootstrap server's requests: first byte chooses the call, the rest is the body.
#include <cstdint>
#include <string_view>

#include "src/proto/directory.h"
#include "src/wire/bodies.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry;
  if (size == 0) return 0;
  const std::string_view body(reinterpret_cast<const char*>(data + 1), size - 1);
  static const Settings settings;
  Random random(1);
  proto::Directory directory(settings, random);
  switch (data[0] % 6) {
    case 0:
      (void)directory.handle("PUT", "/route", body, Time{});
      break;
    case 1:
      (void)directory.handle("POST", "/register_dp_rank", body, Time{});
      break;
    case 2:
      (void)directory.handle("POST", "/query_dp_ranks", body, Time{});
      break;
    case 3:
      (void)directory.handle("GET", "/route?" + std::string(body), "", Time{});
      break;
    case 4:
      (void)wire::parse_topology(body);
      break;
    case 5:
      (void)wire::parse_instance(body);
      break;
  }
  return 0;
}
