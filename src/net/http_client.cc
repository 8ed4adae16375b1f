#include "src/net/http_client.h"

#include <future>
#include <thread>

#include <boost/asio/connect.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>

namespace kvferry::net {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using tcp = asio::ip::tcp;

constexpr std::size_t kAnswerBytesMax = 256U << 20;  // layouts of large instances

// One call: resolve, connect, write, read. Keeps itself alive until it has answered.
class Call : public std::enable_shared_from_this<Call> {
 public:
  Call(asio::io_context& io, proto::HttpRequest request,
       std::function<void(proto::HttpResponse)> done)
      : resolver_(io),
        stream_(io),
        timer_(io),
        request_(std::move(request)),
        done_(std::move(done)) {}

  void start() {
    http::verb verb = http::string_to_verb(request_.method);
    message_ = {verb, request_.path, 11};
    message_.set(http::field::host, request_.server.host_port());
    message_.set(http::field::connection, "close");
    message_.set(http::field::content_type, "application/json");
    message_.body() = request_.body;
    message_.prepare_payload();
    parser_.body_limit(kAnswerBytesMax);
    timer_.expires_after(request_.timeout);
    timer_.async_wait([self = shared_from_this()](beast::error_code error) {
      if (!error) self->finish({0, "timed out"});
    });
    resolver_.async_resolve(
        request_.server.host, std::to_string(request_.server.port),
        [self = shared_from_this()](beast::error_code error,
                                    const tcp::resolver::results_type& found) {
          if (error) return self->finish({0, error.message()});
          self->stream_.async_connect(found, [self](beast::error_code e, const tcp::endpoint&) {
            if (e) return self->finish({0, e.message()});
            http::async_write(
                self->stream_, self->message_, [self](beast::error_code written, std::size_t) {
                  if (written) return self->finish({0, written.message()});
                  http::async_read(
                      self->stream_, self->buffer_, self->parser_,
                      [self](beast::error_code read, std::size_t) {
                        if (read) return self->finish({0, read.message()});
                        self->finish({static_cast<int>(self->parser_.get().result_int()),
                                      std::move(self->parser_.get().body())});
                      });
                });
          });
        });
  }

 private:
  void finish(proto::HttpResponse response) {
    if (!done_) return;
    const auto done = std::exchange(done_, nullptr);
    timer_.cancel();
    resolver_.cancel();
    beast::error_code ignored;
    stream_.socket().close(ignored);
    done(std::move(response));
  }

  tcp::resolver resolver_;
  beast::tcp_stream stream_;
  asio::steady_timer timer_;
  proto::HttpRequest request_;
  std::function<void(proto::HttpResponse)> done_;
  http::request<http::string_body> message_;
  beast::flat_buffer buffer_;
  http::response_parser<http::string_body> parser_;
};

}  // namespace

struct HttpClient::Impl {
  asio::io_context io{1};
  asio::executor_work_guard<asio::io_context::executor_type> work{io.get_executor()};
  std::thread thread{[this] { io.run(); }};
};

HttpClient::HttpClient() : impl_(std::make_unique<Impl>()) {}

HttpClient::~HttpClient() {
  impl_->io.stop();
  impl_->thread.join();
}

void HttpClient::call(proto::HttpRequest request, std::function<void(proto::HttpResponse)> done) {
  asio::post(impl_->io, [this, request = std::move(request), done = std::move(done)]() mutable {
    std::make_shared<Call>(impl_->io, std::move(request), std::move(done))->start();
  });
}

proto::HttpResponse HttpClient::call_and_wait(proto::HttpRequest request) {
  auto promise = std::make_shared<std::promise<proto::HttpResponse>>();
  auto answer = promise->get_future();
  call(std::move(request),
       [promise](proto::HttpResponse response) { promise->set_value(std::move(response)); });
  return answer.get();
}

}  // namespace kvferry::net
