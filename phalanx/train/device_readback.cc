#include "phalanx/train/device_readback.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace phalanx::train {

DeviceReadback::DeviceReadback(const at::Tensor& numbers)
    : on_host_(at::empty(numbers.sizes(), at::TensorOptions(at::kDouble).pinned_memory(true))),
      copied_(numbers.device().type()) {
  on_host_.copy_(numbers, /*non_blocking=*/true);
  copied_.record(c10::impl::VirtualGuardImpl(numbers.device().type()).getStream(numbers.device()));
}

std::vector<double> DeviceReadback::read() const {
  copied_.synchronize();
  const auto* numbers = on_host_.const_data_ptr<double>();
  return {numbers, numbers + on_host_.numel()};
}

}  // namespace phalanx::train
