#include "src/data/tcp/tcp_plane.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include "src/base/parse.h"
#include "src/data/stream/memory_file.h"

namespace kvferry::data {
namespace {

constexpr int kLoopbackSocketBytes = 500000;
constexpr int kBacklog = 1024;

std::string error_text(int error) {
  return std::strerror(error);
}  // NOLINT: the engine's thread and create_tcp_plane() only

struct AddressList {
  addrinfo* list = nullptr;
  AddressList() = default;
  AddressList(const AddressList&) = delete;
  AddressList& operator=(const AddressList&) = delete;
  ~AddressList() {
    if (list != nullptr) freeaddrinfo(list);
  }
};

Status resolve(const std::string& host, std::uint16_t port, bool passive, AddressList& out) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  // Peers' addresses are literals: asking a name server would stop everything that this thread
  // serves.
  hints.ai_flags = AI_NUMERICSERV | (passive ? AI_PASSIVE : AI_NUMERICHOST);
  const int rc = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &out.list);
  if (rc != 0)
    return Status(Code::kUnavailable, fmt::format("host '{}': {}", host, gai_strerror(rc)));
  return {};
}

bool is_loopback(const sockaddr* address) {
  if (address->sa_family == AF_INET)
    return (ntohl(reinterpret_cast<const sockaddr_in*>(address)->sin_addr.s_addr) >> 24) == 127;
  return address->sa_family == AF_INET6 &&
         IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

void tune(int fd, const sockaddr* peer) {
  const int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
  // On one host a bounded flight stays in the cache: rows of 256 B go from about 65 % to 80 % of a
  // raw stream, of 64 KiB from 85 % to 95 % (docs/PERFORMANCE.md). Across hosts the kernel must be
  // free to open the window.
  if (is_loopback(peer)) {
    const int bytes = kLoopbackSocketBytes;
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
  }
}

class TcpLinks final : public Links {
 public:
  explicit TcpLinks(OwnedFd listener) : listener_(std::move(listener)) {}
  [[nodiscard]] int listener() const override { return listener_.get(); }
  [[nodiscard]] bool one_host() const override { return false; }

  // "tcp/host:port/life", or "host:port" of a peer whose life is not known.
  Result<Dialed> dial(const PlaneAddress& peer) override {
    Dialed dialed;
    dialed.text = peer;
    if (peer.starts_with("tcp/")) {
      const auto slash = peer.rfind('/');
      dialed.text = peer.substr(4, slash - 4);
      dialed.life = token_from_string(peer.substr(slash + 1));
      if (slash <= 4 || dialed.life.is_zero())
        return Status(Code::kInvalidArgument,
                      fmt::format("'{}' is no address of a tcp plane", peer));
    }
    const auto address = parse_address(dialed.text);
    if (!address.ok()) return address.status();
    AddressList addresses;
    KVF_RETURN_IF_ERROR(resolve(address->host, address->port, false, addresses));
    dialed.fd = socket(addresses.list->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (dialed.fd < 0)
      return Status(Code::kExhausted,
                    fmt::format("socket for {}: {}", dialed.text, error_text(errno)));
    tune(dialed.fd, addresses.list->ai_addr);
    if (connect(dialed.fd, addresses.list->ai_addr, addresses.list->ai_addrlen) != 0 &&
        errno != EINPROGRESS) {
      const int error = errno;
      close(dialed.fd);
      return Status(Code::kPeerLost, fmt::format("{}: {}", dialed.text, error_text(error)));
    }
    return dialed;
  }

  std::string welcome(int fd, const sockaddr_storage& from, socklen_t size) override {
    const auto* address = reinterpret_cast<const sockaddr*>(&from);
    tune(fd, address);
    char host[NI_MAXHOST] = "?", port[NI_MAXSERV] = "?";
    getnameinfo(address, size, host, sizeof host, port, sizeof port,
                NI_NUMERICHOST | NI_NUMERICSERV);
    return fmt::format("{}:{}", host, port);
  }

 private:
  const OwnedFd listener_;
};

}  // namespace

Result<std::unique_ptr<StreamPlane>> create_tcp_plane(const TcpPlaneOptions& options,
                                                      const Settings& settings, Entropy& entropy) {
  AddressList addresses;
  KVF_RETURN_IF_ERROR(resolve(options.listen_host, options.listen_port, true, addresses));
  OwnedFd listener(
      socket(addresses.list->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const int one = 1;
  setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  if (!listener || bind(listener.get(), addresses.list->ai_addr, addresses.list->ai_addrlen) != 0 ||
      listen(listener.get(), kBacklog) != 0) {
    return Status(Code::kUnavailable,
                  fmt::format("tcp plane cannot listen on {}: {}",
                              Address{options.listen_host, options.listen_port}.host_port(),
                              error_text(errno)));
  }
  sockaddr_storage bound{};
  socklen_t size = sizeof bound;
  getsockname(listener.get(), reinterpret_cast<sockaddr*>(&bound), &size);
  const std::uint16_t port =
      ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                                        : reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
  const std::string host = options.public_host.empty() ? options.listen_host : options.public_host;
  if (is_wildcard(host))
    return Status(Code::kInvalidArgument,
                  fmt::format("tcp plane: {} is a wildcard; set the public host", host));
  AddressList published;
  KVF_RETURN_IF_ERROR(resolve(host, port, true, published));
  char literal[NI_MAXHOST] = "";
  getnameinfo(published.list->ai_addr, published.list->ai_addrlen, literal, sizeof literal, nullptr,
              0, NI_NUMERICHOST);
  const std::string name = Address{literal, port}.host_port();
  const Token life = entropy.token();
  return StreamPlane::create(std::make_unique<TcpLinks>(std::move(listener)), life,
                             "tcp/" + name + "/" + life.to_string(), name, settings);
}

}  // namespace kvferry::data
