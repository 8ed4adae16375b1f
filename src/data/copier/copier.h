// Moves the bytes of a plan: gathers them into a buffer, scatters them from one, or copies them
// straight from place to place. Used by every plane.
//
// Kernels are chosen by what the copy is and how large its pieces are (kernels.h). Large batches
// are shared among threads of its own where the settings give it some; the caller's thread works
// too and returns when all is done. One thread at a time may call.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kvferry/config.h"
#include "src/data/copier/kernels.h"
#include "src/data/plan_cursor.h"

namespace kvferry::data {

class Copier {
 public:
  // settings: copier_kernel, copier_threads.
  explicit Copier(const Settings& settings);
  ~Copier();

  // Each moves the next `budget` bytes of the cursor (or what is left) and returns how many. What
  // was written is visible to other threads then.
  std::uint64_t gather(PlanCursor& cursor, std::uint64_t budget, char* to);
  std::uint64_t scatter(PlanCursor& cursor, std::uint64_t budget, const char* from);
  // The cursor's sources must be readable here.
  std::uint64_t direct(PlanCursor& cursor, std::uint64_t budget);

  // The threads besides the caller's go to that node's processors.
  void run_near(int node);

  [[nodiscard]] const KernelChoice& choice() const { return choice_; }
  // Threads that copy, the caller's included.
  [[nodiscard]] std::size_t threads() const;

 private:
  class Pool;
  void run(CopyKind kind, std::span<const Piece> pieces);
  template <class ToPiece>
  std::uint64_t move(CopyKind kind, PlanCursor& cursor, std::uint64_t budget, ToPiece to_piece);

  KernelChoice choice_;
  std::vector<Piece> batch_;    // one call of a kernel, at most
  std::unique_ptr<Pool> pool_;  // null: the caller alone
};

// How many threads the settings give a copier on a machine with so many cores.
std::size_t copier_threads(const Settings& settings, std::size_t cores);

}  // namespace kvferry::data
