// What both processes of `kvferry bench rooms` share: the geometry, and a bare ZeroMQ ping-pong,
// which is what any control plane over ZeroMQ pays at least.
#pragma once

#include <cstdint>
#include <string>

#include <nlohmann/json.hpp>

#include "kvferry/endpoint.h"

namespace kvferry::cli {

// Four layers of one KV head: a page of 16 tokens is 32 KiB in 8 pieces.
inline constexpr std::uint32_t kRoomLayers = 4, kRoomPages = 8192, kRoomAuxRows = 64;
Layout room_layout(std::uint8_t*& memory);
// Options that both ranks share.
void fill_options(EndpointOptions& options, const Layout& layout);

// One side of the ping-pong. The first message goes from `begin` side to the other.
class PingPong {
 public:
  PingPong();
  ~PingPong();
  PingPong(const PingPong&) = delete;
  PingPong& operator=(const PingPong&) = delete;
  [[nodiscard]] int port() const { return port_; }
  void connect(int port);
  void ping();
  // Waits for a message of the other side.
  void await();

 private:
  void *context_ = nullptr, *pull_ = nullptr, *push_ = nullptr;
  int port_ = 0;
};

// The prefill rank: answers the lines of the other process until they end.
int run_rooms_target(const nlohmann::json& config);

}  // namespace kvferry::cli
