// HTTP calls to bootstrap servers, asynchronous, on a thread of its own. A slow server holds up
// nobody else.
#pragma once

#include <functional>
#include <memory>

#include "src/proto/ports.h"

namespace kvferry::net {

class HttpClient {
 public:
  HttpClient();
  // Calls that are under way never answer.
  ~HttpClient();
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;

  // `done` is called once, on the client's thread, at the latest after the request's timeout.
  void call(proto::HttpRequest request, std::function<void(proto::HttpResponse)> done);
  // The same, waiting. For tools and tests.
  proto::HttpResponse call_and_wait(proto::HttpRequest request);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvferry::net
