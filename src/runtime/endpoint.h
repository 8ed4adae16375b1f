// The loop of one endpoint: it owns a manager, the control sockets and all timers, on one thread.
// The application pushes commands into the inbox and reads atomics.
//
//   epoll_wait(until the next deadline) → inbox (bounded) → control messages until there are none →
//   plane → manager.advance
//     → changed rooms to their cells
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "kvferry/data_plane.h"
#include "kvferry/endpoint.h"
#include "src/base/random.h"
#include "src/net/http_client.h"
#include "src/net/zmq_control.h"
#include "src/proto/decode.h"
#include "src/proto/prefill.h"

namespace kvferry::runtime {

// One room as its handles see it. The loop writes, anybody reads.
struct RoomCell {
  RoomId room{};
  std::uint32_t pool_pages = 0;
  std::weak_ptr<Endpoint> endpoint;
  // Published with release after everything else of a change; a reader that sees a terminal state
  // sees its failure too.
  std::atomic<std::uint8_t> state{static_cast<std::uint8_t>(RoomState::kBootstrapping)};
  std::atomic<bool> pages_reusable{false}, cleared{false};
  std::atomic<std::uint64_t> bytes{0};
  std::atomic<std::int64_t> prefix_tokens{-1};
  mutable std::mutex mutex;
  RoomFailure failure;                // under mutex
  std::atomic<std::uint64_t> use{0};  // the loop's own, set when it opens the room

  [[nodiscard]] RoomState get() const {
    return static_cast<RoomState>(state.load(std::memory_order_acquire));
  }
  void fail(Status status, bool from_other);
};

// What the loop needs of a manager; one small adapter for each kind.
class Manager {
 public:
  virtual ~Manager() = default;
  virtual void on_frames(const wire::Frames& frames, Time now) = 0;
  virtual void on_completion(const Completion& completion, Time now) = 0;
  virtual void on_http(proto::CallId call, const proto::HttpResponse& response, Time now) = 0;
  virtual void on_ready(proto::ReadyId ready, Time now) = 0;
  virtual void advance(Time now) = 0;
  virtual Time next_deadline() const = 0;
  virtual void stop(Time now) = 0;
  virtual bool is_quiet() const = 0;
  virtual std::string metrics() const = 0;
};

class Endpoint final : public std::enable_shared_from_this<Endpoint>,
                       proto::HttpPort,
                       proto::MemoryPort,
                       proto::RoomListener,
                       proto::TracePort {
 public:
  // Sockets and plane stand afterwards; the loop runs from start() on.
  static Result<std::shared_ptr<Endpoint>> create(std::string name, const EndpointOptions& options);
  ~Endpoint() override;

  // Starts the loop with this manager.
  void start(std::unique_ptr<Manager> manager);
  [[nodiscard]] proto::Ports ports();
  // The loop's manager, for commands that run there.
  [[nodiscard]] Manager& manager() { return *manager_; }

  // Runs `act` on the loop. kExhausted when the inbox is full, kAborted when it is closed; nothing
  // was queued then.
  Status post(std::function<void(Time now)> act);
  // The same whatever the inbox holds, for calls that must not be lost. Dropped when it is closed.
  void post_always(std::function<void(Time now)> act);
  void stop(Duration patience);

  // Application side of a room number: open until its handle is cleared.
  Result<std::shared_ptr<RoomCell>> open_cell(RoomId room);
  void close_cell(RoomCell& cell);
  // Loop side.
  void bind_cell(proto::UseId use, std::shared_ptr<RoomCell> cell);
  // After a clear: forgets the cell now if its pages are home, else when they are.
  void drop_cell(proto::UseId use);
  [[nodiscard]] proto::ReadyId next_ready() { return proto::ReadyId{next_ready_++}; }
  void watch_ready(proto::ReadyId ready, int fd);

  [[nodiscard]] const Address& address() const { return control_->address(); }
  [[nodiscard]] const std::string& session_name() const { return session_name_; }
  [[nodiscard]] Token life() const { return life_; }
  [[nodiscard]] std::string metrics();
  std::atomic<bool> registered{false};
  const EndpointOptions options;

 private:
  Endpoint(std::string name, const EndpointOptions& endpoint_options);
  void run();
  void turn(int timeout_ms);
  void end(const std::string& why);

  void call(proto::CallId call, proto::HttpRequest request) override;
  std::string load(std::uint64_t address, std::size_t bytes) override;
  void store(std::uint64_t address, const std::string& bytes) override;
  void on_room(proto::UseId use, const proto::RoomView& view) override;
  void trace(proto::Severity severity, const std::string& line) override;

  const std::string name_;
  std::uint32_t pool_pages_ = 0;
  KernelEntropy entropy_;
  Token life_;
  std::string session_name_;
  std::unique_ptr<net::ZmqControl> control_;
  std::unique_ptr<DataPlane> plane_;
  std::unique_ptr<Manager> manager_;
  int epoll_ = -1, inbox_event_ = -1;

  std::mutex mutex_;  // inbox, room numbers, stopping
  std::vector<std::function<void(Time)>> inbox_;
  std::map<RoomId, std::shared_ptr<RoomCell>> open_;  // until their handles are cleared
  bool closed_ = false, stop_asked_ = false, sleeping_ = false;
  Duration patience_{};
  std::mutex join_mutex_;
  std::thread thread_;

  // The loop's own.
  std::map<proto::UseId, std::shared_ptr<RoomCell>> cells_;
  std::map<proto::UseId, proto::RoomView> changed_;
  std::map<int, std::vector<proto::ReadyId>> ready_;  // by descriptor
  std::vector<Completion> completions_;
  std::uint64_t next_ready_ = 1;
  std::unique_ptr<net::HttpClient> http_;  // last: its thread posts into the inbox
};

}  // namespace kvferry::runtime
