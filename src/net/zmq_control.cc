#include "src/net/zmq_control.h"

#include <zmq.h>

#include <fmt/format.h>

#include "src/base/parse.h"

namespace kvferry::net {
namespace {

constexpr int kLingerMs = 500;  // last words at shutdown
constexpr std::size_t kFramesMax = 64;

std::string endpoint(const std::string& host, const std::string& port) {
  return is_ipv6(host) ? fmt::format("tcp://[{}]:{}", host, port)
                       : fmt::format("tcp://{}:{}", host, port);
}

void set_int(void* socket, int option, int value) {
  zmq_setsockopt(socket, option, &value, sizeof value);
}

void set_common(void* socket) {
  set_int(socket, ZMQ_IPV6, 1);
  set_int(socket, ZMQ_TCP_KEEPALIVE, 1);
  set_int(socket, ZMQ_TCP_KEEPALIVE_IDLE, 30);
  set_int(socket, ZMQ_TCP_KEEPALIVE_INTVL, 5);
  set_int(socket, ZMQ_TCP_KEEPALIVE_CNT, 3);
  set_int(socket, ZMQ_LINGER, kLingerMs);
}

}  // namespace

Result<std::unique_ptr<ZmqControl>> ZmqControl::create(const ZmqControlOptions& options,
                                                       const Settings& settings) {
  const std::string host = std::string(without_brackets(options.listen_host));
  const std::string shown = options.public_host.empty() ? host : options.public_host;
  if (is_wildcard(shown))
    return Status(Code::kInvalidArgument,
                  fmt::format("control socket: {} is a wildcard; set the public host", shown));
  std::unique_ptr<ZmqControl> control(new ZmqControl(settings));
  control->context_ = zmq_ctx_new();
  zmq_ctx_set(control->context_, ZMQ_MAX_SOCKETS,
              static_cast<int>(std::min<std::uint64_t>(settings.control_sockets_max + 16, 65535)));
  control->pull_ = zmq_socket(control->context_, ZMQ_PULL);
  if (control->pull_ == nullptr)
    return Status(Code::kExhausted, fmt::format("control socket: {}", zmq_strerror(zmq_errno())));
  set_common(control->pull_);
  set_int(control->pull_, ZMQ_RCVHWM,
          static_cast<int>(std::min<std::uint64_t>(settings.control_queue_max, 1 << 30)));
  const auto most = static_cast<std::int64_t>(settings.control_message_bytes_max);
  zmq_setsockopt(control->pull_, ZMQ_MAXMSGSIZE, &most, sizeof most);
  const std::string port = options.listen_port == 0 ? "*" : std::to_string(options.listen_port);
  if (zmq_bind(control->pull_, endpoint(host, port).c_str()) != 0) {
    return Status(Code::kUnavailable, fmt::format("control socket cannot listen on {}: {}",
                                                  endpoint(host, port), zmq_strerror(zmq_errno())));
  }
  char bound[256] = "";
  std::size_t size = sizeof bound;
  zmq_getsockopt(control->pull_, ZMQ_LAST_ENDPOINT, bound, &size);
  const std::string_view text(bound);
  const auto number = parse_int<std::uint16_t>(text.substr(text.rfind(':') + 1));
  if (!number) return Status(Code::kInternal, fmt::format("control socket bound to '{}'", text));
  control->address_ = {shown, *number};
  size = sizeof control->fd_;
  zmq_getsockopt(control->pull_, ZMQ_FD, &control->fd_, &size);
  return control;
}

ZmqControl::~ZmqControl() {
  for (auto& [address, peer] : peers_) zmq_close(peer.socket);
  if (pull_ != nullptr) zmq_close(pull_);
  if (context_ != nullptr) zmq_ctx_term(context_);
}

bool ZmqControl::receive(wire::Frames& frames) {
  frames.clear();
  for (;;) {
    zmq_msg_t message;
    zmq_msg_init(&message);
    if (zmq_msg_recv(&message, pull_, ZMQ_DONTWAIT) < 0) {
      zmq_msg_close(&message);
      return false;
    }
    // A message with endless frames is kept short; the decoder then refuses it.
    if (frames.size() < kFramesMax)
      frames.emplace_back(static_cast<const char*>(zmq_msg_data(&message)), zmq_msg_size(&message));
    const bool more = zmq_msg_more(&message) != 0;
    zmq_msg_close(&message);
    if (!more) return true;
  }
}

void* ZmqControl::socket_for(const Address& to) {
  const auto it = peers_.find(to);
  if (it != peers_.end()) {
    by_use_.splice(by_use_.end(), by_use_, it->second.used);
    return it->second.socket;
  }
  if (peers_.size() >= settings_.control_sockets_max) {
    const Address oldest = by_use_.front();
    zmq_close(peers_.at(oldest).socket);
    peers_.erase(oldest);
    by_use_.pop_front();
  }
  void* socket = zmq_socket(context_, ZMQ_PUSH);
  if (socket == nullptr) return nullptr;
  set_common(socket);
  set_int(socket, ZMQ_SNDHWM,
          static_cast<int>(std::min<std::uint64_t>(settings_.control_queue_max, 1 << 30)));
  set_int(socket, ZMQ_RECONNECT_IVL, 20);
  set_int(socket, ZMQ_RECONNECT_IVL_MAX, 500);
  if (zmq_connect(socket, endpoint(to.host, std::to_string(to.port)).c_str()) != 0) {
    zmq_close(socket);
    return nullptr;
  }
  peers_[to] = {socket, by_use_.insert(by_use_.end(), to)};
  return socket;
}

void ZmqControl::send(const Address& to, wire::Frames frames) {
  void* socket = socket_for(to);
  if (socket == nullptr) {
    ++dropped_;
    return;
  }
  for (std::size_t i = 0; i < frames.size(); ++i) {
    const int flags = ZMQ_DONTWAIT | (i + 1 < frames.size() ? ZMQ_SNDMORE : 0);
    if (zmq_send(socket, frames[i].data(), frames[i].size(), flags) < 0) {
      ++dropped_;
      return;
    }
  }
}

}  // namespace kvferry::net
