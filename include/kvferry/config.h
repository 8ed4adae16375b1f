// Every limit and waiting time of kvferry, in one table that prints itself (`kvferry config`).
//
// A value. Loaded from defaults, then environment, then flags, by main() or by the embedding
// engine; nothing in the library reads the environment by itself.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "kvferry/export.h"
#include "kvferry/status.h"
#include "kvferry/types.h"

namespace kvferry {

struct Settings {
  // Life of a room
  Duration bootstrap_timeout = std::chrono::seconds(300);
  Duration waiting_timeout = std::chrono::seconds(300);
  Duration hold_time = std::chrono::seconds(90);
  // Bootstrap server
  Duration http_timeout = std::chrono::seconds(5);
  Duration heartbeat_interval = std::chrono::seconds(5);
  std::uint64_t heartbeat_misses = 2;
  Duration lookup_retry = std::chrono::milliseconds(200);
  Duration register_retry = std::chrono::seconds(1);
  Duration reregister_interval = std::chrono::seconds(10);
  Duration dp_rank_expiry = std::chrono::seconds(120);
  std::uint64_t dp_rank_entries_max = 1000000;
  std::uint64_t http_connections_max = 16384;
  // Sessions between native ranks
  Duration ping_interval = std::chrono::milliseconds(500);
  Duration ping_silence = std::chrono::milliseconds(1500);
  Duration write_lease = std::chrono::seconds(2);
  Duration session_open_timeout = std::chrono::seconds(5);
  std::uint64_t sessions_max = 4096;
  // Tables and queues
  std::uint64_t rooms_max = 65536;
  std::uint64_t pending_rooms_max = 65536;
  std::uint64_t pages_per_room_max = 4194304;
  std::uint64_t chunks_per_room_max = 65536;
  std::uint64_t inbox_max = 65536;
  std::uint64_t control_sockets_max = 1024;
  std::uint64_t control_queue_max = 65536;
  std::uint64_t control_message_bytes_max = 64ULL << 20;
  // Data planes
  std::uint64_t slice_bytes = 256ULL << 10;
  std::uint64_t express_bytes = 64ULL << 10;
  std::uint64_t plan_bytes_max = 64ULL << 20;
  std::uint64_t writes_per_peer_max = 65536;
  Duration cancel_patience = std::chrono::milliseconds(500);
  Duration connect_timeout = std::chrono::seconds(5);
  Duration spin = std::chrono::microseconds(50);
  std::uint64_t copier_kernel = 0;
  std::uint64_t copier_threads = 0;
  // Threads of planes run on the processors near the memory that is registered first.
  std::uint64_t numa_local = 1;
  std::uint64_t shm_ring_bytes = 4ULL << 20;
  std::uint64_t shm_pipe_bytes = 64ULL << 10;
  std::uint64_t shm_pulls_max = 4096;
  Duration shm_apart_after = std::chrono::microseconds(50);
  // Behaviour
  bool all_cp_ranks = false;
  bool force_query_dp_rank = false;
  bool aux_over_control = false;
  std::uint64_t model_layers = 0;

  friend bool operator==(const Settings&, const Settings&) = default;
};

// One row of the table, as text.
struct SettingRow {
  std::string_view name, environment, unit, range, meaning;
  std::string value;
};
// Rows in the order of the struct, with the values of `settings`.
KVF_API std::vector<SettingRow> setting_rows(const Settings& settings);
// Sets one row by name. Text as the table prints it (durations in the row's unit). Names the range
// when it is left.
KVF_API Status set_setting(Settings& settings, std::string_view name, std::string_view text);
// Applies the environment: `get(name)` returns the variable's value or null.
KVF_API Status apply_environment(Settings& settings,
                                 const std::function<const char*(const char*)>& get);

}  // namespace kvferry
