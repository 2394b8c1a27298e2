#include "phalanx/checkpoint/staging_buffer.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/human.h"
#include "phalanx/comm/stream_copy.h"
#include "phalanx/observe/memory_counters.h"

namespace phalanx {
namespace {

constexpr std::uint64_t kAlignment = 64;
constexpr std::uint64_t kHugePage = 2 << 20;
constexpr std::int64_t kBytesPerThread = 4 << 20;
constexpr std::uint64_t kLeastBlock = 256 << 20;  // of pinned memory

at::Tensor rows_of(const NamedTensor& named, const WriteItem& planned) {
  const auto tensor = named.tensor.detach();
  return tensor.dim() == 0 ? tensor : tensor.narrow(0, planned.row_begin, planned.row_end - planned.row_begin);
}

std::uint64_t aligned(std::uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

/// Where each box is copied to.
struct Places {
  struct Place {
    std::size_t block = 0;  // of pinned memory
    std::uint64_t offset = 0;
  };
  std::vector<Place> of_boxes;
  std::uint64_t host_bytes = 0;            // of boxes that are in host memory already
  std::vector<std::int64_t> pinned_bytes;  // of each block, for boxes on a device
};

/// A block is full when the next box does not fit.
Places places_of(const std::vector<NamedTensor>& tensors, const std::vector<WriteItem>& boxes) {
  Places places;
  std::uint64_t used = 0;  // of the last block
  for (const auto& planned : boxes) {
    const at::Tensor rows = rows_of(tensors[planned.tensor], planned);
    const std::uint64_t bytes = aligned(rows.nbytes());
    if (rows.is_cpu()) {
      places.of_boxes.push_back({0, std::exchange(places.host_bytes, places.host_bytes + bytes)});
      continue;
    }
    if (places.pinned_bytes.empty() || used + bytes > static_cast<std::uint64_t>(places.pinned_bytes.back())) {
      places.pinned_bytes.push_back(static_cast<std::int64_t>(std::bit_ceil(std::max(bytes, kLeastBlock))));
      used = 0;
    }
    places.of_boxes.push_back({places.pinned_bytes.size() - 1, std::exchange(used, used + bytes)});
  }
  // The last block need not be larger than what is in it.
  if (!places.pinned_bytes.empty()) places.pinned_bytes.back() = static_cast<std::int64_t>(std::bit_ceil(used));
  return places;
}

void copy_rows(std::byte* memory, const at::Tensor& rows) {
  if (!rows.is_contiguous()) {
    at::from_blob(memory, rows.sizes(), at::TensorOptions().dtype(rows.scalar_type())).copy_(rows);
    return;
  }
  const auto* source = static_cast<const std::byte*>(rows.const_data_ptr());
  at::parallel_for(0, static_cast<std::int64_t>(rows.nbytes()), kBytesPerThread,
                   [&](std::int64_t begin, std::int64_t end) {
                     stream_copy(memory + begin, source + begin, static_cast<std::size_t>(end - begin));
                   });
}

}  // namespace

void StagedBoxes::await_copies() const {
  constexpr const char* kFailed = "the state could not be copied from its device: {}";
  try {
    for (const CopyStream::Mark& mark : copied) CopyStream::synchronize(mark);
  } catch (const c10::Error& error) {
    throw CheckpointError(fmt::format(kFailed, error.what_without_backtrace()));
  } catch (const std::exception& error) {
    throw CheckpointError(fmt::format(kFailed, error.what()));
  }
}

StagingBuffer::~StagingBuffer() { free_memory(); }

void StagingBuffer::free_memory() {
  if (memory_ == nullptr) return;
  ::munmap(memory_, size_);
  observe::record_memory_freed(observe::MemoryCategory::buffers, size_);
  memory_ = nullptr;
  size_ = 0;
}

void StagingBuffer::grow(std::uint64_t bytes) {
  if (bytes <= size_) return;
  bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  free_memory();
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED)
    throw CheckpointError(fmt::format("no memory for a copy of the state ({}): {}; save without one (save())",
                                      human_bytes(bytes), std::strerror(errno)));
  ::madvise(memory, bytes, MADV_HUGEPAGE);  // ignored if it fails: not every system has huge pages
  memory_ = static_cast<std::byte*>(memory);
  size_ = bytes;
  observe::record_memory_allocated(observe::MemoryCategory::buffers, size_);
}

void StagingBuffer::make_pinned(const std::vector<std::int64_t>& blocks) {
  if (std::ranges::equal(pinned_, blocks, {}, [](const at::Tensor& block) { return block.numel(); })) return;
  pinned_.clear();
  for (const std::int64_t bytes : blocks) {
    try {
      pinned_.push_back(at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(true)));
    } catch (const c10::Error& error) {
      const std::int64_t all = std::accumulate(blocks.begin(), blocks.end(), std::int64_t{0});
      throw CheckpointError(
          fmt::format("no pinned host memory for a copy of the state ({}): {}; save without one "
                      "(save())",
                      human_bytes(static_cast<std::uint64_t>(all)), error.what_without_backtrace()));
    }
  }
}

void StagingBuffer::reserve(const std::vector<NamedTensor>& tensors, const std::vector<WriteItem>& boxes) {
  const auto before = size_;
  const Places places = places_of(tensors, boxes);
  grow(places.host_bytes);
  make_pinned(places.pinned_bytes);
  constexpr std::uint64_t kPage = 4096;
  if (size_ > before)
    for (std::uint64_t at = 0; at < size_; at += kPage) memory_[at] = std::byte{};
}

StagedBoxes StagingBuffer::copy(const std::vector<NamedTensor>& tensors, const std::vector<WriteItem>& boxes) {
  const at::NoGradGuard no_grad;
  const Places places = places_of(tensors, boxes);
  grow(places.host_bytes);
  make_pinned(places.pinned_bytes);
  StagedBoxes staged;
  std::vector<at::Device> devices;
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    const WriteItem& planned = boxes[i];
    const auto& named = tensors[planned.tensor];
    const auto rows = rows_of(named, planned);
    const auto [block, offset] = places.of_boxes[i];
    at::Tensor copy;
    if (rows.is_cpu()) {
      copy_rows(memory_ + offset, rows);
      copy = at::from_blob(memory_ + offset, rows.sizes(), at::TensorOptions().dtype(rows.scalar_type()));
    } else {
      const auto bytes = static_cast<std::int64_t>(rows.nbytes());
      copy = pinned_[block].narrow(0, static_cast<std::int64_t>(offset), bytes);
      copy = copy.view(rows.scalar_type()).view(rows.sizes());
      copy.copy_(rows, /*non_blocking=*/true);
      if (std::ranges::find(devices, rows.device()) == devices.end()) devices.push_back(rows.device());
    }
    staged.bytes += rows.nbytes();
    staged.boxes.push_back({staged.tensors.size(), planned.box, 0, planned.row_end - planned.row_begin});
    staged.tensors.push_back({named.name, std::move(copy)});
  }
  for (const at::Device device : devices) staged.copied.push_back(CopyStream::mark_current(device));
  return staged;
}

}  // namespace phalanx
