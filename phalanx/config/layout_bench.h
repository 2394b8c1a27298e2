// What `phalanx bench train` measures: a few steps of the same training under several layouts. Knows no tensor: it
// makes the configurations, says what fits, and reads what the runs left; the program starts the ranks.
//
//   for (const BenchLayout& layout : layouts_to_bench(config, 2, "auto", devices)) {
//     write_file(path, print_config(bench_config(layout.layout.config, folder, {.steps = 8})));
//     ...                                                        // phalanx train -n layout.layout.ranks path
//     const BenchMetrics figures = read_bench_run(folder, {.steps = 8});
//   }
//   scaling(figures, 2, one_rank);                               // 1: twice as fast on two ranks
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/config/layouts.h"
#include "phalanx/plan/devices.h"
#include "phalanx/plan/memory_model.h"

namespace phalanx::train {

struct BenchSteps {
  std::int64_t steps = 8;    // that are measured
  std::int64_t warm_up = 2;  // before them
};

struct BenchLayout {
  NamedLayout layout;
  plan::TrainingMemory predicted;  // of the fullest rank
  std::int64_t available = 0;      // to a rank
  bool fits() const { return predicted.total() <= available; }
};

/// What scaling is measured against: one rank with the whole step of the others (strong scaling), and one with a rank's
/// share of it (weak scaling; nothing where the ranks do not divide the step).
struct ScalingBaseline {
  BenchLayout strong_scaling;
  std::optional<BenchLayout> weak_scaling;
};

/// `list`: "auto", every layout of exactly so many ranks whose degrees are powers of two, as they fit or not; or names,
/// divided by blanks or semicolons. ConfigError for names that are none, or take other numbers of ranks.
std::vector<BenchLayout> layouts_to_bench(const TrainConfig& config, std::int64_t ranks, const std::string& list,
                                          const plan::Devices& devices);
ScalingBaseline scaling_baseline(const TrainConfig& config, std::int64_t ranks, const plan::Devices& devices);

/// The same training for a few steps, in this folder, without checkpoints, validation, reports and traces.
TrainConfig bench_config(TrainConfig config, const std::string& folder, const BenchSteps& steps);

struct BenchMetrics {
  double tokens_per_second = 0;  // of all ranks, by the median step
  double step_seconds = 0;       // the median
  double exposed_percent = 0;    // of a step in which ranks do nothing but wait for each other, mean
  double exposed_of_communication = 0;
  std::int64_t counted = 0;       // tensors of the fullest rank, at their peak
  std::int64_t predicted = 0;     // of these
  std::int64_t proportional = 0;  // PSS of the fullest rank
};

/// From the folder of a run that has ended. DataError where it did not get to its last step.
BenchMetrics read_bench_run(const std::string& folder, const BenchSteps& steps);
/// Of several runs of the same: the run whose median step is in the middle.
BenchMetrics median_run(std::vector<BenchMetrics> runs);

/// Tokens per second as a share of `ranks` times one rank's.
double scaling(const BenchMetrics& metrics, std::int64_t ranks, const BenchMetrics& one_rank);

}  // namespace phalanx::train
