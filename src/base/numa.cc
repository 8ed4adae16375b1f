#include "src/base/numa.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <charconv>
#include <fstream>
#include <iterator>
#include <string>

namespace kvferry {
namespace {

constexpr unsigned long kNodeOfAddress = 1 | 2;  // MPOL_F_NODE | MPOL_F_ADDR
constexpr int kCpusMax = 8192;

std::string read_file(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

}  // namespace

std::vector<int> parse_cpu_list(std::string_view text) {
  std::vector<int> cpus;
  while (!text.empty() && text.back() == '\n') text.remove_suffix(1);
  const char *at = text.data(), *const end = at + text.size();
  while (at != end) {
    int first = 0, last = 0;
    auto parsed = std::from_chars(at, end, first);
    if (parsed.ec != std::errc()) return {};
    last = first;
    if (parsed.ptr != end && *parsed.ptr == '-') {
      parsed = std::from_chars(parsed.ptr + 1, end, last);
      if (parsed.ec != std::errc()) return {};
    }
    if (first < 0 || last < first || last >= kCpusMax) return {};
    for (int cpu = first; cpu <= last; ++cpu) cpus.push_back(cpu);
    at = parsed.ptr;
    if (at == end) break;
    if (*at++ != ',' || at == end) return {};
  }
  return cpus;
}

std::optional<int> numa_node_of(const void* address) {
  static const bool one_node =
      parse_cpu_list(read_file("/sys/devices/system/node/online")).size() <= 1;
  int node = -1;
  if (one_node || syscall(SYS_get_mempolicy, &node, nullptr, 0, address, kNodeOfAddress) != 0 ||
      node < 0)
    return std::nullopt;
  return node;
}

bool run_near(int node) {
  cpu_set_t allowed, near;
  CPU_ZERO(&near);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return false;
  for (const int cpu : parse_cpu_list(
           read_file("/sys/devices/system/node/node" + std::to_string(node) + "/cpulist"))) {
    if (cpu < CPU_SETSIZE && CPU_ISSET(cpu, &allowed)) CPU_SET(cpu, &near);
  }
  return CPU_COUNT(&near) > 0 && sched_setaffinity(0, sizeof near, &near) == 0;
}

}  // namespace kvferry
