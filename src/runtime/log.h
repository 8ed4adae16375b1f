// Log lines of the library. One file knows the logging library.
#pragma once

#include <string>

#include "src/proto/ports.h"

namespace kvferry::runtime {

// Thread-safe. To standard error.
void log_line(proto::Severity severity, const std::string& who, const std::string& line);

}  // namespace kvferry::runtime
