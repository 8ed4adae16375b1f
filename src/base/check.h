// KVF_CHECK: always on, for what cannot happen. In a library inside somebody's process a failed
// check must not abort it: it throws CheckFailed, which the endpoint's loop catches to end itself
// and every room with that reason.
#pragma once

#include <stdexcept>
#include <string>

namespace kvferry {

class CheckFailed : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

[[noreturn]] void check_failed(const char* file, int line, const char* expression,
                               const std::string& detail);

}  // namespace kvferry

#define KVF_CHECK(expression, detail)                                                      \
  do {                                                                                     \
    if (!(expression)) ::kvferry::check_failed(__FILE__, __LINE__, #expression, (detail)); \
  } while (false)
