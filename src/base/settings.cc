#include <limits>

#include <fmt/format.h>

#include "kvferry/config.h"
#include "src/base/parse.h"

namespace kvferry {
namespace {

struct RowInfo {
  std::string_view name, environment, unit, meaning;
  std::uint64_t least, most;
};

// The table. Durations are in the row's unit; the environment variables that the reference has keep
// its names.
template <class S, class F>
void describe_settings(S& s, F&& f) {
  constexpr std::uint64_t kDay = 86400, kMany = 1ULL << 32;
  f(RowInfo{"bootstrap_timeout", "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "s",
            "a room must know its partners after this", 1, kDay},
    s.bootstrap_timeout);
  f(RowInfo{"waiting_timeout", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "s",
            "a room that waits for its KV fails after this", 1, kDay},
    s.waiting_timeout);
  f(RowInfo{"hold_time", "KVFERRY_HOLD_TIME", "s",
            "pages of a failed room with a foreign writer rest this long without a drained answer",
            1, kDay},
    s.hold_time);
  f(RowInfo{"http_timeout", "KVFERRY_HTTP_TIMEOUT", "ms", "one call to a bootstrap server", 10,
            600000},
    s.http_timeout);
  f(RowInfo{"heartbeat_interval", "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL", "s",
            "between two health checks of a bootstrap server", 1, kDay},
    s.heartbeat_interval);
  f(RowInfo{"heartbeat_misses", "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE", "",
            "health checks missed in a row until the instance counts as lost", 1, 1000},
    s.heartbeat_misses);
  f(RowInfo{"lookup_retry", "KVFERRY_LOOKUP_RETRY", "ms",
            "between two tries to look an instance up", 1, 600000},
    s.lookup_retry);
  f(RowInfo{"register_retry", "KVFERRY_REGISTER_RETRY", "ms",
            "between two tries of a rank to register", 1, 600000},
    s.register_retry);
  f(RowInfo{"reregister_interval", "KVFERRY_REREGISTER_INTERVAL", "ms",
            "a rank says again that it is there, so that a server that forgot learns it", 100,
            86400000},
    s.reregister_interval);
  f(RowInfo{"dp_rank_expiry", "SGLANG_DISAGGREGATION_BOOTSTRAP_ENTRY_CLEANUP_INTERVAL", "s",
            "life of a room's dp rank on the bootstrap server", 1, kDay},
    s.dp_rank_expiry);
  f(RowInfo{"dp_rank_entries_max", "KVFERRY_DP_RANK_ENTRIES_MAX", "",
            "rooms with a dp rank on the bootstrap server", 1, kMany},
    s.dp_rank_entries_max);
  f(RowInfo{"http_connections_max", "KVFERRY_HTTP_CONNECTIONS_MAX", "",
            "open connections of the bootstrap server", 1, 1000000},
    s.http_connections_max);
  f(RowInfo{"ping_interval", "KVFERRY_PING_INTERVAL", "ms",
            "a prefill rank asks each decode rank for leave to write", 1, 600000},
    s.ping_interval);
  f(RowInfo{"ping_silence", "KVFERRY_PING_SILENCE", "ms",
            "a session whose pings stay away this long is over", 1, 600000},
    s.ping_silence);
  f(RowInfo{"write_lease", "KVFERRY_WRITE_LEASE", "ms", "how long one answer permits to write", 1,
            600000},
    s.write_lease);
  f(RowInfo{"session_open_timeout", "KVFERRY_SESSION_OPEN_TIMEOUT", "ms",
            "a new session must be answered after this", 1, 600000},
    s.session_open_timeout);
  f(RowInfo{"sessions_max", "KVFERRY_SESSIONS_MAX", "", "peers of one endpoint", 1, 1000000},
    s.sessions_max);
  f(RowInfo{"rooms_max", "KVFERRY_ROOMS_MAX", "", "rooms of one endpoint", 1, kMany}, s.rooms_max);
  f(RowInfo{"pending_rooms_max", "KVFERRY_PENDING_ROOMS_MAX", "",
            "rooms heard of whose sender does not exist yet", 1, kMany},
    s.pending_rooms_max);
  f(RowInfo{"pages_per_room_max", "KVFERRY_PAGES_PER_ROOM_MAX", "", "pages of one room", 1,
            1ULL << 31},
    s.pages_per_room_max);
  f(RowInfo{"chunks_per_room_max", "KVFERRY_CHUNKS_PER_ROOM_MAX", "",
            "chunks of one room that wait", 1, kMany},
    s.chunks_per_room_max);
  f(RowInfo{"inbox_max", "KVFERRY_INBOX_MAX", "", "calls of the application that wait for the loop",
            1, kMany},
    s.inbox_max);
  f(RowInfo{"control_sockets_max", "KVFERRY_CONTROL_SOCKETS_MAX", "",
            "peers with an open control socket; the least recently used one goes", 1, 60000},
    s.control_sockets_max);
  f(RowInfo{"control_queue_max", "KVFERRY_CONTROL_QUEUE_MAX", "", "messages that wait for one peer",
            1, 10000000},
    s.control_queue_max);
  f(RowInfo{"control_message_bytes_max", "KVFERRY_CONTROL_MESSAGE_BYTES_MAX", "B",
            "one control message", 4096, kMany},
    s.control_message_bytes_max);
  f(RowInfo{"slice_bytes", "KVFERRY_SLICE_BYTES", "B",
            "bytes of one room before the next one has its turn", 4096, 64ULL << 20},
    s.slice_bytes);
  f(RowInfo{"express_bytes", "KVFERRY_EXPRESS_BYTES", "B",
            "writes up to this size do not wait behind larger ones", 4096, 1ULL << 20},
    s.express_bytes);
  f(RowInfo{"plan_bytes_max", "KVFERRY_PLAN_BYTES_MAX", "B", "one encoded copy plan", 4096, kMany},
    s.plan_bytes_max);
  f(RowInfo{"writes_per_peer_max", "KVFERRY_WRITES_PER_PEER_MAX", "",
            "writes under way from one peer", 1, kMany},
    s.writes_per_peer_max);
  f(RowInfo{"cancel_patience", "KVFERRY_CANCEL_PATIENCE", "ms",
            "a cancelled write waits this long for the target's word", 1, 1000},
    s.cancel_patience);
  f(RowInfo{"connect_timeout", "KVFERRY_CONNECT_TIMEOUT", "ms",
            "a data connection must stand after this", 1, 600000},
    s.connect_timeout);
  f(RowInfo{"spin", "KVFERRY_SPIN", "us",
            "a thread with a transfer under way looks for so long before it sleeps; 0: never", 0,
            10000},
    s.spin);
  f(RowInfo{"copier_kernel", "KVFERRY_COPIER_KERNEL", "",
            "how pieces are copied, by its number in `kvferry bench copier`; 0: measured at start",
            0, 64},
    s.copier_kernel);
  f(RowInfo{"copier_threads", "KVFERRY_COPIER_THREADS", "",
            "threads that copy for one endpoint; 0: an eighth of the cores, 1 to 8", 0, 256},
    s.copier_threads);
  f(RowInfo{"numa_local", "KVFERRY_NUMA_LOCAL", "",
            "threads of planes run near the memory that is registered first; 0: where they may", 0,
            1},
    s.numa_local);
  f(RowInfo{"shm_ring_bytes", "KVFERRY_SHM_RING_BYTES", "B",
            "ring of shared memory between two endpoints of one host", 64ULL << 10, 64ULL << 20},
    s.shm_ring_bytes);
  f(RowInfo{"shm_pipe_bytes", "KVFERRY_SHM_PIPE_BYTES", "B",
            "frames between two endpoints of one host, each way; 0: through a socket", 0,
            16ULL << 20},
    s.shm_pipe_bytes);
  f(RowInfo{"shm_apart_after", "KVFERRY_SHM_APART_AFTER", "us",
            "the source moves away when its target shares its processor for so long; 0: never", 0,
            1000000},
    s.shm_apart_after);
  f(RowInfo{"shm_pulls_max", "KVFERRY_SHM_PULLS_MAX", "",
            "writes under way that their targets copy out of shared memory; others take the ring",
            1, 65536},
    s.shm_pulls_max);
  f(RowInfo{"all_cp_ranks", "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER", "bool",
            "every context-parallel prefill rank sends its part", 0, 1},
    s.all_cp_ranks);
  f(RowInfo{"force_query_dp_rank", "SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK", "bool",
            "register the dp rank of a room even where it follows from the room", 0, 1},
    s.force_query_dp_rank);
  f(RowInfo{"aux_over_control", "SGLANG_MOONCAKE_SEND_AUX_TCP", "bool",
            "send aux rows over the control plane", 0, 1},
    s.aux_over_control);
  f(RowInfo{"model_layers", "KVFERRY_MODEL_LAYERS", "",
            "layers of the model without draft layers, for sglang peers; 0: not known", 0, 100000},
    s.model_layers);
}

std::int64_t unit_ns(const RowInfo& row) {
  return row.unit == "s" ? 1000000000 : row.unit == "ms" ? 1000000 : 1000;
}

}  // namespace

std::vector<SettingRow> setting_rows(const Settings& settings) {
  std::vector<SettingRow> rows;
  static const auto range_text = [](const RowInfo& row) {
    return fmt::format("{}..{}", row.least, row.most);
  };
  static std::vector<std::string> ranges = [] {
    std::vector<std::string> all;
    const Settings defaults;
    describe_settings(defaults,
                      [&](const RowInfo& row, const auto&) { all.push_back(range_text(row)); });
    return all;
  }();
  describe_settings(settings, [&](const RowInfo& row, const auto& value) {
    using T = std::remove_cvref_t<decltype(value)>;
    std::string text;
    if constexpr (std::is_same_v<T, Duration>) {
      text = fmt::format("{}", value.count() / unit_ns(row));
    } else {
      text = fmt::format("{}", static_cast<std::uint64_t>(value));
    }
    rows.push_back({row.name, row.environment, row.unit, ranges[rows.size()], row.meaning, text});
  });
  return rows;
}

Status set_setting(Settings& settings, std::string_view name, std::string_view text) {
  Status status(Code::kInvalidArgument, fmt::format("there is no setting '{}'", name));
  describe_settings(settings, [&](const RowInfo& row, auto& value) {
    if (row.name != name) return;
    using T = std::remove_cvref_t<decltype(value)>;
    std::string_view number = text;
    if (row.unit == "bool") {
      if (text == "true" || text == "True" || text == "yes") number = "1";
      if (text == "false" || text == "False" || text == "no") number = "0";
    }
    const auto parsed = parse_int<std::uint64_t>(number);
    if (!parsed || *parsed < row.least || *parsed > row.most) {
      status = Status(Code::kInvalidArgument,
                      fmt::format("{}: '{}' is not a whole number from {} to {} {}", name, text,
                                  row.least, row.most, row.unit));
      return;
    }
    if constexpr (std::is_same_v<T, Duration>) {
      value = Duration(static_cast<std::int64_t>(*parsed) * unit_ns(row));
    } else {
      value = static_cast<T>(*parsed);
    }
    status = Status();
  });
  return status;
}

Status apply_environment(Settings& settings, const std::function<const char*(const char*)>& get) {
  for (const SettingRow& row : setting_rows(settings)) {
    const char* value = get(std::string(row.environment).c_str());
    if (value == nullptr || *value == '\0') continue;
    if (Status status = set_setting(settings, row.name, value); !status.ok()) {
      return Status(status.code(),
                    fmt::format("{} = {}: {}", row.environment, value, status.message()));
    }
  }
  return {};
}

}  // namespace kvferry
