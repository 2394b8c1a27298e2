// Opens the token files of a run as it reads them: the training data and, with validation, the held-out data. It does
// not use torch.
//
//   const TrainingFiles files = open_training_files(config, plan);
//   files.train->fill(step, rows, inputs, labels);
//
// Throws ConfigError if a data set is not set. Throws DataError or ConfigError if files do not fit the model, the
// configuration or the model's tokenizer.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "phalanx/config/run_plan.h"
#include "phalanx/data/blended_loader.h"
#include "phalanx/train/inputs/training_tokenizer.h"

namespace phalanx::train {

struct TrainingFiles {
  struct HeldOut {
    std::string name;             // of the data set; empty where there is only one
    data::DataLoader dataloader;  // in order
    data::TokenRange range;
  };
  std::unique_ptr<data::BatchSource> train;
  std::vector<HeldOut> validation;         // a set each; empty without validation
  std::int64_t validation_batch_size = 0;  // local
  TrainingTokenizer tokenizer;
  std::vector<std::string> lines;  // for the log
};

TrainingFiles open_training_files(const config::TrainConfig& config, const config::RunPlan& plan);

}  // namespace phalanx::train
