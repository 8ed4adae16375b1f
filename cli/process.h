// Child processes of the demo and the benches, and the lines of JSON that go to and fro.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

namespace kvferry::cli {

// A child that runs this program with other arguments. Its standard input and output are ours, line
// by line. It is killed when this process dies.
class Child {
 public:
  explicit Child(std::vector<std::string> arguments);
  ~Child();  // kills it if it still runs, and waits for it
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  bool send(const std::string& line);
  // The descriptor from which lines come, for poll().
  [[nodiscard]] int fd() const { return out_; }
  // Reads what is there; returns whole lines. `ended` turns true when the child has closed its
  // output.
  std::vector<std::string> read_lines(bool& ended);
  // Waits for a line. Nothing when the child ended or the time is over.
  std::optional<std::string> wait_line(int timeout_ms);
  [[nodiscard]] pid_t pid() const { return pid_; }
  // Closes its standard input, waits for its end; the exit status.
  int finish();

 private:
  pid_t pid_ = -1;
  int in_ = -1, out_ = -1;
  std::string buffer_;
  std::vector<std::string> lines_;
};

}  // namespace kvferry::cli
