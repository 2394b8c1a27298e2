#include "phalanx/parallel/fsdp/flat_buffer.h"

#include <ATen/ops/empty.h>
#include <c10/core/StorageImpl.h>

#include <memory>
#include <utility>

namespace phalanx::fsdp {
namespace {

void drop_handle(void* handle) { delete static_cast<at::Tensor*>(handle); }

c10::StorageImpl* storage_of(const at::Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl(); }

}  // namespace

FlatBuffer::FlatBuffer(std::int64_t elements, at::TensorOptions options) : flat_(at::empty({0}, options)) {
  storage_of(flat_)->set_nbytes(static_cast<std::size_t>(elements) * flat_.element_size());
  flat_.unsafeGetTensorImpl()->set_sizes_contiguous({elements});
}

at::Tensor FlatBuffer::view(at::IntArrayRef sizes, std::int64_t offset) const {
  std::vector<std::int64_t> strides(sizes.size());
  std::int64_t stride = 1;
  for (std::size_t i = sizes.size(); i-- > 0; stride *= sizes[i]) strides[i] = stride;
  return flat_.as_strided(sizes, strides, offset).variable_data();
}

void FlatBuffer::attach(const at::Tensor& memory) {
  memory_ = memory;
  auto handle = std::make_unique<at::Tensor>(memory);
  void* const data = handle->data_ptr();
  storage_of(flat_)->set_data_ptr_noswap(c10::DataPtr(data, handle.release(), &drop_handle, flat_.device()));
}

at::Tensor FlatBuffer::detach() {
  storage_of(flat_)->set_data_ptr_noswap(c10::DataPtr(nullptr, flat_.device()));
  return std::exchange(memory_, at::Tensor());
}

MemoryPool::MemoryPool(int count, std::int64_t bytes, const std::function<at::Tensor(std::int64_t)>& allocate)
    : bytes_(count * bytes) {
  for (int i = 0; i < count; ++i) free_.push_back(allocate(bytes));
}

std::optional<at::Tensor> MemoryPool::acquire() {
  if (free_.empty()) return std::nullopt;
  at::Tensor memory = std::move(free_.back());
  free_.pop_back();
  return memory;
}

}  // namespace phalanx::fsdp
