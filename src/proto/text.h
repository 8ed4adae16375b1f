// What both managers say alike: words of their messages, and the checks before a room is opened.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include <fmt/format.h>

#include "kvferry/status.h"
#include "kvferry/types.h"
#include "src/base/deadlines.h"

namespace kvferry::proto {

inline std::string room_text(RoomId room) {
  return fmt::format("room {}", value_of(room));
}
inline std::int64_t seconds(Duration d) {
  return std::chrono::duration_cast<std::chrono::seconds>(d).count();
}
inline std::int64_t milliseconds(Duration d) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(d).count();
}

// What must hold before either side opens a room.
struct OpenQuestion {
  RoomId room{};
  const char* side = "";
  bool stopping = false, is_open = false;
  std::size_t open_rooms = 0;
  std::uint64_t rooms_max = 0;
};
inline Status may_open(const OpenQuestion& q) {
  if (q.stopping) return Status(Code::kAborted, room_text(q.room) + ": this endpoint is stopping");
  if (value_of(q.room) > kRoomMax)
    return Status(Code::kInvalidArgument, fmt::format("room {} is above 2^63-1", value_of(q.room)));
  if (q.is_open)
    return Status(Code::kAlreadyExists,
                  fmt::format("{} is open on this {} rank", room_text(q.room), q.side));
  if (q.open_rooms >= q.rooms_max)
    return Status(Code::kExhausted, fmt::format("{}: {} rooms are open (rooms_max)",
                                                room_text(q.room), q.open_rooms));
  return {};
}

}  // namespace kvferry::proto
