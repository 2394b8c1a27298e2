#include "phalanx/train/model/parallelize.h"

#include "phalanx/base/error.h"
#include "phalanx/models/llama_parallel.h"
#include "phalanx/nn/init.h"
#include "phalanx/parallel/context/context_attention.h"
#include "phalanx/train/model/float8_layers.h"
#include "phalanx/train/model/recompute_layers.h"
#include "phalanx/train/model/shard_options.h"

namespace phalanx::train {
namespace {

/// The dimension along which overlapped tensor parallelism splits activations. 0, sequences, where each batch has as
/// many for each rank: no row then moves within a rank, and whole parts are exchanged while others are multiplied. 1,
/// positions, elsewhere and over many devices: more of the exchange is hidden behind products (tensor_parallel.md).
int split_dim(const config::TrainConfig& config, const config::RunPlan& plan, at::Device device) {
  if (!config.parallelism.enable_async_tensor_parallel) return 1;
  const bool divides = plan.local_batch_size % plan.parallel.tp == 0 && plan.parallel.pp == 1;
  const bool evaluates = config.validation.enable || !config.dpo.preferences.empty();
  return divides && !evaluates && (device.is_cpu() || plan.parallel.tp == 2) ? 0 : 1;
}

std::unique_ptr<FullyShardedDataParallel> shard(models::Llama& model, const config::TrainConfig& config,
                                                const RunMeshes& meshes, bool has_experts) {
  FullyShardOptions options = shard_options(config);
  if (!model.part().head) options.output_dtype.reset();  // the next stage takes activations as they are
  if (has_experts) options.own_group = meshes.experts->own_group();
  return std::make_unique<FullyShardedDataParallel>(model, meshes.ranks, options);
}

ContextExchange context_exchange_named(const std::string& name) {
  if (name == "heads") return ContextExchange::heads;
  if (name == "ring") return ContextExchange::ring;
  if (name == "keys") return ContextExchange::keys;
  throw Error("context parallel: no exchange is called '" + name + "'");
}

/// A rank that shares a whole model with nobody reduces with itself: its gradients get buckets too.
std::shared_ptr<Communicator> replicate(models::Llama& model, const config::RunPlan& plan, const DeviceMesh& mesh) {
  nn::materialize(model);
  const char* const axis = plan.parallel.replica_axis();
  if (mesh.has(axis)) return mesh.communicator(axis);
  if (plan.parallel.pp > 1) return nullptr;
  const std::shared_ptr<Communicator>& world = mesh.world();
  return world->size() == 1 ? world : world->split(world->rank(), 0);
}

}  // namespace

std::vector<std::shared_ptr<Communicator>> apply_tensor_parallelism(models::Llama& model,
                                                                    const config::TrainConfig& config,
                                                                    const config::RunPlan& plan, const DeviceMesh& mesh,
                                                                    at::Device device) {
  if (plan.parallel.tp == 1) return {};
  return models::parallelize_llama(model, mesh,
                                   {.sequence_parallel = plan.parallel.sequence_parallel,
                                    .split_dim = split_dim(config, plan, device),
                                    .overlap = config.parallelism.enable_async_tensor_parallel,
                                    .seq_len = config.training.seq_len});
}

Parallelized parallelize(models::Llama& model, const config::TrainConfig& config, const config::RunPlan& plan,
                         const RunMeshes& meshes, at::Device device) {
  auto copy_groups = apply_tensor_parallelism(model, config, plan, meshes.ranks, device);
  if (meshes.context) {
    const ContextCut cut = plan.context_cut(meshes.ranks.world()->rank());
    const ContextExchange exchange = context_exchange_named(plan.exchange.name);
    model.set_context({.cut = cut,
                       .attention = make_context_attention(exchange, meshes.context, cut),
                       .sum = [group = meshes.context](const at::Tensor& x) { group->all_reduce(x); }});
  }
  const bool has_experts = meshes.experts != nullptr && apply_expert_parallelism(model, *meshes.experts);
  apply_float8(model, config, meshes.ranks, device);
  recompute_layers(model, config);
  if (plan.parallel.is_sharded())
    return {.sharded = shard(model, config, meshes, has_experts),
            .replicas = nullptr,
            .copy_groups = std::move(copy_groups)};
  return {.sharded = nullptr, .replicas = replicate(model, plan, meshes.ranks), .copy_groups = std::move(copy_groups)};
}

}  // namespace phalanx::train
