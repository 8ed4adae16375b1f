#include "cli/demo.h"

#include <poll.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <deque>
#include <fstream>
#include <list>
#include <map>
#include <numeric>
#include <set>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/models.h"
#include "cli/plan.h"
#include "cli/process.h"
#include "cli/workload.h"
#include "src/base/hash.h"
#include "src/base/parse.h"
#include "src/base/random.h"

namespace kvferry::cli {
namespace {

using Json = nlohmann::json;
using Clock = std::chrono::steady_clock;

constexpr std::uint64_t kPoolBytes =
    1500000000;  // of all ranks of a decode instance, where prefixes are held
constexpr int kStartTimeoutMs = 60000;
constexpr std::size_t kBaselineBytes = 256 << 20;

volatile sig_atomic_t interrupted = 0;
void on_interrupt(int) {
  interrupted = 1;
}

std::int64_t monotonic_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch())
      .count();
}

// One big memcpy, the best of three, in GB/s.
double raw_copy_speed() {
  std::vector<std::uint8_t> from(kBaselineBytes, 1), to(kBaselineBytes, 2);
  double best = 0;
  for (int i = 0; i < 3; ++i) {
    const auto begin = Clock::now();
    std::memcpy(to.data(), from.data(), kBaselineBytes);
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    best = std::max(best, static_cast<double>(kBaselineBytes) / seconds / 1e9);
    from[static_cast<std::size_t>(i)] = to[static_cast<std::size_t>(i) + 7];
  }
  return best;
}

// Pages of one group of ranks (a prefill or decode DP group), and the prefixes that it holds.
class Pool {
 public:
  Pool(std::uint32_t pages, std::uint32_t aux_rows, std::uint64_t seed) {
    for (std::uint32_t i = 0; i < pages; ++i) free_.push_back(static_cast<PageIndex>(i));
    Random random(seed);
    for (std::size_t i = free_.size(); i > 1; --i)
      std::swap(free_[i - 1], free_[random.below(i)]);  // fragmented, as a used one is
    for (std::uint32_t i = 0; i < aux_rows; ++i) rows_.push_back(i);
  }
  // Leading pages of the chain that are held, a multiple of `unit`; they stay until unpin().
  std::vector<PageIndex> pin_prefix(const std::vector<std::uint64_t>& chain, std::size_t unit) {
    std::vector<PageIndex> pages;
    for (const std::uint64_t key : chain) {
      const auto it = held_.find(key);
      if (it == held_.end()) break;
      ++it->second.pins;
      order_.splice(order_.end(), order_, it->second.used);
      pages.push_back(it->second.page);
    }
    for (; pages.size() % unit != 0; pages.pop_back()) --held_.at(chain[pages.size() - 1]).pins;
    return pages;
  }
  void unpin(const std::vector<std::uint64_t>& chain, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) --held_.at(chain[i]).pins;
  }
  // `evicted`: pages whose prefix was dropped to make room.
  bool take(std::size_t count, std::vector<PageIndex>& pages, std::uint32_t& row,
            std::vector<PageIndex>& evicted) {
    if (rows_.empty()) return false;
    for (auto it = order_.begin(); free_.size() < count && it != order_.end();) {
      const std::uint64_t key = *it;
      ++it;
      const auto held = held_.find(key);
      if (held->second.pins > 0) continue;
      evicted.push_back(held->second.page);
      free_.push_back(held->second.page);
      order_.erase(held->second.used);
      held_.erase(held);
    }
    if (free_.size() < count) return false;
    for (std::size_t i = 0; i < count; ++i) {
      pages.push_back(free_.back());
      free_.pop_back();
    }
    row = rows_.back();
    rows_.pop_back();
    return true;
  }
  void give_row(std::uint32_t row) { rows_.push_back(row); }
  void give_page(PageIndex page) { free_.push_back(page); }
  // False: the prefix is held already, in another page.
  bool hold(std::uint64_t key, PageIndex page) {
    if (held_.contains(key)) return false;
    held_[key] = {page, 0, order_.insert(order_.end(), key)};
    return true;
  }

 private:
  struct Held {
    PageIndex page = 0;
    std::uint32_t pins = 0;
    std::list<std::uint64_t>::iterator used;
  };
  std::vector<PageIndex> free_;
  std::vector<std::uint32_t> rows_;
  std::map<std::uint64_t, Held> held_;
  std::list<std::uint64_t> order_;  // least recently used first
};

class Demo {
 public:
  Demo(const DemoOptions& options, plan::Geometry geometry, Workload workload)
      : o_(options), geometry_(std::move(geometry)), workload_(std::move(workload)) {}

  int run() {
    const bool terminal = isatty(1) == 1;
    baseline_ = raw_copy_speed();
    size_pools();
    fmt::print(
        "model {}: {} layers, {}, {} bytes a token; page size {}\n", geometry_.name,
        geometry_.layers,
        geometry_.attention.mla ? "latent KV" : fmt::format("{} KV heads", geometry_.kv_heads),
        bytes_per_token(geometry_),
        page(true) == page(false) ? fmt::format("{}", page(true))
                                  : fmt::format("{} and {}", page(true), page(false)));
    if (!geometry_.states.empty()) print_state();
    fmt::print(
        "prefill tp={} pp={} cp={} dp={}  ->  decode tp={} pp={} dp={}, plane {}, codec {}\n",
        o_.prefill.tp, o_.prefill.pp, o_.prefill.cp, o_.prefill.dp, o_.decode.tp, o_.decode.pp,
        o_.decode.dp, o_.plane, o_.codec);
    fmt::print("{} requests, token counts divided by {:.4g}, blocks of {} tokens\n",
               workload_.requests.size(), workload_.scale, workload_.block_tokens);
    std::fflush(stdout);
    if (!start_processes()) return interrupted != 0 ? kExitInterrupted : kExitWrong;
    const auto begin = Clock::now();
    if (!replay(terminal)) return interrupted != 0 ? kExitInterrupted : kExitWrong;
    seconds_ = std::chrono::duration<double>(Clock::now() - begin).count();
    if (!finish()) return interrupted != 0 ? kExitInterrupted : kExitWrong;
    return report();
  }

 private:
  struct RankProcess {
    bool prefill = false;
    std::uint32_t dp = 0, tp = 0, pp = 0;
    std::unique_ptr<Child> child;
    bool ready = false, finished = false;
  };
  struct Active {
    std::size_t number = 0;
    std::uint32_t prefill_group = 0, decode_group = 0;
    std::vector<std::uint64_t> chain;  // key of each full page of the prompt
    std::size_t held = 0;
    std::vector<PageIndex> decode_pages, prefill_pages;
    std::uint32_t decode_row = 0, prefill_row = 0;
    std::uint32_t waits_prepared = 0, waits_sent = 0, waits_done = 0, waits_verified = 0;
    std::int64_t went = 0, arrived = 0;
    bool failed = false;
  };

  void print_state() const {
    std::string text;
    for (const plan::StateGeometry& state : geometry_.states)
      text += fmt::format("{}{} in {} layers", text.empty() ? "" : ", ", to_string(state.component),
                          state.layers.size());
    fmt::print("state: {}; KV cache in {} layers\n", text,
               geometry_.kv_layers.empty() ? geometry_.layers : geometry_.kv_layers.size());
  }

  // Tokens of a page on either side.
  std::uint32_t page(bool prefill) const {
    return prefill || o_.decode_page_size == 0 ? o_.page_size : o_.decode_page_size;
  }
  std::uint64_t pages_of(const Request& request, bool prefill) const {
    return (request.tokens + page(prefill) - 1) / page(prefill);
  }
  // Tokens that both sides' pages of a request have room for, the padding of the last one included.
  std::uint64_t common_tokens(const Request& request) const {
    return std::min(pages_of(request, true) * page(true), pages_of(request, false) * page(false));
  }

  // What one decode rank, or all of a group, hold of a request, from the model alone.
  struct Share {
    std::uint64_t token = 0;    // of every page: the KV cache, an index over it
    std::uint64_t window = 0;   // of the pages of a sliding window
    std::uint64_t request = 0;  // slots and aux rows
    void add(const Share& other) {
      token += other.token;
      window += other.window;
      request += other.request;
    }
  };
  Share share_of_rank(std::uint32_t tp, std::uint32_t pp) const {
    const std::uint64_t size = o_.decode.pp, rest = geometry_.layers % size,
                        each = geometry_.layers / size;
    const std::uint64_t begin = pp * each + std::min<std::uint64_t>(pp, rest),
                        end = begin + each + (pp < rest ? 1 : 0);
    const auto steps = [&](std::uint64_t extent) {  // of an axis that the ranks share
      if (o_.decode.tp > extent) return std::uint64_t{1};
      return std::uint64_t{tp + 1} * extent / o_.decode.tp -
             std::uint64_t{tp} * extent / o_.decode.tp;
    };
    Share share;
    for (std::uint64_t layer = begin; layer < end; ++layer) {
      const auto is_here = [&](std::uint32_t other) { return other == layer; };
      if (geometry_.kv_layers.empty() ||
          std::any_of(geometry_.kv_layers.begin(), geometry_.kv_layers.end(), is_here)) {
        share.token += (geometry_.attention.mla ? 1 : steps(geometry_.kv_heads)) *
                       (geometry_.key_head_bytes + geometry_.value_head_bytes);
      }
      for (const plan::StateGeometry& state : geometry_.states) {
        if (std::none_of(state.layers.begin(), state.layers.end(), is_here)) continue;
        std::uint64_t held = state.blocks.empty() ? 1 : 0;
        for (const std::uint32_t block : state.blocks) held += steps(block);
        const bool window = state.component == Component::kSlidingKey ||
                            state.component == Component::kSlidingValue;
        const bool index = state.component == Component::kIndex;
        (window ? share.window : index ? share.token : share.request) += held * state.unit_bytes;
      }
    }
    for (const std::uint32_t bytes : geometry_.aux_bytes) share.request += bytes;
    return share;
  }
  Share share_of_group() const {
    Share total;
    for (std::uint32_t tp = 0; tp < o_.decode.tp; ++tp) {
      for (std::uint32_t pp = 0; pp < o_.decode.pp; ++pp) total.add(share_of_rank(tp, pp));
    }
    return total;
  }
  std::uint64_t window_pages(std::uint64_t pages) const {
    return std::min<std::uint64_t>(pages, geometry_.sliding_window / page(false) + 1);
  }

  void size_pools() {
    std::uint64_t largest = 1, largest_source = 1, all = 0;
    for (const Request& request : workload_.requests) {
      largest = std::max(largest, pages_of(request, false));
      largest_source = std::max(largest_source, pages_of(request, true));
      all += pages_of(request, false);
    }
    const std::uint64_t least = largest * o_.concurrency + 8;
    const Share share = share_of_group();
    const std::uint64_t fits =
        kPoolBytes / std::max<std::uint64_t>(1, (share.token + share.window) * page(false)) /
        o_.decode.dp;
    decode_pages_ =
        static_cast<std::uint32_t>(std::min(std::max(least, fits), std::max(least, all + 8)));
    prefill_pages_ = static_cast<std::uint32_t>(largest_source * o_.concurrency + 8);
    for (std::uint32_t i = 0; i < o_.decode.dp; ++i)
      decode_pools_.emplace_back(decode_pages_ - 1, o_.concurrency + 1,
                                 100 + i);  // the last page is never used
    for (std::uint32_t i = 0; i < o_.prefill.dp; ++i)
      prefill_pools_.emplace_back(prefill_pages_, o_.concurrency + 1, 200 + i);
  }

  bool start_processes() {
    server_ = std::make_unique<Child>(
        std::vector<std::string>{"bootstrap", "--host", "127.0.0.1", "--port", "0"});
    const auto line = server_->wait_line(kStartTimeoutMs);
    if (!line || line->rfind(':') == std::string::npos)
      return complain("the bootstrap server did not start");
    const auto port = parse_int<std::uint16_t>(line->substr(line->rfind(':') + 1));
    if (!port) return complain("the bootstrap server said: " + *line);
    const auto start = [&](bool prefill, const Cut& cut, std::uint32_t dp, std::uint32_t tp,
                           std::uint32_t pp, std::uint32_t cp) {
      RankProcess rank{.prefill = prefill,
                       .dp = dp,
                       .tp = tp,
                       .pp = pp,
                       .child = std::make_unique<Child>(std::vector<std::string>{"demo-rank"})};
      // A decode DP group is an instance of its own; prefill groups register with one server.
      const Json config = {
          {"role", prefill ? "prefill" : "decode"},
          {"tp_rank", tp},
          {"tp_size", cut.tp},
          {"pp_rank", pp},
          {"pp_size", cut.pp},
          {"dp_rank", prefill ? dp : 0},
          {"dp_size", prefill ? cut.dp : 1},
          {"cp_rank", cp},
          {"cp_size", cut.cp},
          {"geometry", to_json(geometry_)},
          {"page_tokens", page(prefill)},
          {"block_tokens", workload_.block_tokens},
          {"pool_pages", prefill ? prefill_pages_ : decode_pages_},
          {"aux_rows", o_.concurrency + 1},
          {"bootstrap_port", *port},
          {"plane", o_.plane},
          {"private_memory", o_.private_memory},
          {"shared_directory", o_.shared_directory},
          {"codec", o_.codec},
          {"sabotage", !prefill && dp == 0 && tp == 0 && pp == 0 ? o_.sabotage : ""}};
      rank.child->send(config.dump());
      ranks_.push_back(std::move(rank));
    };
    for (std::uint32_t dp = 0; dp < o_.prefill.dp; ++dp) {
      for (std::uint32_t tp = 0; tp < o_.prefill.tp; ++tp) {
        for (std::uint32_t pp = 0; pp < o_.prefill.pp; ++pp) {
          for (std::uint32_t cp = 0; cp < o_.prefill.cp; ++cp)
            start(true, o_.prefill, dp, tp, pp, cp);
        }
      }
    }
    for (std::uint32_t dp = 0; dp < o_.decode.dp; ++dp) {
      for (std::uint32_t tp = 0; tp < o_.decode.tp; ++tp) {
        for (std::uint32_t pp = 0; pp < o_.decode.pp; ++pp) start(false, o_.decode, dp, tp, pp, 0);
      }
    }
    return pump([this] {
      return std::all_of(ranks_.begin(), ranks_.end(),
                         [](const RankProcess& r) { return r.ready; });
    });
  }

  static bool complain(const std::string& why) {
    fmt::print(stderr, "kvferry demo: {}\n", why);
    return false;
  }

  // Serves events until the condition holds.
  template <class Condition>
  bool pump(Condition condition, std::int64_t until_ns = 0) {
    while (!condition()) {
      if (interrupted != 0) return complain("interrupted");
      std::vector<pollfd> fds;
      for (const RankProcess& rank : ranks_)
        fds.push_back({rank.child->fd(), static_cast<short>(rank.finished ? 0 : POLLIN), 0});
      int timeout = 1000;
      if (until_ns > 0) {
        const std::int64_t left = (until_ns - monotonic_ns()) / 1000000;
        if (left <= 0) return true;
        timeout = static_cast<int>(std::min<std::int64_t>(left + 1, 1000));
      }
      if (::poll(fds.data(), fds.size(), timeout) < 0 && errno != EINTR)
        return complain("poll failed");
      for (std::size_t i = 0; i < ranks_.size(); ++i) {
        if (ranks_[i].finished) continue;
        bool ended = false;
        for (const std::string& line : ranks_[i].child->read_lines(ended)) {
          const Json event = Json::parse(line, nullptr, false);
          if (event.is_discarded()) return complain("a rank said: " + line);
          if (!on_event(ranks_[i], event)) return false;
        }
        if (ended && !ranks_[i].finished)
          return complain(fmt::format("{} tp{} pp{} dp{} ended before its time",
                                      ranks_[i].prefill ? "prefill" : "decode", ranks_[i].tp,
                                      ranks_[i].pp, ranks_[i].dp));
      }
    }
    return true;
  }

  bool on_event(RankProcess& rank, const Json& event) {
    const std::string what = event["ev"];
    if (what == "ready") {
      rank.ready = true;
      return true;
    }
    if (what == "error") return complain(event["why"].get<std::string>());
    if (what == "finished") {
      rank.finished = true;
      stray_ += event["stray"].get<std::uint64_t>();
      cpu_seconds_ += event["cpu"].get<double>();
      bytes_inline_ += event["inline"].get<std::uint64_t>();
      bytes_ring_ += event["ring"].get<std::uint64_t>();
      bytes_pulled_ += event["pulled"].get<std::uint64_t>();
      return true;
    }
    Active& a = active_.at(event["req"]);
    const auto note_failure = [&] {
      if (event["ok"].get<bool>()) return;
      if (!a.failed)
        complain(fmt::format("request {}: {}", a.number, event["why"].get<std::string>()));
      a.failed = true;
    };
    if (what == "filled" || what == "lent") {
      if (--a.waits_prepared == 0) go(a);
    } else if (what == "sent") {
      note_failure();
      bytes_ += event["bytes"].get<std::uint64_t>();
      --a.waits_sent;
    } else if (what == "done") {
      note_failure();
      a.arrived = std::max(a.arrived, event["t"].get<std::int64_t>());
      if (--a.waits_done == 0) {
        latencies_us_.push_back(static_cast<double>(a.arrived - a.went) / 1000.0);
        busy_.emplace_back(a.went, a.arrived);
      }
    } else if (what == "verified") {
      wrong_ += event["wrong"].get<std::uint64_t>();
      --a.waits_verified;
    }
    if (a.waits_prepared == 0 && a.waits_sent == 0 && a.waits_verified == 0) end(a);
    return true;
  }

  template <class Act>
  void each_rank(bool prefill, std::uint32_t group, Act act) {
    for (RankProcess& rank : ranks_) {
      if (rank.prefill == prefill && rank.dp == group) act(rank);
    }
  }

  // False: no pages are free; try again when a request has ended.
  bool begin(std::size_t number) {
    const Request& request = workload_.requests[number];
    const std::uint64_t room = number + 1;
    Active a;
    a.number = number;
    a.prefill_group = static_cast<std::uint32_t>(room % o_.prefill.dp);
    a.decode_group = static_cast<std::uint32_t>(number % o_.decode.dp);
    const std::uint64_t pages = pages_of(request, false), page_tokens = page(false);
    // A page may be shared when it is full and every block up to its end is the same.
    if (!request.block_ids.empty()) {
      Fnv hash;
      std::uint64_t hashed = 0;
      for (std::uint64_t nth = 0; (nth + 1) * page_tokens <= request.tokens; ++nth) {
        const std::uint64_t last_block = std::min<std::uint64_t>(
            ((nth + 1) * page_tokens - 1) / workload_.block_tokens, request.block_ids.size() - 1);
        for (; hashed <= last_block; ++hashed) hash.add(request.block_ids[hashed]);
        Fnv key = hash;
        key.add(nth);
        a.chain.push_back(key.value());
      }
    }
    Pool& decode = decode_pools_[a.decode_group];
    Pool& prefill = prefill_pools_[a.prefill_group];
    // What is held must be whole pages on the other side too.
    a.decode_pages = decode.pin_prefix(a.chain, page(true) / std::gcd(page(true), page(false)));
    a.held = a.decode_pages.size();
    const std::uint64_t first_source = a.held * page_tokens / page(true);
    std::vector<PageIndex> evicted, none;
    if (!decode.take(pages - a.held, a.decode_pages, a.decode_row, evicted)) {
      decode.unpin(a.chain, a.held);
      release(a.decode_group, evicted);
      return false;
    }
    release(a.decode_group, evicted);
    if (!prefill.take(pages_of(request, true) - first_source, a.prefill_pages, a.prefill_row,
                      none)) {
      decode.unpin(a.chain, a.held);
      for (std::size_t i = a.held; i < a.decode_pages.size(); ++i)
        decode.give_page(a.decode_pages[i]);
      decode.give_row(a.decode_row);
      return false;
    }
    const std::uint32_t senders = o_.prefill.tp * o_.prefill.pp * o_.prefill.cp,
                        receivers = o_.decode.tp * o_.decode.pp;
    a.waits_prepared = senders + receivers;
    a.waits_sent = senders;
    a.waits_done = a.waits_verified = receivers;
    const Json content = request.block_ids;
    each_rank(false, a.decode_group, [&](RankProcess& rank) {
      rank.child->send(Json{
          {"cmd", "lend"},
          {"req", number},
          {"room", room},
          {"pages", a.decode_pages},
          {"new_begin", a.held},
          {"end_token", common_tokens(request)},
          {"aux_row", a.decode_row},
          {"tokens", request.tokens},
          {"block_ids",
           content}}.dump());
    });
    each_rank(true, a.prefill_group, [&](RankProcess& rank) {
      rank.child->send(Json{
          {"cmd", "fill"},
          {"req", number},
          {"room", room},
          {"pages", a.prefill_pages},
          {"first_page", first_source},
          {"aux_row", a.prefill_row},
          {"tokens", request.tokens},
          {"block_ids",
           content}}.dump());
    });
    // What must arrive, from the model and the request alone.
    const Share share = share_of_group();
    expected_ += (common_tokens(request) - a.held * page_tokens) * share.token +
                 window_pages(pages - a.held) * page_tokens * share.window + share.request;
    skipped_ += a.held * page_tokens * share.token;
    active_[number] = std::move(a);
    return true;
  }

  void go(Active& a) {
    a.went = a.arrived = monotonic_ns();
    each_rank(true, a.prefill_group, [&](RankProcess& rank) {
      rank.child->send(Json{{"cmd", "go"}, {"req", a.number}}.dump());
    });
  }

  void release(std::uint32_t group, const std::vector<PageIndex>& pages) {
    if (pages.empty()) return;
    each_rank(false, group, [&](RankProcess& rank) {
      rank.child->send(Json{{"cmd", "release"}, {"pages", pages}}.dump());
    });
  }

  void end(Active& a) {
    Pool& decode = decode_pools_[a.decode_group];
    Pool& prefill = prefill_pools_[a.prefill_group];
    decode.unpin(a.chain, a.held);
    std::vector<PageIndex> freed;
    for (std::size_t i = a.held; i < a.decode_pages.size(); ++i) {
      if (!a.failed && i < a.chain.size() && decode.hold(a.chain[i], a.decode_pages[i])) continue;
      freed.push_back(a.decode_pages[i]);
      decode.give_page(a.decode_pages[i]);
    }
    release(a.decode_group, freed);
    decode.give_row(a.decode_row);
    for (const PageIndex page : a.prefill_pages) prefill.give_page(page);
    prefill.give_row(a.prefill_row);
    failed_ += a.failed ? 1 : 0;
    ++ended_;
    active_.erase(a.number);
  }

  bool replay(bool terminal) {
    const std::int64_t start = monotonic_ns();
    std::size_t next = 0, shown = 0;
    const std::size_t total = workload_.requests.size();
    while (ended_ < total) {
      std::int64_t until = 0;
      while (next < total && active_.size() < o_.concurrency) {
        if (o_.speed > 0) {
          const std::int64_t due =
              start + static_cast<std::int64_t>(
                          (workload_.requests[next].arrival_ms - workload_.requests[0].arrival_ms) *
                          1e6 / o_.speed);
          if (monotonic_ns() < due) {
            until = due;
            break;
          }
        }
        if (!begin(next)) {
          if (active_.empty())
            return complain(fmt::format("request {} needs more pages than the pool has", next));
          break;
        }
        ++next;
      }
      const std::size_t before = ended_;
      if (!pump([&] { return ended_ > before; }, until)) return false;
      const std::size_t percent = ended_ * 100 / total;
      if (terminal) {
        fmt::print("\r[{:<40}] {}/{} rooms, {:.2f} GB ", std::string(percent * 40 / 100, '='),
                   ended_, total, static_cast<double>(bytes_) / 1e9);
        std::fflush(stdout);
      } else if (percent / 10 > shown) {
        shown = percent / 10;
        fmt::print("{:3}%  {}/{} rooms, {:.2f} GB\n", percent, ended_, total,
                   static_cast<double>(bytes_) / 1e9);
        std::fflush(stdout);
      }
    }
    if (terminal) fmt::print("\n");
    return true;
  }

  bool finish() {
    for (RankProcess& rank : ranks_) rank.child->send(Json{{"cmd", "finish"}}.dump());
    if (!pump([this] {
          return std::all_of(ranks_.begin(), ranks_.end(),
                             [](const RankProcess& r) { return r.finished; });
        }))
      return false;
    for (RankProcess& rank : ranks_) rank.child->finish();
    return true;
  }

  int report() {
    // Time in which at least one room was under way.
    std::sort(busy_.begin(), busy_.end());
    std::int64_t busy_ns = 0, reach = 0;
    for (const auto& [from, to] : busy_) {
      busy_ns += std::max<std::int64_t>(0, to - std::max(from, reach));
      reach = std::max(reach, to);
    }
    std::sort(latencies_us_.begin(), latencies_us_.end());
    const auto percentile = [&](double p) {
      return latencies_us_.empty() ? 0.0
                                   : latencies_us_[static_cast<std::size_t>(
                                         p * static_cast<double>(latencies_us_.size() - 1))];
    };
    const double gigabytes = static_cast<double>(bytes_) / 1e9;
    const double speed = busy_ns > 0 ? gigabytes / (static_cast<double>(busy_ns) / 1e9) : 0;
    const double cpu = gigabytes > 0 ? cpu_seconds_ / gigabytes : 0;
    fmt::print("\n{:<26}{}\n", "rooms", ended_);
    fmt::print("{:<26}{}\n", "failed rooms", failed_);
    fmt::print("{:<26}{} ({:.3f} GB)\n", "bytes landed", bytes_, gigabytes);
    fmt::print("{:<26}{}\n", "bytes expected", expected_);
    fmt::print("{:<26}{}\n", "prefix bytes skipped", skipped_);
    fmt::print("{:<26}{}\n", "wrong bytes", wrong_);
    fmt::print("{:<26}{}\n", "stray bytes", stray_);
    fmt::print(
        "{:<26}{:.2f} GB/s while rooms were under way ({:.1f} s of {:.1f} s; the rest fills and "
        "verifies)\n",
        "speed", speed, static_cast<double>(busy_ns) / 1e9, seconds_);
    fmt::print(
        "{:<26}{:.3f} GB through sockets, {:.3f} through shared rings, {:.3f} copied from shared "
        "memory\n",
        "ways", static_cast<double>(bytes_inline_) / 1e9, static_cast<double>(bytes_ring_) / 1e9,
        static_cast<double>(bytes_pulled_) / 1e9);
    fmt::print("{:<26}p50 {:.0f} us, p99 {:.0f} us\n", "room latency", percentile(0.5),
               percentile(0.99));
    fmt::print("{:<26}{:.2f} (all ranks, without filling and verifying)\n", "CPU seconds per GB",
               cpu);
    fmt::print("{:<26}{:.1f} GB/s; this run reached {:.0f} %\n", "raw copy, one thread", baseline_,
               speed / baseline_ * 100);
    // Reference peers elect no writer: several prefill ranks may write the same aux row.
    const bool all_there = o_.codec == "native" ? bytes_ == expected_ : bytes_ >= expected_;
    const bool right = failed_ == 0 && wrong_ == 0 && stray_ == 0 && all_there;
    fmt::print("{}\n", right ? "every byte is right" : "NOT every byte is right");
    std::fflush(stdout);
    if (!o_.json.empty()) {
      std::ofstream file(o_.json);
      file << Json{{"requests", workload_.requests.size()},
                   {"rooms", ended_},
                   {"failed_rooms", failed_},
                   {"bytes", bytes_},
                   {"expected_bytes", expected_},
                   {"prefix_bytes_skipped", skipped_},
                   {"wrong_bytes", wrong_},
                   {"stray_bytes", stray_},
                   {"scale", workload_.scale},
                   {"seconds", seconds_},
                   {"gigabytes_per_second", speed},
                   {"room_latency_us", {{"p50", percentile(0.5)}, {"p99", percentile(0.99)}}},
                   {"cpu_seconds_per_gigabyte", cpu},
                   {"baseline_gigabytes_per_second", baseline_},
                   {"bytes_inline", bytes_inline_},
                   {"bytes_ring", bytes_ring_},
                   {"bytes_pulled", bytes_pulled_}}
                  .dump(2)
           << "\n";
      if (!file) {
        complain(fmt::format("cannot write {}", o_.json));
        return kExitUsage;
      }
    }
    return right ? kExitOk : kExitWrong;
  }

  const DemoOptions& o_;
  const plan::Geometry geometry_;
  const Workload workload_;
  double baseline_ = 0, seconds_ = 0, cpu_seconds_ = 0;
  std::uint32_t decode_pages_ = 0, prefill_pages_ = 0;
  std::vector<Pool> decode_pools_, prefill_pools_;
  std::unique_ptr<Child> server_;
  std::vector<RankProcess> ranks_;
  std::map<std::size_t, Active> active_;
  std::size_t ended_ = 0, failed_ = 0;
  std::uint64_t bytes_inline_ = 0, bytes_ring_ = 0,
                bytes_pulled_ = 0;  // as the prefill ranks count
  std::uint64_t bytes_ = 0, expected_ = 0, skipped_ = 0, wrong_ = 0, stray_ = 0;
  std::vector<double> latencies_us_;
  std::vector<std::pair<std::int64_t, std::int64_t>> busy_;
};

}  // namespace

Result<Cut> parse_cut(const std::string& text) {
  Cut cut;
  std::string_view rest = text;
  while (!rest.empty()) {
    const auto end = std::min(rest.find(','), rest.size());
    const std::string_view part = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    const auto equals = part.find('=');
    const auto value = equals == std::string_view::npos
                           ? std::nullopt
                           : parse_int<std::uint32_t>(part.substr(equals + 1));
    const std::string_view name = part.substr(0, equals);
    if (!value || *value == 0 || *value > 64 ||
        (name != "tp" && name != "pp" && name != "dp" && name != "cp")) {
      return Status(
          Code::kInvalidArgument,
          fmt::format("'{}': expected tp=N, pp=N, cp=N or dp=N with N from 1 to 64", part));
    }
    (name == "tp" ? cut.tp : name == "pp" ? cut.pp : name == "cp" ? cut.cp : cut.dp) = *value;
  }
  return cut;
}

int run_demo(const DemoOptions& options) {
  const auto usage = [](const Status& status) {
    fmt::print(stderr, "kvferry demo: {}\n", status.message());
    return kExitUsage;
  };
  auto geometry = load_model(options.model);
  if (!geometry.ok()) return usage(geometry.status());
  if (options.plane != "tcp" && options.plane != "shm" && options.plane != "auto")
    return usage(Status(Code::kInvalidArgument,
                        fmt::format("plane '{}' is not there (tcp, shm, auto)", options.plane)));
  if (options.plane == "shm" && options.codec != "native")
    return usage(Status(Code::kInvalidArgument,
                        "plane shm reaches native ranks only; codec sglang needs tcp or auto"));
  if (options.prefill.pp > geometry->layers || options.decode.pp > geometry->layers)
    return usage(Status(Code::kInvalidArgument,
                        fmt::format("more pipeline stages than the {} layers", geometry->layers)));
  const Status fit = check_cuts(
      *geometry, options.prefill, options.decode, options.codec == "native", options.page_size,
      options.decode_page_size == 0 ? options.page_size : options.decode_page_size);
  if (!fit.ok()) return usage(fit);
  std::uint64_t copies = 1;  // decode ranks that hold the same bytes
  if (geometry->attention.mla) copies = options.decode.tp;
  if (!geometry->attention.mla && options.decode.tp > geometry->kv_heads)
    copies = (options.decode.tp + geometry->kv_heads - 1) / geometry->kv_heads;
  auto workload = make_workload({.trace = options.trace,
                                 .requests = options.requests,
                                 .tokens = options.tokens,
                                 .scale = options.scale,
                                 .bytes_per_token = bytes_per_token(*geometry) * copies});
  if (!workload.ok()) return usage(workload.status());
  struct sigaction action {};
  action.sa_handler = on_interrupt;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  signal(SIGPIPE, SIG_IGN);
  return Demo(options, std::move(*geometry), std::move(*workload)).run();
}

}  // namespace kvferry::cli
