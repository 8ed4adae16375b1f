// The reference's frames: cut the input at zero bytes into frames; a byte before each says nothing.
#include <cstdint>
#include <cstdlib>

#include "src/wire/sglang_codec.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry::wire;
  Frames frames;
  std::size_t at = 0;
  while (at < size && frames.size() < 24) {
    const std::size_t length = std::min<std::size_t>(data[at], size - at - 1);
    frames.emplace_back(reinterpret_cast<const char*>(data + at + 1), length);
    at += 1 + length;
  }
  if (const auto message = decode_at_prefill(frames); message.ok()) {
    const auto again = encode_to_prefill(*message, Dialect::k0523);
    if (again.ok() && !decode_at_prefill(*again).ok()) std::abort();
  }
  if (const auto message = decode_at_decode(frames); message.ok()) {
    const auto again = encode_to_decode(*message, Dialect::kUnknown);
    if (again.ok() && !decode_at_decode(*again).ok()) std::abort();
  }
  return 0;
}
