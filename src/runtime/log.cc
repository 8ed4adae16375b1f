#include "src/runtime/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

namespace kvferry::runtime {

void log_line(proto::Severity severity, const std::string& who, const std::string& line) {
  static const auto logger = [] {
    auto made = std::make_shared<spdlog::logger>("kvferry",
                                                 std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_pattern("%Y-%m-%d %H:%M:%S.%e %n %L %v");
    made->set_level(spdlog::level::debug);
    return made;
  }();
  switch (severity) {
    case proto::Severity::kDebug:
      return logger->debug("{}: {}", who, line);
    case proto::Severity::kInfo:
      return logger->info("{}: {}", who, line);
    case proto::Severity::kWarning:
      return logger->warn("{}: {}", who, line);
    case proto::Severity::kError:
      return logger->error("{}: {}", who, line);
  }
}

}  // namespace kvferry::runtime
