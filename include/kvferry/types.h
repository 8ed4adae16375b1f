// The words of the domain that need a type of their own.
#pragma once

#include <array>
#include <chrono>
#include <compare>
#include <cstdint>
#include <string>
#include <string_view>

#include "kvferry/export.h"

namespace kvferry {

// Monotonic time. The core never reads a clock: every input carries `Time now`.
using Duration = std::chrono::nanoseconds;
using Time = std::chrono::time_point<std::chrono::steady_clock, Duration>;

// One request's transfer: an unsigned 63-bit number chosen by the router, unique while in use.
enum class RoomId : std::uint64_t {};
inline constexpr std::uint64_t kRoomMax = (std::uint64_t{1} << 63) - 1;
constexpr std::uint64_t value_of(RoomId room) {
  return static_cast<std::uint64_t>(room);
}

// Index of a page in a pool. Signed on the wire (int32); never negative in a valid list.
using PageIndex = std::int32_t;

// 128 random bits that name a session, a life or a grant.
struct Token {
  std::uint64_t high = 0, low = 0;
  [[nodiscard]] bool is_zero() const { return high == 0 && low == 0; }
  [[nodiscard]] KVF_API std::string to_string() const;  // 32 hex digits
  friend auto operator<=>(const Token&, const Token&) = default;
};
// Inverse of Token::to_string(); the zero token for anything that is not 32 hex digits.
KVF_API Token token_from_string(std::string_view text);

// Where a room stands. The numbers are the reference's, also on the wire.
enum class RoomState : std::uint8_t {
  kFailed = 0,
  kBootstrapping = 1,
  kWaitingForInput = 2,
  kTransferring = 3,
  kSuccess = 4,
};
KVF_API std::string_view to_string(RoomState state);
constexpr bool is_terminal(RoomState s) {
  return s == RoomState::kFailed || s == RoomState::kSuccess;
}

// Host and port. IPv6 hosts carry no brackets; host_port() adds them.
struct Address {
  std::string host;
  std::uint16_t port = 0;
  [[nodiscard]] KVF_API std::string host_port() const;
  friend auto operator<=>(const Address&, const Address&) = default;
};

// The place of one rank in its instance. Sizes are at least 1, ranks are below their size.
struct RankPlace {
  std::uint32_t tp_rank = 0, tp_size = 1;
  std::uint32_t pp_rank = 0, pp_size = 1;
  std::uint32_t cp_rank = 0, cp_size = 1;
  std::uint32_t dp_rank = 0, dp_size = 1;
  friend auto operator<=>(const RankPlace&, const RankPlace&) = default;
  // The number by which status messages name a prefill rank.
  [[nodiscard]] constexpr std::uint32_t unique_rank() const {
    return tp_rank * (pp_size * cp_size) + pp_rank * cp_size + cp_rank;
  }
};

}  // namespace kvferry
