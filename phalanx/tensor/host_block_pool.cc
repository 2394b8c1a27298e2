#include "phalanx/tensor/host_block_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <new>

#include "phalanx/base/assert.h"

namespace phalanx {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr unsigned kStepsOfDoubling = 8;  // a block is at most an eighth larger than what is asked for

std::size_t rounded_up(std::size_t bytes) {
  const std::size_t step = std::bit_floor(bytes) / kStepsOfDoubling;
  return (bytes + step - 1) / step * step;
}

/// Begins at a huge page's boundary if it has a whole one. nullptr: no memory.
void* map_pages(std::size_t bytes) {
  const std::size_t more = bytes < kHugePage ? 0 : kHugePage;
  void* const all = ::mmap(nullptr, bytes + more, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (all == MAP_FAILED) return nullptr;
  if (more == 0) return all;
  auto* const begin = static_cast<std::byte*>(all);
  const std::size_t before = (kHugePage - std::bit_cast<std::uintptr_t>(all) % kHugePage) % kHugePage;
  if (before > 0) ::munmap(begin, before);
  if (more > before) ::munmap(begin + before + bytes, more - before);
  ::madvise(begin + before, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);  // ignored where there are none
  return begin + before;
}

}  // namespace

HostBlockPool& HostBlockPool::instance() {
  static auto* const pool = new HostBlockPool;
  return *pool;
}

HostBlockPool::~HostBlockPool() {
  PHALANX_ASSERT(blocks_.empty(), "blocks do not outlive their pool");
  while (use_.kept > 0) return_oldest();
}

void* HostBlockPool::allocate(std::size_t bytes, std::uint8_t tag) noexcept {
  PHALANX_ASSERT(bytes >= kLeastBytes, "smaller blocks are malloc's");
  if (bytes > PTRDIFF_MAX / 2) return nullptr;
  try {
    const std::scoped_lock lock(mutex_);
    const std::size_t rounded = rounded_up(bytes);
    void* block = reuse(rounded);
    if (block == nullptr) {
      const std::size_t most = std::max(use_.most_in_use, use_.in_use + rounded) + kSpareBytes;
      while (use_.kept > 0 && use_.in_use + rounded + use_.kept > most) return_oldest();
      block = map_pages(rounded);
      while (block == nullptr && use_.kept > 0) {
        return_oldest();
        block = map_pages(rounded);
      }
      if (block == nullptr) return nullptr;
    }
    blocks_[block] = {bytes, tag};
    use_.in_use += rounded;
    use_.most_in_use = std::max(use_.most_in_use, use_.in_use);
    return block;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void* HostBlockPool::reuse(std::size_t rounded) {
  const auto same = kept_.find(rounded);
  if (same == kept_.end()) return nullptr;
  void* const block = same->second.back().block;
  same->second.pop_back();
  if (same->second.empty()) kept_.erase(same);
  use_.kept -= rounded;
  return block;
}

void HostBlockPool::return_oldest() {
  const auto oldest = std::ranges::min_element(
      kept_, {}, [](const auto& size_and_blocks) { return size_and_blocks.second.front().freed_at; });
  ::munmap(oldest->second.front().block, oldest->first);
  use_.kept -= oldest->first;
  oldest->second.pop_front();
  if (oldest->second.empty()) kept_.erase(oldest);
}

std::optional<HostBlockPool::Block> HostBlockPool::find(const void* block) {
  constexpr std::uintptr_t kPage = 4096;
  if (std::bit_cast<std::uintptr_t>(block) % kPage != 0) return std::nullopt;
  const std::scoped_lock lock(mutex_);
  const auto found = blocks_.find(block);
  return found == blocks_.end() ? std::nullopt : std::optional(found->second);
}

void HostBlockPool::set_tag(const void* block, std::uint8_t tag) {
  const std::scoped_lock lock(mutex_);
  blocks_.at(block).tag = tag;
}

HostBlockPool::Block HostBlockPool::free(void* block) {
  const std::scoped_lock lock(mutex_);
  const auto found = blocks_.find(block);
  PHALANX_ASSERT(found != blocks_.end(), "the block is in use");
  const Block was = found->second;
  blocks_.erase(found);
  const std::size_t rounded = rounded_up(was.bytes);
  use_.in_use -= rounded;
  use_.kept += rounded;
  kept_[rounded].push_back({block, ++frees_});
  return was;
}

HostBlockPool::Use HostBlockPool::use() {
  const std::scoped_lock lock(mutex_);
  return use_;
}

}  // namespace phalanx
