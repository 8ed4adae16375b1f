#include "kvferry/bootstrap_server.h"

#include "src/base/random.h"
#include "src/net/http_server.h"
#include "src/proto/directory.h"

namespace kvferry {
namespace {

constexpr Duration kProbeTimeout = std::chrono::seconds(1);

net::ServerResponse to_server(proto::DirectoryResponse response) {
  return {response.status, std::move(response.content_type), std::move(response.body),
          std::move(response.allow)};
}

}  // namespace

// The directory lives on the server's thread alone.
struct BootstrapServer::Impl {
  Impl(const Settings& s) : settings(s), directory(settings, entropy) {}
  const Settings settings;
  KernelEntropy entropy;
  proto::Directory directory;
  std::unique_ptr<net::HttpServer> server;  // last: its thread uses the rest

  void handle(net::ServerRequest request, net::HttpServer::Reply reply) {
    if (request.too_large) return reply(to_server(proto::Directory::too_large(request.body_bytes)));
    auto answer = directory.handle(request.method, request.target, request.body,
                                   std::chrono::steady_clock::now());
    if (auto* ready = std::get_if<proto::DirectoryResponse>(&answer))
      return reply(to_server(std::move(*ready)));
    auto& probe = std::get<proto::DirectoryProbe>(answer);
    server->probe(
        std::move(probe.addresses), kProbeTimeout,
        [this, ticket = probe.ticket, reply = std::move(reply)](const std::vector<Address>& alive) {
          reply(to_server(directory.finish(ticket, alive, std::chrono::steady_clock::now())));
        });
  }
};

Result<std::unique_ptr<BootstrapServer>> BootstrapServer::create(const std::string& host,
                                                                 std::uint16_t port,
                                                                 const Settings& settings) {
  auto impl = std::make_unique<Impl>(settings);
  net::HttpServer::Options options;
  options.host = host;
  options.port = port;
  options.body_bytes_max = proto::kBodyBytesMax;
  options.connections_max = settings.http_connections_max;
  auto server = net::HttpServer::create(
      options, [raw = impl.get()](net::ServerRequest request, net::HttpServer::Reply reply) {
        raw->handle(std::move(request), std::move(reply));
      });
  if (!server.ok()) return server.status();
  impl->server = std::move(*server);
  impl->server->start();  // only now: its handler uses the server
  return std::unique_ptr<BootstrapServer>(new BootstrapServer(std::move(impl)));
}

BootstrapServer::BootstrapServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
BootstrapServer::~BootstrapServer() = default;
std::uint16_t BootstrapServer::port() const {
  return impl_->server->port();
}

}  // namespace kvferry
