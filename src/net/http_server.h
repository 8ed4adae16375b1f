// An event-driven HTTP/1.1 server on one thread: thousands of idle keep-alive connections cost no
// thread.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "kvferry/config.h"
#include "kvferry/status.h"
#include "kvferry/types.h"

namespace kvferry::net {

struct ServerRequest {
  std::string method, target, body;
  bool too_large = false;      // the body was above the limit and was not read
  std::size_t body_bytes = 0;  // as announced, when too large
};
struct ServerResponse {
  int status = 200;
  std::string content_type, body, allow;
};

class HttpServer {
 public:
  // Called on the server's thread. `reply` is to be called once, on that thread, now or later.
  using Reply = std::function<void(ServerResponse)>;
  using Handler = std::function<void(ServerRequest, Reply)>;

  struct Options {
    std::string host = "127.0.0.1";
    std::uint16_t port = 0;  // 0: any free one
    std::size_t body_bytes_max = 1 << 20;
    std::size_t connections_max = 16384;
  };
  // Listens; serves from start() on. kUnavailable, naming the address, when it cannot listen there.
  static Result<std::unique_ptr<HttpServer>> create(const Options& options, Handler handler);
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  void start();
  [[nodiscard]] std::uint16_t port() const;
  // For use inside the handler: which of the addresses accept a connection within `timeout`.
  void probe(std::vector<Address> addresses, Duration timeout,
             std::function<void(std::vector<Address>)> done);

 private:
  struct Impl;
  explicit HttpServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvferry::net
