#include "phalanx/testing/sim_device/torch/kernel_tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Storage.h>

#include <algorithm>
#include <utility>

#include "phalanx/testing/sim_device/torch/registration.h"

namespace phalanx::sim_device {

bool is_on_sim(const at::Tensor& tensor) { return tensor.defined() && tensor.device().is_privateuseone(); }

at::Tensor kernel_view(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const c10::Storage& memory = impl.storage();
  c10::Storage view(c10::Storage::use_byte_size_t(), memory.nbytes(),
                    c10::DataPtr(sim_backend().runtime.kernel_view(memory.data()), c10::Device(c10::DeviceType::CPU)),
                    /*allocator=*/nullptr, /*resizable=*/false);
  at::Tensor result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(view), c10::DispatchKeySet(c10::DispatchKey::CPU), impl.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(impl.sizes(), impl.strides(), impl.storage_offset());
  if (impl.is_wrapped_number()) result.unsafeGetTensorImpl()->set_wrapped_number(true);
  return result;
}

namespace {

constexpr std::int64_t kMostPieces = 64;

struct Dimension {
  std::int64_t stride;
  std::int64_t size;
};

// The dimensions between which there are gaps, innermost first, and in `piece` the elements without gaps.
std::vector<Dimension> dimensions_with_gaps(at::IntArrayRef sizes, at::IntArrayRef strides, std::int64_t& piece) {
  std::vector<Dimension> dimensions;
  for (std::size_t d = 0; d < sizes.size(); ++d)
    if (sizes[d] > 1 && strides[d] > 0) dimensions.push_back({strides[d], sizes[d]});
  std::ranges::sort(dimensions, {}, &Dimension::stride);
  piece = 1;
  std::size_t dense = 0;
  while (dense < dimensions.size() && dimensions[dense].stride == piece) piece *= dimensions[dense++].size;
  dimensions.erase(dimensions.begin(), dimensions.begin() + static_cast<std::ptrdiff_t>(dense));
  return dimensions;
}

}  // namespace

void add_accesses(std::vector<Access>& accesses, const at::Tensor& tensor, bool is_write) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const auto offset = static_cast<std::size_t>(impl.storage_offset()) * impl.itemsize();
  add_accesses(accesses, static_cast<const std::byte*>(impl.storage().data()) + offset, impl.itemsize(), impl.sizes(),
               impl.strides(), is_write);
}

void add_accesses(std::vector<Access>& accesses, const void* first, std::size_t itemsize, at::IntArrayRef sizes,
                  at::IntArrayRef strides, bool is_write) {
  if (c10::multiply_integers(sizes) == 0) return;
  std::int64_t piece = 1, pieces = 1, last = 0;
  const std::vector<Dimension> gaps = dimensions_with_gaps(sizes, strides, piece);
  for (const Dimension& dimension : gaps) {
    pieces *= dimension.size;
    last += dimension.stride * (dimension.size - 1);
  }
  const auto bytes = [&](std::int64_t elements) { return static_cast<std::size_t>(elements) * itemsize; };
  const auto* begin = static_cast<const std::byte*>(first);
  if (pieces > kMostPieces) return accesses.push_back({begin, bytes(last + piece), is_write});
  for (std::int64_t number = 0; number < pieces; ++number) {
    std::int64_t offset = 0, rest = number;
    for (const Dimension& dimension : gaps) {
      offset += rest % dimension.size * dimension.stride;
      rest /= dimension.size;
    }
    accesses.push_back({begin + bytes(offset), bytes(piece), is_write});
  }
}

std::vector<Access> accesses_of(const at::Tensor& read, const at::Tensor& written) {
  std::vector<Access> accesses;
  if (read.defined()) add_accesses(accesses, read, false);
  if (written.defined()) add_accesses(accesses, written, true);
  return accesses;
}

at::Tensor empty_on_sim(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  return at::Tensor(at::detail::empty_strided_generic(sizes, strides, &device_allocator(),
                                                      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype));
}

at::Tensor view_of(const at::Tensor& base, at::IntArrayRef sizes, at::IntArrayRef strides, std::int64_t offset,
                   caffe2::TypeMeta dtype) {
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                             base.key_set(), dtype);
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return view;
}

void resize_on_sim(const at::Tensor& tensor, at::IntArrayRef sizes) {
  std::vector<std::int64_t> strides(sizes.size());
  std::int64_t stride = 1;
  for (std::size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<std::int64_t>(1, sizes[d]);
  }
  c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const std::size_t bytes =
      static_cast<std::size_t>(c10::multiply_integers(sizes) + impl.storage_offset()) * impl.itemsize();
  if (bytes > impl.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(impl.storage(), bytes);
  impl.set_sizes_and_strides(sizes, strides);
}

void launch(int device, const char* name, std::vector<Access> accesses, std::function<void()> body) {
  sim_backend().runtime.launch(current_stream_id(device), {name, std::move(accesses), std::move(body)});
}

}  // namespace phalanx::sim_device
