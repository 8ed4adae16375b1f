// The registry behind a bootstrap server, without I/O: requests in, answers out. Where an answer
// depends on whether an old rank still lives, the server is asked to knock at its control port
// first.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "kvferry/config.h"
#include "src/base/deadlines.h"
#include "src/base/random.h"
#include "src/wire/bodies.h"

namespace kvferry::proto {

inline constexpr std::size_t kBodyBytesMax = 1 << 20;

struct DirectoryResponse {
  int status = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body;
  std::string allow;  // the Allow header of a 405, or empty
};
// Knock at these addresses (a TCP connection that is accepted counts), then call finish() with the
// same ticket.
struct DirectoryProbe {
  std::uint64_t ticket = 0;
  std::vector<Address> addresses;
};
using DirectoryAnswer = std::variant<DirectoryResponse, DirectoryProbe>;

class Directory {
 public:
  Directory(const Settings& settings, Entropy& entropy)
      : settings_(settings), life_(entropy.token()) {}

  // `target`: path with query, as in the request line. The caller refuses bodies above
  // kBodyBytesMax with too_large().
  DirectoryAnswer handle(std::string_view method, std::string_view target, std::string_view body,
                         Time now);
  // Ends a registration that had to wait: `alive` are the addresses that answered.
  DirectoryResponse finish(std::uint64_t ticket, const std::vector<Address>& alive, Time now);
  static DirectoryResponse too_large(std::size_t actual);

  void advance(Time now);
  [[nodiscard]] Time next_deadline() const { return dp_rank_deadlines_.next(); }

  [[nodiscard]] std::size_t registered_ranks() const { return ranks_.size(); }
  [[nodiscard]] std::size_t dp_rank_entries() const { return dp_ranks_.size(); }
  // Lines in Prometheus' text format.
  [[nodiscard]] std::string metrics() const;

 private:
  using PlaceKey = std::array<std::uint32_t, 4>;  // dp, cp, tp, pp
  struct Waiting {
    wire::RankRegistration registration;
    DirectoryResponse refusal;
  };
  DirectoryAnswer put_route(std::string_view body);
  DirectoryResponse get_route(std::string_view query) const;
  void store(const wire::RankRegistration& registration);
  [[nodiscard]] std::optional<DirectoryResponse> conflict(
      const wire::RankRegistration& registration) const;
  [[nodiscard]] std::size_t expected_ranks() const;

  const Settings& settings_;
  const Token life_;
  std::optional<wire::RankRegistration> shape_;  // whose sizes the instance has
  std::map<PlaceKey, wire::RankRegistration> ranks_;
  std::map<std::uint64_t, Waiting> waiting_;
  std::map<RoomId, std::uint32_t> dp_ranks_;
  Deadlines<RoomId> dp_rank_deadlines_;
  std::map<std::pair<std::string, int>, std::uint64_t> answered_;  // by path and status
  std::uint64_t next_ticket_ = 1, replaced_ = 0;
};

}  // namespace kvferry::proto
