// Layouts by name, and all of them: what `phalanx verify` goes through. Knows no tensor.
//
//   const TrainConfig laid_out = with_layout(config, "dp_shard=2,tp=2,zero=1", /*ranks=*/8);
//   for (const NamedLayout& layout : all_layouts(config, 8)) ...       // every mix that the model's numbers allow
//
// Every layout trains on the same global batch: that of the configuration, or else local_batch_size for each of the
// given ranks. Each forward pass has as many sequences as local_batch_size says, or the most below that divide a data
// rank's share; the rest is accumulated.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "phalanx/config/run_plan.h"

namespace phalanx::train {

struct NamedLayout {
  std::string name;  // dp_replicate=2,dp_shard=2,zero=3,tp=2
  TrainConfig config;
  std::int64_t ranks = 1;
};

/// Parts: pp=N, schedule=NAME, dp_replicate=N, dp_shard=N, tp=N, zero=1|2|3, sp=on|off,
/// ac=none|full|op|N (of N blocks one is computed again), reshard=always|never, precision=float32|bfloat16|float16,
/// batch=N (sequences of a forward pass or of a pipeline's micro-batch); what is not named is 1, 1F1B, 3, on, none,
/// always, the configuration's, as above. ConfigError for others, for more ranks than
/// there are, and where numbers do not divide.
NamedLayout with_layout(const TrainConfig& config, const std::string& name, std::int64_t ranks);

/// Of 1 to `ranks` ranks, fewest first: every mix of degrees that are powers of two, each with every stage of ZeRO; one
/// rank with every kind of recomputation and precision, and each mix of degrees of 2 with recomputation in both 16-bit
/// types.
std::vector<NamedLayout> all_layouts(const TrainConfig& config, std::int64_t ranks);

}  // namespace phalanx::train
