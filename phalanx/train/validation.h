// Validator computes the loss on held-out tokens or pairs: the mean over all samples of one range, or of several data
// sets, and then of each set, too. Each sample is visited once; the data-parallel ranks share them.
//
// The result is the same on every rank and, up to rounding, for every number of ranks. The samples go to the ranks in
// turn, the last round may be short, and sums rather than means are added up.
//
//   Validator validator({{"", held_out_dataloader}}, {.local_batch_size = 8, .steps = -1});
//   const ValidationMetrics result = *validator.run(model, *world, step);    // collective
#pragma once

#include <cstdint>
#include <functional>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/data/data_loader.h"
#include "phalanx/train/metrics_logger.h"
#include "phalanx/train/model/parallel_model.h"

namespace phalanx::train {

struct ValidatorOptions {
  std::int64_t local_batch_size = 8;
  std::int64_t steps = -1;              // at most this many forward passes per rank and set; -1: all samples
  std::int64_t data_parallel_rank = 0;  // among the ranks that have different batches
  std::int64_t data_parallel_size = 1;
  ContextCut cut;                          // the positions of this rank
  std::optional<at::ScalarType> autocast;  // unset: none
  at::Device device = at::kCPU;
  at::Tensor reference = {};  // of pairs of preferences (model/preference_reference.h); undefined: there are none
};

class Validator {
 public:
  struct Set {
    std::string name;
    data::DataLoader dataloader;
  };
  /// REQUIRES: one set or more, with the same sequence length.
  Validator(std::vector<Set> sets, ValidatorOptions options);
  /// If no rank has the whole model, every rank runs as many forward passes as the others. `is_cut_short` is called
  /// before each pass; once it returns true there is no result. Unset: never cut short.
  /// REQUIRES: `is_cut_short` returns the same on all ranks.
  std::optional<ValidationMetrics> run(ParallelModel& model, Communicator& world, std::int64_t step,
                                       const std::function<bool()>& is_cut_short = {}) const;
  std::int64_t sample_count() const;  // of one run(), of all sets
  std::int64_t set_count() const { return std::ssize(sets_); }
  const std::vector<Set>& sets() const noexcept { return sets_; }

 private:
  std::int64_t sample_count_of(const Set& set) const;

  std::vector<Set> sets_;
  ValidatorOptions options_;
};

}  // namespace phalanx::train
