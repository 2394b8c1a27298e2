#include "phalanx/models/expert_bias.h"

#include <ATen/ops/zeros.h>
#include <fmt/format.h>

namespace phalanx::models {

std::vector<MixtureOfLayer> mixtures_of(Llama& model) {
  std::vector<MixtureOfLayer> found;
  for (std::size_t i = 0; i < model.layers.size(); ++i) {
    auto* const mixture = dynamic_cast<nn::MixtureOfExperts*>(model.layers[i]->feed_forward.get());
    if (mixture != nullptr) found.push_back({model.part().begin / 2 + static_cast<std::int64_t>(i), mixture});
  }
  return found;
}

std::string expert_bias_name(std::int64_t layer) { return fmt::format("layers.{}.moe.expert_bias", layer); }

std::vector<NamedTensor> make_expert_biases(Llama& model) {
  std::vector<NamedTensor> biases;
  for (const MixtureOfLayer& one : mixtures_of(model)) {
    const at::Device device = one.mixture->gate->weight.device();
    const at::Tensor bias = at::zeros({one.mixture->options().experts}, at::TensorOptions(device).dtype(at::kFloat));
    one.mixture->set_tensors({.bias = bias, .counts = {}});
    biases.push_back({expert_bias_name(one.layer), bias});
  }
  return biases;
}

}  // namespace phalanx::models
