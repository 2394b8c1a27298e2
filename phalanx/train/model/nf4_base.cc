#include "phalanx/train/model/nf4_base.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/checkpoint/nf4_layers.h"
#include "phalanx/checkpoint/nf4_weights.h"
#include "phalanx/config/model_config.h"
#include "phalanx/kernels/nf4.h"
#include "phalanx/models/config/lora_config.h"
#include "phalanx/tensor/init.h"

namespace phalanx::train {
namespace {

using Nf4Tables = std::shared_ptr<const kernels::Nf4Tables>;

Nf4Tables tables_for(const std::vector<NamedTensor>& weights) {
  return kernels::Nf4Tables::make(weights.front().tensor.device());
}

}  // namespace

void initialise_nf4_base(const config::TrainConfig& config, ParallelModel& model) {
  const std::vector<std::string> layers = models::nf4_layers(model.model().config(), config.lora);
  if (layers.empty()) return;
  std::unordered_map<std::string, Init> inits;
  for (const auto& module : model.model().named_modules("", /*include_self=*/false)) {
    const auto* linear = dynamic_cast<const nn::Linear*>(module.value().get());
    if (linear != nullptr && linear->nf4_tables()) inits.emplace(module.key(), linear->dense_init());
  }
  const std::vector<NamedTensor> weights = model.weights();
  fill_nf4_parts(layers, weights,
                 [&, tables = tables_for(weights)](const std::string& layer, std::int64_t rows, std::int64_t columns) {
                   const at::Tensor wide = at::empty({rows, columns}, at::TensorOptions(at::kFloat));
                   fill(wide, inits.at(layer), static_cast<std::uint64_t>(config.debug.seed), layer + ".weight");
                   return kernels::quantise_nf4(wide, tables);
                 });
}

std::vector<NamedTensor> without_nf4(const config::TrainConfig& config, const std::vector<NamedTensor>& weights) {
  return without_nf4_parts(models::nf4_layers(config::model_config(config), config.lora), weights);
}

std::uint64_t load_nf4_base(const config::TrainConfig& config, const std::filesystem::path& path,
                            const std::vector<NamedTensor>& weights, const LoadWeightsOptions& options) {
  return load_nf4_layers(path, models::nf4_layers(config::model_config(config), config.lora), weights, options);
}

void refuse_nf4_files(const config::TrainConfig& config, const std::filesystem::path& path) {
  if (config.lora.has_nf4_base()) return;
  const BitsAndBytesFiles files(path);
  if (files.names().empty()) return;
  throw CheckpointError(
      fmt::format("{} holds matrices in 4 bits, of bitsandbytes ({}, ...): they are the frozen base of adapters; set "
                  "[lora] rank and base_dtype = \"nf4\", or take the model in 16 or 32 bits",
                  path.string(), safetensors::quote_name(files.names().front())));
}

}  // namespace phalanx::train
