// The bootstrap server of a prefill instance: an HTTP registry of its ranks (docs/PROTOCOL.md,
// "bootstrap").
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "kvferry/config.h"
#include "kvferry/export.h"
#include "kvferry/status.h"

namespace kvferry {

class KVF_API BootstrapServer {
 public:
  // Listens on host:port; port 0 takes any free one. kUnavailable names the address when it cannot.
  static Result<std::unique_ptr<BootstrapServer>> create(const std::string& host,
                                                         std::uint16_t port,
                                                         const Settings& settings);
  // Closes every connection and joins its thread.
  ~BootstrapServer();
  BootstrapServer(const BootstrapServer&) = delete;
  BootstrapServer& operator=(const BootstrapServer&) = delete;

  // The port that it really listens on.
  [[nodiscard]] std::uint16_t port() const;

 private:
  struct Impl;
  explicit BootstrapServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvferry
