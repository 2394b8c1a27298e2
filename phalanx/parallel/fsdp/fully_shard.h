// Sharded data parallelism (FSDP, ZeRO-1, -2, -3): every rank keeps a part of the model's state and borrows the rest.
//
//   auto model = std::make_shared<models::Llama>(config);
//   FullyShardedDataParallel sharded(*model, mesh);             // mesh: DeviceMesh with an axis "dp_shard"
//   sharded.initialise(seed);                                   // or a checkpoint
//   AdamW optimizer(sharded.parameters());                      // of this rank's rows
//   model->loss(tokens, labels).backward();
//   clip_grad_norm(sharded.parameters(), 1.0, mesh.world().get());
//   optimizer.step(lr);
//
// What it does
// - Parameters are grouped into units (a block each). A unit is gathered right before it is used, in the forward pass
//   and again in the backward pass, while the one before it computes, and let go after it; its gradients are averaged
//   as soon as they are complete, and each rank keeps its rows of them. At most two units are gathered at a time
//   (one more for each level of units inside units).
// - stage 3 shards parameters, gradients and optimizer state; 2 keeps parameters whole; 1 keeps gradients whole too.
//   Communication per step in parameters: 3 for stage 3 (2 without reshard_after_forward), 2 for the others, as DDP.
// - On a mesh that also has "dp_replicate", shards are replicated along it and averaged there (HSDP), while the
//   backward pass goes on.
// - reshard_group = k: from the forward to the backward pass every k neighbours (of one machine, say) keep a unit
//   together, so that the second gathering goes no further; 1 / k of the model on each rank for that time.
// - Mixed precision (param_dtype, reduce_dtype, output_dtype, as PyTorch's FSDP2): parameters() stay what they are and
//   are the master; they are gathered and used in param_dtype, which the first input of every unit is brought to;
//   gradients are averaged in reduce_dtype, and parameters' .grad() are of that dtype; micro-batches are added up in it
//   under no_sync(), under no_all_reduce() in float32 if it has 16 bits, and so is what they leave in .grad(). What the
//   module returns is in output_dtype; of a plain module that is no Sequential, where it is run by run().
// - offload keeps parameters(), their gradients and with them the optimizer and its state on the host (pinned, where
//   the module is on a GPU); rows go to the device when their unit is gathered.
// - A module that parallelize_module() has split over another axis of the mesh (parallel/tensor/styles.h) is sharded in
//   what each rank has of it: made of that module afterwards, with the same mesh.
// - The values are those of DistributedDataParallel to the bit, on backends whose sums are in rank order; but for
//   no_all_reduce(), which sums over micro-batches after ranks.
//
// Units: what nn::Module::shard_units() of the module says (models do); else the children of every
// torch::nn::Sequential and of numbered lists of nn::Modules in it. A parameter is in the innermost unit around it, so
// {{block}, {block.attention}} is attention, and the rest of the block. Parameters in no unit, or in several, are one
// more, which stays gathered; a module that has such is run by nn::call(), or, if it is a plain torch::nn::Module, by
// run(). A module that is all of that kind costs a warning that states its bytes.
//
// Contract
// - The constructor is collective over the mesh. All ranks have the same module, mesh and options; values are taken
//   from rank 0. A module whose parameters were born without memory (TensorOptionsOfModule::without_memory) is never
//   whole anywhere: initialise() or a checkpoint fills it shard by shard.
// - From then on the module's own parameters are without memory between uses: reading them is undefined.
//   parameters() are what exists: this rank's rows, by name, with their ShardSpec; their gradients after a synchronised
//   backward pass. zero_grad() between steps; a gradient that is still there is added to.
// - Each backward pass that sends anything must give every trained parameter a gradient (Error otherwise, on every
//   rank, and the communicators are aborted). Parameters stay as they are: one that is frozen, unfrozen or added later
//   is an Error that names it in the next backward pass, on every rank. (Added ones are seen of modules that a
//   shared_ptr owns.) Gradients must be dense. An exception inside backward() aborts, too, and drops what has been
//   accumulated since the last average.
// - Whoever changes parameters() other than between a synchronised backward pass and the next forward pass says so with
//   invalidate_unsharded().
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

struct FullyShardOptions {
  int stage = 3;                      // of ZeRO: 1, 2 or 3
  bool reshard_after_forward = true;  // stage 3: false keeps units gathered from the forward pass on
  int reshard_group = 0;              // stage 3: ranks that keep them together instead; divides the sharding axis
  bool prefetch = true;               // false: a unit is gathered when it is used, and not before
  bool offload = false;               // to the host
  std::int64_t smallest_unit = 0;     // elements: neighbours are joined until each unit has as many
  std::optional<at::ScalarType> param_dtype;   // unset: the module's
  std::optional<at::ScalarType> reduce_dtype;  // unset: that of the parameters when used
  std::optional<at::ScalarType> output_dtype;  // of the module's output, where that is floating-point; unset: as it is
};

struct FullyShardStatistics {
  std::int64_t synchronisations = 0;  // backward passes whose gradients were averaged
  std::int64_t prefetches = 0;        // of units, while another one was in use
  std::int64_t gathers = 0;           // of units, those included
  std::int64_t reduced_bytes = 0;     // of gradients handed to reduce_scatter by this rank
  double exposed_seconds = 0;         // spent waiting for either (CPU; on CUDA host time)
  // Memory of this rank.
  std::int64_t shard_bytes = 0;         // parameters: the rows of this rank, and all of them, or parts, where they stay
  std::int64_t sharded_grad_bytes = 0;  // gradients of these rows
  std::int64_t unsharded_bytes = 0;     // for gathered units beside that
  std::int64_t gradient_bytes = 0;      // for whole gradients
  std::int64_t padding_bytes = 0;       // of all that is sharded, over all ranks
};

class FullyShardedDataParallel {
 public:
  FullyShardedDataParallel(torch::nn::Module& module, const DeviceMesh& mesh, FullyShardOptions options = {});
  ~FullyShardedDataParallel();
  FullyShardedDataParallel(const FullyShardedDataParallel&) = delete;
  FullyShardedDataParallel& operator=(const FullyShardedDataParallel&) = delete;

  /// Gives every parameter its starting values (nn/init.h), each rank its own rows.
  void initialise(std::uint64_t seed);

  /// module.forward(inputs...) for a plain torch::nn::Module with parameters of its own.
  template <class M, class... Inputs>
  at::Tensor run(M& module, Inputs&&... inputs) {
    root_pre_forward();
    return root_post_forward(module.forward(as_input(std::forward<Inputs>(inputs))...));
  }

  /// While one is alive, backward() accumulates locally and nothing is sent; whole gradients are kept from then on. The
  /// first backward() after the last guard is gone averages the sum. Made on all ranks at once.
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

  /// For all micro-batches of a step but the last. While one is alive, each backward() averages its gradients among the
  /// ranks that share a copy (reduce-scatter), as without it, and adds this rank's rows of them up, in float32 where
  /// reduce_dtype is of 16 bits; no whole gradients are kept in between. The copies (dp_replicate) average, and
  /// parameters() get their gradients, in the first backward() after it is gone: once a step. Whole gradients that stay
  /// anyhow (stage 1, one rank, parameters in no unit) are added up as no_sync() does. Made on all ranks at once.
  /// In PyTorch's FSDP2: set_requires_all_reduce(false); its set_requires_gradient_sync(false) is no_sync().
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

  /// For the pipeline that the module is a stage of (parallel/pipeline/stage.h); valid as long as this object. From its
  /// first step on whole gradients are kept; they are averaged once a step. Units that come and go are gathered for
  /// every pass; with reshard_after_forward = false, or stage 1 or 2, once a step. They must be used one after the
  /// other: what comes behind a unit needs nothing of the units before it but through it.
  std::shared_ptr<StageSharding> in_pipeline() const;

  /// This rank's rows of every parameter, each once; the same names in the same order on every rank.
  const std::vector<NamedTensor>& parameters() const noexcept { return shards_; }
  /// The same, of those that are trained.
  const std::vector<NamedTensor>& trained_parameters() const noexcept { return trained_; }
  /// The names of each unit's parameters, in the order of use.
  std::vector<std::vector<std::string>> units() const;
  void invalidate_unsharded();
  FullyShardStatistics statistics() const;
  /// Those that keep units together with this rank (reshard_group); null: nobody does.
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

  std::optional<std::size_t> root_;  // the unit that run() gathers
  std::optional<at::ScalarType> param_dtype_, run_output_dtype_;
  std::vector<Init> inits_;
  std::vector<NamedTensor> shards_, trained_;
  std::shared_ptr<fsdp::FsdpRuntime> runtime_;
};

}  // namespace phalanx
