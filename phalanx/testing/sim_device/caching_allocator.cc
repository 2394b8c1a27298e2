#include "phalanx/testing/sim_device/caching_allocator.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

namespace phalanx::sim_device {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kSmallest = 512;
constexpr std::size_t kSmall = kMiB;  // up to here a request comes out of a small segment
constexpr std::size_t kSmallSegment = 2 * kMiB;
constexpr std::size_t kLargeSegment = 20 * kMiB;
constexpr std::size_t kOwnSegment = 10 * kMiB;  // from here a request gets a segment of its own

std::size_t round_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

std::size_t segment_size(std::size_t size) {
  if (size <= kSmall) return kSmallSegment;
  return size < kOwnSegment ? kLargeSegment : round_up(size, 2 * kMiB);
}

}  // namespace

struct CachingAllocator::Block {
  std::byte* begin = nullptr;
  std::size_t size = 0;
  StreamId stream;
  bool is_small = false;  // part of a small segment
  std::size_t requested = 0;
  bool is_used = false;
  bool is_fresh = true;     // some of it was never given out
  Block* before = nullptr;  // neighbours in the segment
  Block* after = nullptr;
  std::set<StreamId> users;  // other streams, by record_stream()
};

bool CachingAllocator::ByStreamAndSize::operator()(const Block* a, const Block* b) const {
  return std::tie(a->stream, a->size, a->begin) < std::tie(b->stream, b->size, b->begin);
}

struct CachingAllocator::Device {
  mutable std::mutex mutex;
  int index = 0;
  std::size_t addresses_taken = 0;
  std::multimap<std::size_t, std::byte*> free_addresses;  // of segments given back, by size
  std::map<const std::byte*, std::unique_ptr<Block>> blocks;
  std::array<FreeBlocks, 2> free;  // of large and of small segments
  struct Pending {
    Block* block;
    std::vector<EventPtr> uses;
  };
  std::vector<Pending> pending;  // freed, but other streams may still use them
  MemoryStats stats;

  Block* find(const void* address) {
    auto after = blocks.upper_bound(static_cast<const std::byte*>(address));
    if (after == blocks.begin()) return nullptr;
    Block* block = std::prev(after)->second.get();
    return address < block->begin + block->size ? block : nullptr;
  }
};

CachingAllocator::CachingAllocator(Runtime& runtime) : runtime_(runtime) {
  for (int i = 0; i < kDevices; ++i) {
    auto& device = devices_[static_cast<std::size_t>(i)] = std::make_unique<Device>();
    device->index = i;
  }
}
CachingAllocator::~CachingAllocator() = default;

std::byte* CachingAllocator::allocate(StreamId stream, std::size_t bytes) {
  Device& device = *devices_.at(static_cast<std::size_t>(stream.device));
  const std::size_t size = std::max(kSmallest, round_up(bytes, kSmallest));
  const std::lock_guard lock(device.mutex);
  finish_recorded_uses(device);
  Block* block = take_free(device, stream, size);
  if (block != nullptr) {
    ++device.stats.reuses;
  } else {
    block = new_segment(device, stream, size);
  }
  split(device, block, size);
  if (std::exchange(block->is_fresh, false)) poison(*block, "allocate");
  block->is_used = true;
  MemoryStats& stats = device.stats;
  ++stats.allocations;
  block->requested = size;
  stats.allocated += block->size;
  stats.requested += size;
  stats.peak_allocated = std::max(stats.peak_allocated, stats.allocated);
  stats.peak_requested = std::max(stats.peak_requested, stats.requested);
  return block->begin;
}

CachingAllocator::Block* CachingAllocator::take_free(Device& device, StreamId stream, std::size_t size) {
  FreeBlocks& free = device.free[size <= kSmall ? 1 : 0];
  Block wanted;
  wanted.stream = stream;
  wanted.size = size;
  const auto best = free.lower_bound(&wanted);
  if (best == free.end() || (*best)->stream != stream) return nullptr;
  Block* const block = *best;
  free.erase(best);
  return block;
}

CachingAllocator::Block* CachingAllocator::new_segment(Device& device, StreamId stream, std::size_t size) {
  const std::size_t bytes = segment_size(size);
  if (device.stats.reserved + bytes > device.stats.capacity) release_segments(device);
  if (device.stats.reserved + bytes > device.stats.capacity)
    throw DeviceOutOfMemory(fmt::format(
        "sim:{} is out of memory: {} bytes wanted, {} of {} in use, {} reserved. Use less memory, or a larger "
        "set_capacity()",
        device.index, size, device.stats.allocated, device.stats.capacity, device.stats.reserved));
  auto block = std::make_unique<Block>();
  block->begin = take_addresses(device, bytes);
  block->size = bytes;
  block->stream = stream;
  block->is_small = size <= kSmall;
  device.stats.reserved += bytes;
  device.stats.peak_reserved = std::max(device.stats.peak_reserved, device.stats.reserved);
  return (device.blocks[block->begin] = std::move(block)).get();
}

std::byte* CachingAllocator::take_addresses(Device& device, std::size_t size) {
  if (const auto known = device.free_addresses.find(size); known != device.free_addresses.end()) {
    std::byte* const begin = known->second;
    device.free_addresses.erase(known);
    return begin;
  }
  if (device.addresses_taken + size > DeviceMemory::kBytesPerDevice)
    throw DeviceOutOfMemory(fmt::format("sim:{}: no addresses left for a segment of {} bytes", device.index, size));
  return runtime_.memory().begin(device.index) + std::exchange(device.addresses_taken, device.addresses_taken + size);
}

void CachingAllocator::split(Device& device, Block* block, std::size_t size) {
  const std::size_t rest = block->size - size;
  if (block->is_small ? rest < kSmallest : rest <= kSmall) return;
  auto upper = std::make_unique<Block>(*block);
  upper->begin += size;
  upper->size = rest;
  upper->before = block;
  if (block->after != nullptr) block->after->before = upper.get();
  block->after = upper.get();
  block->size = size;
  device.free[block->is_small ? 1 : 0].insert(upper.get());
  device.blocks[upper->begin] = std::move(upper);
}

void CachingAllocator::free(std::byte* begin) {
  const int index = runtime_.memory().device_of(begin);
  Device& device = *devices_[static_cast<std::size_t>(index)];
  const std::lock_guard lock(device.mutex);
  Block* const block = device.find(begin);
  device.stats.allocated -= block->size;
  device.stats.requested -= block->requested;
  if (block->users.empty()) {
    poison(*block, "free");
    make_free(device, block);
    return;
  }
  Device::Pending pending{block, {runtime_.record(block->stream)}};
  for (const StreamId user : std::exchange(block->users, {})) pending.uses.push_back(runtime_.record(user));
  device.pending.push_back(std::move(pending));
}

void CachingAllocator::make_free(Device& device, Block* block) {
  block->is_used = false;
  if (block->after != nullptr && !block->after->is_used) merge(device, block, block->after);
  if (block->before != nullptr && !block->before->is_used) merge(device, block, block->before);
  device.free[block->is_small ? 1 : 0].insert(block);
}

// The neighbour is free. It becomes part of the block.
void CachingAllocator::merge(Device& device, Block* block, Block* neighbour) {
  device.free[block->is_small ? 1 : 0].erase(neighbour);
  block->size += neighbour->size;
  block->is_fresh |= neighbour->is_fresh;
  auto own = device.blocks.extract(block->begin);
  if (neighbour == block->before) {
    block->begin = neighbour->begin;
    block->before = neighbour->before;
    if (block->before != nullptr) block->before->after = block;
  } else {
    block->after = neighbour->after;
    if (block->after != nullptr) block->after->before = block;
  }
  device.blocks.erase(device.blocks.find(neighbour->begin));
  own.key() = block->begin;
  device.blocks.insert(std::move(own));
}

// libtorch's allocator asks the events, too. The program learns nothing from that, so neither does the race detector:
// it only forgets the memory's past.
void CachingAllocator::finish_recorded_uses(Device& device) {
  std::vector<Block*> done;
  std::erase_if(device.pending, [&](const Device::Pending& one) {
    const bool is_done = std::ranges::all_of(one.uses, [](const EventPtr& use) { return use->is_done(); });
    if (is_done) done.push_back(one.block);
    return is_done;
  });
  for (Block* const block : done) {
    runtime_.forget_accesses(block->begin, block->size);
    poison(*block, "free after recorded uses");
    make_free(device, block);
  }
}

void CachingAllocator::empty_cache(int device) {
  Device& of = *devices_.at(static_cast<std::size_t>(device));
  const std::lock_guard lock(of.mutex);
  release_segments(of);
}

void CachingAllocator::release_segments(Device& device) {
  runtime_.synchronize_device(device.index, "the allocator gives back its cache");
  finish_recorded_uses(device);
  runtime_.synchronize_device(device.index, "the allocator gives back its cache");  // until all is poisoned
  for (FreeBlocks& free : device.free) {
    std::erase_if(free, [&](Block* block) {
      if (block->before != nullptr || block->after != nullptr) return false;
      runtime_.forget_accesses(block->begin, block->size);
      runtime_.memory().discard(block->begin, block->size);
      device.free_addresses.emplace(block->size, block->begin);
      device.stats.reserved -= block->size;
      device.blocks.erase(block->begin);
      return true;
    });
  }
}

void CachingAllocator::record_stream(const void* address, StreamId stream) {
  if (!runtime_.memory().owns(address)) return;
  Device& device = *devices_[static_cast<std::size_t>(runtime_.memory().device_of(address))];
  const std::lock_guard lock(device.mutex);
  Block* const block = device.find(address);
  if (block != nullptr && block->stream != stream) block->users.insert(stream);
}

MemoryStats CachingAllocator::stats(int device) const {
  const Device& of = *devices_.at(static_cast<std::size_t>(device));
  const std::lock_guard lock(of.mutex);
  return of.stats;
}

void CachingAllocator::reset_peaks(int device) {
  Device& of = *devices_.at(static_cast<std::size_t>(device));
  const std::lock_guard lock(of.mutex);
  of.stats.peak_allocated = of.stats.allocated;
  of.stats.peak_requested = of.stats.requested;
  of.stats.peak_reserved = of.stats.reserved;
}

void CachingAllocator::set_capacity(int device, std::size_t bytes) {
  Device& of = *devices_.at(static_cast<std::size_t>(device));
  const std::lock_guard lock(of.mutex);
  of.stats.capacity = bytes;
}

void CachingAllocator::poison(const Block& block, const char* name) {
  runtime_.launch(block.stream, {name,
                                 {{block.begin, block.size, true}},
                                 [begin = runtime_.memory().kernel_view(block.begin), size = block.size] {
                                   std::memset(begin, 0xff, size);  // a NaN in every floating-point type
                                 },
                                 /*counts_as_launch=*/false});
}

}  // namespace phalanx::sim_device
