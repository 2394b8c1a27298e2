#include "phalanx/testing/sim_device/torch/native_operators.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/set_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/ScalarTypeToTypeMeta.h>

#include <cstring>
#include <optional>

#include "phalanx/testing/sim_device/torch/kernel_tensors.h"
#include "phalanx/testing/sim_device/torch/registration.h"

namespace phalanx::sim_device {
namespace {

c10::Device or_current(std::optional<c10::Device> device) {
  return device.value_or(SimBackend::device(current_device()));
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
                 std::optional<at::Device> device, std::optional<bool> /*pin*/,
                 std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(or_current(device));
  return at::Tensor(at::detail::empty_generic(sizes, &device_allocator(),
                                              c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                              c10::dtype_or_default(dtype), format));
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout> /*layout*/, std::optional<at::Device> device,
                         std::optional<bool> /*pin*/) {
  const c10::DeviceGuard guard(or_current(device));
  return empty_on_sim(sizes, strides, c10::dtype_or_default(dtype));
}

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides,
                      std::optional<std::int64_t> offset) {
  return view_of(self, sizes, strides, offset.value_or(self.storage_offset()), self.dtype());
}

// --- copies ----------------------------------------------------------------------------------------------------------

bool is_pinned_on_sim(const at::Tensor& tensor) { return sim_backend().runtime.pinned().owns(tensor.storage().data()); }

void wait_for_stream(int device, const char* cause) {
  sim_backend().runtime.synchronize(current_stream_id(device), cause);
}

void one_waits_for_other(int one, int other) {
  Runtime& runtime = sim_backend().runtime;
  runtime.wait(current_stream_id(one), runtime.record(current_stream_id(other)));
}

// On the stream of the source. With two devices, each waits for the other, as CUDA's copies do.
void copy_on_devices(const at::Tensor& from, const at::Tensor& to) {
  const int source = from.device().index(), target = to.device().index();
  if (source != target) one_waits_for_other(source, target);
  launch(source, "copy_ (device to device)", accesses_of(from, to),
         [from = kernel_view(from), to = kernel_view(to)] { to.copy_(from); });
  if (source != target) one_waits_for_other(target, source);
}

void copy_to_device(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const int device = to.device().index();
  if (!is_pinned_on_sim(from)) {
    launch(device, "copy_ (from pageable memory)", accesses_of({}, to),
           [from = from.clone(), to = kernel_view(to)] { to.copy_(from); });
    return wait_for_stream(device, "copy from pageable memory");
  }
  launch(device, "copy_ (host to device)", accesses_of(from, to),
         [from = kernel_view(from), to = kernel_view(to)] { to.copy_(from); });
  if (!non_blocking) wait_for_stream(device, "copy to the device");
}

void copy_to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const int device = from.device().index();
  launch(device, "copy_ (device to host)", accesses_of(from, to),
         [from = kernel_view(from), to = kernel_view(to)] { to.copy_(from); });
  if (!non_blocking || !is_pinned_on_sim(to)) wait_for_stream(device, "copy to the host");
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (is_on_sim(from) && is_on_sim(to)) {
    copy_on_devices(from, to);
  } else if (is_on_sim(to)) {
    copy_to_device(from, to, non_blocking);
  } else {
    copy_to_host(from, to, non_blocking);
  }
  return to;
}

at::Scalar item(const at::Tensor& self) {
  const int device = self.device().index();
  at::Tensor number(at::detail::empty_cpu({}, self.scalar_type()));
  launch(device, "item", accesses_of(self, {}), [from = kernel_view(self), number] {
    std::memcpy(number.mutable_data_ptr(), from.const_data_ptr(), from.itemsize());
  });
  wait_for_stream(device, "item");
  return number.item();
}

// --- memory ----------------------------------------------------------------------------------------------------------

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef sizes,
                          std::optional<at::MemoryFormat> /*format*/) {
  const c10::DeviceGuard guard(self.device());
  resize_on_sim(self, C10_AS_INTARRAYREF_SLOW(sizes));
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) { return at::native::set_(self, source); }
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) { return at::native::set_tensor_(self, source); }
at::Tensor& set_view(at::Tensor& self, at::Storage source, std::int64_t offset, at::IntArrayRef sizes,
                     at::IntArrayRef strides) {
  c10::TensorImpl& impl = *self.unsafeGetTensorImpl();
  impl.set_storage_keep_dtype(source);
  if (strides.empty()) {
    impl.set_sizes_contiguous(sizes);
    impl.set_storage_offset(offset);
  } else {
    impl.set_sizes_and_strides(sizes, strides, offset);
  }
  return self;
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  sim_backend().memory.record_stream(self.storage().data(), {stream.device_index(), stream.id()});
}

// libtorch's own asks a list of devices on which this one is not.
// set_data() needs it: Module::to() moves parameters by it.
bool may_take_data_of(const at::Tensor& self, const at::Tensor& from) {
  const auto is_dense = [](const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && (tensor.is_cpu() || is_on_sim(tensor));
  };
  return is_dense(self) && is_dense(from);
}

}  // namespace

void register_native_operators(torch::Library& library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &as_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_local_scalar_dense", &item);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_.source_Storage_storage_offset", &set_view);
  library.impl("record_stream", &record_stream);
  library.impl("_has_compatible_shallow_copy_type", &may_take_data_of);
}

}  // namespace phalanx::sim_device
