// What the core needs from the world, as interfaces that the core declares. The runtime implements
// them with sockets and threads, the simulator with a queue of events. No call blocks; no call
// fails on the spot.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "kvferry/data_plane.h"
#include "kvferry/status.h"
#include "kvferry/types.h"
#include "src/base/random.h"
#include "src/wire/messages.h"

namespace kvferry::proto {

// One use of a room number by this endpoint, never given twice.
enum class UseId : std::uint64_t {};
enum class CallId : std::uint64_t {};
// An event of the producer that must fire before source bytes are read. 0: none.
enum class ReadyId : std::uint64_t {};

// Control messages. May be lost when the peer or the connection dies; never reordered within one
// connection.
class ControlPort {
 public:
  virtual ~ControlPort() = default;
  virtual void send(const Address& to, wire::Frames frames) = 0;
};

struct HttpRequest {
  std::string method;
  Address server;
  std::string path;
  std::string body;
  Duration timeout{};
};
struct HttpResponse {
  int status = 0;  // 0: no answer; `body` then says why
  std::string body;
};
// Exactly one on_http(call, response) follows each call, at the latest after the request's timeout.
class HttpPort {
 public:
  virtual ~HttpPort() = default;
  virtual void call(CallId call, HttpRequest request) = 0;
};

// The endpoint's own memory, for aux rows that travel over the control plane. Addresses are inside
// registered slabs.
class MemoryPort {
 public:
  virtual ~MemoryPort() = default;
  virtual std::string load(std::uint64_t address, std::size_t bytes) = 0;
  virtual void store(std::uint64_t address, const std::string& bytes) = 0;
};

// Why a room failed: the first cause, and whether it came from another rank.
struct Failure {
  Status status;
  bool from_other = false;
};

// What the application may see of a room. Published on every change.
struct RoomView {
  RoomState state = RoomState::kBootstrapping;
  Failure failure;
  std::optional<std::uint64_t> prefix_tokens;  // prefill: known once a room message has come
  bool pages_reusable = false;                 // the room's pages may be given to others
  std::uint64_t bytes = 0;  // prefill: landed; decode: promised by the room's pages
};
// The one rule by which a room's state changes: Failed and Success are final, Failed comes from
// anywhere else, otherwise it only grows. False: the state stays as it is.
inline bool move_to(RoomState& state, RoomState next) {
  if (is_terminal(state)) return false;
  if (next != RoomState::kFailed && next <= state) return false;
  state = next;
  return true;
}

class RoomListener {
 public:
  virtual ~RoomListener() = default;
  virtual void on_room(UseId use, const RoomView& view) = 0;
};

// One line about something that was decided here. The runtime writes a log, the simulator its event
// log.
enum class Severity : std::uint8_t { kDebug, kInfo, kWarning, kError };
class TracePort {
 public:
  virtual ~TracePort() = default;
  virtual void trace(Severity severity, const std::string& line) = 0;
};

struct Ports {
  ControlPort& control;
  HttpPort& http;
  DataPlane& plane;
  MemoryPort& memory;
  RoomListener& rooms;
  TracePort& trace;
  Entropy& entropy;
};

// Counted, never reset. Names as the metrics page prints them.
struct Counters {
  std::uint64_t rooms_opened = 0, rooms_succeeded = 0, rooms_failed = 0, rooms_aborted = 0;
  std::uint64_t bytes_moved = 0, writes_failed = 0;
  std::uint64_t malformed_messages = 0, unexpected_messages = 0, refused_aux = 0;
  std::uint64_t sessions_opened = 0, sessions_ended = 0;
  std::uint64_t reuse_unproven = 0;
};

}  // namespace kvferry::proto
