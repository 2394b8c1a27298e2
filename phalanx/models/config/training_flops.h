// Floating-point operations of training a part of a model, or its adapters. Torch-free.
//
//   const TrainingFlops flops = training_flops(config, frozen_parameters(config, {}, lora), lora);
//   flops.per_token(4096);
//
// Forward takes 2 N per token. Backward takes 2 N for the gradients of inputs, from the output to the first layer with
// something to train, and 2 per trained parameter. So adapters on all layers take about 4 N. N is as in
// LlamaConfig::flops_per_token(), whose result this is if everything is trained. Adapters count in N.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "phalanx/models/config/llama_config.h"
#include "phalanx/models/config/lora_config.h"

namespace phalanx::models {

struct TrainingFlops {
  double in_products = 0;   // per token, of products with parameters
  double per_position = 0;  // of attention, per token and position that it sees

  double per_token(double seq) const noexcept { return in_products + per_position * seq; }
};

/// `frozen`: frozen_parameters() of the same model and adapters.
TrainingFlops training_flops(const LlamaConfig& config, const std::vector<std::string>& frozen,
                             const LoraOptions& lora);

/// Parameters of model and adapters that are trained, and all of them.
struct TrainedCount {
  std::int64_t trained = 0, all = 0;
};
TrainedCount trained_count(const LlamaConfig& config, const std::vector<std::string>& frozen, const LoraOptions& lora);

}  // namespace phalanx::models
