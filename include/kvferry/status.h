// Status and Result: how every call of kvferry says what went wrong.
//
// Values, copyable and comparable. A Code exists only where a caller reacts to it; everything else
// is in the message, which is lower case, concrete and carries the values ("page 931 outside pool
// of 512").
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "kvferry/export.h"

namespace kvferry {

enum class Code : std::uint8_t {
  kOk,
  kInvalidArgument,  // the caller's values cannot be right; nothing was done
  kAlreadyExists,    // the room or name is in use; the first owner goes on
  kNotFound,
  kExhausted,    // a limit of the configuration is reached; nothing was queued, try later
  kAborted,      // somebody ended it on purpose
  kTimedOut,     // a deadline of the configuration passed
  kPeerLost,     // the other process is gone or silent
  kProtocol,     // bytes from outside that do not parse
  kRefused,      // the two sides do not fit, or memory was not lent
  kUnavailable,  // not yet, or not now
  kInternal,     // a defect of ours
};

KVF_API std::string_view to_string(Code code);

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  [[nodiscard]] bool ok() const { return code_ == Code::kOk; }
  [[nodiscard]] Code code() const { return code_; }
  [[nodiscard]] const std::string& message() const { return message_; }
  // "timed out: room 7 ...", or "ok".
  [[nodiscard]] KVF_API std::string to_string() const;

  friend bool operator==(const Status&, const Status&) = default;

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

// A value or the Status that says why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}          // NOLINT: implicit on purpose
  Result(Status status) : status_(std::move(status)) {}  // NOLINT: implicit on purpose

  [[nodiscard]] bool ok() const { return value_.has_value(); }
  [[nodiscard]] const Status& status() const { return status_; }
  T& operator*() { return *value_; }
  const T& operator*() const { return *value_; }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }

 private:
  std::optional<T> value_;
  Status status_;
};

#define KVF_RETURN_IF_ERROR(expr)                                                      \
  do {                                                                                 \
    if (::kvferry::Status kvf_status_ = (expr); !kvf_status_.ok()) return kvf_status_; \
  } while (false)

}  // namespace kvferry
