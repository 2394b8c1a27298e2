#include "phalanx/tensor/host_block_pool.h"

#include <pthread.h>
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
  // A child has no other thread that could unlock it.
  static const int at_fork =
      ::pthread_atfork([] { pool->mutex_.lock(); }, [] { pool->mutex_.unlock(); }, [] { pool->mutex_.unlock(); });
  static_cast<void>(at_fork);
  return *pool;
}

HostBlockPool::~HostBlockPool() {
  PHALANX_ASSERT(blocks_.empty(), "blocks do not outlive their pool");
  trim();
}

void* HostBlockPool::allocate(std::size_t bytes, std::uint8_t tag) noexcept {
  PHALANX_ASSERT(bytes >= kLeastBytes, "smaller blocks are malloc's");
  if (bytes > PTRDIFF_MAX / 2) return nullptr;
  const std::size_t rounded = rounded_up(bytes);
  void* block = nullptr;
  // The kernel's work on large blocks is not done under the lock.
  try {
    std::vector<Pages> returned;
    {
      const std::scoped_lock lock(mutex_);
      block = reuse(rounded);
      const std::size_t most = std::max(use_.most_in_use, use_.in_use + rounded) + kSpareBytes;
      while (block == nullptr && use_.cached > 0 && use_.in_use + rounded + use_.cached > most) {
        returned.emplace_back();
        returned.back() = take_oldest();
      }
    }
    for (const Pages& pages : returned) return_pages(pages);
    if (block == nullptr) block = map_pages(rounded);
    if (block == nullptr && trim() > 0) block = map_pages(rounded);
    if (block == nullptr) return nullptr;
    const std::scoped_lock lock(mutex_);
    blocks_[block] = {bytes, tag};
    use_.in_use += rounded;
    use_.most_in_use = std::max(use_.most_in_use, use_.in_use);
    return block;
  } catch (const std::bad_alloc&) {
    if (block != nullptr) return_pages({block, rounded});
    return nullptr;
  }
}

void* HostBlockPool::reuse(std::size_t rounded) noexcept {
  const auto same = cached_.find(rounded);
  if (same == cached_.end()) return nullptr;
  void* const block = same->second.back().block;
  same->second.pop_back();
  if (same->second.empty()) cached_.erase(same);
  use_.cached -= rounded;
  return block;
}

HostBlockPool::Pages HostBlockPool::take_oldest() noexcept {
  const auto oldest = std::ranges::min_element(
      cached_, {}, [](const auto& size_and_blocks) { return size_and_blocks.second.front().freed_at; });
  const Pages pages{oldest->second.front().block, oldest->first};
  use_.cached -= pages.bytes;
  oldest->second.pop_front();
  if (oldest->second.empty()) cached_.erase(oldest);
  return pages;
}

void HostBlockPool::return_pages(const Pages& pages) noexcept {
  // A process has only so many mappings, and this may need one more. The addresses are lost then, the memory is not.
  if (::munmap(pages.begin, pages.bytes) != 0) ::madvise(pages.begin, pages.bytes, MADV_DONTNEED);
}

std::size_t HostBlockPool::trim() noexcept {
  std::size_t sum = 0;
  while (true) {
    Pages pages;
    {
      const std::scoped_lock lock(mutex_);
      use_.most_in_use = use_.in_use;
      if (use_.cached == 0) return sum;
      pages = take_oldest();
    }
    return_pages(pages);
    sum += pages.bytes;
  }
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

HostBlockPool::Block HostBlockPool::free(void* block) noexcept {
  Block was;
  std::size_t rounded = 0;
  {
    const std::scoped_lock lock(mutex_);
    const auto found = blocks_.find(block);
    PHALANX_ASSERT(found != blocks_.end(), "the block is in use");
    was = found->second;
    blocks_.erase(found);
    rounded = rounded_up(was.bytes);
    use_.in_use -= rounded;
    try {
      cached_[rounded].push_back({block, ++frees_});
      use_.cached += rounded;
      return was;
    } catch (const std::bad_alloc&) {
      if (const auto same = cached_.find(rounded); same != cached_.end() && same->second.empty()) cached_.erase(same);
    }
  }
  return_pages({block, rounded});
  return was;
}

HostBlockPool::Use HostBlockPool::use() {
  const std::scoped_lock lock(mutex_);
  return use_;
}

}  // namespace phalanx
