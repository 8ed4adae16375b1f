// The bytes of the tcp plane (docs/DATA_PLANES.md, "tcp"). All integers little-endian.
//
//   frame := kind u8, zero u8[3], length u32, write u64, payload[length]
//
//   source -> target: Hello, Begin (authority and plan), Slice (the next bytes in plan order),
//   Cancel target -> source: Done, CancelDone, Refused (of the whole connection)
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kvferry/data_plane.h"

namespace kvferry::data::tcp {

enum class Kind : std::uint8_t {
  kHello = 1,
  kBegin = 2,
  kSlice = 3,
  kCancel = 4,
  kDone = 5,
  kCancelDone = 6,
  kRefused = 7
};

struct Header {
  Kind kind{};
  std::uint32_t length = 0;
  std::uint64_t write = 0;
};
inline constexpr std::size_t kHeaderBytes = 16;
inline constexpr std::uint64_t kMagic = 0x31504354'52464B4BULL;  // version 1

void store_header(char* to, Header header);  // kHeaderBytes
// False: a kind that is not known.
bool parse_header(const char* bytes, Header& header);

// Hello: the target's life as the source knows it; zero when it knows none (peers without
// sessions).
std::string encode_hello(Token life);
Result<Token> decode_hello(std::string_view payload);

struct Begin {
  Authority authority;
  CopyPlan plan;  // decoded: only the target side is there
};
std::string encode_begin(const Authority& authority, const CopyPlan& plan);
Result<Begin> decode_begin(std::string_view payload);

std::string encode_done(const Status& status);
Status decode_done(std::string_view payload);

}  // namespace kvferry::data::tcp
