#include "phalanx/train/nf4_base.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <string>
#include <unordered_map>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/checkpoint/nf4_weights.h"
#include "phalanx/config/model_config.h"
#include "phalanx/kernels/nf4.h"
#include "phalanx/models/config/lora_config.h"
#include "phalanx/tensor/init.h"

namespace phalanx::train {
namespace {

using Nf4Tables = std::shared_ptr<const kernels::Nf4Tables>;
constexpr std::size_t kParts = 3;  // codes and two kinds of scales

std::array<std::string, kParts> parts_of(const std::string& layer) {
  const std::string weight = layer + ".weight";
  return {weight, weight + models::kNf4Scales[0], weight + models::kNf4Scales[1]};
}

void copy_part(const NamedTensor& part, at::Tensor whole) {
  if (part.shard) {
    const Box box = part.shard->box();
    for (std::size_t dim = 0; dim < box.shape.size(); ++dim) {
      whole = whole.narrow(static_cast<std::int64_t>(dim), box.offsets[dim], box.shape[dim]);
    }
  }
  part.tensor.copy_(whole);
}

/// make(layer's name, rows, columns) is asked for the matrices of which this rank has a part.
using Make = std::function<kernels::Nf4Weight(const std::string& layer, std::int64_t rows, std::int64_t columns)>;

void fill_parts(const config::TrainConfig& config, const std::vector<NamedTensor>& weights, const Make& make) {
  const at::NoGradGuard no_grad;
  std::unordered_map<std::string, const NamedTensor*> by_name;
  for (const NamedTensor& one : weights) by_name.emplace(one.name, &one);
  for (const std::string& layer : models::nf4_layers(config::model_config(config), config.lora)) {
    std::array<const NamedTensor*, kParts> parts{};
    const auto names = parts_of(layer);
    for (std::size_t i = 0; i < kParts; ++i) {
      const auto found = by_name.find(names[i]);
      parts[i] = found == by_name.end() ? nullptr : found->second;
    }
    const bool is_here =
        std::ranges::any_of(parts, [](const auto* p) { return p != nullptr && p->tensor.numel() > 0; });
    if (!is_here) continue;
    const std::vector<std::int64_t> shape = parts[0]->global_shape();
    const kernels::Nf4Weight whole = make(layer, shape[0], 2 * shape[1]);
    copy_part(*parts[0], whole.codes);
    copy_part(*parts[1], whole.absmax);
    copy_part(*parts[2], whole.nested);
  }
}

Nf4Tables tables_for(const std::vector<NamedTensor>& weights) {
  return kernels::Nf4Tables::make(weights.front().tensor.device());
}

}  // namespace

void initialise_nf4_base(const config::TrainConfig& config, ParallelModel& model) {
  if (models::nf4_layers(model.model().config(), config.lora).empty()) return;
  std::unordered_map<std::string, Init> inits;
  for (const auto& module : model.model().named_modules("", /*include_self=*/false)) {
    const auto* linear = dynamic_cast<const nn::Linear*>(module.value().get());
    if (linear != nullptr && linear->nf4_tables()) inits.emplace(module.key(), linear->dense_init());
  }
  const std::vector<NamedTensor> weights = model.weights();
  fill_parts(config, weights,
             [&, tables = tables_for(weights)](const std::string& layer, std::int64_t rows, std::int64_t columns) {
               const at::Tensor wide = at::empty({rows, columns}, at::TensorOptions(at::kFloat));
               fill(wide, inits.at(layer), static_cast<std::uint64_t>(config.debug.seed), layer + ".weight");
               return kernels::quantise_nf4(wide, tables);
             });
}

std::vector<NamedTensor> without_nf4(const config::TrainConfig& config, const std::vector<NamedTensor>& weights) {
  std::vector<std::string> parts;
  for (const std::string& layer : models::nf4_layers(config::model_config(config), config.lora)) {
    for (std::string& name : parts_of(layer)) parts.push_back(std::move(name));
  }
  std::vector<NamedTensor> others;
  std::ranges::copy_if(weights, std::back_inserter(others),
                       [&](const NamedTensor& one) { return std::ranges::find(parts, one.name) == parts.end(); });
  return others;
}

std::uint64_t load_nf4_base(const config::TrainConfig& config, const std::filesystem::path& path,
                            const std::vector<NamedTensor>& weights, const LoadWeightsOptions& options) {
  const BitsAndBytesFiles files(path);
  LoadWeightsOptions of_one = options;
  of_one.elsewhere = [](const std::string&) { return true; };
  of_one.copy_in_file = nullptr;
  std::uint64_t bytes = 0;
  fill_parts(config, weights,
             [&, tables = tables_for(weights)](const std::string& layer, std::int64_t rows, std::int64_t columns) {
               const std::string name = layer + ".weight";
               const std::string in_file = options.key_mapping ? options.key_mapping(name).name : name;
               if (files.has(in_file)) {
                 kernels::Nf4Weight stored = files.read(in_file, rows, columns, tables);
                 bytes += stored.codes.nbytes() + stored.absmax.nbytes() + stored.nested.nbytes();
                 return stored;
               }
               if (!files.names().empty()) {
                 throw CheckpointError(fmt::format(
                     "{}: {} is not in 4 bits, as others there are: expected all matrices of the blocks, or "
                     "none, which are then quantised here",
                     path.string(), safetensors::quote_name(in_file)));
               }
               const at::Tensor wide = at::empty({rows, columns}, at::TensorOptions(at::kFloat));
               bytes += load_weights(path, {{name, wide}}, of_one).bytes;
               if (!at::isfinite(wide).all().item<bool>()) {
                 throw CheckpointError(fmt::format("{}: {} holds a number that is not finite, which 4 bits cannot keep",
                                                   path.string(), safetensors::quote_name(in_file)));
               }
               return kernels::quantise_nf4(wide, tables);
             });
  return bytes;
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
