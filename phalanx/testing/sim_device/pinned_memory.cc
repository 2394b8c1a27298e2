#include "phalanx/testing/sim_device/pinned_memory.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

#include "phalanx/base/error.h"

namespace phalanx::sim_device {
namespace {

constexpr std::size_t kPage = 4096;

std::byte* map_shared(int file, std::size_t bytes) {
  void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  if (at == MAP_FAILED) throw Error(fmt::format("pinned memory of simulated devices: {}", std::strerror(errno)));
  return static_cast<std::byte*>(at);
}

}  // namespace

PinnedMemory::PinnedMemory() {
  const int file = ::memfd_create("phalanx-sim-pinned", MFD_CLOEXEC);
  if (file < 0 || ::ftruncate(file, static_cast<off_t>(kBytes)) != 0)
    throw Error(fmt::format("pinned memory of simulated devices: {}", std::strerror(errno)));
  host_ = map_shared(file, kBytes);
  kernel_ = map_shared(file, kBytes);
  ::close(file);
}

PinnedMemory::~PinnedMemory() {
  ::munmap(host_, kBytes);
  ::munmap(kernel_, kBytes);
}

std::size_t PinnedMemory::block_size(std::size_t bytes) { return std::bit_ceil(std::max(bytes, kPage)); }

std::byte* PinnedMemory::allocate(std::size_t bytes) {
  const std::size_t size = block_size(bytes);
  const std::lock_guard lock(mutex_);
  for (auto& entry : blocks_) {
    Block& block = entry.second;
    if (!block.is_free || block.bytes != size) continue;
    if (!std::ranges::all_of(block.uses, [](const Use& use) { return use.is_done(); })) continue;
    block.uses.clear();
    block.is_free = false;
    protect(entry);
    return entry.first;
  }
  if (taken_ + size > kBytes)
    throw Error(
        fmt::format("pinned memory of simulated devices: {} bytes are taken, no room for {} more", taken_, size));
  std::byte* begin = host_ + std::exchange(taken_, taken_ + size);
  blocks_.emplace(begin, Block{size, false, {}});
  return begin;
}

void PinnedMemory::release(std::byte* block) {
  const std::lock_guard lock(mutex_);
  blocks_.at(block).is_free = true;
}

void PinnedMemory::used(const void* address, Use use) {
  const std::lock_guard lock(mutex_);
  const auto block = find(address);
  if (block == blocks_.end()) return;
  block->second.uses.push_back(std::move(use));
  protect(*block);
}

void PinnedMemory::host_joined(const VectorClock& host) {
  const std::lock_guard lock(mutex_);
  for (auto& entry : blocks_)
    if (std::erase_if(entry.second.uses, [&](const Use& use) { return host.covers(use.stamp); }) > 0) protect(entry);
}

std::optional<PinnedMemory::Use> PinnedMemory::take_conflict(const void* address, bool is_write) {
  const std::lock_guard lock(mutex_);
  const auto block = find(address);
  if (block == blocks_.end()) return std::nullopt;
  auto& uses = block->second.uses;
  const auto conflict = std::ranges::find_if(uses, [&](const Use& use) { return use.is_write || is_write; });
  if (conflict == uses.end()) return std::nullopt;
  std::optional<Use> found = std::move(*conflict);
  uses.clear();
  protect(*block);
  return found;
}

PinnedMemory::Blocks::iterator PinnedMemory::find(const void* address) {
  auto block = blocks_.upper_bound(const_cast<std::byte*>(static_cast<const std::byte*>(address)));
  if (block == blocks_.begin()) return blocks_.end();
  --block;
  return address < block->first + block->second.bytes ? block : blocks_.end();
}

void PinnedMemory::protect(const Blocks::value_type& block) {
  const auto& uses = block.second.uses;
  const bool is_written = std::ranges::any_of(uses, [](const Use& use) { return use.is_write; });
  const int allowed = is_written ? PROT_NONE : uses.empty() ? PROT_READ | PROT_WRITE : PROT_READ;
  ::mprotect(block.first, block.second.bytes, allowed);
}

}  // namespace phalanx::sim_device
