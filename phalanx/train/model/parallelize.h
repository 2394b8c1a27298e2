// Applies the forms of parallelism of a run's plan to a model, or to one stage of a pipeline.
//
//   Parallelized parts = parallelize(stage, config, plan, {mesh, context, experts}, device);   // stage: without memory
//   if (parts.sharded) parts.sharded->initialise(seed);
#pragma once

#include <memory>

#include "phalanx/comm/communicator.h"
#include "phalanx/config/run_plan.h"
#include "phalanx/mesh/device_mesh.h"
#include "phalanx/models/llama.h"
#include "phalanx/parallel/ddp/ddp.h"
#include "phalanx/parallel/fsdp/fully_shard.h"
#include "phalanx/train/model/expert_mesh.h"

namespace phalanx::train {

/// How the ranks that hold the same model, or the same stage, share their batches.
struct Parallelized {
  std::unique_ptr<FullyShardedDataParallel> sharded;  // null: replicated
  /// The ranks whose gradients DistributedDataParallel sums, once the parameters have values. Null: sharded, or a stage
  /// that no other rank holds.
  std::shared_ptr<Communicator> replicas;
  std::vector<std::shared_ptr<Communicator>> copy_groups;  // parallelize_module()'s, of tensor parallelism
};

/// For these ranks. Every loss is divided by what the global batch has, so that gradients are summed.
inline DdpOptions ddp_options() { return {.gradient_reduction = ReduceOp::sum}; }

struct RunMeshes {
  const DeviceMesh& ranks;
  std::shared_ptr<Communicator> context;  // the ranks that share this rank's sequences; null: each rank has its own
  const ExpertMesh* experts = nullptr;    // null: every rank has all experts
};

/// In this order: tensor parallelism cuts the matrices, context parallelism the sequences, expert parallelism divides
/// the experts, layers are marked for float8 and for recomputation, and data parallelism shards the parameters
/// or gives a replica its memory.
/// REQUIRES: the parameters have no memory, unless nothing is cut. Collective over the world of the mesh.
Parallelized parallelize(models::Llama& model, const config::TrainConfig& config, const config::RunPlan& plan,
                         const RunMeshes& meshes, at::Device device);

/// The first of these alone; the groups that parallelize_module() returned.
std::vector<std::shared_ptr<Communicator>> apply_tensor_parallelism(models::Llama& model,
                                                                    const config::TrainConfig& config,
                                                                    const config::RunPlan& plan, const DeviceMesh& mesh,
                                                                    at::Device device);

}  // namespace phalanx::train
