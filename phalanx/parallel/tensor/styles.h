// Tensor parallelism applied from outside: parallelize_module() splits the parameters of a model over the ranks of a
// mesh's axis "tp" and puts the collectives that this needs around its modules. The model's code does not change.
//
//   parallelize_module(*net, mesh, {{"in_proj", ColwiseParallel{}}, {"out_proj", RowwiseParallel{}}});
//   nn::initialise(*net, seed);                       // or a checkpoint: each rank fills its own part
//   nn::call(net, x);                                 // x the same on all ranks of the group
//
// Styles. L(in, out) is a Linear, whose weight is [out, in]. E(count, dim) is an Embedding. Defaults are PyTorch's.
//   ColwiseParallel      L: splits the rows of the weight and of the bias, so the columns of y = x W^T + b. E: columns.
//                        FusedLinear ([q; k; v] or [gate; up]): rows of each part, so y has this rank's columns of
//                        each part.
//                        input: any -> shared. output: split(-1) -> any
//   RowwiseParallel      L: splits the columns of the weight; the whole bias is added once. E: rows, that is ids
//                        ("vocabulary"). If the output stays partial, the first rank adds the bias, and its gradient is
//                        there on every rank.
//                        input (L): any -> split(-1); E: none, ids are replicated. output: partial -> any
//                        An adapter of a Linear (nn/linear.h) is cut with it: under Colwise A is whole and B split by
//                        rows, under Rowwise A is split by columns and B whole, and its addends join those of W. The
//                        gradient of the whole one is summed over the group. Such a layer does not overlap
//   SequenceParallel     the module works on parts of the activations. The parameters of a norm, a Linear or an
//                        Embedding stay whole, and their gradients are summed over the group. A Dropout drops its part
//                        of what one rank would drop.
//   SplitNorm            RMSNorm: splits the weight, and takes the mean of all ranks' parts. For a norm over the
//                        columns that ColwiseParallel splits, with the same `copies`
//   SplitSinks           Attention: splits its sinks, as ColwiseParallel does the heads of its queries
//   Overlapped           an Attention or a FeedForward takes and returns parts of the activations, and multiplies chunk
//                        by chunk while the rows are in flight (overlapped_layers.h). Its projections must be
//                        ColwiseParallel{.input = shared()}, the last one RowwiseParallel{.output = partial()}
//   PrepareModuleInput   converts the first input of a module of any kind
//   PrepareModuleOutput  converts its output
// "any -> shared" is convert() of layout.h, in the module's forward pass and, mirrored, in its backward pass. A module
// that prepares the input for several ColwiseParallel layers inside gathers once for all of them. These layers then use
// ColwiseParallel{.input = ActivationLayout::shared()}.
//
// Contract
// - Every rank of the mesh calls with the same model and plan. Everything is checked before anything is changed,
//   allocated or sent. ConfigError for a pattern that names no module, a dimension that the ranks do not divide, a
//   style that does not fit the module, two styles for one parameter, and a conversion that does not exist.
// - From then on the modules hold this rank's part. The parameters are the same objects with other shapes. Parameters
//   with values keep their own part of them; parameters made without memory stay without. Every parameter of the model,
//   in the plan or not, knows its part (nn::Module::set_shard) on the whole mesh that was given. nn::named_parameters()
//   passes that on to optimizers, clipping and checkpoints.
// - Parameters that are in no entry are replicated: their gradients must come out the same on every rank of the group.
// - Gradients are complete, and grad_ready fires, once per backward pass. Construct DistributedDataParallel over
//   another axis, or FullyShardedDataParallel, afterwards: they need not know about this.
// - Names are those of nn::Module's children; patterns are as in base: "layers.*.attention.wq". An entry may match many
//   modules. A module may be in several entries, of which at most one concerns its parameters.
// - In the backward pass, a module that makes an input shared computes the weight gradients of the layers inside it
//   while the gradient of that input is in flight (all-reduce or reduce-scatter). For this it takes the module's runner
//   (nn/module.h), unless the module already has one. If a checkpoint or a pipeline's queue takes its place, gradients
//   are computed as they come.
// - While a forward or backward pass runs, only the model may use the group's communicator.
// - Values are a function of (seed, name, index), so they do not depend on the layout. The same holds for dropout masks
//   if all ranks hold the same activations. If they hold columns, set nn::Dropout::set_split().
#pragma once

#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "phalanx/mesh/device_mesh.h"
#include "phalanx/parallel/tensor/layout.h"

namespace torch::nn {
class Module;
}

namespace phalanx {

struct ColwiseParallel {
  ActivationLayout input = ActivationLayout::replicated();
  ActivationLayout output = ActivationLayout::split(-1);
  /// This many neighbouring ranks hold the same part, and their gradients are summed. For key and value heads that are
  /// fewer than the ranks. The output is then split over groups of these ranks and cannot be converted.
  int copies = 1;
  /// For a Linear whose input is split along a dimension other than the last: multiplies the rows that are there while
  /// the rest of the input arrives, and sends the input's gradient chunk by chunk.
  bool overlap = false;
  /// `copies` for single parts of a FusedLinear: {{"k", 2}, {"v", 2}}. The other parts use `copies`.
  std::vector<std::pair<std::string, int>> part_copies = {};
};
struct RowwiseParallel {
  ActivationLayout input = ActivationLayout::split(-1);
  ActivationLayout output = ActivationLayout::replicated();
  bool overlap = false;  // for a Linear whose output is split that way: likewise, mirrored
};
struct Overlapped {
  ActivationLayout activations = ActivationLayout::split(1);
};
struct SequenceParallel {
  int dim = 1;  // the dimension along which activations are split, for a Dropout
};
struct SplitNorm {
  int copies = 1;
};
struct SplitSinks {};
struct PrepareModuleInput {
  ActivationLayout from = ActivationLayout::split(1);
  ActivationLayout to = ActivationLayout::shared();
};
struct PrepareModuleOutput {
  ActivationLayout from = ActivationLayout::split(1);
  ActivationLayout to = ActivationLayout::replicated();
};

struct ParallelStyle {
  std::string pattern;
  std::variant<ColwiseParallel, RowwiseParallel, SequenceParallel, SplitNorm, SplitSinks, Overlapped,
               PrepareModuleInput, PrepareModuleOutput>
      style;
};

/// Returns the groups that it split from the tensor-parallel one. They sum the gradients of what several ranks hold
/// copies of (`copies`). The modules keep them, too.
std::vector<std::shared_ptr<Communicator>> parallelize_module(torch::nn::Module& model, const DeviceMesh& mesh,
                                                              const std::vector<ParallelStyle>& plan);

}  // namespace phalanx
