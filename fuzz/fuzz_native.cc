// The native codec: whatever decodes must encode to the same bytes, or be of another version.
#include <cstdint>
#include <cstdlib>

#include "src/wire/native_codec.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const kvferry::wire::Frames frames{"KVFN" +
                                     std::string(reinterpret_cast<const char*>(data), size)};
  const auto frame = kvferry::wire::decode_native(frames);
  if (frame.ok()) {
    (void)kvferry::wire::dump(*frame);
    if (frame->version == kvferry::wire::kNativeVersion &&
        kvferry::wire::encode_native(*frame) != frames)
      std::abort();
  }
  return 0;
}
