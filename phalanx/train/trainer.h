// Trainer: trains a Llama with data parallelism, whole or sharded, as a TrainConfig says, from start or from the newest
// checkpoint, of whatever layout.
//
// Contract
// - Every rank makes one with the same configuration and calls run() once; construction and run() are collective.
// - All ranks have the same configuration (but for what setting_rules.h leaves to each), versions, model, data and
//   initial weights: compared before the first step, a difference is an error on every rank.
// - A checkpoint of another model or optimizer is refused; other settings that were changed since are said, and kept in
//   run.json (run_identity.h).
// - A run that is stopped and continued gives the same bits as one that never stopped: weights, optimizer, bucket order
//   and the few integers are checkpointed, learning rate and batches are functions of the step.
// - The wish to stop (context.stop_requested) is heard on any rank and acted on by all after the same step: a
//   checkpoint is saved and run() returns with `stopped`. A validation is cut short for it, and after a save no step is
//   begun.
// - A run whose predicted memory is not there is a MemoryError on every rank, before it is taken; an allocation that
//   fails is one on the rank that it fails on (run_memory.h).
// - A loss or gradient norm that is not finite is an Error on every rank, before any weight is touched by it. Under
//   loss scaling (float16) a step whose gradients are not finite is skipped on every rank.
// - One run at a time has the run's folder: another is refused with the holder's host and process (run_lock.h).
// - Rank 0 writes the run's folder (metrics_logger.h) and the log; with profiling every rank writes traces (profiler.h).
//
//   Trainer trainer(config, {.world = world, .device = device});
//   const TrainResult result = trainer.run();
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/config/run_plan.h"
#include "phalanx/observe/communication_time.h"
#include "phalanx/tensor/train_state.h"
#include "phalanx/train/device_info.h"
#include "phalanx/train/metrics_logger.h"
#include "phalanx/train/optimizer_step.h"
#include "phalanx/train/parallel_model.h"
#include "phalanx/train/profiler.h"
#include "phalanx/train/run_checkpoints.h"
#include "phalanx/train/run_job.h"
#include "phalanx/train/run_lock.h"
#include "phalanx/train/run_memory.h"
#include "phalanx/train/training_data.h"

namespace phalanx::train {

struct TrainerContext {
  std::shared_ptr<Communicator> world;  // a world of one too
  at::Device device = at::kCPU;
  std::function<bool()> stop_requested;  // asked between steps, and in a validation; unset on all ranks: never
  std::function<void(bool)> on_steps;    // told true before the first step, false when the last save is on the disk
  std::vector<std::pair<std::string, std::string>> environment;  // more lines for the start and the report
  bool quiet = false;                                            // no log lines and no progress bar
  RunJob job;                                                    // which attempt of which job this is
};

struct TrainResult {
  std::int64_t step = 0;       // steps done, those before a resume included
  bool stopped = false;        // on request, before the last step
  bool asked_to_stop = false;  // also where there was no step left
  double loss = 0;             // of the last step of this run; NaN if there was none
  std::optional<double> validation_loss;
  std::optional<double> unigram_entropy;  // of the validation tokens
};

class Trainer {
 public:
  Trainer(TrainConfig config, TrainerContext context);
  ~Trainer();
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  TrainResult run();

  models::Llama& model() { return model_->model(); }
  /// Whether all ranks must run the model together, because none has all of it.
  bool is_model_sharded() const { return model_->is_model_sharded(); }
  /// Collective: the model as one rank has it, on rank 0; null elsewhere. Its weights are copies where it is cut.
  std::shared_ptr<models::Llama> full_model() const;
  /// What this rank holds of the weights.
  std::vector<NamedTensor> weights() const { return model_->weights(); }
  /// All that a checkpoint holds: handles to what this rank has of weights and optimizer, and the run's numbers.
  TrainState collect_state() const;
  /// Whether matrices are cut over ranks, so that model() is for training alone.
  bool uses_model_parallelism() const { return plan_.parallel.uses_model_parallelism(); }
  MetricsLogger* metrics_logger() { return metrics_logger_.get(); }  // rank 0 only; null elsewhere
  const RunPlan& plan() const { return plan_; }

 private:
  struct StepOutcome;
  void run_steps();
  void make_model();
  void load_state();
  std::vector<std::string> check_new_run() const;
  void compare_with_saved(const std::filesystem::path& step_directory, const Manifest& manifest);
  void say_changes();
  StepOutcome train_step(std::int64_t step);
  void check_replicas_before(std::int64_t step);
  std::string advice_on_divergence() const;
  void require_finite() const;
  [[noreturn]] void fail_not_finite(std::int64_t step, const std::string& what, double value, double loss) const;
  void log_step(const StepOutcome& outcome, double lr);
  bool validate(bool is_asked_to_stop);  // false: cut short, all are to stop
  bool any_asked_to_stop() const;
  void save_checkpoint();
  void save_in_hf();
  std::string saved_metadata() const;  // of checkpoints and of the exported weights
  void report_memory();
  void announce() const;
  bool is_first_rank() const { return context_.world->rank() == 0; }
  void log_info(const std::string& line) const;

  TrainConfig config_;
  TrainerContext context_;
  std::unique_ptr<RunLock> lock_;  // let go after all that writes
  RunPlan plan_;
  Profiler profiler_;
  RunCheckpoints checkpoints_;
  DeviceInfo device_;
  std::unique_ptr<MetricsLogger> metrics_logger_;
  std::unique_ptr<RunMemory> memory_;
  TrainingData data_;
  nlohmann::json identity_;  // run_identity.h
  struct ResumedState;
  std::unique_ptr<ResumedState> resumed_;  // from a checkpoint; null in a new run
  std::unique_ptr<ParallelModel> model_;
  std::unique_ptr<OptimizerStep> optimizer_step_;
  std::unique_ptr<observe::CommunicationTimer> comm_timer_;
  observe::CommunicationTime comm_carry_;  // of a step's end, counted in the next one
  double tail_seconds_ = 0;                // of that end

  std::int64_t step_ = 0;  // done
  std::optional<double> peak_tflops_;
  double interval_seconds_ = 0;                                          // of steps since the last log line
  double interval_wall_ = 0, interval_comm_ = 0, interval_exposed_ = 0;  // seconds of these, means over the ranks
  std::int64_t interval_tokens_ = 0;
  double last_cpu_seconds_ = 0;
  bool said_no_replicas_ = false;
  TrainResult result_;
};

}  // namespace phalanx::train
