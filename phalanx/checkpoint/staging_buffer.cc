#include "phalanx/checkpoint/staging_buffer.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <fmt/format.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
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

at::Tensor rows_of(const NamedTensor& named, const WriteItem& planned) {
  const auto tensor = named.tensor.detach();
  return tensor.dim() == 0 ? tensor : tensor.narrow(0, planned.row_begin, planned.row_end - planned.row_begin);
}

std::uint64_t aligned(std::uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

std::uint64_t bytes_of(const std::vector<NamedTensor>& tensors, const std::vector<WriteItem>& boxes) {
  std::uint64_t bytes = 0;
  for (const auto& planned : boxes) bytes += aligned(rows_of(tensors[planned.tensor], planned).nbytes());
  return bytes;
}

void copy_rows(std::byte* memory, const at::Tensor& rows) {
  if (!rows.is_cpu() || !rows.is_contiguous()) {
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

void StagingBuffer::reserve(const std::vector<NamedTensor>& tensors, const std::vector<WriteItem>& boxes) {
  const auto before = size_;
  grow(bytes_of(tensors, boxes));
  constexpr std::uint64_t kPage = 4096;
  if (size_ > before)
    for (std::uint64_t at = 0; at < size_; at += kPage) memory_[at] = std::byte{};
}

StagedBoxes StagingBuffer::copy(const std::vector<NamedTensor>& tensors, const std::vector<WriteItem>& boxes) {
  const at::NoGradGuard no_grad;
  grow(bytes_of(tensors, boxes));
  std::uint64_t used = 0;
  StagedBoxes staged;
  for (const auto& planned : boxes) {
    const auto& named = tensors[planned.tensor];
    const auto rows = rows_of(named, planned);
    auto* const memory = memory_ + used;
    used += aligned(rows.nbytes());
    copy_rows(memory, rows);
    auto copy = at::from_blob(memory, rows.sizes(), at::TensorOptions().dtype(rows.scalar_type()));
    staged.bytes += rows.nbytes();
    staged.boxes.push_back({staged.tensors.size(), planned.box, 0, planned.row_end - planned.row_begin});
    staged.tensors.push_back({named.name, std::move(copy)});
  }
  return staged;
}

}  // namespace phalanx
