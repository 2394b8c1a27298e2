// The measurements of `phalanx bench train`: a few steps of the same training under several layouts. It does not use
// torch. It makes the configurations, predicts which fit into memory, and reads the results of the runs. The program
// starts the ranks.
//
//   for (const BenchLayout& layout : layouts_to_bench(config, 2, "auto", devices)) {
//     write_file(path, print_config(bench_config(layout.layout.config, folder, {.steps = 8})));
//     // Run: phalanx train -n layout.layout.ranks path
//     const BenchMetrics metrics = read_bench_run(folder, {.steps = 8});
//     scaling(metrics, 2, one_rank);                             // 1: twice as fast on two ranks
//   }
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/config/layouts.h"
#include "phalanx/plan/devices.h"
#include "phalanx/plan/memory_model.h"

namespace phalanx::config {

struct BenchSteps {
  std::int64_t steps = 8;    // measured steps
  std::int64_t warm_up = 2;  // steps before them
};

struct BenchLayout {
  NamedLayout layout;
  plan::TrainingMemory predicted;  // of the rank with the most memory
  std::int64_t available = 0;      // for one rank
  bool fits() const { return predicted.total() <= available; }
};

/// The baselines of scaling: one rank with the whole step of the others (strong scaling), and one rank with a single
/// rank's share of it (weak scaling; nothing if the ranks do not divide the step).
struct ScalingBaseline {
  BenchLayout strong_scaling;
  std::optional<BenchLayout> weak_scaling;
};

/// `list`: "auto", or layout names divided by blanks or semicolons. "auto" is every layout of exactly this many ranks
/// whose degrees are powers of two, whether it fits or not. Throws ConfigError for unknown names and for names of
/// another number of ranks.
std::vector<BenchLayout> layouts_to_bench(const TrainConfig& config, std::int64_t ranks, const std::string& list,
                                          const plan::Devices& devices);
ScalingBaseline scaling_baseline(const TrainConfig& config, std::int64_t ranks, const plan::Devices& devices);

/// The same training for a few steps, in `folder`, without checkpoints, validation, reports and traces.
TrainConfig bench_config(TrainConfig config, const std::string& folder, const BenchSteps& steps);

struct BenchMetrics {
  double tokens_per_second = 0;  // of all ranks, by the median step
  double step_seconds = 0;       // the median
  double exposed_percent = 0;    // of a step in which ranks only wait for each other, mean
  double exposed_of_communication = 0;
  std::int64_t counted = 0;       // bytes of tensors of the rank with the most, at their peak
  std::int64_t predicted = 0;     // prediction of `counted`
  std::int64_t proportional = 0;  // PSS of the rank with the most
};

/// Reads the folder of a run that has ended. Throws DataError if it did not reach its last step.
BenchMetrics read_bench_run(const std::string& folder, const BenchSteps& steps);
/// Of several runs of the same training: the run with the median step time.
BenchMetrics median_run(std::vector<BenchMetrics> runs);

/// Tokens per second as a share of `ranks` times one rank's.
double scaling(const BenchMetrics& metrics, std::int64_t ranks, const BenchMetrics& one_rank);

}  // namespace phalanx::config
