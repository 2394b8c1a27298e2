#include "phalanx/tensor/device_readback.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace phalanx {

DeviceReadback::DeviceReadback(const at::Tensor& values)
    : on_host_(at::empty(values.sizes(), at::TensorOptions(values.scalar_type()).pinned_memory(true))),
      copied_(values.device().type()) {
  on_host_.copy_(values, /*non_blocking=*/true);
  copied_.record(c10::impl::VirtualGuardImpl(values.device().type()).getStream(values.device()));
}

const at::Tensor& DeviceReadback::wait() const {
  copied_.synchronize();
  return on_host_;
}

std::vector<double> DeviceReadback::read() const {
  copied_.synchronize();
  const auto* numbers = on_host_.const_data_ptr<double>();
  return {numbers, numbers + on_host_.numel()};
}

}  // namespace phalanx
