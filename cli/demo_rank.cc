#include "cli/demo_rank.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <limits>
#include <map>
#include <set>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/models.h"
#include "cli/pattern.h"
#include "cli/workload.h"
#include "kvferry/endpoint.h"
#include "kvferry/memory.h"
#include "src/plan/components.h"
#include "src/plan/geometry.h"

namespace kvferry::cli {
namespace {

using Json = nlohmann::json;

constexpr std::uint32_t kAuxKind = 99;
constexpr long kNapNs = 100000;  // between two looks at open rooms

std::int64_t monotonic_ns() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}
double thread_cpu() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}
double process_cpu() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

void say(const Json& json) {
  const std::string line = json.dump() + "\n";
  std::size_t done = 0;
  while (done < line.size()) {
    const ssize_t n = write(1, line.data() + done, line.size() - done);
    if (n <= 0 && errno != EINTR) _exit(3);  // the coordinator is gone
    if (n > 0) done += static_cast<std::size_t>(n);
  }
}

// Bytes that took one way, out of an endpoint's metrics.
std::uint64_t bytes_by(const std::string& metrics, const std::string& way) {
  const std::string series = "\nkvferry_plane_bytes_total{way=\"" + way + "\"} ";
  const auto at = metrics.find(series);
  return at == std::string::npos ? 0 : std::stoull(metrics.substr(at + series.size()));
}

// A request as this rank sees it.
struct Job {
  std::size_t number = 0;
  std::vector<PageIndex> pages;  // of the whole prompt (decode) or of what is sent (prefill)
  std::uint64_t first_page = 0;  // prefill: page of the prompt that pages[0] is
  std::uint64_t new_begin =
      0;  // decode: pages[new_begin..] are lent, those before are held already
  // Decode: the other side has no page for what is behind it.
  std::uint64_t end_token = std::numeric_limits<std::uint64_t>::max();
  std::uint32_t aux_row = 0;
  Request request;
  Sender sender;
  Receiver receiver;
  bool ended = false;
};

class Rank {
 public:
  explicit Rank(const Json& config) {
    prefill_ = config["role"] == "prefill";
    place_ = {.tp_rank = config["tp_rank"],
              .tp_size = config["tp_size"],
              .pp_rank = config["pp_rank"],
              .pp_size = config["pp_size"],
              .cp_rank = config["cp_rank"],
              .cp_size = config["cp_size"],
              .dp_rank = config["dp_rank"],
              .dp_size = config["dp_size"]};
    geometry_ = geometry_from_json(config["geometry"]);
    page_tokens_ = config["page_tokens"];
    block_tokens_ = config["block_tokens"];
    sabotage_ = config["sabotage"];
    bootstrap_ = {"127.0.0.1", config["bootstrap_port"].get<std::uint16_t>()};
    layout_ = plan::layout_of_rank(geometry_, place_, page_tokens_, config["pool_pages"],
                                   config["aux_rows"]);
    bytes_ = plan::place_slabs(layout_, 0, 4096);
    if (prefill_ && config["plane"] != "tcp" && !config["private_memory"].get<bool>()) {
      auto shared = SharedMemory::create(bytes_);
      if (!shared.ok()) fail(shared.status().to_string());
      memory_ = static_cast<std::uint8_t*>(shared->data());
      shared_.push_back(std::move(*shared));
    } else {
      memory_ = static_cast<std::uint8_t*>(
          mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
      if (memory_ == MAP_FAILED) fail(fmt::format("no memory for {} bytes of pages", bytes_));
      madvise(memory_, bytes_, MADV_HUGEPAGE);
    }
    std::memset(memory_, kPoison, bytes_);
    plan::place_slabs(layout_, reinterpret_cast<std::uint64_t>(memory_), 4096);
    const auto common = [&](EndpointOptions& o) {
      o.place = place_;
      o.layout = layout_;
      o.state_kinds = plan::kinds_of(geometry_);
      o.mla = geometry_.attention.mla;
      o.hybrid_mla = geometry_.attention.hybrid_mla;
      o.total_kv_heads = geometry_.kv_heads;
      o.native = config["codec"] == "native";
      const std::string plane = config["plane"];
      o.plane = plane == "tcp"   ? PlaneKind::kTcp
                : plane == "shm" ? PlaneKind::kShm
                                 : PlaneKind::kAuto;
      o.shared_directory = config["shared_directory"];
      for (const SharedMemory& memory : shared_) o.shared.push_back(memory.region());
      o.log_level = LogLevel::kError;
      (void)apply_environment(o.settings,
                              [](const char* name) -> const char* { return std::getenv(name); });
    };
    if (prefill_) {
      PrefillOptions o;
      common(o);
      o.bootstrap = bootstrap_;
      const auto stage = plan::layers_of_stage(geometry_.layers, place_.pp_size, place_.pp_rank);
      o.stage_begin = stage.begin;
      o.stage_layers = stage.count;
      if (o.settings.model_layers == 0) o.settings.model_layers = geometry_.layers;
      auto made = PrefillEndpoint::create(o);
      if (!made.ok()) fail(made.status().to_string());
      prefill_endpoint_ = std::move(*made);
    } else {
      DecodeOptions o;
      common(o);
      auto made = DecodeEndpoint::create(o);
      if (!made.ok()) fail(made.status().to_string());
      decode_endpoint_ = std::move(*made);
    }
    start_process_ = process_cpu();
  }

  bool ready() {
    if (said_ready_) return false;
    if (prefill_ && !prefill_endpoint_->registered()) return true;
    said_ready_ = true;
    say({{"ev", "ready"}});
    return false;
  }

  void command(const Json& c) {
    const std::string what = c["cmd"];
    if (what == "fill") {
      Job& job = new_job(c);
      auto sender = prefill_endpoint_->open(RoomId{c["room"].get<std::uint64_t>()});
      if (!sender.ok()) fail(sender.status().to_string());
      job.sender = *sender;
      (void)job.sender.init(job.pages.size(), job.aux_row);
      const double before = thread_cpu();
      for_each(job, job.first_page, [](std::uint8_t* at, std::size_t n, const PatternPlace& p) {
        fill_pattern(at, n, p);
      });
      own_work_ += thread_cpu() - before;
      say({{"ev", "filled"}, {"req", job.number}});
    } else if (what == "go") {
      const auto it = jobs_.find(c["req"]);
      if (it == jobs_.end()) return;  // it has failed before
      Job& job = it->second;
      // As an engine with chunked prefill does: the first half, then the rest.
      const std::size_t half = job.pages.size() / 2;
      const std::span<const PageIndex> pages(job.pages);
      Status status;
      if (half > 0) status = job.sender.send(pages.first(half));
      if (status.ok()) status = job.sender.send(pages.subspan(half), states_of(job));
      if (!status.ok()) job.sender.abort(status.to_string());
    } else if (what == "lend") {
      Job& job = new_job(c);
      auto receiver = decode_endpoint_->open(RoomId{c["room"].get<std::uint64_t>()}, bootstrap_);
      if (!receiver.ok()) fail(receiver.status().to_string());
      job.receiver = *receiver;
      (void)job.receiver.init();
      const std::span<const PageIndex> lent =
          std::span<const PageIndex>(job.pages).subspan(job.new_begin);
      if (const Status status = job.receiver.send_metadata(
              lent, job.aux_row, job.new_begin * page_tokens_, states_of(job));
          !status.ok())
        job.receiver.abort(status.to_string());
      say({{"ev", "lent"}, {"req", job.number}});
    } else if (what == "release") {
      const double before = thread_cpu();
      for (const PageIndex page : c["pages"].get<std::vector<PageIndex>>()) {
        owned_.erase(page);
        for (const Slab& slab : layout_.slabs) {
          if (is_paged(slab))
            std::memset(reinterpret_cast<void*>(slab.base + static_cast<std::uint64_t>(page) *
                                                                slab.item_stride),
                        kPoison, slab.item_bytes);
        }
      }
      own_work_ += thread_cpu() - before;
    } else if (what == "finish") {
      finish();
    }
  }

  [[nodiscard]] bool busy() const { return !jobs_.empty(); }

  void look() {
    for (auto it = jobs_.begin(); it != jobs_.end();) {
      Job& job = it->second;
      const bool over = prefill_ ? look_at_sender(job) : look_at_receiver(job);
      it = over ? jobs_.erase(it) : std::next(it);
    }
  }

 private:
  [[noreturn]] static void fail(const std::string& why) {
    say({{"ev", "error"}, {"why", why}});
    std::exit(1);
  }

  Job& new_job(const Json& c) {
    Job& job = jobs_[c["req"]];
    job.number = c["req"];
    job.pages = c["pages"].get<std::vector<PageIndex>>();
    job.first_page = c.value("first_page", std::uint64_t{0});
    job.new_begin = c.value("new_begin", std::uint64_t{0});
    job.end_token = c.value("end_token", job.end_token);
    job.aux_row = c["aux_row"];
    job.request.tokens = c["tokens"];
    job.request.block_ids = c["block_ids"].get<std::vector<std::uint64_t>>();
    if (!prefill_) {
      for (std::size_t i = job.new_begin; i < job.pages.size(); ++i) owned_.insert(job.pages[i]);
    }
    return job;
  }

  std::uint64_t content_of(const Job& job, std::uint64_t token) const {
    if (job.request.block_ids.empty()) return 0x5EED0000ULL + job.number;
    return job.request.block_ids[std::min<std::uint64_t>(token / block_tokens_,
                                                         job.request.block_ids.size() - 1)];
  }

  static bool is_paged(const Slab& slab) {
    const auto kind = state_of(slab.component);
    return slab.component != Component::kAux &&
           (!kind || plan::row_of(*kind).pairing == plan::Pairing::kPages);
  }

  // The pages of a job that are moved: those that are not held already.
  static std::span<const PageIndex> moved_pages(const Job& job) {
    return std::span(job.pages).subspan(job.new_begin);
  }
  // How many of its last moved pages a sliding window can still look into.
  std::size_t window_pages(const Job& job) const {
    return std::min<std::size_t>(moved_pages(job).size(),
                                 geometry_.sliding_window / page_tokens_ + 1);
  }

  // What the request owns beside its pages: a window or an index over them, the slot with the
  // number of its aux row.
  std::vector<StateItems> states_of(const Job& job) const {
    std::vector<StateItems> states;
    for (const StateKind kind : plan::kinds_of(layout_)) {
      const auto pages = moved_pages(job);
      const auto tail = pages.last(window_pages(job));
      if (plan::row_of(kind).pairing != plan::Pairing::kPages) {
        states.push_back({kind, {static_cast<PageIndex>(job.aux_row)}});
      } else if (kind == StateKind::kSlidingWindow) {
        states.push_back({kind, {tail.begin(), tail.end()}});
      } else {
        states.push_back({kind, {pages.begin(), pages.end()}});
      }
    }
    return states;
  }

  // Visits every piece of the job's memory: f(address, bytes, what belongs there). `first_page` is
  // the prompt's page of pages[0].
  template <class F>
  void for_each(const Job& job, std::uint64_t first_page, F f) {
    for (const Slab& slab : layout_.slabs) {
      const auto kind = static_cast<std::uint32_t>(slab.component);
      const auto at = [&](std::uint64_t item, std::uint32_t row, std::uint32_t head) {
        return reinterpret_cast<std::uint8_t*>(slab.base + item * slab.item_stride +
                                               row * slab.row_stride + head * slab.head_stride);
      };
      if (!is_paged(slab)) {
        const std::uint32_t word = slab.component == Component::kAux ? kAuxKind : kind;
        for (std::uint32_t h = 0; h < slab.head_count; ++h) {
          f(at(job.aux_row, 0, h), slab.head_bytes,
            PatternPlace{0x5EED0000ULL + job.number, word, slab.layer, slab.head_begin + h, 0});
        }
        continue;
      }
      const bool window = state_of(slab.component) == StateKind::kSlidingWindow;
      for (std::size_t i = window ? job.pages.size() - window_pages(job) : 0; i < job.pages.size();
           ++i) {
        for (std::uint32_t row = 0; row < slab.rows_per_item; ++row) {
          const std::uint64_t token = (first_page + i) * page_tokens_ + row;
          if (token >= job.end_token) break;
          const std::uint64_t content = content_of(job, token);
          for (std::uint32_t h = 0; h < slab.head_count; ++h) {
            f(at(static_cast<std::uint64_t>(job.pages[i]), row, h), slab.head_bytes,
              PatternPlace{content, kind, slab.layer, slab.head_begin + h, token});
          }
        }
      }
    }
  }

  bool look_at_sender(Job& job) {
    const RoomState state = job.sender.poll();
    if (!is_terminal(state) || !job.sender.pages_reusable()) return false;
    say({{"ev", "sent"},
         {"req", job.number},
         {"ok", state == RoomState::kSuccess},
         {"bytes", job.sender.bytes_moved()},
         {"why", job.sender.failure().status.to_string()}});
    job.sender.clear();
    return true;
  }

  bool look_at_receiver(Job& job) {
    const RoomState state = job.receiver.poll();
    if (!is_terminal(state)) return false;
    if (!job.ended) {
      job.ended = true;
      say({{"ev", "done"},
           {"req", job.number},
           {"ok", state == RoomState::kSuccess},
           {"t", monotonic_ns()},
           {"why", job.receiver.failure().status.to_string()}});
    }
    if (!job.receiver.pages_reusable()) return false;
    job.receiver.clear();
    std::uint64_t wrong = 0, bytes = 0;
    const double before = thread_cpu();
    if (state == RoomState::kSuccess) {
      sabotage(job);
      for_each(job, 0, [&](const std::uint8_t* at, std::size_t n, const PatternPlace& p) {
        wrong += count_wrong(at, n, p);
        bytes += n;
      });
    }
    for (const Slab& slab : layout_.slabs) {
      if (!is_paged(slab))
        std::memset(reinterpret_cast<void*>(slab.base + job.aux_row * slab.item_stride), kPoison,
                    slab.item_bytes);
    }
    own_work_ += thread_cpu() - before;
    say({{"ev", "verified"}, {"req", job.number}, {"wrong", wrong}, {"bytes", bytes}});
    return true;
  }

  // Damages one block on purpose, so that a test can see that damage is seen.
  void sabotage(const Job& job) {
    if (sabotage_.empty() || sabotaged_ || job.new_begin == job.pages.size()) return;
    sabotaged_ = true;
    const Slab& slab = layout_.slabs.front();
    const auto block = [&](PageIndex page) {
      return reinterpret_cast<std::uint8_t*>(slab.base +
                                             static_cast<std::uint64_t>(page) * slab.item_stride);
    };
    std::uint8_t* at = block(job.pages[job.new_begin]);
    if (sabotage_ == "wrong") {
      for (std::uint64_t i = 0; i < slab.item_bytes; ++i) at[i] ^= 0xFF;
    } else if (sabotage_ == "drop") {
      std::memset(at, kPoison, slab.item_bytes);
    } else if (sabotage_ == "stray") {
      // The last page is kept free by the coordinator for this.
      std::memset(block(static_cast<PageIndex>(slab.item_count - 1)), 0x55, slab.item_bytes);
    }
  }

  void finish() {
    const double cpu = process_cpu() - start_process_ - own_work_;
    // Whatever is in no page of a room or of a held prefix must still be poison.
    std::uint64_t stray = 0;
    if (!prefill_) {
      std::vector<std::uint8_t> poison(65536, kPoison);
      const auto scan = [&](const std::uint8_t* at, std::uint64_t n) {
        for (std::uint64_t i = 0; i < n; i += poison.size()) {
          const std::uint64_t part = std::min<std::uint64_t>(poison.size(), n - i);
          if (std::memcmp(at + i, poison.data(), part) == 0) continue;
          for (std::uint64_t b = i; b < i + part; ++b) stray += at[b] != kPoison ? 1 : 0;
        }
      };
      std::uint64_t end_of_last = reinterpret_cast<std::uint64_t>(memory_);
      for (const Slab& slab : layout_.slabs) {
        if (slab.base > end_of_last)  // between the pools
          scan(reinterpret_cast<const std::uint8_t*>(end_of_last), slab.base - end_of_last);
        for (std::uint32_t item = 0; item < slab.item_count; ++item) {
          if (is_paged(slab) && owned_.contains(static_cast<PageIndex>(item))) continue;
          scan(reinterpret_cast<const std::uint8_t*>(slab.base + item * slab.item_stride),
               slab.item_bytes);
        }
        end_of_last = std::max(
            end_of_last, slab.base + slab.item_stride * (slab.item_count - 1) + slab.item_bytes);
      }
      scan(reinterpret_cast<const std::uint8_t*>(end_of_last),
           reinterpret_cast<std::uint64_t>(memory_) + bytes_ - end_of_last);
    }
    const std::string metrics = prefill_ ? prefill_endpoint_->metrics() : "";
    prefill_endpoint_.reset();
    decode_endpoint_.reset();
    say({{"ev", "finished"},
         {"stray", stray},
         {"cpu", cpu},
         {"inline", bytes_by(metrics, "inline")},
         {"ring", bytes_by(metrics, "ring")},
         {"pulled", bytes_by(metrics, "pulled")}});
    std::exit(0);
  }

  bool prefill_ = false, said_ready_ = false, sabotaged_ = false;
  RankPlace place_;
  plan::Geometry geometry_;
  std::uint32_t page_tokens_ = 1;
  std::uint64_t block_tokens_ = 512, bytes_ = 0;
  std::string sabotage_;
  Address bootstrap_;
  Layout layout_;
  std::uint8_t* memory_ = nullptr;
  std::vector<SharedMemory> shared_;  // none or one, and memory_ is in it
  std::unique_ptr<PrefillEndpoint> prefill_endpoint_;
  std::unique_ptr<DecodeEndpoint> decode_endpoint_;
  std::map<std::size_t, Job> jobs_;
  std::set<PageIndex> owned_;  // decode: pages that hold something
  double start_process_ = 0, own_work_ = 0;
};

}  // namespace

int run_demo_rank() {
  std::string buffer;
  std::unique_ptr<Rank> rank;
  fcntl(0, F_SETFL, O_NONBLOCK);
  for (;;) {
    pollfd input{0, POLLIN, 0};
    const bool waiting = rank != nullptr && (rank->ready() || rank->busy());
    const timespec nap{0, kNapNs};
    ppoll(&input, 1, waiting ? &nap : nullptr, nullptr);
    if (input.revents != 0) {
      char chunk[65536];
      const ssize_t n = read(0, chunk, sizeof chunk);
      if (n == 0) return 0;  // the coordinator has closed us
      if (n > 0) buffer.append(chunk, static_cast<std::size_t>(n));
      std::size_t begin = 0;
      for (std::size_t end; (end = buffer.find('\n', begin)) != std::string::npos;
           begin = end + 1) {
        const Json line = Json::parse(buffer.substr(begin, end - begin));
        if (rank == nullptr) {
          rank = std::make_unique<Rank>(line);
        } else {
          rank->command(line);
        }
      }
      buffer.erase(0, begin);
    }
    if (rank != nullptr) rank->look();
  }
}

}  // namespace kvferry::cli
