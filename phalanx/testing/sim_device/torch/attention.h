// Which fused kernel at::scaled_dot_product_attention takes on the simulated devices.
#pragma once

#include <ATen/SDPBackend.h>

namespace phalanx::sim_device {

/// overrideable, flash_attention or cudnn_attention: in this process, until it is called again. At first overrideable.
/// The others are CUDA's own operators, with their argument checks. The CPU's flash attention computes all of them.
/// What they do not take (dropout, other than four dimensions) is math, in pieces.
void choose_attention_kernel(at::SDPBackend kernel);

}  // namespace phalanx::sim_device
