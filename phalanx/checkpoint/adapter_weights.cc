#include "phalanx/checkpoint/adapter_weights.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/matmul.h>
#include <c10/core/ScalarType.h>

#include <nlohmann/json.hpp>
#include <unordered_map>

#include "phalanx/base/file.h"
#include "phalanx/checkpoint/files/weights_description.h"
#include "phalanx/checkpoint/nf4_weights.h"
#include "phalanx/checkpoint/weights.h"

namespace phalanx {
namespace {

std::vector<NamedTensor> those(const std::vector<NamedTensor>& tensors, bool of_adapters) {
  std::vector<NamedTensor> result;
  for (const NamedTensor& one : tensors) {
    if (models::is_lora_name(one.name) == of_adapters) result.push_back(one);
  }
  return result;
}

/// What may be published of a checkpoint's metadata, and on which base the adapter was trained.
std::string header_text(const std::string& metadata) {
  auto told = nlohmann::json::parse(metadata_for_weights(metadata));
  const auto json = nlohmann::json::parse(metadata);
  if (json.contains(kBaseInMetadata)) told[kBaseInMetadata] = json.at(kBaseInMetadata);
  return told.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace

std::vector<NamedTensor> adapters_among(const std::vector<NamedTensor>& tensors) { return those(tensors, true); }
std::vector<NamedTensor> base_among(const std::vector<NamedTensor>& tensors) { return those(tensors, false); }

void load_adapter(const PeftAdapter& adapter, const models::LlamaConfig& model, const std::vector<NamedTensor>& tensors,
                  bool all) {
  LoadWeightsOptions options{.key_mapping = [&model](const std::string& name) { return peft_name(model, name); }};
  if (!all) options.elsewhere = [](const std::string&) { return true; };
  load_weights(adapter.weights(), adapters_among(tensors), options);
}

void save_adapter(const std::filesystem::path& folder, const models::LlamaConfig& model,
                  const models::LoraOptions& lora, const std::vector<NamedTensor>& tensors,
                  const SaveAdapterOptions& options) {
  posix_file_system().make_directory(folder);
  export_weights(folder / kAdapterWeightsName, adapters_among(tensors),
                 {.key_mapping = [&model](const std::string& name) { return peft_name(model, name); },
                  .dtype = at::kFloat,
                  .metadata = {{kMetadataInHeader, header_text(options.metadata.empty() ? "{}" : options.metadata)}}},
                 posix_file_system());
  replace_file(folder / kAdapterConfigName, peft_config_text(model, lora, options.base_name));
}

std::vector<NamedTensor> merged_weights(const std::vector<NamedTensor>& tensors, const models::LoraOptions& lora) {
  const at::NoGradGuard no_grad;
  std::unordered_map<std::string, at::Tensor> adapters;
  for (const NamedTensor& one : adapters_among(tensors)) adapters.emplace(one.name, one.tensor);
  std::vector<NamedTensor> merged = dense_weights(base_among(tensors));
  for (NamedTensor& one : merged) {
    if (!one.name.ends_with(".weight")) continue;
    const std::string layer = one.name.substr(0, one.name.rfind('.'));
    const auto a = adapters.find(layer + models::kLoraA), b = adapters.find(layer + models::kLoraB);
    if (a == adapters.end() || b == adapters.end()) continue;
    // A base in fewer bits is widened: its sum with the adapter has more digits.
    const auto type = c10::promoteTypes(one.tensor.scalar_type(), b->second.scalar_type());
    one.tensor = one.tensor.to(type) + at::matmul(b->second, a->second).mul(lora.scale()).to(type);
  }
  return merged;
}

}  // namespace phalanx
