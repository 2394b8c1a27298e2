// The checkpoints of a run: what it starts from, what it continues from, what it saves.
//
// Contract
// - All of it is collective, but for resumes(), saved_step() and has_ended_save(). What goes wrong is the same
//   error on every rank. Rank 0 looks for all: files that the others see otherwise change nothing.
// - From decide() on the run's lock is held (run_lock.h), so that no other process changes the answer.
// - Where [checkpoint] enable is off, load() finds nothing, and save() and finish() do nothing.
//
//   RunCheckpoints checkpoints(config, world, say);
//   checkpoints.decide();
//   if (!checkpoints.resumes()) start_with_weights(config, model, say) or model.initialise(seed);
//   if (const auto step = checkpoints.load(state)) ...
//   checkpoints.save(state, step, metadata);
//   checkpoints.finish();
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/checkpoint/checkpoint_manager.h"
#include "phalanx/comm/communicator.h"
#include "phalanx/config/config.h"
#include "phalanx/tensor/train_state.h"
#include "phalanx/train/run_job.h"

namespace phalanx::train {

using LogFunction = std::function<void(const std::string&)>;  // a line for the log

/// Fills the weights with the initial ones (initial_weights.h), each rank its part of the files.
void load_initial_weights(const TrainConfig& config, const std::vector<NamedTensor>& weights,
                          const LogFunction& log_info);

class RunCheckpoints {
 public:
  RunCheckpoints(const TrainConfig& config, std::shared_ptr<Communicator> world, LogFunction log_info, RunJob job = {});

  /// Whether there is something to go on from now, as rank 0 sees it.
  bool has_checkpoint() const;
  /// The same, once and for all: load() finds something exactly where there was something then, or is a
  /// CheckpointError.
  void decide();
  bool resumes() const noexcept { return resumes_; }  // after decide()
  /// The step of what was loaded, if anything was: the newest complete one, or [checkpoint] load_step, from which a
  /// branch begins (checkpoint/files/branch.h): newer steps are set aside. The same command again, and a job's later
  /// attempts, go on with the newest step of the branch that they have begun. To be called once, before save(), with
  /// all that save() is going to be given. `check` looks at the checkpoint first.
  std::optional<std::int64_t> load(TrainState& state, const LoadCheck& check = {});
  /// `metadata`: a JSON object, kept with it. A step that has just been saved is not saved again.
  void save(const TrainState& state, std::int64_t step, const std::string& metadata);
  /// This rank's part of an asynchronous save has ended, well or not: finish() will not wait for it.
  bool has_ended_save() const { return manager_ && manager_->has_ended(); }
  /// Waits for the asynchronous save under way, if there is one, and says or throws what became of it. The run is not
  /// over before its last checkpoint is on the disk.
  void finish();

  bool enabled() const noexcept { return config_.enable; }
  std::int64_t saved_step() const noexcept { return saved_step_; }  // -1: none

 private:
  bool follows_its_branch() const;
  void begin_its_branch();

  const TrainConfig::Checkpoint config_;
  const std::string folder_;
  const std::string run_folder_;
  const std::string command_;  // the hash of the settings
  const RunJob job_;
  const std::shared_ptr<Communicator> world_;
  const LogFunction log_info_;
  std::unique_ptr<CheckpointManager> manager_;
  bool resumes_ = false;
  std::int64_t saved_step_ = -1;
};

}  // namespace phalanx::train
