// The native codec: one frame a message. Header: magic "KVFN", version u16, kind u8, session (16
// bytes), reply address.
//
// Compatibility: fields are only appended. A decoder skips trailing bytes of a newer version and
// leaves trailing fields that an older version lacks at their defaults; anything else is kProtocol.
#pragma once

#include "kvferry/status.h"
#include "src/wire/messages.h"

namespace kvferry::wire {

inline constexpr std::uint16_t kNativeVersion = 3;

struct NativeFrame {
  std::uint16_t version = kNativeVersion;
  Token session;
  Address reply;  // control socket of the sender of this message
  Message message;
  friend bool operator==(const NativeFrame&, const NativeFrame&) = default;
};

Frames encode_native(const NativeFrame& frame);
Result<NativeFrame> decode_native(const Frames& frames);
// Whether the frames claim to be native (the magic is there); the reference never sends such a
// first frame.
bool is_native(const Frames& frames);

// A human-readable line: kind, session and every field.
std::string dump(const NativeFrame& frame);

}  // namespace kvferry::wire
