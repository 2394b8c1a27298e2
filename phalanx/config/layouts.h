// Layouts by name, and the list of all layouts, which `phalanx verify` checks. It does not use torch.
//
//   const NamedLayout layout = with_layout(config, "dp_shard=2,tp=2,zero=1", /*ranks=*/8);
//   for (const NamedLayout& one : all_layouts(config, 8)) check(one);   // every mix that the model's dimensions allow
//
// Every layout trains on the same global batch: that of the configuration, or else local_batch_size for each of the
// given ranks. Each forward pass has local_batch_size sequences, or the largest smaller number that divides the share
// of a data-parallel rank. The rest is accumulated.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "phalanx/config/run_plan.h"

namespace phalanx::config {

struct NamedLayout {
  std::string name;  // dp_replicate=2,dp_shard=2,zero=3,tp=2
  TrainConfig config;
  std::int64_t ranks = 1;
};

struct LeftOutLayout {
  std::string name, reason;
};

/// Parts of a name: pp=N, schedule=NAME, dp_replicate=N, dp_shard=N, cp=N, exchange=keys|heads|ring|auto,
/// balance=auto|headtail|ptrr, ep=N, tp=N, zero=1|2|3, sp=on|off, ac=none|full|op|N (one of N blocks is recomputed),
/// reshard=always|never, precision=float32|bfloat16|float16, batch=N (sequences of a forward pass or of a pipeline's
/// micro-batch). Defaults: 1, 1F1B, 1, 1, 1, keys, auto, 1, 1, 3, on, none, always, the configuration's precision, and
/// the batch described above. With cp above 1 and dp_shard 1, zero= makes the ranks of cp share the model. Throws
/// ConfigError for other parts, for more ranks than `ranks`, and if numbers do not divide.
NamedLayout with_layout(const TrainConfig& config, const std::string& name, std::int64_t ranks);

/// All layouts of 1 to `ranks` ranks, fewest first. These are every mix of degrees that are powers of two, each with
/// every ZeRO stage; context parallelism by gathered keys, alone also by heads, by a ring, which is mixed with one more
/// kind, and with documents by heads and tails of packed sequences; experts divided among all ranks that share a copy,
/// or among half of them; one rank with every kind of recomputation and precision; and each mix of degrees of 2 with
/// recomputation in both 16-bit types.
/// Mixes that do not divide the model or the batch, or that no single rank can repeat, go to `left_out`.
std::vector<NamedLayout> all_layouts(const TrainConfig& config, std::int64_t ranks,
                                     std::vector<LeftOutLayout>* left_out = nullptr);

}  // namespace phalanx::config
