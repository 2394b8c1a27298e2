// Tensor parallelism from outside: parallelize_module() splits the parameters of a model over the ranks of a mesh's
// axis "tp" and puts the collectives that this needs around its modules. The model's code stays what it is.
//
//   parallelize_module(*net, mesh, {{"in_proj", ColwiseParallel{}}, {"out_proj", RowwiseParallel{}}});
//   nn::initialise(*net, seed);                       // or a checkpoint: each rank fills its own part
//   net->forward(x);                                  // through nn::call(), x the same on all ranks of the group
//
// Styles; L(in, out) is a Linear, whose weight is [out, in], E(count, dim) an Embedding. Defaults are PyTorch's.
//   ColwiseParallel          L: rows of the weight and the bias, so columns of y = x W^T + b. E: columns.
//                    A FusedLinear, [q; k; v] or [gate; up]: rows of each part, so y has this rank's columns of each.
//                    input: any -> shared. output: split(-1) -> any
//   RowwiseParallel          L: columns of the weight, and the whole bias, added once. E: rows, that is ids ("vocabulary").
//                    input (L): any -> split(-1); E: none, ids are replicated. output: partial -> any
//   SequenceParallel the module works on parts of the activations: parameters of a norm, a Linear or an Embedding stay
//                    whole, their gradients are summed over the group; a Dropout drops its part of what one rank would
//                    drop
//   Overlapped       an Attention or a FeedForward takes and gives parts of the activations, and multiplies piece by
//                    piece while the rows are on their way (overlapped_layers.h). Its projections say
//                    ColwiseParallel{.input = shared()}, the last one RowwiseParallel{.output = partial()}
//   PrepareModuleInput     the first input of a module of any kind is converted; PrepareModuleOutput: its output
// "any -> shared" is what convert() of layout.h does, in the module's forward pass and, mirrored, in its backward pass.
// A module that prepares the input for the ColwiseParallel layers inside gathers once for all of them, which then say
// ColwiseParallel{.input = ActivationLayout::shared()}.
//
// Contract
// - Every rank of the mesh calls with the same model and plan. Everything is checked before anything changes, is
//   allocated or is sent: ConfigError for a pattern that names no module, a dimension that the ranks do not divide, a
//   style that does not fit the module, two styles for one parameter, a conversion that does not exist.
// - From then on the modules hold this rank's part: the parameters are the same objects with other shapes (what had
//   values keeps its own part of them; what was born without memory stays so). Every parameter of the model, in the
//   plan or not, knows its part (nn::Module::set_shard) on the whole mesh that was given; nn::named_parameters() hands
//   that to optimizers, clipping and checkpoints. Parameters that are in no entry are replicated: their gradients must
//   be the same on every rank of the group by themselves.
// - Gradients are complete, and grad_ready fires, once per backward pass: DistributedDataParallel over another axis, or
//   FullyShardedDataParallel, is constructed afterwards and sees nothing of this.
// - Names are those of nn::Module's children, patterns as in base: "layers.*.attention.wq". An entry may match many
//   modules, a module may be in several entries of which one at most concerns its parameters.
// - What makes an input shared computes the weight gradients of the layers inside while the gradient of that input is
//   under way (all-reduce or reduce-scatter), in the backward pass. It takes the module's runner (nn/module.h), unless
//   it has one; where a checkpoint or a pipeline's queue takes its place, gradients are computed as they come.
// - The group's communicator belongs to the model while a forward or backward pass runs.
// - Values are made by (seed, name, index) and so do not depend on the layout. So are dropout's masks where all ranks
//   hold the same; where they hold columns, nn::Dropout::set_split() says which.
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
  /// So many neighbours hold the same part, and their gradients are summed: key and value heads that are fewer than the
  /// ranks. The output is split over groups of them then, and can only be left so.
  int copies = 1;
  /// Of a Linear whose input is split along another than the last dimension: multiplies what is there while the rest of
  /// the input comes, and sends the input's gradient piece by piece.
  bool overlap = false;
  /// The same of single parts of a FusedLinear, whose other parts have `copies`: {{"k", 2}, {"v", 2}}.
  std::vector<std::pair<std::string, int>> part_copies = {};
};
struct RowwiseParallel {
  ActivationLayout input = ActivationLayout::split(-1);
  ActivationLayout output = ActivationLayout::replicated();
  bool overlap = false;  // of a Linear whose output is split so: likewise, mirrored
};
struct Overlapped {
  ActivationLayout activations = ActivationLayout::split(1);
};
struct SequenceParallel {
  int dim = 1;  // along which activations are split, for a Dropout
};
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
  std::variant<ColwiseParallel, RowwiseParallel, SequenceParallel, Overlapped, PrepareModuleInput, PrepareModuleOutput>
      style;
};

void parallelize_module(torch::nn::Module& model, const DeviceMesh& mesh, const std::vector<ParallelStyle>& plan);

}  // namespace phalanx
