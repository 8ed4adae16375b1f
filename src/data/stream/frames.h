// The bytes of the tcp and shm planes (docs/DATA_PLANES.md, "Streams"). All integers little-endian.
//
//   frame := kind u32, length u32, write u64, payload[length]
//
//   source -> target: Hello, Begin (authority and plan), Slice (the next bytes in plan order), Pull
//   (Begin of a write that the target copies out of shared memory by itself), Cancel
//   target -> source: Done, CancelDone, Credit (bytes of the ring that are free again), Refused (of
//   the whole connection)
//   either: Switch (the last frame in the socket: what follows goes through the pipe)
//
// Where Hello offers a ring, the payload of a Slice is not in the stream but the next `length`
// bytes of the ring. Where it offers a pipe, a target that takes it says Switch at once, and the
// source says Switch when it hears that. Whatever comes through the socket after Switch is a bell:
// look into the pipe.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kvferry/data_plane.h"

namespace kvferry::data::stream {

enum class Kind : std::uint8_t {
  kHello = 1,
  kBegin = 2,
  kSlice = 3,
  kCancel = 4,
  kDone = 5,
  kCancelDone = 6,
  kRefused = 7,
  kPull = 8,
  kCredit = 9,
  kSwitch = 10
};
// Whether a source, or a target, says it.
bool may_come_from(bool source, Kind kind);

struct Header {
  Kind kind{};
  std::uint32_t length = 0;
  std::uint64_t write = 0;
};
inline constexpr std::size_t kHeaderBytes = 16;
// What one Hello may offer.
inline constexpr std::size_t kRegionsMax = 64, kDescriptorsMax = kRegionsMax + 3;
inline constexpr std::uint64_t kRingBytesMax = 64ULL << 20, kPipeBytesMax = 16ULL << 20,
                               kEpochSlotsMax = 65536;
inline constexpr std::uint64_t kMagic = 0x32504354'52464B4BULL;  // version 2

void store_header(char* to, Header header);  // kHeaderBytes
// False: a kind that is not known.
bool parse_header(const char* bytes, Header& header);

// Part of the source's memory that the target may map.
struct SharedRegion {
  std::uint64_t base = 0, bytes = 0;  // as the source addresses it
  friend bool operator==(const SharedRegion&, const SharedRegion&) = default;
};
// The first frame. The descriptors of what it offers come with it: ring, pipe, epochs, regions, in
// this order, each where its size is not 0.
struct Hello {
  Token life;  // the target's, as the source knows it; zero when it knows none
  std::uint64_t ring_bytes = 0;
  std::uint64_t pipe_bytes = 0;  // each way
  std::uint64_t epoch_slots = 0;
  std::vector<SharedRegion> regions;
  friend bool operator==(const Hello&, const Hello&) = default;
};
std::string encode_hello(const Hello& hello);
Result<Hello> decode_hello(std::string_view payload);

struct Begin {
  Authority authority;
  CopyPlan plan;  // decoded from Begin: only the target side is there
  // Pull only. The write counts while the slot holds this value.
  std::uint64_t flow = 0, epoch = 0;
  std::uint32_t epoch_slot = 0;
};
std::string encode_begin(const Authority& authority, const CopyPlan& plan);
Result<Begin> decode_begin(std::string_view payload);
std::string encode_pull(const Begin& begin);
Result<Begin> decode_pull(std::string_view payload);

std::string encode_done(const Status& status);
Status decode_done(std::string_view payload);

}  // namespace kvferry::data::stream
