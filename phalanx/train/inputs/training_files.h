// The token files of a run, opened as it reads them: batches to train on and, with validation, those held out. Without
// torch.
//
//   const TrainingFiles files = open_training_files(config, plan);   // files.train.fill(step, rows, inputs, labels)
//
// A data set that is not set is a ConfigError; files that do not fit the model, the configuration or the model's
// tokenizer are DataErrors and ConfigErrors.
#pragma once

#include <optional>

#include "phalanx/config/run_plan.h"
#include "phalanx/data/data_loader.h"
#include "phalanx/train/inputs/training_tokenizer.h"

namespace phalanx::train {

struct TrainingFiles {
  struct HeldOut {
    data::DataLoader dataloader;  // in order
    data::TokenRange range;
    std::int64_t local_batch_size = 0;
  };
  data::DataLoader train;
  std::optional<HeldOut> validation;
  TrainingTokenizer tokenizer;
};

TrainingFiles open_training_files(const TrainConfig& config, const RunPlan& plan);

}  // namespace phalanx::train
