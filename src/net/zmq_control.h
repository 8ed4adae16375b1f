// The control socket of one rank: a ZeroMQ PULL socket that peers push to, and a PUSH socket for
// each peer. Owned and used by the endpoint's loop thread alone. No call blocks.
#pragma once

#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>

#include "kvferry/config.h"
#include "kvferry/status.h"
#include "src/proto/ports.h"

namespace kvferry::net {

struct ZmqControlOptions {
  std::string listen_host = "127.0.0.1";
  std::uint16_t listen_port = 0;  // 0: any free one
  std::string public_host;        // what is published; listen_host if empty
};

class ZmqControl final : public proto::ControlPort {
 public:
  // kUnavailable with the address when it cannot listen there; kInvalidArgument for a wildcard
  // without a public host.
  static Result<std::unique_ptr<ZmqControl>> create(const ZmqControlOptions& options,
                                                    const Settings& settings);
  ~ZmqControl() override;

  [[nodiscard]] const Address& address() const { return address_; }
  // Edge-triggered, as ZeroMQ's are: after it fires, receive() until it returns false.
  [[nodiscard]] int fd() const { return fd_; }
  // One message. False: there is none.
  bool receive(wire::Frames& frames);

  // Queues for the peer; connections are made, and made again, by ZeroMQ. Dropped when the peer's
  // queue is full.
  void send(const Address& to, wire::Frames frames) override;

  [[nodiscard]] std::uint64_t dropped() const { return dropped_; }
  [[nodiscard]] std::size_t open_sockets() const { return peers_.size(); }

 private:
  struct Peer {
    void* socket = nullptr;
    std::list<Address>::iterator used;
  };
  explicit ZmqControl(const Settings& settings) : settings_(settings) {}
  void* socket_for(const Address& to);

  const Settings& settings_;
  void* context_ = nullptr;
  void* pull_ = nullptr;
  int fd_ = -1;
  Address address_;
  std::map<Address, Peer> peers_;
  std::list<Address> by_use_;  // least recently used first
  std::uint64_t dropped_ = 0;
};

}  // namespace kvferry::net
