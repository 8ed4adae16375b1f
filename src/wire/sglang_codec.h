// The reference's ZeroMQ multipart frames: SGLang's Mooncake connector from the seeds' version to
// 0.5.23.
//
// The encoder takes the dialect of the peer's release; a peer of unknown release gets the form that
// all of them read. The decoders read every release's frames. What does not parse is kProtocol with
// the frame and the value; nothing throws.
#pragma once

#include <compare>

#include "kvferry/status.h"
#include "src/wire/messages.h"

namespace kvferry::wire {

// In order of release. kUnknown gets what works with all.
enum class Dialect : std::uint8_t { kUnknown, kSeed, k0516, k0517, k0518, k0520, k0521, k0523 };
// "0.5.21" and the like; kUnknown for anything else.
Dialect dialect_from_release(std::string_view release);

// Messages that go to a prefill rank: Register, Metadata, Abort, StagingGrant, Watermark.
Result<Frames> encode_to_prefill(const Message& message, Dialect peer);
Result<Message> decode_at_prefill(const Frames& frames);

// Messages that go to a decode rank: Done, AuxData, ChunkReady, StagingRequest, AbortAck.
Result<Frames> encode_to_decode(const Message& message, Dialect peer);
Result<Message> decode_at_decode(const Frames& frames);

// pack(lists): u32 count, u32 byte length of each, then the elements; all little-endian. An empty
// list of lists is empty.
std::string pack(const Lists<std::uint32_t>& lists);
std::string pack(const Lists<std::int32_t>& lists);
std::string pack(const Lists<std::uint64_t>& lists);
// Trailing bytes are ignored, as in the reference; lengths that lie are kProtocol.
Result<Lists<std::uint32_t>> unpack_u32(std::string_view bytes);
Result<Lists<std::int32_t>> unpack_i32(std::string_view bytes);
Result<Lists<std::uint64_t>> unpack_u64(std::string_view bytes);

}  // namespace kvferry::wire
