#include "src/data/copier/copier.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>

#include "src/base/numa.h"

namespace kvferry::data {
namespace {

constexpr std::size_t kBatchPieces = 256;          // one call of a kernel when alone
constexpr std::size_t kPoolBatchPieces = 16384;    // and when shared
constexpr std::uint64_t kSharedLeast = 128 << 10;  // bytes below which waking others costs more
constexpr std::uint64_t kShareBytes = 32 << 10;    // one thread's part at a time
constexpr std::size_t kCoresPerThread = 8, kThreadsMost = 8;

}  // namespace

std::size_t copier_threads(const Settings& settings, std::size_t cores) {
  if (settings.copier_threads > 0) return static_cast<std::size_t>(settings.copier_threads);
  // A host runs one rank on each accelerator, and its cores feed them all: an eighth of them
  // copies.
  return std::clamp<std::size_t>(cores / kCoresPerThread, 1, kThreadsMost);
}

// Helpers that copy parts of one batch at a time.
class Copier::Pool {
 public:
  explicit Pool(std::size_t helpers) {
    for (std::size_t i = 0; i < helpers; ++i) threads_.emplace_back([this] { help(); });
  }
  ~Pool() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  [[nodiscard]] std::size_t size() const { return threads_.size(); }

  void move_near(int node) {
    const std::lock_guard lock(mutex_);
    node_ = node;
  }

  void run(const Kernel& kernel, std::span<const Piece> pieces, std::uint64_t bytes) {
    parts_.clear();
    const std::uint64_t share = std::max<std::uint64_t>(kShareBytes, bytes / (4 * (size() + 1)));
    std::uint64_t in_part = 0;
    std::size_t begin = 0;
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      in_part += pieces[i].bytes;
      if (in_part < share && i + 1 < pieces.size()) continue;
      parts_.push_back(pieces.subspan(begin, i + 1 - begin));
      begin = i + 1;
      in_part = 0;
    }
    {
      const std::lock_guard lock(mutex_);
      kernel_ = &kernel;
      next_ = 0;
      ++job_;
    }
    wake_.notify_all();
    work();
    // Parts that others took are theirs to finish before the caller may say that all is there.
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return working_ == 0; });
    kernel_ = nullptr;
  }

 private:
  void work() {
    for (;;) {
      const std::size_t part = next_.fetch_add(1, std::memory_order_relaxed);
      if (part >= parts_.size()) break;
      kernel_->copy(parts_[part]);
    }
    landing_fence();
  }
  void help() {
    std::uint64_t seen = 0;
    std::optional<int> here;
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return stopping_ || (job_ != seen && kernel_ != nullptr); });
      if (stopping_) return;
      seen = job_;
      const std::optional<int> node = node_;
      ++working_;  // under the mutex: the caller cannot go on, nor change the parts, before us
      lock.unlock();
      if (node && node != here) kvferry::run_near(*(here = node));
      work();
      lock.lock();
      if (--working_ == 0) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  bool stopping_ = false;
  std::uint64_t job_ = 0;
  std::optional<int> node_;
  std::size_t working_ = 0;
  const Kernel* kernel_ = nullptr;  // null: no job
  // Written by the caller while nobody works; read by helpers after they entered under the mutex.
  std::vector<std::span<const Piece>> parts_;
  std::atomic<std::size_t> next_{0};
  std::vector<std::thread> threads_;
};

Copier::Copier(const Settings& settings) {
  if (settings.copier_kernel == 0) {
    choice_ = measured_kernels();
  } else {
    const std::size_t index = std::min<std::size_t>(settings.copier_kernel, kernels().size()) - 1;
    for (auto& kind : choice_.kernel) kind.fill(static_cast<std::uint8_t>(index));
  }
  const std::size_t threads = copier_threads(settings, std::thread::hardware_concurrency());
  if (threads > 1) pool_ = std::make_unique<Pool>(threads - 1);
  batch_.resize(pool_ != nullptr ? kPoolBatchPieces : kBatchPieces);
}

Copier::~Copier() = default;

void Copier::run_near(int node) {
  if (pool_ != nullptr) pool_->move_near(node);
}

std::size_t Copier::threads() const {
  return pool_ == nullptr ? 1 : pool_->size() + 1;
}

void Copier::run(CopyKind kind, std::span<const Piece> pieces) {
  if (pieces.empty()) return;
  const Kernel& kernel = choice_.at(kind, pieces.back().bytes);
  if (pool_ == nullptr) return kernel.copy(pieces);
  std::uint64_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.bytes;
  if (bytes < kSharedLeast) return kernel.copy(pieces);
  pool_->run(kernel, pieces, bytes);
}

template <class ToPiece>
std::uint64_t Copier::move(CopyKind kind, PlanCursor& cursor, std::uint64_t budget,
                           ToPiece to_piece) {
  // Of the batch that grows here; locals, because this runs once for each row.
  std::size_t size = SIZE_MAX, kernel_class = 0;
  Piece* next = batch_.data();
  Piece* const end = next + batch_.size();
  const auto flush = [&] {
    run(kind, {batch_.data(), next});
    next = batch_.data();
  };
  const std::uint64_t moved =
      cursor.advance(budget, [&](std::uint64_t source, std::uint64_t target, std::uint64_t bytes) {
        if (bytes != size) {  // a piece of another size may want another kernel
          if (next != batch_.data() && size_class(bytes) != kernel_class) flush();
          size = bytes;
          kernel_class = size_class(bytes);
        }
        if (pool_ == nullptr) {
          *next++ = to_piece(source, target, bytes);
          if (next == end) flush();
          return;
        }
        // Helpers share pieces, so a large one is cut.
        for (std::uint64_t done = 0; done < bytes; done += kShareBytes) {
          *next++ = to_piece(source + done, target + done, std::min(kShareBytes, bytes - done));
          if (next == end) flush();
        }
      });
  flush();
  landing_fence();
  return moved;
}

std::uint64_t Copier::gather(PlanCursor& cursor, std::uint64_t budget, char* to) {
  return move(CopyKind::kGather, cursor, budget,
              [&to](std::uint64_t source, std::uint64_t, std::uint64_t bytes) {
                const Piece piece{to, reinterpret_cast<const char*>(source), bytes};
                to += bytes;
                return piece;
              });
}

std::uint64_t Copier::scatter(PlanCursor& cursor, std::uint64_t budget, const char* from) {
  return move(CopyKind::kScatter, cursor, budget,
              [&from](std::uint64_t, std::uint64_t target, std::uint64_t bytes) {
                const Piece piece{reinterpret_cast<char*>(target), from, bytes};
                from += bytes;
                return piece;
              });
}

std::uint64_t Copier::direct(PlanCursor& cursor, std::uint64_t budget) {
  return move(
      CopyKind::kDirect, cursor, budget,
      [](std::uint64_t source, std::uint64_t target, std::uint64_t bytes) {
        return Piece{reinterpret_cast<char*>(target), reinterpret_cast<const char*>(source), bytes};
      });
}

}  // namespace kvferry::data
