#include "phalanx/plan/comm_volume.h"

#include <algorithm>
#include <utility>

#include "phalanx/plan/context_exchange.h"
#include "phalanx/plan/model_partition.h"

namespace phalanx::plan {
namespace {

struct Group {
  std::int64_t size = 1;
  std::int64_t stride = 1;  // between consecutive ranks of the group
};

class Sum {
 public:
  explicit Sum(std::int64_t per_node) : per_node_(per_node) {}

  /// An all-gather or a reduce-scatter of a buffer of this many bytes, `times` over.
  void add(const Group& group, std::int64_t bytes, std::int64_t times) {
    std::int64_t local_ranks = std::clamp<std::int64_t>(per_node_ / group.stride, 1, group.size);
    while (group.size % local_ranks != 0) --local_ranks;
    const std::int64_t nodes = group.size / local_ranks;
    sum_.intra_node += times * bytes * (local_ranks - 1) / local_ranks;
    sum_.inter_node += times * bytes / local_ranks * (nodes - 1) / nodes;
  }
  /// An all-to-all of this many bytes of each rank, as much for every rank, `times` over.
  void exchange(const Group& group, std::int64_t bytes, std::int64_t times) {
    const std::int64_t local_ranks = std::clamp<std::int64_t>(per_node_ / group.stride, 1, group.size);
    sum_.intra_node += times * bytes * (local_ranks - 1) / group.size;
    sum_.inter_node += times * bytes * (group.size - local_ranks) / group.size;
  }
  /// Messages between adjacent ranks of the group.
  void send(const Group& group, std::int64_t bytes) {
    (group.stride * group.size > per_node_ ? sum_.inter_node : sum_.intra_node) += bytes;
  }
  const StepCommVolume& result() const { return sum_; }

 private:
  std::int64_t per_node_;
  StepCommVolume sum_;
};

/// Parameters of a rank, before they are sharded.
struct Weights {
  std::int64_t all = 0;
  std::int64_t divided = 0;  // of these, experts that other ranks do not have
};

Weights largest_part(const TrainingShape& shape) {
  const ModelPartition model(shape);
  const bool tied = shape.model.tie_embeddings, divides = shape.expert_parallel_size > 1;
  const auto weights_of = [&](const models::LlamaPart& part) {
    return Weights{model.parameters(part, tied), divides ? model.expert_parameters(part) : 0};
  };
  if (!shape.pipeline) return weights_of(models::full_llama(shape.model));
  Weights largest;
  for (int rank = 0; rank < shape.pipeline->schedule.ranks(); ++rank) {
    Weights sum;
    for (const int stage : shape.pipeline->schedule.stages_of(rank)) {
      const Weights one = weights_of(shape.pipeline->parts[static_cast<std::size_t>(stage)]);
      sum.all += one.all;
      sum.divided += one.divided;
    }
    if (sum.all > largest.all) largest = sum;
  }
  return largest;
}

}  // namespace

StepCommVolume predict_comm_volume(const TrainingShape& shape, const Layout& layout, std::int64_t per_node) {
  const ParallelPlan& parallel = layout.parallel;
  const Group tensor{parallel.tp, 1}, shards{parallel.shards(), parallel.tp},
      copies{parallel.replicas(), parallel.tp * parallel.shards()}, context{parallel.cp, parallel.tp},
      pipeline{parallel.pp, parallel.tp * parallel.loss_parts()};
  Sum sum(per_node);
  const Weights weights = largest_part(shape);
  if (parallel.is_sharded()) {
    const Group of_experts{shape.shards_of_experts(), parallel.tp * parallel.ep};
    const bool reshards = parallel.zero_stage == 3 && shape.reshard_after_forward;
    for (const auto& [group, count] :
         {std::pair(shards, weights.all - weights.divided), {of_experts, weights.divided}}) {
      sum.add(group, count * shape.reduce_bytes, shape.accumulates_sharded_gradients() ? layout.passes : 1);
      sum.add(group, count * shape.gather_bytes, reshards ? 2 * layout.passes : 1);
    }
  }
  const std::int64_t sharded =
      (weights.all - weights.divided) / shape.shards + weights.divided / shape.shards_of_experts();
  sum.add(copies, sharded * shape.reduce_bytes, 2);

  const std::int64_t element = shape.gather_bytes;  // under autocast, float32 is sent
  const std::int64_t hidden = shape.batch * shape.local_seq() * shape.model.dim * element;
  const std::int64_t blocks = shape.model.n_layers / parallel.pp;
  sum.add(tensor, hidden, layout.passes * (blocks * (shape.recompute_every > 0 ? 12 : 8) + 4));
  if (parallel.ep > 1) {
    // A token's rows to its experts and back, in each of the passes.
    const std::int64_t with_experts = (shape.model.n_layers - shape.model.dense_layers) / parallel.pp;
    const std::int64_t passes = layout.passes * with_experts * (shape.recompute_every > 0 ? 3 : 2);
    sum.exchange({parallel.ep, parallel.tp}, hidden * shape.model.experts_per_token, 2 * passes);
  }
  if (parallel.cp > 1) {
    // Keys and values are gathered, and their gradients summed in float32.
    const ModelPartition model(shape);
    const std::int64_t tokens = shape.batch * shape.local_seq(), forwards = shape.recompute_every > 0 ? 2 : 1;
    const std::int64_t numbers = 2 * tokens * parallel.cp * model.keys;  // of all ranks
    if (layout.context_exchange == "keys") {
      sum.add(context, numbers * element, layout.passes * blocks * forwards);
      sum.add(context, numbers * kFloatBytes, layout.passes * blocks);
    } else if (layout.context_exchange == "ring") {
      // The share of its pieces' whole way that a ring needs. They travel in the backward pass, too, and in it their
      // gradients in float32.
      const std::int64_t transfers = ring_transfers(parallel.cp, shape.seq, window_of_all_layers(shape.model));
      const std::int64_t sent = numbers * transfers / (2 * parallel.cp * (parallel.cp - 1));
      sum.add(context, sent * element, layout.passes * blocks * (forwards + 1));
      sum.add(context, sent * kFloatBytes, layout.passes * blocks);
    } else {
      // Each rank sends all but its own part of its queries, keys, values and results.
      const std::int64_t own = 2 * tokens * (model.queries + model.keys);
      sum.add(context, own * element, layout.passes * blocks * (forwards + 1));
    }
  }
  if (shape.pipeline) {
    const std::int64_t part = shape.sequence_parallel ? hidden / parallel.tp : hidden;
    const std::int64_t stages = shape.pipeline->schedule.stages() / shape.pipeline->schedule.ranks();
    sum.send(pipeline, 2 * stages * layout.passes * part);
  }
  return sum.result();
}

}  // namespace phalanx::plan
