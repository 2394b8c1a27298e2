#include "phalanx/plan/exchange.h"

#include <algorithm>

#include "phalanx/plan/cut_model.h"

namespace phalanx::plan {
namespace {

struct Group {
  std::int64_t size = 1;
  std::int64_t stride = 1;  // from one of its ranks to the next
};

class Sum {
 public:
  explicit Sum(std::int64_t per_node) : per_node_(per_node) {}

  /// A gather or a scatter of a buffer of so many bytes, `times` over.
  void add(const Group& group, std::int64_t bytes, std::int64_t times) {
    std::int64_t together = std::clamp<std::int64_t>(per_node_ / group.stride, 1, group.size);
    while (group.size % together != 0) --together;
    const std::int64_t machines = group.size / together;
    sum_.inside += times * bytes * (together - 1) / together;
    sum_.across += times * bytes / together * (machines - 1) / machines;
  }
  /// Messages between neighbours of the group.
  void send(const Group& group, std::int64_t bytes) {
    (group.stride * group.size > per_node_ ? sum_.across : sum_.inside) += bytes;
  }
  const Exchange& result() const { return sum_; }

 private:
  std::int64_t per_node_;
  Exchange sum_;
};

std::int64_t largest_part(const TrainingShape& shape) {
  const CutModel model(shape);
  const bool tied = shape.model.tie_embeddings;
  if (!shape.pipeline) return model.parameters(models::whole_llama(shape.model), tied);
  std::int64_t largest = 0;
  for (int rank = 0; rank < shape.pipeline->schedule.ranks(); ++rank) {
    std::int64_t sum = 0;
    for (const int stage : shape.pipeline->schedule.stages_of(rank)) {
      sum += model.parameters(shape.pipeline->parts[static_cast<std::size_t>(stage)], tied);
    }
    largest = std::max(largest, sum);
  }
  return largest;
}

}  // namespace

Exchange exchanged(const TrainingShape& shape, const Layout& layout, std::int64_t per_node) {
  const ParallelPlan& parallel = layout.parallel;
  const Group tensor{parallel.tp, 1}, shards{parallel.dp_shard, parallel.tp},
      copies{parallel.dp_replicate, parallel.tp * parallel.dp_shard},
      pipeline{parallel.pp, parallel.tp * parallel.data_ranks()};
  Sum sum(per_node);
  const std::int64_t weights = largest_part(shape);
  if (parallel.dp_shard > 1) {
    sum.add(shards, weights * shape.reduce_bytes, shape.adds_up_rows() ? layout.passes : 1);
    const bool lets_go = parallel.zero_stage == 3 && shape.reshard_after_forward;
    sum.add(shards, weights * shape.gather_bytes, lets_go ? 2 * layout.passes : 1);
  }
  sum.add(copies, weights * shape.reduce_bytes / parallel.dp_shard, 2);

  const std::int64_t element = shape.gather_bytes;  // autocast leaves what is sent in float32
  const std::int64_t hidden = shape.batch * shape.seq * shape.model.dim * element;
  const std::int64_t blocks = shape.model.n_layers / parallel.pp;
  sum.add(tensor, hidden, layout.passes * (blocks * (shape.recompute_every > 0 ? 12 : 8) + 4));
  if (shape.pipeline) {
    const std::int64_t part = shape.splits_tokens ? hidden / parallel.tp : hidden;
    const std::int64_t stages = shape.pipeline->schedule.stages() / shape.pipeline->schedule.ranks();
    sum.send(pipeline, 2 * stages * layout.passes * part);
  }
  return sum.result();
}

}  // namespace phalanx::plan
