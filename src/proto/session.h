// Names of peers, and how a frame that is addressed to a session goes out. Shared by both managers.
#pragma once

#include <compare>
#include <string>

#include "src/proto/ports.h"
#include "src/wire/native_codec.h"

namespace kvferry::proto {

// One counterpart: a session of a native rank, or the session name of a foreign one.
struct PeerKey {
  Token session;
  std::string name;
  [[nodiscard]] bool is_native() const { return !session.is_zero(); }
  [[nodiscard]] std::string text() const {
    return is_native() ? "session " + session.to_string().substr(0, 8) : name;
  }
  friend auto operator<=>(const PeerKey&, const PeerKey&) = default;
};

inline void send_native(ControlPort& control, const Address& to, const Address& self, Token session,
                        wire::Message message) {
  control.send(to, wire::encode_native({.version = wire::kNativeVersion,
                                        .session = session,
                                        .reply = self,
                                        .message = std::move(message)}));
}

// Whether frames could be read. What could not is counted and dropped.
template <class T>
bool is_readable(const Result<T>& message, Counters& counters, TracePort& trace) {
  if (message.ok()) return true;
  ++counters.malformed_messages;
  trace.trace(Severity::kDebug, message.status().message());
  return false;
}

}  // namespace kvferry::proto
