// The loss on held-out tokens: the mean over all samples of a range, each visited once, shared out over the ranks.
//
// The result is the same on every rank and, up to rounding, for every number of ranks: sample i goes to the rank whose
// turn it is, the last round may be short, and sums rather than means are added up.
//
//   Validator validator(held_out_batches, {.local_batch_size = 8, .steps = -1});
//   ValidationMetrics result = *validator.run(*model, *world, step);    // collective
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "phalanx/comm/communicator.h"
#include "phalanx/data/data_loader.h"
#include "phalanx/train/metrics_logger.h"
#include "phalanx/train/parallel_model.h"

namespace phalanx::train {

struct ValidatorOptions {
  std::int64_t local_batch_size = 8;
  std::int64_t steps = -1;              // forward passes per rank at most; -1: all samples
  std::int64_t data_parallel_rank = 0;  // of those that have batches of their own
  std::int64_t data_parallel_size = 1;
  std::optional<at::ScalarType> autocast;  // unset: none
  at::Device device = at::kCPU;
};

class Validator {
 public:
  Validator(data::DataLoader dataloader, ValidatorOptions options);
  /// Where no rank has the whole model every one goes through as many forward passes as the others. `is_cut_short` is
  /// asked before each, and is to say the same on all ranks: once true there is no result. Unset: never.
  std::optional<ValidationMetrics> run(ParallelModel& model, Communicator& world, std::int64_t step,
                                       const std::function<bool()>& is_cut_short = {}) const;
  std::int64_t sample_count() const;  // of one run()

 private:
  data::DataLoader dataloader_;
  ValidatorOptions options_;
};

}  // namespace phalanx::train
