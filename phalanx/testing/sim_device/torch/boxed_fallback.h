// How the simulated devices run an operator of which they know only the schema.
//
// - A view is metadata, made at once.
// - In-place and out= operators are queued on the memory of their arguments.
// - Of others the shapes of the results are inferred (output_shapes.h), memory is
//   allocated, and the operator is queued.
// - Where a shape depends on data, the host waits, which is counted.
//
// Throws if tensors are on several devices. CPU tensors are refused, but for single numbers, and for indices, which
// libtorch copies to the device (a wait of the host).
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace phalanx::sim_device {

void run_boxed(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace phalanx::sim_device
