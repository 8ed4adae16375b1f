// `kvferry bench rooms`: what a small room costs. The decode rank and the bootstrap server are
// here, the prefill rank in another process.
#include <sched.h>
#include <sys/prctl.h>

#include <cstdio>
#include <stdexcept>
#include <vector>

#include <fmt/format.h>

#include "cli/bench/bench.h"
#include "cli/bench/common.h"
#include "cli/bench/rooms.h"
#include "cli/process.h"
#include "kvferry/bootstrap_server.h"
#include "src/base/turns.h"

namespace kvferry::cli {
namespace {

using Json = nlohmann::json;

constexpr std::uint32_t kBatch = 500;  // rooms that the prefill side opens at once
constexpr std::uint32_t kInFlight = 64;
constexpr std::uint32_t kLargePages = 4096;  // of the large room beside the small ones: 128 MiB
constexpr int kPings = 1000;

double microseconds(Clock::time_point begin) {
  return seconds_since(begin) * 1e6;
}

// How the measuring thread waits: looking all the time, which is exact where a core is free for it,
// or with naps of 30 microseconds, as beside a large room, where it would take a core from what
// it measures.
enum class Waiting : std::uint8_t { kLooking, kNapping };
void wait_a_little(Waiting how) {
  const timespec nap{0, 30000};
  if (how == Waiting::kLooking) {
    sched_yield();
  } else {
    nanosleep(&nap, nullptr);
  }
}

class Rooms {
 public:
  Rooms() {
    const Settings settings = settings_here();
    auto server = BootstrapServer::create("127.0.0.1", 0, settings);
    if (!server.ok()) throw std::runtime_error(server.status().to_string());
    server_ = std::move(*server);
    bootstrap_ = {"127.0.0.1", server_->port()};
    prefill_ = std::make_unique<Child>(std::vector<std::string>{"bench-target"});
    const Json hello = ask({{"rooms", true}, {"bootstrap_port", server_->port()}});
    ping_.connect(hello["ping_port"]);
    layout_ = room_layout(memory_);
    DecodeOptions options;
    fill_options(options, layout_);
    auto decode = DecodeEndpoint::create(options);
    if (!decode.ok()) throw std::runtime_error(decode.status().to_string());
    decode_ = std::move(*decode);
  }

  // Round trips of bare messages, in microseconds.
  std::vector<double> ping_pong() {
    std::vector<double> times;
    ask({{"ping", ping_.port()}, {"count", kPings}});
    for (int i = 0; i < kPings; ++i) {
      const auto begin = Clock::now();
      ping_.ping();
      ping_.await();
      if (i >= kPings / 10) times.push_back(microseconds(begin));
    }
    return times;
  }

  // One room after the other: from send_metadata() to Success.
  std::vector<double> one_by_one(std::uint32_t count, Waiting how) {
    std::vector<double> times;
    for (std::uint32_t done = 0; done < count; done += kBatch) {
      open_batch(kBatch, 1);
      for (std::uint32_t i = 0; i < kBatch; ++i) times.push_back(one(first_ + i, i, how));
      clear_batch();
    }
    return times;
  }

  // Many at once; the seconds that `count` rooms took, and what both sides burned.
  struct Load {
    double seconds = 0, cpu_prefill = 0, cpu_decode = 0;
  };
  Load many(std::uint32_t count) {
    Load load;
    const double cpu_before = open_batch(count, 1), own_before = process_cpu_seconds();
    const auto begin = Clock::now();
    std::vector<Receiver> flying;
    std::uint32_t next = 0, ended = 0;
    while (ended < count) {
      while (next < count && flying.size() < kInFlight) {
        flying.push_back(begin_room(first_ + next, {static_cast<PageIndex>(next % kRoomPages)}));
        ++next;
      }
      for (std::size_t i = 0; i < flying.size();) {
        if (!is_terminal(flying[i].poll())) {
          ++i;
          continue;
        }
        expect_success(flying[i]);
        flying[i].clear();
        flying[i] = flying.back();
        flying.pop_back();
        ++ended;
      }
      timespec nap{0, 100000};  // as an engine looks once in a step
      nanosleep(&nap, nullptr);
    }
    load.seconds = seconds_since(begin);
    load.cpu_decode = process_cpu_seconds() - own_before;
    load.cpu_prefill = clear_batch() - cpu_before;
    return load;
  }

  // Small rooms while large ones go on all the time.
  std::vector<double> beside_large(std::uint32_t count) {
    std::vector<double> times;
    std::vector<PageIndex> large_pages(kLargePages);
    for (std::uint32_t i = 0; i < kLargePages; ++i)
      large_pages[i] = static_cast<PageIndex>(kRoomPages - 1 - i);
    while (times.size() < count) {
      open_batch(kBatch, 1);
      const std::uint64_t small = first_;
      const std::uint64_t large = first_ + kBatch;
      ask({{"open", large}, {"count", 1}, {"pages", kLargePages}});
      first_ = large + 1;
      Receiver big = begin_room(large, large_pages);
      for (std::uint32_t i = 0; i < kBatch && times.size() < count; ++i) {
        const bool beside = !is_terminal(big.poll());
        const double took = one(small + i, i, Waiting::kNapping);
        if (beside) times.push_back(took);
        if (!beside) break;
      }
      while (!is_terminal(big.poll())) wait_a_little(Waiting::kNapping);
      expect_success(big);
      big.clear();
      clear_batch();
    }
    return times;
  }

  // The pages of the last batch hold what the prefill side filled them with.
  void verify(std::uint32_t count) const {
    std::uint64_t wrong = 0;
    for (const Slab& slab : layout_.slabs) {
      if (slab.component == Component::kAux) continue;
      for (std::uint32_t item = 0; item < count; ++item)
        wrong += count_wrong(
            reinterpret_cast<const std::uint8_t*>(slab.base + item * slab.item_stride),
            slab.item_bytes, {item, static_cast<std::uint32_t>(slab.component), slab.layer, 0, 0});
    }
    if (wrong > 0) throw std::runtime_error(fmt::format("rooms: {} wrong bytes", wrong));
  }

 private:
  Json ask(const Json& question) {
    prefill_->send(question.dump());
    const auto answer = prefill_->wait_line(kTimeoutMs);
    if (!answer) throw std::runtime_error("the prefill process gave no answer");
    return Json::parse(*answer);
  }
  double open_batch(std::uint32_t count, std::uint32_t pages) {
    first_ = next_room_;
    next_room_ += count + 2;
    return ask({{"open", first_}, {"count", count}, {"pages", pages}})["cpu"];
  }
  double clear_batch() { return ask({{"clear", true}})["cpu"]; }

  Receiver begin_room(std::uint64_t room, const std::vector<PageIndex>& pages) {
    auto receiver = decode_->open(RoomId{room}, bootstrap_);
    if (!receiver.ok() || !receiver->init().ok() ||
        !receiver->send_metadata(pages, room % kRoomAuxRows).ok())
      throw std::runtime_error("a room could not begin");
    return *receiver;
  }
  static void expect_success(const Receiver& receiver) {
    if (receiver.poll() != RoomState::kSuccess)
      throw std::runtime_error(receiver.failure().status.to_string());
  }
  double one(std::uint64_t room, std::uint32_t page, Waiting how) {
    auto receiver = decode_->open(RoomId{room}, bootstrap_);
    if (!receiver.ok() || !receiver->init().ok())
      throw std::runtime_error("a room could not begin");
    while (receiver->poll() == RoomState::kBootstrapping) wait_a_little(how);
    const std::vector<PageIndex> pages{static_cast<PageIndex>(page % kRoomPages)};
    const auto begin = Clock::now();
    if (!receiver->send_metadata(pages, room % kRoomAuxRows).ok())
      throw std::runtime_error("a room could not begin");
    while (!is_terminal(receiver->poll())) wait_a_little(how);
    const double took = microseconds(begin);
    expect_success(*receiver);
    receiver->clear();
    return took;
  }

  std::unique_ptr<BootstrapServer> server_;
  Address bootstrap_;
  std::unique_ptr<Child> prefill_;
  PingPong ping_;
  std::uint8_t* memory_ = nullptr;
  Layout layout_;
  std::unique_ptr<DecodeEndpoint> decode_;
  std::uint64_t first_ = 1, next_room_ = 1;
};

}  // namespace

void bench_rooms(const BenchOptions& options, std::vector<Figure>& figures) {
  prctl(PR_SET_TIMERSLACK, 1);  // naps are as short as they say
  const ShortTurns turns(kLoopTurn);
  Rooms rooms;
  rooms.one_by_one(kBatch, Waiting::kLooking);  // opens sessions and connections
  std::vector<double> ping50, ping99, room50, room99, per_second, cpu_prefill, cpu_decode, napping,
      beside;
  for (std::uint32_t pair = 0; pair < options.pairs; ++pair) {
    const auto pings = rooms.ping_pong();
    ping50.push_back(percentile(pings, 0.5));
    ping99.push_back(percentile(pings, 0.99));
    const auto alone = rooms.one_by_one(kBatch * 2, Waiting::kLooking);
    rooms.verify(kBatch);
    room50.push_back(percentile(alone, 0.5));
    room99.push_back(percentile(alone, 0.99));
    constexpr std::uint32_t kLoad = 4000;
    const auto load = rooms.many(kLoad);
    rooms.verify(kLoad);
    per_second.push_back(kLoad / load.seconds);
    cpu_prefill.push_back(load.cpu_prefill * 1e6 / kLoad);
    cpu_decode.push_back(load.cpu_decode * 1e6 / kLoad);
    napping.push_back(percentile(rooms.one_by_one(kBatch, Waiting::kNapping), 0.99));
    beside.push_back(percentile(rooms.beside_large(300), 0.99));
    fmt::print("rooms, pair {} of {}\n", pair + 1, options.pairs);
    std::fflush(stdout);
  }
  const double trip = median(ping50);
  figures.push_back({"rooms.p50_us", median(room50), "us", trip});
  figures.push_back({"rooms.p99_us", median(room99), "us", median(ping99)});
  figures.push_back({"rooms.per_second_64", median(per_second), "1/s", 1e6 / trip});
  figures.push_back({"rooms.cpu_us_per_room_prefill", median(cpu_prefill), "us", trip});
  figures.push_back({"rooms.cpu_us_per_room_decode", median(cpu_decode), "us", trip});
  figures.push_back({"rooms.small_beside_large_p99", median(beside), "us", median(napping)});
  fmt::print("rooms: one page of 32 KiB; a bare ZeroMQ round trip takes {:.0f} us (p99 {:.0f})\n",
             trip, median(ping99));
  for (std::size_t i = figures.size() - 6; i < figures.size(); ++i)
    fmt::print("  {:<34}{:>10.1f} {:<4} {:>6.2f} x its baseline of {:.1f}\n", figures[i].name,
               figures[i].value, figures[i].unit, figures[i].value / figures[i].baseline,
               figures[i].baseline);
}

}  // namespace kvferry::cli
