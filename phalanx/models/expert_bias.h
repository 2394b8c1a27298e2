// The mixtures of experts of a model, and the biases that even out their load (nn/mixture_of_experts.h) by name: in
// checkpoints "model.layers.3.moe.expert_bias" is that of layer 3. They are no parameters of the model.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "phalanx/models/llama.h"
#include "phalanx/nn/mixture_of_experts.h"
#include "phalanx/tensor/named.h"

namespace phalanx::models {

struct MixtureOfLayer {
  std::int64_t layer = 0;  // of the whole model
  nn::MixtureOfExperts* mixture = nullptr;
};
/// Those of the model, or of this part of it.
std::vector<MixtureOfLayer> mixtures_of(Llama& model);

std::string expert_bias_name(std::int64_t layer);  // is_expert_bias() (parameter_kinds.h)

/// Makes biases of zeros, which the mixtures of the model, or of this part of it, use from now on. Returns them.
std::vector<NamedTensor> make_expert_biases(Llama& model);

}  // namespace phalanx::models
