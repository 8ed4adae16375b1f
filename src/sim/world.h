// One seed: a whole cluster in virtual time, on one thread. Nodes with real byte memory run the
// real managers; network, data plane, bootstrap server and applications are simulated and faulty.
// Two acts: faults, then heal.
//
//            ┌────────── bootstrap (Directory) ──────────┐   HTTP: late, lost, down, forgetful
//   prefill tp0..tpP-1 × pp        control: late, lost, cut       decode instances × tp0..tpD-1
//            └───────── SimFabric: piece by piece ───────┘
//
// Checkers know nothing of the core: every landing byte belongs to the room that owns its page at
// that moment; success means that every byte is right; states never move back; everything ends;
// every page comes home.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "kvferry/config.h"
#include "src/base/hash.h"
#include "src/base/mark.h"
#include "src/plan/geometry.h"
#include "src/proto/decode.h"
#include "src/proto/directory.h"
#include "src/proto/prefill.h"
#include "src/sim/plane.h"
#include "src/sim/queue.h"

namespace kvferry::sim {

struct Report {
  std::uint64_t seed = 0, rooms = 0, succeeded = 0, bytes = 0;
  std::vector<std::string> violations;
  std::uint64_t digest = 0;
  Marks marks;
};

class World {
 public:
  World(std::uint64_t seed, bool print);
  ~World();
  Report run();

 private:
  struct Node;
  struct Room;
  struct Ports;

  // What a use of a room number on one node stands for.
  struct Part {
    std::uint64_t room = 0;  // sequence number of the simulated request
    std::uint32_t node = 0;
    std::vector<PageIndex> pages;
    std::uint32_t aux_row = 0;
    bool holds = false;  // pages and row are taken from the pool
    RoomState state = RoomState::kBootstrapping;
    bool ended = false, cleared = false;
    std::uint64_t sent = 0;
  };

  void draw();
  void build();
  void start_node(Node& node);
  void crash(Node& node, Duration down);
  void schedule_faults();
  void heal();
  void on_node(std::uint32_t node, std::uint64_t life, Duration delay,
               std::function<void(Node&)> act);
  void open_room(bool fresh, std::uint32_t pair);
  void decode_side(std::uint64_t room, std::uint32_t node);
  void prefill_side(std::uint64_t room, std::uint32_t node);
  void lend_pages(std::uint64_t room, std::uint32_t node, proto::UseId use, int tries);
  void send_next(std::uint64_t room, std::uint32_t node, proto::UseId use);
  void after_input(Node& node);
  void wake(Node& node);
  void on_room(std::uint32_t node, std::uint64_t life, proto::UseId use,
               const proto::RoomView& view);
  void release(Node& node, Part& part);
  void deliver(std::uint32_t from, const Address& to, wire::Frames frames);
  void arrive(std::uint32_t node, std::uint64_t life, const wire::Frames& frames);
  void thaw(Node& node);
  void http(std::uint32_t from, proto::CallId call, proto::HttpRequest request);
  void answer(std::uint32_t node, std::uint64_t life, proto::CallId call,
              proto::HttpResponse response, Duration delay);
  void on_land(const std::string& from_host, std::uint64_t from_life, std::uint64_t flow,
               const std::string& to_host, std::uint64_t address, std::uint64_t bytes);
  static bool is_one(const Slab& slab);
  static std::vector<PageIndex> items_of(const Slab& slab, const Part& part);
  static std::vector<StateItems> states_of(const Node& node, const Part& part);
  [[nodiscard]] std::uint32_t pool_of(const Node& node) const;
  static std::uint64_t pages_of(const Room& room, const Node& node);
  // Pages [begin, end), tokens below end_token.
  void for_bytes(const Node& node, const Part& part, std::uint64_t begin, std::uint64_t end,
                 std::uint64_t end_token,
                 const std::function<void(std::uint8_t&, std::uint8_t)>& visit) const;
  static void overwrite(const Node& node, const Part& part, int value);
  void draw_state();
  void draw_compressed();
  void fill_source(Node& node, const Part& part, std::uint64_t begin, std::uint64_t count);
  void verify_target(Node& node, const Part& part);
  void check_end();
  [[nodiscard]] bool linked(const std::string& a, const std::string& b) const;
  void violation(std::string text);
  void log(const std::string& line);
  std::uint8_t pattern(std::uint64_t room, Component component, std::uint32_t layer,
                       std::uint32_t head, std::uint64_t token, std::uint32_t byte) const;
  Duration ms(std::uint64_t low, std::uint64_t high) {
    return std::chrono::microseconds(random_.between(low * 1000, high * 1000));
  }

  const std::uint64_t seed_;
  const bool print_;
  Random random_;
  EventQueue queue_;
  SimFabric fabric_;
  Settings settings_;
  Report report_;
  Fnv digest_;

  // Drawn.
  plan::Geometry geometry_;
  std::uint32_t page_tokens_ = 1, their_page_tokens_ = 1;  // of prefill and decode ranks
  std::uint32_t pool_pages_ = 16, aux_rows_ = 8;
  std::uint32_t p_tp_ = 1, p_pp_ = 1, p_cp_ = 1, p_dp_ = 1, d_tp_ = 1, d_pp_ = 1, d_instances_ = 1;
  bool native_ = true;
  std::string load_balance_;
  std::uint64_t lose_percent_ = 0, slow_http_percent_ = 0, abort_percent_ = 0;
  bool crashes_ = false, partitions_ = false, freezes_ = false, server_faults_ = false,
       ready_events_ = false;
  Duration act_one_{};
  std::uint32_t rooms_wanted_ = 0;

  std::vector<std::unique_ptr<Node>> nodes_;
  std::map<Address, std::uint32_t> by_address_;
  std::map<std::string, std::uint32_t> by_host_;
  std::unique_ptr<proto::Directory> directory_;
  Time directory_down_until_{};
  std::map<std::pair<std::string, std::string>, Time> cut_;
  std::map<std::pair<std::uint32_t, Address>, Time> last_arrival_;  // FIFO per direction
  std::map<std::uint64_t, std::unique_ptr<Room>> rooms_;
  std::map<RoomId, std::uint32_t>
      opening_;  // nodes that have yet to hear of a number that the router gave out
  std::uint64_t next_room_ = 1;
  bool healed_ = false;
};

}  // namespace kvferry::sim
