// Marks that any run of at least 500 seeds must have reached: proof that the rare branches are walked.
#pragma once

namespace kvferry::sim {

inline constexpr const char* kRequiredMarks[] = {
    "a call to the bootstrap server ran out of time",
};

}  // namespace kvferry::sim
