// MetricsLogger writes what a run leaves in its folder for people and programs: run.json, metrics.jsonl and TensorBoard
// files.
//
// Rank 0 owns one. It does not use torch. Files are flushed line by line, so a killed run keeps what it wrote. In
// metrics.jsonl, "time" is in seconds since the epoch, at the end of the step.
//
// When a run is resumed:
// - metrics.jsonl and the TensorBoard files are continued. Lines of steps after the resumed step are dropped.
// - Files of another run (recognised by its id in run.json) are moved to earlier-1/ (the next ones to earlier-2/), so
//   that no curve mixes two runs. They are moved back when that run resumes.
// - A metrics.jsonl that has another loss at the resumed step, or no loss there, belongs to another branch. It is moved
//   in the same way.
//
//   MetricsLogger logger(config.job.dump_folder, {.tensorboard_folder = "tb"});
//   logger.describe({{"status", "running"}, {"steps", 100}});        // merged into run.json
//   logger.write_step({.step = 1, .loss = 8.3}, /*to_tensorboard=*/true);
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/data/batch_source.h"
#include "phalanx/train/model/preference_metrics.h"

namespace phalanx::train {

/// One training step, as in metrics.jsonl: tokens summed and averages taken over all ranks.
struct StepMetrics {
  std::int64_t step = 0;
  double loss = 0;
  double max_loss = 0;  // over ranks
  double grad_norm = 0;
  double lr = 0;
  double seconds = 0;       // of this step, data loading included
  double data_seconds = 0;  // of the slowest rank
  std::int64_t tokens = 0;
  double tps = 0;  // of one device
  double tflops = 0;
  std::optional<double> mfu_percent;
  std::optional<double> loss_scale;                   // only in float16
  bool skipped = false;                               // gradients were not finite: the weights are unchanged
  std::vector<double> memory_gib;                     // peak, per rank
  std::vector<double> comm_seconds, exposed_seconds;  // per rank (RankStepMetrics); empty on a single rank
  double exposed_percent = 0;                         // of the ranks' time
  std::vector<double> cpu_seconds;                    // processor time of the step, per rank
  std::vector<data::SetCount> sets;                   // read so far of each data set of a blend, or of texts
  std::optional<PreferenceMetrics> preferences;       // with [dpo]
  std::vector<double> expert_load;       // of logged steps: ExpertLoadNumbers::fullest (model/expert_load.h)
  std::optional<double> expert_dropped;  // of logged steps: ExpertLoadNumbers::dropped
};

struct ValidationMetrics {
  struct Set {
    std::string name;
    double loss = 0;
    std::int64_t tokens = 0;
    std::int64_t labels = 0;  // tokens that have a loss
  };
  std::int64_t step = 0;
  double loss = 0;  // of the tokens of all sets
  std::int64_t tokens = 0;
  double seconds = 0;
  std::vector<Set> sets = {};  // empty if there is only one
  std::optional<PreferenceMetrics> preferences = {};
};

struct MetricsLoggerOptions {
  std::string id = {};                       // of the run (run_identity.h); empty: unknown, not compared
  std::string tensorboard_folder;            // empty: no TensorBoard files
  std::optional<std::int64_t> resumed_step;  // unset: a new run
  std::optional<double> resumed_loss = {};   // of resumed_step, as saved; unset: unknown, not compared
  std::string checkpoint_folder = {};        // where a rollback saves curves (run_rollback.h); empty: nowhere
};

/// Seconds since the epoch, as in "time" of these files.
double unix_time();

/// The mean over the ranks of a value that each of them has; 0 if `by_rank` is empty.
double mean_of(const std::vector<double>& by_rank);

class MetricsLogger {
 public:
  /// Creates the folder. Throws Error that says which file cannot be written and why.
  MetricsLogger(std::string folder, const MetricsLoggerOptions& options);
  ~MetricsLogger();

  const std::string& folder() const noexcept { return folder_; }
  /// For the log: where another run's run.json and metrics.jsonl were moved to, if there were any.
  const std::vector<std::string>& notes() const noexcept;
  void describe(const nlohmann::json& values);
  /// Appends to a list in run.json.
  void add_to(const std::string& list, const nlohmann::json& value);
  void write_step(const StepMetrics& metrics, bool to_tensorboard);
  void write_validation(const ValidationMetrics& metrics);

 private:
  class Impl;
  std::string folder_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace phalanx::train
