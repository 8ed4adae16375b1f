// Data plane over TCP: the stream engine with its payload inline (src/data/stream/engine.h).
#pragma once

#include <memory>
#include <string>

#include "src/data/stream/stream_plane.h"

namespace kvferry::data {

struct TcpPlaneOptions {
  std::string listen_host = "127.0.0.1";
  std::uint16_t listen_port = 0;  // 0: any free one
  std::string public_host;        // what peers connect to; listen_host if empty
};

// kUnavailable with the address when it cannot listen there.
Result<std::unique_ptr<StreamPlane>> create_tcp_plane(const TcpPlaneOptions& options,
                                                      const Settings& settings, Entropy& entropy);

}  // namespace kvferry::data
