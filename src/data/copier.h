// Copies of pieces into memory that nobody reads soon: the landing side of a plane.
//
// Ordinary stores first read each line that they are about to overwrite; streaming stores do not,
// which is worth a third of the bandwidth when the target is cold. Chosen once, by what the
// processor has.
#pragma once

#include <cstddef>

namespace kvferry::data {

using CopyFunction = void (*)(void* to, const void* from, std::size_t bytes);

// A copy with streaming stores where the processor has them and the piece is large enough, else
// memcpy. What it wrote is visible to other threads after landing_fence().
CopyFunction landing_copy();
// Orders the streaming stores of this thread before what it does next. Once for each batch.
void landing_fence();

}  // namespace kvferry::data
