// Marks prove that rare branches were reached. KVF_REACHED("text") counts one visit in the Marks of
// the current simulator run; in programs it costs one thread-local load.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace kvferry {

using Marks = std::map<std::string, std::uint64_t>;

// The simulator sets this to its own table for the time of a run, on its own thread. Null
// elsewhere.
extern thread_local Marks* current_marks;

inline void reached(const char* mark) {
  if (current_marks != nullptr) ++(*current_marks)[mark];
}

}  // namespace kvferry

#define KVF_REACHED(mark) ::kvferry::reached(mark)
