// How an engine uses kvferry: a prefill process computes two pages of KV, a decode process receives
// them.
//
//   two_processes            starts both and says whether the bytes arrived
//
// The parent is the decode rank and hosts the bootstrap server; the child is the prefill rank.
#include <kvferry/bootstrap_server.h>
#include <kvferry/endpoint.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

namespace {

constexpr std::uint32_t kPages = 16, kPageTokens = 16, kHeads = 4, kHeadBytes = 64, kLayers = 2;

// Pools of one rank: for each layer K and V, [page][token][head][byte], and one aux pool of 64-byte
// rows.
struct Pools {
  std::vector<std::vector<unsigned char>> memory;
  kvferry::Layout layout;

  Pools() {
    layout.page_tokens = kPageTokens;
    for (const auto component : {kvferry::Component::kKey, kvferry::Component::kValue}) {
      for (std::uint32_t layer = 0; layer < kLayers; ++layer)
        add(component, layer, kPages, kPageTokens, kHeads, kHeadBytes);
    }
    add(kvferry::Component::kAux, 0, 8, 1, 1, 64);
  }
  void add(kvferry::Component component, std::uint32_t layer, std::uint32_t items,
           std::uint32_t rows, std::uint32_t heads, std::uint32_t head_bytes) {
    kvferry::Slab slab;
    slab.component = component;
    slab.layer = layer;
    slab.item_count = items;
    slab.rows_per_item = rows;
    slab.head_count = heads;
    slab.head_bytes = slab.head_stride = head_bytes;
    slab.row_stride = heads * head_bytes;
    slab.item_bytes = slab.item_stride = slab.row_stride * rows;
    slab.base =
        reinterpret_cast<std::uint64_t>(memory.emplace_back(slab.item_stride * items).data());
    layout.slabs.push_back(slab);
  }
};

unsigned char value(std::size_t pool, std::size_t position, std::size_t byte) {
  return static_cast<unsigned char>(pool * 50 + position * 20 + byte % 13 + 1);
}

template <class Handle>
bool wait_for_end(const Handle& handle) {
  while (!kvferry::is_terminal(handle.poll()))
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  if (handle.poll() == kvferry::RoomState::kSuccess) return true;
  std::fprintf(stderr, "room failed: %s\n", handle.failure().status.to_string().c_str());
  return false;
}

int prefill(std::uint16_t bootstrap_port) {
  Pools pools;
  kvferry::PrefillOptions options;
  options.layout = pools.layout;
  options.total_kv_heads = kHeads;
  options.stage_layers = kLayers;
  options.bootstrap = {"127.0.0.1", bootstrap_port};
  auto endpoint = kvferry::PrefillEndpoint::create(options);
  if (!endpoint.ok()) return 1;

  const std::vector<kvferry::PageIndex> pages{3, 7};  // where this engine has computed the prompt
  for (std::size_t pool = 0; pool < 2 * kLayers; ++pool) {
    const std::size_t bytes = pools.layout.slabs[pool].item_bytes;
    for (std::size_t i = 0; i < pages.size(); ++i) {
      for (std::size_t b = 0; b < bytes; ++b)
        pools.memory[pool][static_cast<std::size_t>(pages[i]) * bytes + b] = value(pool, i, b);
    }
  }
  auto room = (*endpoint)->open(kvferry::RoomId{42});
  if (!room.ok() || !room->init(pages.size(), /*aux_row=*/0).ok() || !room->send(pages).ok())
    return 1;
  const bool ok = wait_for_end(*room);
  room->clear();
  return ok ? 0 : 1;
}

}  // namespace

int main() {
  auto server = kvferry::BootstrapServer::create("127.0.0.1", 0, {});
  if (!server.ok()) return 1;
  const std::uint16_t port = (*server)->port();
  const pid_t child = fork();
  if (child == 0) _exit(prefill(port));

  Pools pools;
  kvferry::DecodeOptions options;
  options.layout = pools.layout;
  options.total_kv_heads = kHeads;
  auto endpoint = kvferry::DecodeEndpoint::create(options);
  if (!endpoint.ok()) return 1;
  const std::vector<kvferry::PageIndex> pages{10, 2};  // where the KV shall go
  auto room = (*endpoint)->open(kvferry::RoomId{42}, {"127.0.0.1", port});
  if (!room.ok() || !room->init().ok() || !room->send_metadata(pages, /*aux_row=*/1).ok()) return 1;
  bool ok = wait_for_end(*room);
  for (std::size_t pool = 0; pool < 2 * kLayers; ++pool) {
    const std::size_t bytes = pools.layout.slabs[pool].item_bytes;
    for (std::size_t i = 0; i < pages.size(); ++i) {
      for (std::size_t b = 0; b < bytes; ++b)
        ok = ok && pools.memory[pool][static_cast<std::size_t>(pages[i]) * bytes + b] ==
                       value(pool, i, b);
    }
  }
  room->clear();
  int status = 1;
  waitpid(child, &status, 0);
  ok = ok && WIFEXITED(status) && WEXITSTATUS(status) == 0;
  std::printf("%s\n", ok ? "all bytes arrived" : "FAILED");
  return ok ? 0 : 1;
}
