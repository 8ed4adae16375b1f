#include "cli/process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "src/base/check.h"

namespace kvferry::cli {

Child::Child(std::vector<std::string> arguments) {
  int to_child[2], from_child[2];
  KVF_CHECK(pipe2(to_child, O_CLOEXEC) == 0 && pipe2(from_child, O_CLOEXEC) == 0, "pipe");
  std::vector<char*> argv;
  std::string self = "/proc/self/exe";
  argv.push_back(self.data());
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  const pid_t parent = getpid();
  pid_ = fork();
  KVF_CHECK(pid_ >= 0, "fork");
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(127);
    setpgid(0, 0);  // Ctrl-C reaches the parent alone, which ends its children in order
    dup2(to_child[0], 0);
    dup2(from_child[1], 1);
    execv("/proc/self/exe", argv.data());
    _exit(127);
  }
  close(to_child[0]);
  close(from_child[1]);
  in_ = to_child[1];
  out_ = from_child[0];
  fcntl(out_, F_SETFL, O_NONBLOCK);
}

Child::~Child() {
  if (in_ >= 0) close(in_);
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  if (out_ >= 0) close(out_);
}

bool Child::send(const std::string& line) {
  std::string bytes = line + "\n";
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t n = write(in_, bytes.data() + done, bytes.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    done += static_cast<std::size_t>(n);
  }
  return true;
}

std::vector<std::string> Child::read_lines(bool& ended) {
  char chunk[65536];
  for (;;) {
    const ssize_t n = read(out_, chunk, sizeof chunk);
    if (n > 0) {
      buffer_.append(chunk, static_cast<std::size_t>(n));
      continue;
    }
    if (n == 0) ended = true;
    if (n < 0 && errno == EINTR) continue;
    break;
  }
  std::size_t begin = 0;
  for (std::size_t end; (end = buffer_.find('\n', begin)) != std::string::npos; begin = end + 1)
    lines_.push_back(buffer_.substr(begin, end - begin));
  buffer_.erase(0, begin);
  return std::exchange(lines_, {});
}

std::optional<std::string> Child::wait_line(int timeout_ms) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  for (;;) {
    bool ended = false;
    auto lines = read_lines(ended);
    if (!lines.empty()) {
      std::string first = lines.front();
      lines_.assign(lines.begin() + 1, lines.end());
      return first;
    }
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
                          end - std::chrono::steady_clock::now())
                          .count();
    if (ended || left <= 0) return std::nullopt;
    pollfd fd{out_, POLLIN, 0};
    ::poll(&fd, 1, static_cast<int>(left));
  }
}

int Child::finish() {
  if (in_ >= 0) close(std::exchange(in_, -1));
  int status = -1;
  if (pid_ > 0) {
    waitpid(pid_, &status, 0);
    pid_ = -1;
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

}  // namespace kvferry::cli
