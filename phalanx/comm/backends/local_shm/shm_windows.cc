#include "phalanx/comm/backends/local_shm/shm_windows.h"

#include <sys/mman.h>

#include <functional>
#include <numeric>
#include <utility>

#include "phalanx/comm/backends/local_shm/shared_heap.h"

namespace phalanx {

ShmWindow::ShmWindow(const std::shared_ptr<SharedPages>& pages, std::uint64_t number, std::size_t stride,
                     const Form& form)
    : number_(number),
      stride_(stride),
      rank_(form.rank),
      keeps_peers_mapped_(form.options.keeps_peers_mapped),
      category_(observe::MemoryScope::current()) {
  for (int r = 0; r < form.size; ++r) parts_.emplace_back(pages, pages->data() + static_cast<std::size_t>(r) * stride);
  observe::record_memory_allocated(category_, stride_, /*shared=*/true);
}

ShmWindow::ShmWindow(std::vector<std::shared_ptr<std::byte>> heaps, std::size_t own_bytes, int rank)
    : parts_(std::move(heaps)),
      number_(kHeaps),
      stride_(own_bytes),
      rank_(rank),
      keeps_peers_mapped_(true),
      category_(observe::MemoryCategory::buffers) {}

ShmWindow::~ShmWindow() {
  if (number_ != kHeaps) observe::record_memory_freed(category_, stride_, /*shared=*/true);
}

bool ShmWindow::holds(const void* data, std::size_t bytes) const noexcept {
  const std::less_equal<> not_after;  // of pointers into different objects
  const auto* begin = static_cast<const std::byte*>(data);
  return not_after(part(rank_), begin) && not_after(begin + bytes, part(rank_) + stride_);
}

void ShmWindow::leave_peers() const noexcept {
  if (keeps_peers_mapped_) return;
  // If the kernel refuses, they stay mapped, and nothing is lost. The parts are contiguous.
  const auto before = static_cast<std::size_t>(rank_), behind = parts_.size() - before - 1;
  madvise(part(0), stride_ * before, MADV_DONTNEED);
  madvise(part(rank_) + stride_, stride_ * behind, MADV_DONTNEED);
}

void ShmWindow::abandon(const void* data) const noexcept {
  if (SharedHeap* const heap = number_ == kHeaps ? SharedHeap::owner_of(data) : nullptr) heap->abandon(data);
}

std::shared_ptr<ShmWindow> ShmWindows::make(const ShmWindow::Form& form, const SharedPages::Exchange& exchange) {
  constexpr std::size_t kPage = 4096;
  const std::size_t stride = (form.bytes + kPage - 1) / kPage * kPage;
  const auto size = static_cast<std::size_t>(form.size);
  SharedPages::Request request;
  request.bytes = stride * size;
  request.form = {~std::uint64_t{0}, size, stride};  // no segment has so many ranks
  request.members.resize(size);
  std::iota(request.members.begin(), request.members.end(), 0);
  request.rank = form.rank;
  // Each rank allocates its own part, so that the pages are near the cores that it runs on.
  request.prepare = [&](SharedPages& pages) { pages.take(stride * static_cast<std::size_t>(form.rank), form.bytes); };
  auto pages = SharedPages::make(std::move(request), exchange);
  const std::lock_guard lock(mutex_);
  auto window = std::make_shared<ShmWindow>(std::move(pages), ++made_, stride, form);
  std::erase_if(windows_, [](const auto& one) { return one.expired(); });
  windows_.push_back(window);
  return window;
}

void ShmWindows::add_heaps(const std::vector<std::string>& addresses, int rank) {
  SharedHeap* const own = SharedHeap::current();
  if (own == nullptr || addresses[static_cast<std::size_t>(rank)] != own->address()) return;
  std::vector<std::shared_ptr<std::byte>> heaps;
  for (const std::string& address : addresses) {
    heaps.push_back(SharedHeap::attach(address));
    if (!heaps.back()) return;
  }
  heaps_ = std::make_shared<ShmWindow>(std::move(heaps), own->bytes(), rank);
}

std::shared_ptr<ShmWindow> ShmWindows::find(const void* data, std::size_t bytes) {
  if (heaps_ && heaps_->holds(data, bytes)) return heaps_;
  const std::lock_guard lock(mutex_);
  for (const auto& one : windows_) {
    auto window = one.lock();
    if (window && window->holds(data, bytes)) return window;
  }
  return nullptr;
}

}  // namespace phalanx
