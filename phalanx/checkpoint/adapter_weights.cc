#include "phalanx/checkpoint/adapter_weights.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/block_diag.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/matmul.h>
#include <c10/core/ScalarType.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/log.h"
#include "phalanx/checkpoint/files/safetensors.h"
#include "phalanx/checkpoint/files/weights_description.h"
#include "phalanx/checkpoint/nf4_weights.h"
#include "phalanx/checkpoint/own_part.h"
#include "phalanx/checkpoint/weights.h"
#include "phalanx/models/config/file_layers.h"

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

/// The adapter of a layer of the files: those of its parts, in the order of its rows.
struct AdaptedLayer {
  std::string name;  // in the files
  std::vector<std::string> ours;
  std::vector<NamedTensor> a, b;

  std::string name_of(const char* half) const { return peft_name(name + half); }
};

/// Those of all `tensors`. Throws Error if a half or a part is not there.
std::vector<AdaptedLayer> adapted_layers(const models::LlamaConfig& model, const std::vector<NamedTensor>& tensors) {
  std::unordered_map<std::string, const NamedTensor*> by_name;
  std::vector<std::string> layers;
  for (const NamedTensor& one : tensors) {
    if (!models::is_lora_name(one.name)) continue;
    by_name.emplace(one.name, &one);
    if (one.name.ends_with(models::kLoraA)) layers.push_back(one.name.substr(0, one.name.rfind('.')));
  }
  const auto half = [&](const std::string& layer, const char* name) -> const NamedTensor& {
    const auto found = by_name.find(layer + name);
    if (found == by_name.end()) {
      throw Error(fmt::format("the tensors have no {}{}, which is a part of an adapter that they have", layer, name));
    }
    return *found->second;
  };
  std::vector<AdaptedLayer> adapted;
  for (const models::FileLayer& layer : models::file_layers(model, layers)) {
    AdaptedLayer& one = adapted.emplace_back(AdaptedLayer{layer.name, layer.ours, {}, {}});
    for (const std::string& ours : layer.ours) {
      one.a.push_back(half(ours, models::kLoraA));
      one.b.push_back(half(ours, models::kLoraB));
    }
  }
  for (const auto& [name, tensor] : by_name) half(name.substr(0, name.rfind('.')), models::kLoraA);
  return adapted;
}

/// Of tensors that are whole.
std::vector<AdaptedLayer> whole_adapted_layers(const models::LlamaConfig& model,
                                               const std::vector<NamedTensor>& tensors) {
  for (const NamedTensor& one : tensors) {
    if (one.tensor.sizes() == one.global_shape()) continue;
    throw Error(fmt::format("{}: this rank has only {} of {}; expected whole tensors, such as a checkpoint holds",
                            one.name, fmt::join(one.tensor.sizes(), " x "), fmt::join(one.global_shape(), " x ")));
  }
  return adapted_layers(model, tensors);
}

std::vector<at::Tensor> tensors_of(const std::vector<NamedTensor>& named) {
  std::vector<at::Tensor> tensors;
  for (const NamedTensor& one : named) tensors.push_back(one.tensor);
  return tensors;
}

/// B A, as PEFT multiplies them: with one A for the whole layer if the parts' are the same.
at::Tensor product(const AdaptedLayer& layer) {
  const std::vector<at::Tensor> a = tensors_of(layer.a), b = tensors_of(layer.b);
  const bool is_one = std::ranges::all_of(a, [&](const at::Tensor& each) { return at::equal(each, a[0]); });
  return is_one ? at::matmul(at::cat(b), a[0]) : at::matmul(at::block_diag(b), at::cat(a));
}

/// Both halves as the file has them, and whose parts they are.
struct JoinedAdapter {
  AdaptedLayer layer;
  at::Tensor a, b;
  bool has_one_a = false;  // for all parts
};

JoinedAdapter joined_adapter(const PeftAdapter& adapter, const AdaptedLayer& layer) {
  const std::vector<std::int64_t> of_part = layer.a[0].global_shape();
  const auto found = adapter.ranks.find(layer.name);
  const auto parts = static_cast<std::int64_t>(layer.a.size());
  JoinedAdapter joined{
      .layer = layer, .a = {}, .b = {}, .has_one_a = found != adapter.ranks.end() && found->second == of_part[0]};
  const std::int64_t rank = joined.has_one_a ? of_part[0] : parts * of_part[0];
  std::int64_t rows = 0;
  for (const NamedTensor& b : layer.b) rows += b.global_shape()[0];
  const at::TensorOptions options(at::kFloat);
  joined.a = at::empty({rank, of_part[1]}, options);
  joined.b = at::empty({rows, rank}, options);
  return joined;
}

/// The rows of A that are the part's.
std::int64_t first_row(const JoinedAdapter& joined, std::size_t part) {
  return joined.has_one_a ? 0 : static_cast<std::int64_t>(part) * joined.layer.a[0].global_shape()[0];
}

/// For each part its rows of B. Throws CheckpointError if they take more of A than is the part's.
std::vector<at::Tensor> parts_of_b(const PeftAdapter& adapter, const JoinedAdapter& joined) {
  const AdaptedLayer& layer = joined.layer;
  const std::int64_t rank = layer.a[0].global_shape()[0];
  std::vector<at::Tensor> parts;
  std::int64_t row = 0;
  for (std::size_t i = 0; i < layer.b.size(); ++i) {
    const std::int64_t rows = layer.b[i].global_shape()[0], first = first_row(joined, i);
    const at::Tensor all = joined.b.narrow(0, row, rows), own = all.narrow(1, first, rank);
    if (all.count_nonzero().item<std::int64_t>() != own.count_nonzero().item<std::int64_t>()) {
      throw CheckpointError(fmt::format(
          "{}: '{}' has an A of {} rows for its {} parts ({}), and its B takes {} from rows {} to {} of A, "
          "but not from these alone; expected zeros elsewhere, or one A of {} rows; merge such an adapter with peft "
          "(merge_and_unload) and train on the result",
          adapter.weights().string(), layer.name, joined.a.size(0), layer.a.size(), fmt::join(layer.ours, ", "),
          layer.ours[i], first, first + rank - 1, rank));
    }
    parts.push_back(own);
    row += rows;
  }
  return parts;
}

void copy_parts(const PeftAdapter& adapter, const JoinedAdapter& joined) {
  const std::vector<at::Tensor> b = parts_of_b(adapter, joined);
  for (std::size_t i = 0; i < b.size(); ++i) {
    const NamedTensor& a = joined.layer.a[i];
    copy_own_part(a, joined.a.narrow(0, first_row(joined, i), a.global_shape()[0]));
    copy_own_part(joined.layer.b[i], b[i]);
  }
}

/// Whether test(rows of a, the same of b) is true of all rows, in fp32, some at a time.
bool all_rows(const at::Tensor& a, const at::Tensor& b,
              const std::function<bool(const at::Tensor&, const at::Tensor&)>& test) {
  constexpr std::int64_t kRows = 1024;
  for (std::int64_t row = 0; row < a.size(0); row += kRows) {
    const std::int64_t count = std::min(kRows, a.size(0) - row);
    if (!test(a.narrow(0, row, count).to(at::kFloat), b.narrow(0, row, count).to(at::kFloat))) return false;
  }
  return true;
}

bool fit(const at::Tensor& values, at::ScalarType type) {
  return all_rows(values, values, [&](const at::Tensor& rows, const at::Tensor&) {
    return at::equal(rows.to(type).to(at::kFloat), rows);
  });
}

/// The same values, or the same before one of both was rounded to 16 bits. That is seen in the values: the type of a
/// file or of a tensor does not say what they were converted to before.
bool are_same_but_for_rounding(const at::Tensor& a, const at::Tensor& b) {
  constexpr double kUnitOfBFloat16 = 1.0 / 256, kUnitOfFloat16 = 1.0 / 2048, kLeastFloat16 = 0x1p-24;
  const bool is_a_bfloat16 = fit(a, at::kBFloat16), one_is_bfloat16 = is_a_bfloat16 != fit(b, at::kBFloat16);
  const bool one_is_float16 = fit(a, at::kHalf) != fit(b, at::kHalf);
  const double relative = one_is_bfloat16 ? kUnitOfBFloat16 : one_is_float16 && !is_a_bfloat16 ? kUnitOfFloat16 : 0;
  const double absolute = one_is_float16 ? kLeastFloat16 : 0;  // it holds no smaller numbers
  return all_rows(a, b,
                  [&](const at::Tensor& x, const at::Tensor& y) { return at::allclose(x, y, relative, absolute); });
}

/// PEFT would take its own copy in place of the base's. Either may have been rounded: the copy when PEFT read the base,
/// ours when Phalanx did.
void require_same_output(const PeftAdapter& adapter, const std::vector<NamedTensor>& tensors, bool allow_other) {
  const auto output = std::ranges::find(tensors, "output.weight", &NamedTensor::name);
  if (output == tensors.end() || output->tensor.numel() == 0) return;
  const at::Tensor base = output->tensor.to(at::kCPU);
  const NamedTensor copy{kOutputInAdapter, at::empty(base.sizes(), at::TensorOptions(at::kFloat)), output->shard};
  load_weights(adapter.weights(), {copy}, {.elsewhere = [](const std::string&) { return true; }});
  if (are_same_but_for_rounding(copy.tensor, base)) return;
  const std::string text = fmt::format("{}: {} is another weight of the output layer than the base's",
                                       adapter.weights().string(), safetensors::quote_name(kOutputInAdapter));
  if (allow_other) {
    log::warn(text + ": the base's is used all the same, as the base may be another one");
    return;
  }
  throw CheckpointError(text +
                        "; expected an adapter of this base, or one that was saved without it (save_pretrained(..., "
                        "save_embedding_layers=False)); merge one that brings its own with peft (merge_and_unload)");
}

}  // namespace

std::vector<NamedTensor> adapters_among(const std::vector<NamedTensor>& tensors) { return those(tensors, true); }
std::vector<NamedTensor> base_among(const std::vector<NamedTensor>& tensors) { return those(tensors, false); }

void load_adapter(const PeftAdapter& adapter, const models::LlamaConfig& model, const std::vector<NamedTensor>& tensors,
                  const LoadAdapterOptions& how) {
  const at::NoGradGuard no_grad;
  std::vector<NamedTensor> wanted;  // under PEFT's names
  std::vector<JoinedAdapter> joined;
  for (const AdaptedLayer& layer : adapted_layers(model, tensors)) {
    if (layer.a.size() == 1) {
      wanted.push_back({layer.name_of(models::kLoraA), layer.a[0].tensor, layer.a[0].shard});
      wanted.push_back({layer.name_of(models::kLoraB), layer.b[0].tensor, layer.b[0].shard});
      continue;
    }
    joined.push_back(joined_adapter(adapter, layer));
    wanted.push_back({layer.name_of(models::kLoraA), joined.back().a});
    wanted.push_back({layer.name_of(models::kLoraB), joined.back().b});
  }
  LoadWeightsOptions options;
  options.elsewhere = [&](const std::string& name) { return !how.all || name == kOutputInAdapter; };
  load_weights(adapter.weights(), wanted, options);
  for (const JoinedAdapter& one : joined) copy_parts(adapter, one);
  if (adapter.has_output_weight) require_same_output(adapter, tensors, how.allow_other_base);
}

void save_adapter(const std::filesystem::path& folder, const models::LlamaConfig& model,
                  const models::LoraOptions& lora, const std::vector<NamedTensor>& tensors,
                  const SaveAdapterOptions& options) {
  posix_file_system().make_directory(folder);
  const at::NoGradGuard no_grad;
  std::vector<NamedTensor> in_file;
  for (const AdaptedLayer& layer : whole_adapted_layers(model, tensors)) {
    in_file.push_back({layer.name_of(models::kLoraA), at::cat(tensors_of(layer.a))});
    in_file.push_back({layer.name_of(models::kLoraB), at::block_diag(tensors_of(layer.b))});
  }
  export_weights(folder / kAdapterWeightsName, in_file,
                 {.dtype = at::kFloat,
                  .metadata = {{kMetadataInHeader, header_text(options.metadata.empty() ? "{}" : options.metadata)}}},
                 posix_file_system());
  replace_file(folder / kAdapterConfigName, peft_config_text(model, lora, options.base_name));
}

std::vector<NamedTensor> merged_weights(const std::vector<NamedTensor>& tensors, const models::LlamaConfig& model,
                                        const models::LoraOptions& lora) {
  const at::NoGradGuard no_grad;
  std::vector<NamedTensor> merged = dense_weights(base_among(tensors));
  std::unordered_map<std::string, NamedTensor*> by_name;
  for (NamedTensor& one : merged) by_name.emplace(one.name, &one);
  for (const AdaptedLayer& layer : whole_adapted_layers(model, tensors)) {
    const at::Tensor added = product(layer).mul(lora.scale());
    std::int64_t row = 0;
    for (std::size_t i = 0; i < layer.ours.size(); ++i) {
      const std::int64_t rows = layer.b[i].tensor.size(0);
      const auto found = by_name.find(layer.ours[i] + ".weight");
      if (found == by_name.end()) throw Error(fmt::format("{} has an adapter, but no weight", layer.ours[i]));
      // A base in fewer bits is widened: its sum with the adapter has more digits.
      at::Tensor& weight = found->second->tensor;
      const auto type = c10::promoteTypes(weight.scalar_type(), layer.b[i].tensor.scalar_type());
      weight = weight.to(type) + added.narrow(0, row, rows).to(type);
      row += rows;
    }
  }
  return merged;
}

}  // namespace phalanx
