// Trainer trains a Llama as a TrainConfig says: with data parallelism, whole or sharded, from the start or from the
// newest checkpoint of any layout.
//
// Contract
// - Every rank makes one with the same configuration and calls run() once. Construction and run() are collective.
// - All ranks must have the same configuration (except settings that setting_rules.h leaves to each rank), versions,
//   model, data and initial weights. They are compared before the first step; a difference is an error on every rank.
// - A checkpoint of another model or optimizer is refused. Other settings that have changed since are logged, and
//   recorded in run.json (run_identity.h).
// - A run that is stopped and resumed gives the same bits as one that never stopped. Weights, optimizer, bucket order
//   and a few integers are checkpointed; learning rate and batches are functions of the step.
// - Any rank may request a stop (context.stop_requested). All ranks act on it after the same step: a checkpoint is
//   saved and run() returns with `stopped`. A validation is cut short for it, and no step begins after the save.
// - If a run's predicted memory is not available, every rank throws MemoryError before allocating it. If an allocation
//   fails, the rank on which it fails throws MemoryError (run_memory.h).
// - A loss or gradient norm that is not finite is an Error on every rank, before any weight is changed. With loss
//   scaling (float16) a step whose gradients are not finite is skipped on every rank.
// - Where weights and optimizer are on a device, the host waits for nothing between a step's batch and its optimizer.
//   The device decides whether to step. The host reads a step's loss and norm, and exchanges the metrics, when the next
//   step is queued, and at once after the first step and before a validation, a save, a stop and the end of a trace. So
//   an error of a step may come one step late, but no weight has changed since, and nothing was saved.
// - One run at a time holds the run's folder. Another is refused with the holder's host and process (run_lock.h).
// - Rank 0 writes the run's folder (metrics_logger.h) and the log. With profiling every rank writes traces
//   (profiling/profiler.h).
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
#include "phalanx/models/config/training_flops.h"
#include "phalanx/observe/communication_time.h"
#include "phalanx/tensor/device_readback.h"
#include "phalanx/tensor/train_state.h"
#include "phalanx/train/device_info.h"
#include "phalanx/train/metrics_logger.h"
#include "phalanx/train/model/optimizer_step.h"
#include "phalanx/train/model/parallel_model.h"
#include "phalanx/train/profiling/profiler.h"
#include "phalanx/train/run_checkpoints.h"
#include "phalanx/train/run_job.h"
#include "phalanx/train/run_lock.h"
#include "phalanx/train/run_memory.h"
#include "phalanx/train/training_data.h"

namespace phalanx::train {

struct ForwardBackwardResult;
struct GlobalStepMetrics;
struct RankStepMetrics;

struct TrainerContext {
  std::shared_ptr<Communicator> world;  // required, also for a single rank
  at::Device device = at::kCPU;
  std::function<bool()> stop_requested;  // called between steps and in a validation; unset on all ranks: never stop
  std::function<void(bool)> on_steps;    // true before the first step, false when the last save is on disk
  std::vector<std::pair<std::string, std::string>> environment;  // more lines for the start and the report
  bool quiet = false;                                            // no log lines and no progress bar
  RunJob job;                                                    // which attempt of which job this is
};

struct TrainResult {
  std::int64_t step = 0;       // steps done, including those before a resume
  bool stopped = false;        // on request, before the last step
  bool asked_to_stop = false;  // also if no step was left
  double loss = 0;             // of the last step of this run; NaN if there was none
  std::optional<double> validation_loss;
  std::optional<double> unigram_entropy;  // of the validation tokens
};

class Trainer {
 public:
  Trainer(config::TrainConfig config, TrainerContext context);
  ~Trainer();
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  TrainResult run();

  models::Llama& model() { return model_->model(); }
  /// Whether all ranks must run the model together, because no rank has all of it.
  bool is_model_sharded() const { return model_->is_model_sharded(); }
  /// Collective. The full model on rank 0; null elsewhere. If the model is cut, its weights are copies on the host.
  std::shared_ptr<models::Llama> full_model() const;
  /// This rank's shards of the weights.
  std::vector<NamedTensor> weights() const { return model_->weights(); }
  /// Everything that a checkpoint holds: handles to this rank's weights and optimizer state, and the run's integers.
  TrainState collect_state() const;
  /// Whether matrices or sequences are cut over ranks, or experts divided, so that model() is only for training.
  bool model_is_only_for_training() const {
    return plan_.parallel.uses_model_parallelism() || plan_.parallel.cp > 1 || plan_.parallel.ep > 1;
  }
  MetricsLogger* metrics_logger() { return metrics_logger_.get(); }  // rank 0 only; null elsewhere
  const config::RunPlan& plan() const { return plan_; }

 private:
  struct StepOutcome;
  struct QueuedStep {       // on a device
    std::int64_t step = 0;  // counted from 0
    double data_seconds = 0;
    std::int64_t label_count = 0, global_label_count = 0;
    double pairs = 0;
    DeviceReadback numbers;                            // of OptimizerStep::queue()
    std::optional<DeviceReadback> expert_counts = {};  // of a logged step
    bool has_preferences = false;                      // the last numbers are PreferenceLoss::take_sums()
  };
  void run_steps();
  void make_model();
  void load_state();
  void compute_references();  // of a new run with [dpo]
  std::vector<std::string> check_new_run() const;
  void compare_with_saved(const std::filesystem::path& step_directory, const Manifest& manifest);
  void say_changes();
  void begin_timing();
  bool do_step();  // whether some rank wants to stop
  bool validates_after(std::int64_t step) const;
  bool saves_after(std::int64_t step) const;
  ForwardBackwardResult compute_gradients(std::int64_t step);
  GlobalStepMetrics exchange(const RankStepMetrics& of_rank, const observe::CommunicationTime& comm,
                             Communicator& group);
  StepOutcome train_step(std::int64_t step);
  QueuedStep queue_step(std::int64_t step);
  StepOutcome await_step(const QueuedStep& queued, bool is_last_queued);
  bool end_step(const StepOutcome& outcome);  // whether some rank wants to stop
  void check_replicas_before(std::int64_t step);
  std::string advice_on_divergence() const;
  /// Collective over all groups of the training; waits for the device. Throws CommError where a collective of one of
  /// them failed, and Error on all ranks where a weight is not finite.
  void require_sound_weights() const;
  static void require_label_count(const StepOutcome& outcome, std::int64_t expected);
  void require_finite_loss(const StepOutcome& outcome) const;
  void require_finite_norm(const StepOutcome& outcome) const;
  [[noreturn]] void fail_not_finite(std::int64_t step, const std::string& what, double value, double loss) const;
  void log_step(const StepOutcome& outcome);
  bool logs(std::int64_t step) const;  // counted from 1
  /// The load of experts of a step that is logged, over all ranks; null: the step is not,
  /// or there are none. Collective.
  const ExpertLoad* logged_expert_load(std::int64_t step) const;
  double flops_of(const StepOutcome& outcome) const;  // of the global batch
  bool validate(bool is_asked_to_stop);               // false: cut short, all ranks must stop
  bool any_asked_to_stop() const;
  void save_checkpoint();
  /// Runs `body` with the averages of [ema] in the place of the weights, if `wanted`. Collective.
  void with_averages(bool wanted, const std::function<void()>& body);
  void save_results();
  void save_adapters();
  void save_in_hf();
  std::string saved_metadata() const;  // of checkpoints and of the exported weights
  void report_memory();
  void announce() const;
  bool is_first_rank() const { return context_.world->rank() == 0; }
  void log_info(const std::string& line) const;

  config::TrainConfig config_;
  TrainerContext context_;
  std::unique_ptr<RunLock> lock_;  // released after all members that write
  config::RunPlan plan_;
  Profiler profiler_;
  RunCheckpoints checkpoints_;
  DeviceInfo device_;
  std::unique_ptr<MetricsLogger> metrics_logger_;
  std::unique_ptr<RunMemory> memory_;
  TrainingData data_;
  nlohmann::json identity_;  // run_identity.h
  nlohmann::json base_;      // the fingerprint of the weights that adapters are trained on; null: random ones
  struct ResumedState;
  std::unique_ptr<ResumedState> resumed_;  // from a checkpoint; null in a new run
  std::unique_ptr<ParallelModel> model_;
  std::unique_ptr<OptimizerStep> optimizer_step_;
  std::unique_ptr<observe::CommunicationTimer> comm_timer_;
  observe::CommunicationTime comm_carry_;  // of the end of a step, counted in the next step
  double tail_seconds_ = 0;                // of that end

  std::int64_t step_ = 0;             // done; on a device the last one may still be queued
  std::optional<QueuedStep> queued_;  // its numbers were not read yet
  bool has_ended_a_step_ = false;
  std::shared_ptr<Communicator> metrics_group_;        // on a device: all ranks, for metrics while a step is queued
  std::chrono::steady_clock::time_point timed_until_;  // on a device: up to here, time is counted in a step
  std::optional<double> peak_tflops_;
  double interval_seconds_ = 0;                                          // of steps since the last log line
  double interval_wall_ = 0, interval_comm_ = 0, interval_exposed_ = 0;  // seconds of these, means over the ranks
  std::int64_t interval_tokens_ = 0;
  double interval_flops_ = 0;
  double last_cpu_seconds_ = 0;
  bool said_no_replicas_ = false;
  models::TrainingFlops flops_;
  TrainResult result_;
};

}  // namespace phalanx::train
