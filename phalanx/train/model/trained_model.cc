#include "phalanx/train/model/trained_model.h"

#include <algorithm>
#include <set>

#include "phalanx/base/name_patterns.h"
#include "phalanx/models/config/frozen_parameters.h"
#include "phalanx/models/lora.h"
#include "phalanx/nn/init.h"
#include "phalanx/train/model/precision.h"

namespace phalanx::train {

std::shared_ptr<models::Llama> build_model(const config::TrainConfig& config, const models::LlamaConfig& shape,
                                           const models::LlamaPart& part, nn::TensorOptionsOfModule tensor) {
  // Who asks for another type wants all of the model in it.
  const bool is_narrow = config.lora.has_narrow_base() && tensor.dtype == at::kFloat;
  if (tensor.dtype == at::kFloat) tensor.dtype = weights_dtype(config);
  const at::ScalarType activations = tensor.dtype;
  if (is_narrow) tensor.dtype = at::kBFloat16;
  auto model = std::make_shared<models::Llama>(shape, part, tensor);
  models::add_lora(*model, config.lora, activations);
  models::store_in_nf4(*model, config.lora);
  if (is_narrow) models::use_narrow_base(*model, activations);
  const std::vector<std::string> frozen = frozen_parameters(config, shape);
  const std::set<std::string> names(frozen.begin(), frozen.end());
  for (const NamedTensor& parameter : nn::named_parameters(*model)) {
    if (names.contains(parameter.name)) parameter.tensor.set_requires_grad(false);
  }
  return model;
}

std::shared_ptr<models::Llama> build_model(const config::TrainConfig& config, const models::LlamaConfig& shape,
                                           nn::TensorOptionsOfModule tensor) {
  return build_model(config, shape, models::full_llama(shape), tensor);
}

std::vector<std::string> frozen_parameters(const config::TrainConfig& config, const models::LlamaConfig& shape) {
  return models::frozen_parameters(shape, config.training.frozen, config.lora);
}

std::vector<NamedTensor> without(const std::vector<std::string>& frozen, const std::vector<NamedTensor>& tensors) {
  const std::set<std::string> names(frozen.begin(), frozen.end());
  std::vector<NamedTensor> trained;
  for (const NamedTensor& one : tensors) {
    if (!names.contains(one.name)) trained.push_back(one);
  }
  return trained;
}

std::vector<std::string> patterns_that_match(const std::vector<NamedTensor>& parameters, const std::string& what,
                                             const std::vector<std::string>& patterns,
                                             const std::vector<std::string>& others) {
  std::vector<std::string> all = others, kept;
  for (const NamedTensor& one : parameters) all.push_back(one.name);
  for (const std::string& pattern : patterns) {
    const std::vector<bool> matched = matching_names(what, {pattern}, all);
    const auto first = matched.begin() + static_cast<std::ptrdiff_t>(others.size());
    if (std::find(first, matched.end(), true) != matched.end()) kept.push_back(pattern);
  }
  return kept;
}

}  // namespace phalanx::train
