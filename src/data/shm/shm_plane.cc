#include "src/data/shm/shm_plane.h"

#include <dirent.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include "src/base/parse.h"
#include "src/data/stream/memory_file.h"

namespace kvferry::data {
namespace {

constexpr int kBacklog = 1024;
constexpr const char* kPrefix = "kvferry-";

std::string error_text(int error) {
  return std::strerror(error);
}  // NOLINT: the engine's thread and create_shm_plane() only

Status fill_address(const std::string& path, sockaddr_un& address) {
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof address.sun_path)
    return Status(Code::kInvalidArgument,
                  fmt::format("'{}' is no path of a socket (at most {} bytes)", path,
                              sizeof address.sun_path - 1));
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  return {};
}

struct ShmAddress {
  std::string path;
  Token life;
};
Result<ShmAddress> parse(const PlaneAddress& peer) {
  const auto slash = peer.rfind('/');
  ShmAddress address;
  if (peer.starts_with("shm/") && slash > 4) {
    address.path = peer.substr(4, slash - 4);
    address.life = token_from_string(peer.substr(slash + 1));
  }
  if (address.life.is_zero())
    return Status(Code::kInvalidArgument, fmt::format("'{}' is no address of a shm plane", peer));
  return address;
}

Result<OwnedFd> connect_to(const std::string& path) {
  sockaddr_un address{};
  KVF_RETURN_IF_ERROR(fill_address(path, address));
  OwnedFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd)
    return Status(Code::kExhausted, fmt::format("socket for {}: {}", path, error_text(errno)));
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
    return Status(Code::kPeerLost, fmt::format("{}: {}", path, error_text(errno)));
  return fd;
}

// A process that was killed leaves its socket behind; nobody listens there any more.
void remove_leftovers(const std::string& directory) {
  DIR* entries = opendir(directory.c_str());
  if (entries == nullptr) return;
  while (const dirent* entry = readdir(entries)) {  // NOLINT: no other thread has this stream
    const std::string path = directory + "/" + entry->d_name;
    if (!std::string_view(entry->d_name).starts_with(kPrefix) || !path.ends_with(".sock")) continue;
    sockaddr_un address{};
    if (!fill_address(path, address).ok()) continue;
    const OwnedFd probe(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (probe &&
        connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 &&
        errno == ECONNREFUSED)
      unlink(path.c_str());
  }
  closedir(entries);
}

class ShmLinks final : public Links {
 public:
  ShmLinks(OwnedFd listener, std::string path)
      : listener_(std::move(listener)), path_(std::move(path)) {}
  ~ShmLinks() override { unlink(path_.c_str()); }
  [[nodiscard]] int listener() const override { return listener_.get(); }
  [[nodiscard]] bool one_host() const override { return true; }

  Result<Dialed> dial(const PlaneAddress& peer) override {
    const auto address = parse(peer);
    if (!address.ok()) return address.status();
    auto fd = connect_to(address->path);
    if (!fd.ok()) return fd.status();
    return Dialed{fd->release(), address->life, address->path};
  }

  std::string welcome(int fd, const sockaddr_storage&, socklen_t) override {
    ucred peer{};
    socklen_t size = sizeof peer;
    getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size);
    return fmt::format("process {}", peer.pid);
  }

 private:
  const OwnedFd listener_;
  const std::string path_;
};

}  // namespace

Result<std::unique_ptr<StreamPlane>> create_shm_plane(const std::string& directory,
                                                      const Settings& settings, Entropy& entropy) {
  remove_leftovers(directory);
  const Token life = entropy.token();
  const std::string path =
      fmt::format("{}/{}{}.sock", directory, kPrefix, life.to_string().substr(0, 16));
  sockaddr_un address{};
  KVF_RETURN_IF_ERROR(fill_address(path, address));
  OwnedFd listener(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  // Only the owner may connect, from the first moment on.
  if (!listener || fchmod(listener.get(), S_IRUSR | S_IWUSR) != 0 ||
      bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      listen(listener.get(), kBacklog) != 0) {
    return Status(Code::kUnavailable,
                  fmt::format("shm plane cannot listen at {}: {}", path, error_text(errno)));
  }
  return StreamPlane::create(std::make_unique<ShmLinks>(std::move(listener), path), life,
                             "shm/" + path + "/" + life.to_string(), "", settings);
}

bool shm_plane_in_reach(const PlaneAddress& peer) {
  const auto address = parse(peer);
  return address.ok() && access(address->path.c_str(), W_OK) == 0;
}

}  // namespace kvferry::data
