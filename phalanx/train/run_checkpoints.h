// The checkpoints of a run: what it starts from, what it resumes from, what it saves.
//
// Contract
// - All of it is collective, has_checkpoint() too, except resumes(), saved_step() and has_ended_save(). A failure is
//   the same error on every rank. Only rank 0 looks at the files: what other ranks see on their disks changes nothing.
// - From decide() on the run's lock is held (run_lock.h), so that no other process changes the answer.
// - If [checkpoint] enable is off, load() finds nothing, and save() and finish() do nothing.
//
//   RunCheckpoints checkpoints(config, world, log_info);
//   checkpoints.decide();
//   if (!checkpoints.resumes()) model.initialise(seed);   // or load_initial_weights(config, model.weights(), log_info)
//   if (const auto loaded = checkpoints.load(state)) step = *loaded;
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

/// Fills the weights with the initial ones (initial_weights.h). Each rank reads its part of the files.
void load_initial_weights(const config::TrainConfig& config, const std::vector<NamedTensor>& weights,
                          const LogFunction& log_info);

class RunCheckpoints {
 public:
  RunCheckpoints(const config::TrainConfig& config, std::shared_ptr<Communicator> world, LogFunction log_info,
                 RunJob job = {});

  /// Whether there is a checkpoint to resume from now, as rank 0 sees it.
  bool has_checkpoint() const;
  /// Decides this once and for all.
  /// ENSURES: load() finds a checkpoint exactly if there was one now, or throws CheckpointError.
  void decide();
  bool resumes() const noexcept { return resumes_; }  // after decide()
  /// Loads a checkpoint and returns its step; nothing if there is none. It is the newest complete step, or [checkpoint]
  /// load_step. From load_step a branch begins (checkpoint/files/branch.h): newer steps are set aside. The same command
  /// again, and a job's later attempts, resume from the newest step of the branch that they have begun. `check` sees
  /// the checkpoint first.
  /// REQUIRES: called once, before save(), with everything that save() will be given.
  std::optional<std::int64_t> load(TrainState& state, const LoadCheck& check = {});
  /// `metadata`: a JSON object, stored with the checkpoint. A step that has just been saved is not saved again.
  void save(const TrainState& state, std::int64_t step, const std::string& metadata);
  /// Whether this rank's part of an asynchronous save has ended, successfully or not: finish() will not wait for it.
  bool has_ended_save() const { return manager_ && manager_->has_ended(); }
  /// Waits for the asynchronous save in flight, if there is one, and reports its success or throws its error. The run
  /// is not over before its last checkpoint is on disk.
  void finish();

  bool enabled() const noexcept { return config_.enable; }
  std::int64_t saved_step() const noexcept { return saved_step_; }  // -1: none

 private:
  bool follows_its_branch() const;
  void begin_its_branch();

  const config::TrainConfig::Checkpoint config_;
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
