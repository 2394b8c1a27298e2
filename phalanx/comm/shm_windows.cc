#include "phalanx/comm/shm_windows.h"

#include <sys/mman.h>

#include <functional>
#include <numeric>
#include <utility>

namespace phalanx {

ShmWindow::ShmWindow(std::shared_ptr<SharedPages> pages, std::uint64_t number, std::size_t stride, const Form& form)
    : pages_(std::move(pages)),
      number_(number),
      stride_(stride),
      rank_(form.rank),
      size_(form.size),
      options_(form.options),
      category_(observe::MemoryScope::current()) {
  observe::note_memory_taken(category_, stride_, /*shared=*/true);
}

ShmWindow::~ShmWindow() { observe::note_memory_freed(category_, stride_, /*shared=*/true); }

bool ShmWindow::holds(const void* data, std::size_t bytes) const noexcept {
  const std::less_equal<> not_after;  // of pointers into different objects
  const auto* begin = static_cast<const std::byte*>(data);
  return not_after(part(rank_), begin) && not_after(begin + bytes, part(rank_) + stride_);
}

void ShmWindow::leave_peers() const noexcept {
  if (options_.keeps_peers_mapped) return;
  // Should the kernel refuse, they stay mapped, and nothing is lost.
  madvise(part(0), stride_ * static_cast<std::size_t>(rank_), MADV_DONTNEED);
  madvise(part(rank_ + 1), stride_ * static_cast<std::size_t>(size_ - rank_ - 1), MADV_DONTNEED);
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
  // Each rank takes its own part, so that the pages are near the cores that it runs on.
  request.prepare = [&](SharedPages& pages) { pages.take(stride * static_cast<std::size_t>(form.rank), form.bytes); };
  auto pages = SharedPages::make(std::move(request), exchange);
  const std::lock_guard lock(mutex_);
  auto window = std::make_shared<ShmWindow>(std::move(pages), ++made_, stride, form);
  std::erase_if(windows_, [](const auto& one) { return one.expired(); });
  windows_.push_back(window);
  return window;
}

std::shared_ptr<ShmWindow> ShmWindows::find(const void* data, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  for (const auto& one : windows_) {
    auto window = one.lock();
    if (window && window->holds(data, bytes)) return window;
  }
  return nullptr;
}

}  // namespace phalanx
