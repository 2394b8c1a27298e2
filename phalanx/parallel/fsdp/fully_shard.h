// Sharded data parallelism (FSDP, ZeRO-1, -2, -3): every rank stores a part of the model's state and gathers the rest
// when it is needed.
//
//   auto model = std::make_shared<models::Llama>(config);
//   FullyShardedDataParallel sharded(*model, mesh);   // mesh: DeviceMesh with an axis "dp_shard" or "dp_shard_cp"
//   sharded.initialise(seed);                         // or a checkpoint
//   AdamW optimizer(sharded.parameters());            // of this rank's rows
//   model->loss(tokens, labels).backward();
//   clip_grad_norm(sharded.parameters(), 1.0, mesh.world().get());
//   optimizer.step(lr);
//
// The sharding axis is "dp_shard", or "dp_shard_cp" if the mesh has that: its inner part are ranks that have parts of
// the same sequences (layout/parallel_plan.h).
//
// What it does
// - Parameters are grouped into units (one per block). A unit is unsharded right before it is used, in the forward pass
//   and again in the backward pass, while the previous unit computes. After its use it is resharded. Its gradients are
//   averaged (or summed: gradient_reduction) as soon as they are complete, and each rank keeps its rows of them. At
//   most two units are unsharded at a time (plus one for each level of nested units).
// - Stage 3 shards parameters, gradients and optimizer state. Stage 2 keeps parameters unsharded. Stage 1 keeps
//   gradients unsharded, too. Communication per step, in multiples of the parameters: 3 for stage 3 (2 without
//   reshard_after_forward), 2 for the other stages, as in DDP.
// - On a mesh that also has an axis "dp_replicate", shards are replicated along it and averaged over it (HSDP), while
//   the backward pass goes on.
// - reshard_group = k: between the forward and the backward pass, every k neighbouring ranks (of one node, say) keep a
//   unit together. The second all-gather then stays among these k ranks. Each rank holds 1 / k of the model during that
//   time.
// - Mixed precision (param_dtype, reduce_dtype, output_dtype, as in PyTorch's FSDP2):
//   - parameters() keep their dtype and are the master weights. They are gathered and used in param_dtype. The first
//     input of every unit is cast to param_dtype.
//   - Gradients are averaged in reduce_dtype, and the parameters' .grad() have that dtype. no_sync() accumulates
//     micro-batches in it. no_all_reduce() accumulates in float32 if reduce_dtype has 16 bits, and then .grad() is
//     float32, too.
//   - The module's output is cast to output_dtype. For a plain module that is not a Sequential, only run() casts it.
// - offload keeps parameters() and their gradients on the host, and with them the optimizer and its state (in pinned
//   memory if the module is on a GPU). Rows are copied to the device when their unit is unsharded.
// - A module that parallelize_module() has split over another axis of the mesh (parallel/tensor/styles.h) can be
//   sharded: construct this object afterwards, with the same mesh. It shards the part of the module that each rank has.
// - The values equal those of DistributedDataParallel to the bit, on backends that sum in rank order. The exception is
//   no_all_reduce(), which sums over ranks first and over micro-batches afterwards.
//
// Units: what nn::Module::shard_units() of the module returns (models implement it). Otherwise the children of every
// torch::nn::Sequential and of every numbered list of nn::Modules in the module. A parameter belongs to the innermost
// unit around it: {{block}, {block.attention}} makes one unit of attention and one of the rest of the block. Parameters
// in no unit, or in several, form one more unit, which stays unsharded. A module that has such parameters must be run
// by nn::call(), or by run() if it is a plain torch::nn::Module. If all parameters are in that unit, a warning states
// their bytes.
//
// With gather_on_use the forward pass of a plain module needs no change. Its units are also the plain members of
// numbered lists, and the own parameters of any other plain module, whose children are units of their own. The first
// operator of libtorch that reads a parameter of a unit gathers it; the next unit's first operator releases it. So
// every such operator outside of a forward pass is collective, too. Operators that need no values, such as zeros_like,
// gather nothing. A warning names the largest unit if it has children and holds more than half of all parameters. A
// phalanx::nn::Module still has to be run by nn::call().
//
// Contract
// - The constructor is collective over the mesh. All ranks have the same module, mesh and options. Values are taken
//   from rank 0. A module whose parameters were made without memory (TensorOptionsOfModule::without_memory) is never
//   whole on any rank: initialise() or a checkpoint fills it shard by shard.
// - From then on the module's own parameters have no memory between uses. An operator that reads one then throws Error,
//   or gathers its unit with gather_on_use. data_ptr() without any operator throws in stage 3; in stages 1 and 2 it has
//   what was gathered last. An operator that writes to a parameter of a plain module throws Error. Use parameters()
//   instead: this rank's rows, by name, with their ShardSpec, and with their gradients after a
//   synchronised backward pass. Call zero_grad() between steps: a gradient that is still there is added to.
// - Each backward pass that sends anything must give every trained parameter a gradient. Otherwise every rank throws
//   Error, and the communicators are aborted.
// - The set of trained parameters must not change. If one is frozen, unfrozen or added later, every rank throws an
//   Error that names it in the next backward pass. (Added ones are detected only in modules that a shared_ptr owns.)
// - Gradients must be dense.
// - An exception inside backward() also aborts the communicators, and drops what has been accumulated since the last
//   average.
// - parameters() may be changed between a synchronised backward pass and the next forward pass. Code that changes them
//   at any other time must call invalidate_unsharded().
// - The module must outlive this object, and cannot be used after it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "phalanx/mesh/device_mesh.h"
#include "phalanx/parallel/stage_sharding.h"
#include "phalanx/tensor/init.h"
#include "phalanx/tensor/named.h"

namespace torch::nn {
class Module;
}

namespace phalanx {

namespace fsdp {
class FsdpRuntime;
}

/// Units whose parameters fewer ranks share than the others: of experts that are divided among ranks, for example.
struct OwnShardGroup {
  std::vector<std::string> patterns;    // of the names of all parameters of these units (base/name_patterns.h)
  std::shared_ptr<Communicator> ranks;  // those of the sharding axis that have these parameters, in its order
};

struct FullyShardOptions {
  int stage = 3;                              // of ZeRO: 1, 2 or 3
  bool reshard_after_forward = true;          // stage 3: false keeps units unsharded from the forward pass on
  int reshard_group = 0;                      // stage 3: that many ranks keep units together; divides the sharding axis
  bool prefetch = true;                       // false: a unit is unsharded only when it is used
  bool gather_on_use = false;                 // plain modules become units; see "Units" above
  bool offload = false;                       // keep shards, gradients and optimizer state on the host
  std::int64_t smallest_unit = 0;             // elements: neighbours are joined until each unit has as many
  std::optional<at::ScalarType> param_dtype;  // unset: the module's
  std::optional<at::ScalarType> reduce_dtype;  // unset: that of the parameters when used
  std::optional<at::ScalarType> output_dtype;  // of the module's output if floating-point; unset: unchanged
  /// What the ranks' gradients become: their average, or their sum where each loss is divided by what the global batch
  /// has. avg or sum.
  ReduceOp gradient_reduction = ReduceOp::avg;
  /// REQUIRES: its parameters know their part (nn::Module::set_shard) on a mesh whose sharding axis has as many ranks.
  /// With it reduction is the sum: the ranks of a mean are not the same for all parameters.
  std::optional<OwnShardGroup> own_group;
};

struct FullyShardStatistics {
  std::int64_t synchronisations = 0;  // backward passes whose gradients were averaged
  std::int64_t prefetches = 0;        // of units, while another one was in use
  std::int64_t gathers = 0;           // of units, prefetches included
  std::int64_t reduced_bytes = 0;     // of gradients handed to reduce_scatter by this rank
  double exposed_seconds = 0;         // time spent waiting for either (on CUDA: host time)
  // Memory of this rank.
  std::int64_t shard_bytes = 0;         // parameters: this rank's rows, and all or parts of them where they stay
  std::int64_t sharded_grad_bytes = 0;  // gradients of these rows
  std::int64_t unsharded_bytes = 0;     // for unsharded units, beyond that
  std::int64_t gradient_bytes = 0;      // for unsharded gradients
  std::int64_t padding_bytes = 0;       // of everything sharded, over all ranks
};

class FullyShardedDataParallel {
 public:
  FullyShardedDataParallel(torch::nn::Module& module, const DeviceMesh& mesh, FullyShardOptions options = {});
  ~FullyShardedDataParallel();
  FullyShardedDataParallel(const FullyShardedDataParallel&) = delete;
  FullyShardedDataParallel& operator=(const FullyShardedDataParallel&) = delete;

  /// Gives every parameter its initial values (nn/init.h). Each rank fills its own rows.
  void initialise(std::uint64_t seed);

  /// Calls module.forward(inputs...), for a plain torch::nn::Module that has parameters in no unit, or in several.
  template <class M, class... Inputs>
  at::Tensor run(M& module, Inputs&&... inputs) {
    root_pre_forward();
    return root_post_forward(module.forward(as_input(std::forward<Inputs>(inputs))...));
  }

  /// While a NoSync is alive, backward() accumulates locally and sends nothing. Unsharded gradients are kept from then
  /// on. The first backward() after the last guard is destroyed averages the sum.
  /// REQUIRES: all ranks make it at the same point.
  class [[nodiscard]] NoSync {
   public:
    explicit NoSync(std::shared_ptr<fsdp::FsdpRuntime> units);
    NoSync(NoSync&&) noexcept = default;
    NoSync& operator=(NoSync&&) = delete;
    ~NoSync();

   private:
    std::shared_ptr<fsdp::FsdpRuntime> runtime_;
  };
  NoSync no_sync();

  /// Guards all micro-batches of a step but the last. While a NoAllReduce is alive, each backward() still averages its
  /// gradients among the ranks that share a copy (reduce-scatter). It accumulates this rank's rows of them, in float32
  /// if reduce_dtype has 16 bits. No unsharded gradients are kept in between. The first backward() after the guard is
  /// destroyed averages over the copies (dp_replicate) and gives parameters() their gradients: once per step. Gradients
  /// that stay unsharded anyway (stage 1, one rank, parameters in no unit) are accumulated as no_sync() does. In
  /// PyTorch's FSDP2 this is set_requires_all_reduce(false). set_requires_gradient_sync(false) is no_sync().
  /// REQUIRES: all ranks make it at the same point.
  class [[nodiscard]] NoAllReduce {
   public:
    explicit NoAllReduce(std::shared_ptr<fsdp::FsdpRuntime> units);
    NoAllReduce(NoAllReduce&&) noexcept = default;
    NoAllReduce& operator=(NoAllReduce&&) = delete;
    ~NoAllReduce();

   private:
    std::shared_ptr<fsdp::FsdpRuntime> runtime_;
  };
  NoAllReduce no_all_reduce();

  /// For the pipeline in which the module is a stage (parallel/pipeline/stage.h). The result is valid as long as this
  /// object. From the pipeline's first step on, gradients are kept unsharded and averaged once per step. With
  /// reshard_after_forward, stage 3 unshards a unit for every pass; otherwise, and in stages 1 and 2, once per step.
  /// REQUIRES: units are used one after the other: what follows a unit depends on the units before it only through it.
  std::shared_ptr<StageSharding> in_pipeline() const;

  /// This rank's rows of every parameter, each once. All ranks have the same names in the same order.
  const std::vector<NamedTensor>& parameters() const noexcept { return shards_; }
  /// The trained ones among parameters().
  const std::vector<NamedTensor>& trained_parameters() const noexcept { return trained_; }
  /// The names of each unit's parameters, in the order of use.
  std::vector<std::vector<std::string>> units() const;
  void invalidate_unsharded();
  FullyShardStatistics statistics() const;
  /// The ranks that keep units together with this rank (reshard_group). Null if there are none.
  std::shared_ptr<Communicator> post_forward_group() const;

 private:
  template <class Input>
  decltype(auto) as_input(Input&& input) const {
    if constexpr (std::is_same_v<std::decay_t<Input>, at::Tensor>) {
      return in_param_dtype(input);
    } else {
      return std::forward<Input>(input);
    }
  }
  at::Tensor in_param_dtype(const at::Tensor& input) const;
  void root_pre_forward();
  at::Tensor root_post_forward(at::Tensor output);

  std::optional<std::size_t> root_;  // the unit that run() unshards
  std::optional<at::ScalarType> param_dtype_, run_output_dtype_;
  std::vector<Init> inits_;
  std::vector<NamedTensor> shards_, trained_;
  std::shared_ptr<fsdp::FsdpRuntime> runtime_;
};

}  // namespace phalanx
