// How two planes of one kind reach each other. What comes after is the engine's.
#pragma once

#include <sys/socket.h>

#include <string>

#include "kvferry/data_plane.h"

namespace kvferry::data {

struct Dialed {
  int fd = -1;  // non-blocking, perhaps not connected yet; the caller's
  Token life;   // that the peer must be in; zero: not known
  std::string text;
};

class Links {
 public:
  virtual ~Links() = default;
  // Non-blocking, listening; stays the links' own.
  [[nodiscard]] virtual int listener() const = 0;
  virtual Result<Dialed> dial(const PlaneAddress& peer) = 0;
  // Tunes a connection that was accepted; says who it is, for messages.
  virtual std::string welcome(int fd, const sockaddr_storage& from, socklen_t size) = 0;
  // Whether both ends can share memory.
  [[nodiscard]] virtual bool one_host() const = 0;
};

}  // namespace kvferry::data
