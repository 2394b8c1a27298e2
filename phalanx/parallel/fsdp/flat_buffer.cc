#include "phalanx/parallel/fsdp/flat_buffer.h"

#include <ATen/ops/empty.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "phalanx/base/assert.h"
#include "phalanx/parallel/fsdp/operator_use.h"

namespace phalanx::fsdp {
namespace {

void drop_handle(void* handle) { delete static_cast<at::Tensor*>(handle); }

c10::StorageImpl* storage_of(const at::Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl(); }

// libtorch 2.11 can forbid access to a storage, but has no function that allows it again. The flag is private there. An
// explicit instantiation may name a private member, so this one passes it to a function that is found by its argument.
struct ThrowsOnAccess {
  friend bool c10::StorageImpl::*member_of(ThrowsOnAccess);
};
template <bool c10::StorageImpl::*Member>
struct PrivateMember {
  friend bool c10::StorageImpl::*member_of(ThrowsOnAccess) { return Member; }
};
template struct PrivateMember<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

/// The storage's next set_data_ptr_noswap() makes it known to all checks.
template <class Storage>
void allow_access(Storage& storage) {
  if constexpr (requires { storage.clear_data_ptr_access_error_msg_(); }) {
    storage.clear_data_ptr_access_error_msg_();
  } else {
    storage.*member_of(ThrowsOnAccess{}) = false;
  }
}

}  // namespace

FlatBuffer::FlatBuffer(std::int64_t elements, at::TensorOptions options) : flat_(at::empty({0}, options)) {
  const auto bytes = elements * static_cast<std::int64_t>(flat_.element_size());
  flat_.unsafeGetTensorImpl()->set_storage_keep_dtype(watched_storage(bytes, flat_.device()));
  flat_.unsafeGetTensorImpl()->set_sizes_contiguous({elements});
  forbid_access();
}

at::Tensor FlatBuffer::view(at::IntArrayRef sizes, std::int64_t offset) const {
  std::vector<std::int64_t> strides(sizes.size());
  std::int64_t stride = 1;
  for (std::size_t i = sizes.size(); i-- > 0; stride *= sizes[i]) strides[i] = stride;
  return flat_.as_strided(sizes, strides, offset).variable_data();
}

void FlatBuffer::set_missing_text(std::string text) {
  missing_text_ = std::move(text);
  if (!is_attached()) forbid_access();
}

// Without it a kernel would read a null pointer.
void FlatBuffer::forbid_access() {
  storage_of(flat_)->release_data_and_set_meta_custom_data_ptr_error_msg_(missing_text_);
}

void FlatBuffer::attach(const at::Tensor& memory) {
  PHALANX_ASSERT(!is_attached(), "a buffer gives its memory back before it gets other memory");
  PHALANX_ASSERT(memory.nbytes() >= flat_.nbytes(), "the memory holds the whole buffer");
  memory_ = memory;
  auto handle = std::make_unique<at::Tensor>(memory);
  void* const data = handle->data_ptr();
  allow_access(*storage_of(flat_));
  storage_of(flat_)->set_data_ptr_noswap(c10::DataPtr(data, handle.release(), &drop_handle, flat_.device()));
}

at::Tensor FlatBuffer::detach() {
  storage_of(flat_)->set_data_ptr_noswap(c10::DataPtr(nullptr, flat_.device()));
  forbid_access();
  return std::exchange(memory_, at::Tensor());
}

MemoryPool::MemoryPool(int count, std::int64_t bytes, const std::function<at::Tensor(std::int64_t)>& allocate)
    : bytes_(count * bytes) {
  for (int i = 0; i < count; ++i) free_.push_back({allocate(bytes), nullptr});
}

std::optional<at::Tensor> MemoryPool::acquire() {
  if (free_.empty()) return std::nullopt;
  Piece piece = std::move(free_.back());
  free_.pop_back();
  CopyStream::current_waits(piece.last_use);
  return std::move(piece.memory);
}

void MemoryPool::release(at::Tensor memory, CopyStream::Mark last_use) {
  PHALANX_ASSERT(std::ranges::none_of(free_, [&](const Piece& piece) { return piece.memory.is_alias_of(memory); }),
                 "a piece of memory is released once");
  free_.push_back({std::move(memory), std::move(last_use)});
}

}  // namespace phalanx::fsdp
