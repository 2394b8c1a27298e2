// How the ranks of a run share the experts of its model: expert parallelism divides dp_shard into two axes.
//
//   mesh of the run       pp, dp_replicate, dp_shard = 4,             tp
//   mesh of the experts   pp, dp_replicate, dp_shard = 2, ep = 2,     tp
//
// Under context parallelism it divides dp_shard_cp likewise. Neighbours along that axis have different experts. The
// ranks that have the same ones shard them along what is left of it. A rank has the same number in both meshes.
//
//   const auto experts = ExpertMesh::make(plan, mesh);               // collective; null without expert parallelism
//   apply_expert_parallelism(model, *experts);                       // after tensor parallelism
//   FullyShardOptions options{.own_group = experts->own_group()};    // along dp_shard of this mesh
//   weights = experts->with_others(sharded.parameters(), names);     // collective
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/layout/parallel_plan.h"
#include "phalanx/mesh/device_mesh.h"
#include "phalanx/models/llama.h"
#include "phalanx/parallel/fsdp/fully_shard.h"
#include "phalanx/tensor/named.h"

namespace phalanx::train {

class ExpertMesh {
 public:
  /// Collective over the ranks of `mesh`. Null if the plan has no expert parallelism.
  static std::shared_ptr<const ExpertMesh> make(const ParallelPlan& plan, const DeviceMesh& mesh);

  const MeshShape& shape() const noexcept { return shape_; }
  int rank() const noexcept { return rank_; }
  /// The ranks among which the experts are divided, and those that have the same experts.
  const std::shared_ptr<Communicator>& ep() const noexcept { return ep_; }
  const std::shared_ptr<Communicator>& dp_shard() const noexcept { return dp_shard_; }
  OwnShardGroup own_group() const;

  /// The tensors of all ranks of ep(): `names` in their order. Of those that only other ranks have, this rank holds no
  /// rows. Collective over ep().
  /// REQUIRES: every name is held by this rank, or by another one of ep().
  std::vector<NamedTensor> with_others(const std::vector<NamedTensor>& held,
                                       const std::vector<std::string>& names) const;

 private:
  ExpertMesh() = default;
  MeshShape shape_;
  int rank_ = 0;
  std::shared_ptr<Communicator> ep_, dp_shard_;
};

/// Each rank keeps its own experts, which know their part on the mesh of the experts. Returns whether the model, or
/// this part of it, has layers with experts.
/// REQUIRES: the parameters have no memory.
bool apply_expert_parallelism(models::Llama& model, const ExpertMesh& mesh);

}  // namespace phalanx::train
