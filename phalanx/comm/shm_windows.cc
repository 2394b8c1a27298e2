#include "phalanx/comm/shm_windows.h"

#include <functional>
#include <numeric>
#include <utility>

namespace phalanx {

ShmWindow::ShmWindow(std::shared_ptr<SharedPages> pages, std::uint64_t number, std::size_t stride, int rank)
    : pages_(std::move(pages)),
      number_(number),
      stride_(stride),
      rank_(rank),
      category_(observe::MemoryScope::current()) {
  observe::note_memory_taken(category_, stride_, /*shared=*/true);
}

ShmWindow::~ShmWindow() { observe::note_memory_freed(category_, stride_, /*shared=*/true); }

bool ShmWindow::holds(const void* data, std::size_t bytes) const noexcept {
  const std::less_equal<> not_after;  // of pointers into different objects
  const auto* begin = static_cast<const std::byte*>(data);
  return not_after(part(rank_), begin) && not_after(begin + bytes, part(rank_) + stride_);
}

std::shared_ptr<ShmWindow> ShmWindows::make(std::size_t bytes, int rank, int size,
                                            const SharedPages::Exchange& exchange) {
  constexpr std::size_t kPage = 4096;
  const std::size_t stride = (bytes + kPage - 1) / kPage * kPage;
  SharedPages::Request request;
  request.bytes = stride * static_cast<std::size_t>(size);
  request.form = {~std::uint64_t{0}, static_cast<std::uint64_t>(size), stride};  // no segment has so many ranks
  request.members.resize(static_cast<std::size_t>(size));
  std::iota(request.members.begin(), request.members.end(), 0);
  request.rank = rank;
  // Each rank takes its own part, so that the pages are near the cores that it runs on.
  request.prepare = [&](SharedPages& pages) { pages.take(stride * static_cast<std::size_t>(rank), bytes); };
  auto pages = SharedPages::make(std::move(request), exchange);
  const std::lock_guard lock(mutex_);
  auto window = std::make_shared<ShmWindow>(std::move(pages), ++made_, stride, rank);
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
