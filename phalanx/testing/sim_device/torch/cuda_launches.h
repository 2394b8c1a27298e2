// How many kernels an operator launches on CUDA. The simulated device runs each operator as one.
//
//   for (const auto& [name, count] : sim.runtime.launches_by_kernel()) sum += count * *cuda_launches(name);
//
// The numbers are those of libtorch 2.11 to 2.13 for tensors of usual sizes: one for what a single elementwise,
// reducing, indexing or product kernel does. Copies and fills in memory count, too. What libraries choose by size, such
// as a product that is split along its inner dimension, is left out.
#pragma once

#include <optional>
#include <string_view>

namespace phalanx::sim_device {

/// `name`: "aten::sort.stable", of an operator, or "swiglu", of a kernel. Nothing for an operator that is not in the
/// table.
std::optional<int> cuda_launches(std::string_view name);

}  // namespace phalanx::sim_device
