#include "src/net/http_server.h"

#include <thread>
#include <vector>

#include <fmt/format.h>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>

#include "src/base/parse.h"

namespace kvferry::net {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using tcp = asio::ip::tcp;

constexpr std::uint32_t kHeaderBytesMax = 64 << 10;
constexpr auto kBodyTimeout =
    std::chrono::seconds(30);  // a request that has begun must end; an idle connection may stay
constexpr std::size_t kDrainBytesMax =
    8 << 20;  // of a body that is refused, read so that the answer arrives

}  // namespace

struct HttpServer::Impl {
  Impl(const Options& o, Handler h) : options(o), handler(std::move(h)), acceptor(io), retry(io) {}
  Options options;
  Handler handler;
  std::size_t connections = 0;  // outlives io, whose handlers hold the connections
  asio::io_context io{1};
  tcp::acceptor acceptor;
  asio::steady_timer retry;
  std::thread thread;

  void accept();
};

namespace {

// One connection. Keeps itself alive while an operation is under way.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(tcp::socket socket, const HttpServer::Options& options,
             const HttpServer::Handler& handler, std::size_t& count)
      : stream_(std::move(socket)), options_(options), handler_(handler), count_(count) {
    ++count_;
    beast::error_code ignored;
    stream_.socket().set_option(tcp::no_delay(true), ignored);
  }
  ~Connection() { --count_; }

  void read() {
    parser_.emplace();
    parser_->header_limit(kHeaderBytesMax);
    parser_->body_limit(kDrainBytesMax);
    http::async_read_header(stream_, buffer_, *parser_,
                            [self = shared_from_this()](beast::error_code error, std::size_t) {
                              if (error) return;  // closed by the peer, or no HTTP
                              const auto length = self->parser_->content_length();
                              if (length && *length > self->options_.body_bytes_max) {
                                self->too_large_ = true;
                                self->announced_ = *length;
                                if (*length > kDrainBytesMax) return self->handle();
                              }
                              self->read_body();
                            });
  }

 private:
  void read_body() {
    stream_.expires_after(kBodyTimeout);
    http::async_read(stream_, buffer_, *parser_,
                     [self = shared_from_this()](beast::error_code error, std::size_t) {
                       if (error == http::error::body_limit) {
                         self->too_large_ = true;
                         return self->handle();
                       }
                       if (error) return;
                       self->handle();
                     });
  }

  void handle() {
    auto& message = parser_->get();
    keep_alive_ = message.keep_alive() && !too_large_;
    if (message.body().size() > options_.body_bytes_max) {
      too_large_ = true;
      announced_ = message.body().size();
      keep_alive_ = false;
    }
    head_ = message.method() == http::verb::head;
    ServerRequest request{std::string(message.method_string()), std::string(message.target()),
                          too_large_ ? std::string() : std::move(message.body()), too_large_,
                          announced_};
    handler_(std::move(request), [self = shared_from_this()](ServerResponse response) {
      self->write(std::move(response));
    });
  }

  void write(ServerResponse response) {
    message_ = {static_cast<http::status>(response.status), 11};
    message_.set(http::field::server, "kvferry");
    if (!response.content_type.empty())
      message_.set(http::field::content_type, response.content_type);
    if (!response.allow.empty()) message_.set(http::field::allow, response.allow);
    message_.keep_alive(keep_alive_);
    message_.body() = std::move(response.body);
    message_.prepare_payload();
    http::async_write(stream_, message_,
                      [self = shared_from_this()](beast::error_code error, std::size_t) {
                        if (error) return;
                        self->stream_.expires_never();
                        if (self->keep_alive_) return self->read();
                        beast::error_code ignored;
                        self->stream_.socket().shutdown(tcp::socket::shutdown_send, ignored);
                      });
  }

  beast::tcp_stream stream_;
  const HttpServer::Options& options_;
  const HttpServer::Handler& handler_;
  std::size_t& count_;
  beast::flat_buffer buffer_;
  std::optional<http::request_parser<http::string_body>> parser_;
  http::response<http::string_body> message_;
  bool keep_alive_ = true, head_ = false, too_large_ = false;
  std::size_t announced_ = 0;
};

// Knocks at several addresses at once.
class Probe : public std::enable_shared_from_this<Probe> {
 public:
  Probe(asio::io_context& io, std::vector<Address> addresses,
        std::function<void(std::vector<Address>)> done)
      : timer_(io), resolver_(io), addresses_(std::move(addresses)), done_(std::move(done)) {
    for (std::size_t i = 0; i < addresses_.size(); ++i)
      sockets_.push_back(std::make_unique<tcp::socket>(io));
  }
  void start(Duration timeout) {
    left_ = addresses_.size();
    if (left_ == 0) return finish();
    timer_.expires_after(timeout);
    timer_.async_wait([self = shared_from_this()](beast::error_code error) {
      if (!error) self->finish();
    });
    for (std::size_t i = 0; i < addresses_.size(); ++i) {
      // Ranks register addresses, not names that need a resolver; a name counts as dead.
      beast::error_code bad;
      const auto ip = asio::ip::make_address(addresses_[i].host, bad);
      if (bad) {
        ended();
        continue;
      }
      sockets_[i]->async_connect({ip, addresses_[i].port},
                                 [self = shared_from_this(), i](beast::error_code error) {
                                   if (!error && self->done_)
                                     self->alive_.push_back(self->addresses_[i]);
                                   self->ended();
                                 });
    }
  }

 private:
  void ended() {
    if (--left_ == 0) finish();
  }
  void finish() {
    if (!done_) return;
    const auto done = std::exchange(done_, nullptr);
    timer_.cancel();
    beast::error_code ignored;
    for (const auto& socket : sockets_) socket->close(ignored);
    done(std::move(alive_));
  }
  asio::steady_timer timer_;
  tcp::resolver resolver_;
  std::vector<Address> addresses_, alive_;
  std::vector<std::unique_ptr<tcp::socket>> sockets_;
  std::size_t left_ = 0;
  std::function<void(std::vector<Address>)> done_;
};

}  // namespace

void HttpServer::Impl::accept() {
  acceptor.async_accept([this](beast::error_code error, tcp::socket socket) {
    if (error == asio::error::operation_aborted) return;
    if (error) {  // no descriptor is free: try again in a moment
      retry.expires_after(std::chrono::milliseconds(100));
      retry.async_wait([this](beast::error_code cancelled) {
        if (!cancelled) accept();
      });
      return;
    }
    if (!error && connections < options.connections_max)
      std::make_shared<Connection>(std::move(socket), options, handler, connections)->read();
    accept();
  });
}

Result<std::unique_ptr<HttpServer>> HttpServer::create(const Options& options, Handler handler) {
  auto impl = std::make_unique<Impl>(options, std::move(handler));
  const std::string where =
      Address{std::string(without_brackets(options.host)), options.port}.host_port();
  const auto failed = [&](std::string_view what, const beast::error_code& error) {
    return Status(Code::kUnavailable, fmt::format("bootstrap server cannot listen on {}: {}: {}",
                                                  where, what, error.message()));
  };
  beast::error_code error;
  tcp::resolver resolver(impl->io);
  const auto found = resolver.resolve(std::string(without_brackets(options.host)),
                                      std::to_string(options.port), tcp::resolver::passive, error);
  if (error) return failed("host", error);
  const tcp::endpoint endpoint = *found.begin();
  impl->acceptor.open(endpoint.protocol(), error);
  if (error) return failed("socket", error);
  impl->acceptor.set_option(asio::socket_base::reuse_address(true), error);
  impl->acceptor.bind(endpoint, error);
  if (error) return failed("bind", error);
  impl->acceptor.listen(asio::socket_base::max_listen_connections, error);
  if (error) return failed("listen", error);

  return std::unique_ptr<HttpServer>(new HttpServer(std::move(impl)));
}

HttpServer::HttpServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

HttpServer::~HttpServer() {
  impl_->io.stop();
  if (impl_->thread.joinable()) impl_->thread.join();
}

void HttpServer::start() {
  impl_->accept();
  impl_->thread = std::thread([this] { impl_->io.run(); });
}

std::uint16_t HttpServer::port() const {
  return impl_->acceptor.local_endpoint().port();
}

void HttpServer::probe(std::vector<Address> addresses, Duration timeout,
                       std::function<void(std::vector<Address>)> done) {
  std::make_shared<Probe>(impl_->io, std::move(addresses), std::move(done))->start(timeout);
}

}  // namespace kvferry::net
