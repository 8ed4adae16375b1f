// Which processors are near which memory. On a machine with one node, or where the kernel does not
// say, there is nothing to choose and these do nothing.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

namespace kvferry {

// Processors of a list as the kernel prints it, such as "0-3,8,10-11\n"; empty when it is none.
std::vector<int> parse_cpu_list(std::string_view text);

// The node that holds the page at `address`, of this process; it must have been touched. Nothing
// on a machine with one node.
std::optional<int> numa_node_of(const void* address);

// From now on this thread, and those that it starts, run on the node's processors, of those that
// they were allowed before. False: nothing was changed.
bool run_near(int node);

}  // namespace kvferry
