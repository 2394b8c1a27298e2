#include "phalanx/comm/backends/local_shm/shared_heap.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <iterator>
#include <new>
#include <sstream>
#include <string_view>
#include <system_error>
#include <vector>

#include "phalanx/base/error.h"

namespace phalanx {
namespace {

constexpr std::uint64_t kHeapMagic = 0x31504145484c4850ULL;  // "PHLHEAP1"
constexpr std::size_t kHeapPage = 4096;

struct HeapHead {
  std::uint64_t magic;
  std::array<std::uint64_t, 2> token;
  std::uint64_t bytes;
};

std::atomic<SharedHeap*> the_heap{nullptr};  // the newest, linked to those it inherited; never destroyed
thread_local int pauses = 0;

std::size_t in_pages(std::size_t bytes) { return (bytes + kHeapPage - 1) / kHeapPage * kHeapPage; }

[[noreturn]] void throw_no_heap(const std::string& what) {
  throw CommError(fmt::format("the shared heap cannot be made: {}: {}", what, std::generic_category().message(errno)));
}

}  // namespace

SharedHeap::SharedHeap(const SharedHeapOptions& options)
    : bytes_(in_pages(std::max(options.reserved_bytes, 2 * kHeapPage))), cache_limit_(options.cached_bytes) {
  if (options.reserved_bytes == 0)
    bytes_ = static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  // A longer file would raise SIGXFSZ.
  if (rlimit limit{}; getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < bytes_)
    bytes_ = std::max<std::size_t>(limit.rlim_cur / kHeapPage, 2) * kHeapPage;
  descriptor_ = memfd_create("phalanx-heap", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (descriptor_ < 0) throw_no_heap("memfd_create");
  HeapHead head{.magic = kHeapMagic, .token = {}, .bytes = bytes_};
  void* address = MAP_FAILED;
  if (fchmod(descriptor_, 0600) == 0 && ftruncate(descriptor_, static_cast<off_t>(bytes_)) == 0 &&
      fcntl(descriptor_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0 &&
      getrandom(head.token.data(), sizeof head.token, 0) == static_cast<ssize_t>(sizeof head.token) &&
      pwrite(descriptor_, &head, sizeof head, 0) == static_cast<ssize_t>(sizeof head))
    address = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor_, 0);
  if (address == MAP_FAILED) {
    const int error = errno;
    close(descriptor_);
    errno = error;
    throw_no_heap(fmt::format("{} bytes", bytes_));
  }
  base_ = static_cast<std::byte*>(address);
  address_ = fmt::format("{} {} {} {} {}", getpid(), descriptor_, head.token[0], head.token[1], bytes_);
  add_free(kHeapPage, bytes_ - kHeapPage);
}

void SharedHeap::start(const SharedHeapOptions& options) {
  static std::mutex starting;
  const std::lock_guard lock(starting);
  if (current() != nullptr) return;
  static const int forks = pthread_atfork(
      [] {
        if (SharedHeap* heap = current()) heap->mutex_.lock();
      },
      [] {
        if (SharedHeap* heap = current()) heap->mutex_.unlock();
      },
      &SharedHeap::on_fork_in_child);
  if (forks != 0) throw CommError("the shared heap cannot be made: no memory");
  auto* heap = new SharedHeap(options);
  heap->inherited_ = the_heap.load(std::memory_order_acquire);
  the_heap.store(heap, std::memory_order_release);
}

// Only functions that are safe in signal handlers may be called here.
void SharedHeap::lose_access() noexcept {
  constexpr std::string_view kReason =
      "phalanx: a forked process gets no copy of the shared heap: the system gives it no private memory of that size, "
      "or the heap's descriptor was closed. If this process uses a tensor from before the fork, it dies. Expected: "
      "vm.overcommit_memory is not 2, or SharedHeapOptions::reserved_bytes is smaller\n";
  [[maybe_unused]] const auto written = write(STDERR_FILENO, kReason.data(), kReason.size());
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
  if (mmap(base_, bytes_, PROT_NONE, kFlags, -1, 0) == MAP_FAILED) _exit(1);
}

// The child must not change the parent's memory: from now on each page is copied when this process writes to it.
void SharedHeap::on_fork_in_child() noexcept {
  SharedHeap* const heap = current();
  if (heap == nullptr) return;
  heap->is_parents_ = true;
  heap->mutex_.unlock();
  constexpr int kFlags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
  if (mmap(heap->base_, heap->bytes_, PROT_READ | PROT_WRITE, kFlags, heap->descriptor_, 0) == MAP_FAILED)
    heap->lose_access();
}

SharedHeap* SharedHeap::current() noexcept {
  SharedHeap* const heap = the_heap.load(std::memory_order_acquire);
  return heap != nullptr && !heap->is_parents_ ? heap : nullptr;
}

SharedHeap* SharedHeap::owner_of(const void* data) noexcept {
  SharedHeap* heap = the_heap.load(std::memory_order_acquire);
  while (heap != nullptr && !heap->offset_of(data, 0)) heap = heap->inherited_;
  return heap;
}

void* SharedHeap::try_allocate(std::size_t bytes, std::uint8_t tag) noexcept {
  if (bytes < kLeastBytes || pauses > 0) return nullptr;
  SharedHeap* const heap = current();
  return heap != nullptr ? heap->allocate(bytes, tag) : nullptr;
}

void* SharedHeap::allocate(std::size_t bytes, std::uint8_t tag) noexcept try {
  if (bytes > bytes_) return nullptr;
  const std::size_t wanted = in_pages(bytes);
  const std::lock_guard lock(mutex_);
  const auto best = free_by_size_.lower_bound({wanted, 0});
  if (best == free_by_size_.end()) return nullptr;
  const auto [bytes_there, offset] = *best;
  used_.emplace(offset, Used{wanted, tag, false});
  remove_free(free_.find(offset));
  uncache(offset, wanted);
  in_use_ += wanted;
  if (bytes_there > wanted) add_free(offset + wanted, bytes_there - wanted);
  return base_ + offset;
} catch (const std::bad_alloc&) {
  return nullptr;
}

SharedHeap::Block SharedHeap::at(const void* block) {
  const std::lock_guard lock(mutex_);
  const Used& used = used_.at(*offset_of(block, 0));
  return {used.bytes, used.tag};
}

void SharedHeap::set_tag(const void* block, std::uint8_t tag) {
  const std::lock_guard lock(mutex_);
  used_.at(*offset_of(block, 0)).tag = tag;
}

SharedHeap::Block SharedHeap::free(void* block) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = used_.find(*offset_of(block, 0));
  const Used used = found->second;
  if (used.is_abandoned || is_parents_) return {used.bytes, used.tag};
  const std::size_t offset = found->first;
  used_.erase(found);
  in_use_ -= used.bytes;
  add_free(offset, used.bytes);
  cache(offset, used.bytes);
  if (cached_bytes_ > cache_limit_) trim();
  return {used.bytes, used.tag};
}

// Merges the block with its free neighbours.
void SharedHeap::add_free(std::size_t offset, std::size_t bytes) {
  const auto after = free_.lower_bound(offset);
  if (after != free_.end() && offset + bytes == after->first) {
    bytes += after->second;
    remove_free(after);
  }
  if (const auto behind = free_.lower_bound(offset); behind != free_.begin()) {
    const auto before = std::prev(behind);
    if (before->first + before->second == offset) {
      offset = before->first;
      bytes += before->second;
      remove_free(before);
    }
  }
  free_.emplace(offset, bytes);
  free_by_size_.emplace(bytes, offset);
}

void SharedHeap::remove_free(std::map<std::size_t, std::size_t>::iterator block) {
  free_by_size_.erase({block->second, block->first});
  free_.erase(block);
}

void SharedHeap::cache(std::size_t offset, std::size_t bytes) {
  cached_bytes_ += bytes;
  const auto after = cached_.upper_bound(offset);
  if (after != cached_.end() && after->first == offset + bytes) {
    bytes += after->second;
    cached_.erase(after);
  }
  if (const auto behind = cached_.lower_bound(offset); behind != cached_.begin()) {
    const auto before = std::prev(behind);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  cached_.emplace(offset, bytes);
}

void SharedHeap::uncache(std::size_t offset, std::size_t bytes) {
  const std::size_t end = offset + bytes;
  auto part = cached_.upper_bound(offset);
  if (part != cached_.begin()) --part;
  while (part != cached_.end() && part->first < end) {
    const std::size_t part_begin = part->first, part_end = part_begin + part->second;
    if (part_end <= offset) {
      ++part;
      continue;
    }
    part = cached_.erase(part);
    cached_bytes_ -= std::min(end, part_end) - std::max(offset, part_begin);
    if (part_begin < offset) cached_.emplace(part_begin, offset - part_begin);
    if (part_end > end) cached_.emplace(end, part_end - end);
  }
}

// Releases the largest first, until half of the limit is left, so that it does not happen again at once.
void SharedHeap::trim() {
  std::vector<std::pair<std::size_t, std::size_t>> parts;  // bytes, offset
  for (const auto& [offset, bytes] : cached_) parts.emplace_back(bytes, offset);
  std::sort(parts.rbegin(), parts.rend());
  for (const auto& [bytes, offset] : parts) {
    if (cached_bytes_ <= cache_limit_ / 2) return;
    // If the kernel refuses, the pages stay, and nothing is lost.
    fallocate(descriptor_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
              static_cast<off_t>(bytes));
    uncache(offset, bytes);
  }
}

std::optional<std::size_t> SharedHeap::offset_of(const void* data, std::size_t bytes) const noexcept {
  const auto begin = reinterpret_cast<std::uintptr_t>(base_), at = reinterpret_cast<std::uintptr_t>(data);
  if (at < begin || at - begin >= bytes_ || bytes > bytes_ - (at - begin)) return std::nullopt;
  return at - begin;
}

void SharedHeap::abandon(const void* data) noexcept {
  const auto offset = offset_of(data, 0);
  if (!offset) return;
  const std::lock_guard lock(mutex_);
  const auto behind = used_.upper_bound(*offset);
  if (behind != used_.begin()) std::prev(behind)->second.is_abandoned = true;
}

SharedHeap::Use SharedHeap::use() {
  const std::lock_guard lock(mutex_);
  return {in_use_, cached_bytes_};
}

std::shared_ptr<std::byte> SharedHeap::attach(const std::string& address) {
  if (SharedHeap* const own = current(); own != nullptr && own->address_ == address)
    return {std::shared_ptr<void>(), own->base_};  // it is never destroyed
  static std::mutex mutex;
  static std::unordered_map<std::string, std::weak_ptr<std::byte>> known;
  const std::lock_guard lock(mutex);
  if (auto there = known[address].lock()) return there;
  int pid = 0, number = -1;
  HeapHead expected{.magic = kHeapMagic, .token = {}, .bytes = 0};
  std::istringstream text(address);
  if (!(text >> pid >> number >> expected.token[0] >> expected.token[1] >> expected.bytes)) return nullptr;
  const int descriptor = open(fmt::format("/proc/{}/fd/{}", pid, number).c_str(), O_RDWR | O_CLOEXEC);
  if (descriptor < 0) return nullptr;
  HeapHead found{};
  void* base = MAP_FAILED;
  if (pread(descriptor, &found, sizeof found, 0) == static_cast<ssize_t>(sizeof found) &&
      found.magic == expected.magic && found.token == expected.token && found.bytes == expected.bytes)
    base = mmap(nullptr, found.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
  close(descriptor);
  if (base == MAP_FAILED) return nullptr;
  std::shared_ptr<std::byte> there(static_cast<std::byte*>(base),
                                   [bytes = found.bytes](std::byte* memory) { munmap(memory, bytes); });
  known[address] = there;
  return there;
}

SharedHeap::Pause::Pause() noexcept { ++pauses; }
SharedHeap::Pause::~Pause() { --pauses; }

}  // namespace phalanx
