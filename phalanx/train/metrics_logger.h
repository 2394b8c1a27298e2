// What a run leaves in its folder for people and programs: run.json, metrics.jsonl, TensorBoard files.
//
// Rank 0 owns one; torch-free. metrics.jsonl and the TensorBoard files go on when a run continues, and are flushed line
// by line, so that a killed run keeps what it did. What belongs to steps after the one that a run continues from is
// dropped; files of another run, which its id in run.json tells, are moved to earlier-1/ (the next ones to earlier-2/),
// so that no curve is of two runs; and back, when that run goes on. The same of a metrics.jsonl that has another loss
// of the step that the run continues from, or none: it is of another branch. "time" is in seconds since the epoch, at
// the end of the step.
//
//   MetricsLogger files(config.job.dump_folder, {.tensorboard_folder = "tb"});
//   files.describe({{"status", "running"}, {"steps", 100}});        // merged into run.json
//   files.write_step({.step = 1, .loss = 8.3, ...});
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

namespace phalanx::train {

/// One training step, as metrics.jsonl has it; all ranks' tokens, averages over ranks.
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
  std::optional<double> loss_scale;                   // float16 alone
  bool skipped = false;                               // its gradients were not finite: the weights are as before
  std::vector<double> memory_gib;                     // peak, per rank
  std::vector<double> comm_seconds, exposed_seconds;  // per rank, see exchange_step_metrics.h; empty on a rank alone
  double exposed_percent = 0;                         // of the ranks' time
  std::vector<double> cpu_seconds;                    // processor time of the step, per rank
};

struct ValidationMetrics {
  std::int64_t step = 0;
  double loss = 0;
  std::int64_t tokens = 0;
  double seconds = 0;
};

struct MetricsLoggerOptions {
  std::string id = {};                       // of the run (run_identity.h); empty: not known, and not compared
  std::string tensorboard_folder;            // empty: no TensorBoard files
  std::optional<std::int64_t> resumed_step;  // unset: a new run
  std::optional<double> resumed_loss = {};   // of that step, as it was saved; unset: not known, and not compared
  std::string checkpoint_folder = {};        // where a rollback keeps curves (run_rollback.h); empty: nowhere
};

/// Mean over the ranks of a figure that each of them has; 0 for none.
double mean_of(const std::vector<double>& by_rank);

class MetricsLogger {
 public:
  /// Makes the folder; an Error says which file cannot be written and why.
  MetricsLogger(std::string folder, MetricsLoggerOptions options);
  ~MetricsLogger();

  const std::string& folder() const noexcept { return folder_; }
  /// For the log: where run.json and metrics.jsonl have gone that stood there, if they were another run's.
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
