// Opens the data of a training run: the training data and, with validation, the held-out data.
//
//   const TrainingData data = open_training_data(config, plan, device, rank);      // on every rank; nothing is sent
//   if (data.validator) data.validator->run(model, *world, step);
//
// Throws ConfigError if a data set is not set, and DataError if files do not fit, before any step.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/config/run_plan.h"
#include "phalanx/data/data_loader.h"
#include "phalanx/train/validation.h"

namespace phalanx::train {

struct TrainingData {
  std::unique_ptr<data::BatchSource> dataloader;
  std::unique_ptr<Validator> validator;  // null without validation
  // Of [dpo], still zeros: what the reference says of pairs (model/preference_reference.h). Undefined: there are none.
  at::Tensor reference, validation_reference;
  std::optional<double> unigram_entropy;  // of the held-out tokens; counted by rank 0
  // They identify the data by content, for run_identity.h: objects; empty if nothing is known.
  nlohmann::json identity = nlohmann::json::object();
  nlohmann::json validation = nlohmann::json::object();
  nlohmann::json tokenizer = nlohmann::json::object();
  std::vector<std::string> lines;  // for the log
};

TrainingData open_training_data(const config::TrainConfig& config, const config::RunPlan& plan, c10::Device device,
                                int rank);

}  // namespace phalanx::train
