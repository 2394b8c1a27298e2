// Activation checkpointing: a layer keeps its input instead of everything in between, and computes that again in the
// backward pass. One more forward pass of the layer for the memory of its activations (Chen et al., 2016).
//
//   for (const auto& layer : model.layers) checkpoint_activations(*layer);                 // whole blocks
//   for (const auto& layer : model.layers) checkpoint_activations(*layer, op_sac_policy);    // but for costly operations
//   at::Tensor y = checkpoint([&](const at::Tensor& x) { return net->forward(x); }, x);
//
// Contract
// - The bits are those without it: the same operations run on the same input, under the autocast that was on,
//   whose cache of weights neither run uses (kernels/autocast.h).
// - The function must be pure: run twice, it gives the same. Our layers draw no random numbers from a generator.
// - Only the output's gradient leads back into it, and only the input's and parameters' gradients out: tensors that the
//   function captures and that need a gradient, other than parameters (leaves), get none.
// - It recomputes by a backward pass inside the backward pass; both DistributedDataParallel and
//   FullyShardedDataParallel know that. create_graph, autograd::grad() and a second backward pass through the
//   same output are Errors.
// - Whatever the function refers to must live until the backward pass is done.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "phalanx/kernels/saved_activations.h"
#include "phalanx/nn/module.h"

namespace phalanx {

/// Attention, and every second linear layer, the first one included: half of a block's products outside the
/// feed-forward net for a small part of its activations, in the manner of torchtitan's selective_ac_option = "op". The
/// fused feed-forward net, whose activations are most of the memory, is computed again.
bool op_sac_policy(kernels::SavedOp op, int nth);

/// fn(input), with nothing kept but the input, and the outputs of the operations that `policy` names (saved_activations.h).
/// Without a gradient to compute it is fn(input).
at::Tensor checkpoint(std::function<at::Tensor(const at::Tensor&)> fn, const at::Tensor& input,
                      kernels::CheckpointPolicy policy = nullptr);

/// From now on the module's calls (nn::call) are checkpointed; its first input is what is kept, the others are copied
/// (handles) and must not need a gradient.
void checkpoint_activations(nn::Module& module, const kernels::CheckpointPolicy& policy = nullptr);

}  // namespace phalanx
