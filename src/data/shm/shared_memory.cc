#include <cstring>

#include "kvferry/memory.h"
#include "src/data/stream/memory_file.h"

namespace kvferry {

struct SharedMemory::State {
  data::OwnedFd file;
  data::Mapping mapping;
};

SharedMemory::SharedMemory(std::unique_ptr<State> state) : state_(std::move(state)) {}
SharedMemory::SharedMemory(SharedMemory&& other) noexcept = default;
SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept = default;
SharedMemory::~SharedMemory() = default;

Result<SharedMemory> SharedMemory::create(std::uint64_t bytes) {
  auto state = std::make_unique<State>();
  auto file = data::create_memory_file("kvferry-memory", bytes);
  if (!file.ok()) return file.status();
  auto mapping = data::Mapping::of(file->get(), bytes, true);
  if (!mapping.ok()) return mapping.status();
  std::memset(mapping->data(), 0, bytes);
  state->file = std::move(*file);
  state->mapping = std::move(*mapping);
  return SharedMemory(std::move(state));
}

void* SharedMemory::data() const {
  return state_->mapping.data();
}
std::uint64_t SharedMemory::size() const {
  return state_->mapping.size();
}
Region SharedMemory::region() const {
  return {reinterpret_cast<std::uint64_t>(data()), size(), {}, state_->file.get()};
}

}  // namespace kvferry
