// One rank process of the demo: obeys lines of JSON on standard input, answers on standard output.
#pragma once

namespace kvferry::cli {

int run_demo_rank();

}  // namespace kvferry::cli
