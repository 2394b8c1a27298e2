// Opens the token files of a run as it reads them: the training data and, with validation, the held-out data. It does
// not use torch.
//
//   const TrainingFiles files = open_training_files(config, plan);
//   files.train.fill(step, rows, inputs, labels);
//
// Throws ConfigError if a data set is not set. Throws DataError or ConfigError if files do not fit the model, the
// configuration or the model's tokenizer.
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

TrainingFiles open_training_files(const config::TrainConfig& config, const config::RunPlan& plan);

}  // namespace phalanx::train
