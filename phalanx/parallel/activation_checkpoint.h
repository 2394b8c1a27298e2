// Activation checkpointing: a layer saves only its input and recomputes its activations in the backward pass.
// It costs one more forward pass of the layer and saves the memory of its activations (Chen et al., 2016).
//
//   for (const auto& layer : model.layers) checkpoint_activations(*layer);                 // whole blocks
//   for (const auto& layer : model.layers) checkpoint_activations(*layer, op_sac_policy);  // all but costly operations
//   at::Tensor y = checkpoint([&](const at::Tensor& x) { return net->forward(x); }, x);
//
// Contract
// - The results are the same bits as without it. The same operations run on the same input, under the autocast state of
//   the forward pass. Neither run uses autocast's cache of weights (kernels/autocast.h).
// - The function must be pure: two runs give the same result. Phalanx's layers draw no random numbers from a generator.
// - Gradients flow only from the output to the input and to the parameters (leaves). Any other captured tensor that
//   requires a gradient gets none.
// - The recomputation runs a backward pass inside the backward pass. DistributedDataParallel and
//   FullyShardedDataParallel support that. create_graph, autograd::grad() and a second backward pass through the same
//   output throw Error.
// - Whatever the function refers to must live until the backward pass has ended.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "phalanx/kernels/saved_activations.h"
#include "phalanx/nn/module.h"

namespace phalanx {

/// Saves attention and every second linear layer, starting with the first. That is half of a block's matrix products
/// outside the feed-forward net, for a small part of its activations, as torchtitan's selective_ac_option = "op" does.
/// The fused feed-forward net, whose activations take most of the memory, is recomputed.
bool op_sac_policy(kernels::SavedOp op, int nth);

/// Returns fn(input). Saves only the input and the outputs of the operations that `policy` names (saved_activations.h).
/// Where no gradient is needed, it just calls fn(input).
at::Tensor checkpoint(std::function<at::Tensor(const at::Tensor&)> fn, const at::Tensor& input,
                      kernels::CheckpointPolicy policy = nullptr);

/// From now on every call of the module (nn::call) is checkpointed. Its first input is saved. The other inputs are
/// copied (as handles).
/// REQUIRES: the inputs other than the first do not need a gradient.
void checkpoint_activations(nn::Module& module, const kernels::CheckpointPolicy& policy = nullptr);

}  // namespace phalanx
