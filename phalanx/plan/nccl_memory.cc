#include "phalanx/plan/nccl_memory.h"

#include <algorithm>

namespace phalanx::plan {
namespace {

constexpr std::int64_t kMebibyte = 1 << 20;
constexpr std::int64_t kChannels = 32;
constexpr std::int64_t kOfAPeer = kChannels * (10 + 2) * kMebibyte;  // to receive and to send
constexpr std::int64_t kOverNetwork = 512 * kMebibyte;
constexpr std::int64_t kNode = 8;  // ranks

std::int64_t ring(std::int64_t ranks) { return ranks > 1 ? kOfAPeer : 0; }

std::int64_t all_to_all(std::int64_t ranks) {
  return kOfAPeer * (std::min(ranks, kNode) - 1) + (ranks > kNode ? kOverNetwork : 0);
}

// A stage sends to the next one, and the last one may send to the first.
std::int64_t neighbours(std::int64_t ranks) { return kOfAPeer * std::min<std::int64_t>(ranks - 1, 2); }

}  // namespace

std::int64_t nccl_bytes(const TrainingShape& shape) {
  if (!shape.over_nccl) return 0;
  const std::int64_t stages = shape.pipeline ? shape.pipeline->schedule.ranks() : 1, cp = shape.context_parallel_size;
  const std::int64_t world = shape.ranks() * shape.tensor_parallel_size * stages;
  const std::int64_t of_context = shape.gathers_keys      ? ring(cp)
                                  : shape.exchanges_heads ? all_to_all(cp)
                                                          : neighbours(cp);
  const std::int64_t ep = shape.expert_parallel_size;
  const std::int64_t of_experts = ep > 1 ? all_to_all(ep) + ring(shape.shards_of_experts()) : 0;
  return ring(world) + ring(shape.replicas) + ring(shape.shards) + ring(shape.tensor_parallel_size) +
         (cp > 1 ? of_context : 0) + neighbours(stages) + of_experts;
}

}  // namespace phalanx::plan
