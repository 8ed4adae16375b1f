#include <sys/random.h>

#include <cerrno>

#include <fmt/format.h>

#include "kvferry/status.h"
#include "kvferry/types.h"
#include "src/base/check.h"
#include "src/base/mark.h"
#include "src/base/parse.h"
#include "src/base/random.h"

namespace kvferry {

thread_local Marks* current_marks = nullptr;

void check_failed(const char* file, int line, const char* expression, const std::string& detail) {
  throw CheckFailed(fmt::format("{}:{}: check failed: {} ({})", file, line, expression, detail));
}

std::uint64_t KernelEntropy::next64() {
  std::uint64_t value = 0;
  for (;;) {
    const ssize_t got = getrandom(&value, sizeof value, 0);
    if (got == static_cast<ssize_t>(sizeof value)) return value;
    KVF_CHECK(got < 0 && errno == EINTR, "getrandom gave no bytes");
  }
}

std::string_view to_string(Code code) {
  switch (code) {
    case Code::kOk:
      return "ok";
    case Code::kInvalidArgument:
      return "invalid argument";
    case Code::kAlreadyExists:
      return "already exists";
    case Code::kNotFound:
      return "not found";
    case Code::kExhausted:
      return "exhausted";
    case Code::kAborted:
      return "aborted";
    case Code::kTimedOut:
      return "timed out";
    case Code::kPeerLost:
      return "peer lost";
    case Code::kProtocol:
      return "protocol";
    case Code::kRefused:
      return "refused";
    case Code::kUnavailable:
      return "unavailable";
    case Code::kInternal:
      return "internal";
  }
  return "unknown";
}

std::string Status::to_string() const {
  return ok() ? "ok" : fmt::format("{}: {}", kvferry::to_string(code_), message_);
}

std::string Token::to_string() const {
  return fmt::format("{:016x}{:016x}", high, low);
}

Token token_from_string(std::string_view text) {
  Token token;
  if (text.size() != 32) return token;
  const auto parse = [](std::string_view part, std::uint64_t& value) {
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), value, 16);
    return error == std::errc{} && end == part.data() + part.size();
  };
  if (!parse(text.substr(0, 16), token.high) || !parse(text.substr(16), token.low)) return Token{};
  return token;
}

std::string_view to_string(RoomState state) {
  switch (state) {
    case RoomState::kFailed:
      return "Failed";
    case RoomState::kBootstrapping:
      return "Bootstrapping";
    case RoomState::kWaitingForInput:
      return "WaitingForInput";
    case RoomState::kTransferring:
      return "Transferring";
    case RoomState::kSuccess:
      return "Success";
  }
  return "unknown";
}

bool is_ipv6(std::string_view host) {
  return host.find(':') != std::string_view::npos;
}

bool is_wildcard(std::string_view host) {
  host = without_brackets(host);
  return host == "0.0.0.0" || host == "::" || host == "::0" || host == "0:0:0:0:0:0:0:0" ||
         host.empty();
}

std::string_view without_brackets(std::string_view host) {
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']')
    return host.substr(1, host.size() - 2);
  return host;
}

std::string Address::host_port() const {
  return is_ipv6(host) ? fmt::format("[{}]:{}", host, port) : fmt::format("{}:{}", host, port);
}

Result<Address> parse_address(std::string_view text) {
  const auto bad = [&](std::string_view why) {
    return Status(Code::kInvalidArgument, fmt::format("address '{}': {}", text, why));
  };
  std::string_view host, port;
  if (text.starts_with('[')) {
    const auto close = text.find(']');
    if (close == std::string_view::npos) return bad("']' is missing");
    host = text.substr(1, close - 1);
    if (!is_ipv6(host)) return bad("brackets are for IPv6 hosts");
    if (close + 1 >= text.size() || text[close + 1] != ':') return bad("':port' is missing");
    port = text.substr(close + 2);
  } else {
    const auto colon = text.rfind(':');
    if (colon == std::string_view::npos) return bad("':port' is missing");
    host = text.substr(0, colon);
    if (is_ipv6(host)) return bad("an IPv6 host needs brackets");
    port = text.substr(colon + 1);
  }
  const auto number = parse_int<std::uint16_t>(port);
  if (!number) return bad("the port is not a number up to 65535");
  if (host.empty()) return bad("the host is empty");
  return Address{std::string(host), *number};
}

}  // namespace kvferry
