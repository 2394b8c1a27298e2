// The data of a run that trains on conversations ([sft]) or preferences ([dpo]): token files, which rank 0 makes for
// all ranks (inputs/conversation_data.h).
//
//   const config::TrainConfig reads = config_of_data(config, world, {.log_info = log_info});  // collective
//   TrainingData data = open_training_data(reads, plan, device, rank);
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "phalanx/comm/communicator.h"
#include "phalanx/config/config.h"

namespace phalanx::train {

struct ConversationFilesOptions {
  std::function<void(const std::string& line)> log_info = {};  // called on rank 0; unset: nothing is said
  bool quiet = false;                                          // no progress
};

/// Collective. `config`, with token files in place of conversations or preferences; unchanged without them. The other
/// ranks wait as long as rank 0 works. An error of rank 0 is the same error on all ranks.
config::TrainConfig config_of_data(const config::TrainConfig& config, const std::shared_ptr<Communicator>& world,
                                   const ConversationFilesOptions& options = {});

}  // namespace phalanx::train
