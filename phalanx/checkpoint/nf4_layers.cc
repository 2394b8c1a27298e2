#include "phalanx/checkpoint/nf4_layers.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/checkpoint/nf4_weights.h"
#include "phalanx/checkpoint/own_part.h"
#include "phalanx/models/config/lora_config.h"

namespace phalanx {
namespace {

constexpr std::size_t kNf4Parts = 3;  // codes and two kinds of scales

std::array<std::string, kNf4Parts> nf4_parts_of(const std::string& layer) {
  const std::string weight = layer + ".weight";
  return {weight, weight + models::kNf4Scales[0], weight + models::kNf4Scales[1]};
}

}  // namespace

void fill_nf4_parts(const std::vector<std::string>& layers, const std::vector<NamedTensor>& weights,
                    const MakeNf4& make) {
  const at::NoGradGuard no_grad;
  std::unordered_map<std::string, const NamedTensor*> by_name;
  for (const NamedTensor& one : weights) by_name.emplace(one.name, &one);
  for (const std::string& layer : layers) {
    std::array<const NamedTensor*, kNf4Parts> parts{};
    const auto names = nf4_parts_of(layer);
    for (std::size_t i = 0; i < kNf4Parts; ++i) {
      const auto found = by_name.find(names[i]);
      parts[i] = found == by_name.end() ? nullptr : found->second;
    }
    const bool is_here =
        std::ranges::any_of(parts, [](const auto* p) { return p != nullptr && p->tensor.numel() > 0; });
    if (!is_here) continue;
    const std::vector<std::int64_t> shape = parts[0]->global_shape();
    const kernels::Nf4Weight whole = make(layer, shape[0], 2 * shape[1]);
    copy_own_part(*parts[0], whole.codes);
    copy_own_part(*parts[1], whole.absmax);
    copy_own_part(*parts[2], whole.nested);
  }
}

std::vector<NamedTensor> without_nf4_parts(const std::vector<std::string>& layers,
                                           const std::vector<NamedTensor>& weights) {
  std::unordered_set<std::string> parts;
  for (const std::string& layer : layers) {
    for (std::string& name : nf4_parts_of(layer)) parts.insert(std::move(name));
  }
  std::vector<NamedTensor> others;
  std::ranges::copy_if(weights, std::back_inserter(others),
                       [&](const NamedTensor& one) { return !parts.contains(one.name); });
  return others;
}

std::string weight_of_nf4_scales(const std::string& name) {
  for (const std::string_view end : models::kNf4Scales) {
    if (name.ends_with(end)) return name.substr(0, name.size() - end.size());
  }
  return name;
}

std::uint64_t load_nf4_layers(const std::filesystem::path& path, const std::vector<std::string>& layers,
                              const std::vector<NamedTensor>& weights, const LoadWeightsOptions& options) {
  if (layers.empty()) return 0;
  const BitsAndBytesFiles files(path);
  LoadWeightsOptions of_one = options;
  of_one.elsewhere = [](const std::string&) { return true; };
  of_one.copy_in_file = nullptr;
  std::uint64_t bytes = 0;
  fill_nf4_parts(
      layers, weights,
      [&, tables = kernels::Nf4Tables::make(weights.front().tensor.device())](const std::string& layer,
                                                                              std::int64_t rows, std::int64_t columns) {
        const std::string name = layer + ".weight";
        const FileTensorView view = options.key_mapping ? options.key_mapping(name) : FileTensorView(name);
        const std::string& in_file = view.name;
        if (files.has(in_file) && view.form.parts > 1) {
          throw CheckpointError(fmt::format(
              "{}: {} is in 4 bits, and holds {} as one of its parts, whose blocks have no scales of their own; "
              "expected a model in 16 or 32 bits",
              path.string(), safetensors::quote_name(in_file), name));
        }
        if (files.has(in_file)) {
          kernels::Nf4Weight stored = files.read(in_file, rows, columns, tables);
          bytes += stored.codes.nbytes() + stored.absmax.nbytes() + stored.nested.nbytes();
          return stored;
        }
        if (!files.names().empty()) {
          throw CheckpointError(
              fmt::format("{}: {} is not in 4 bits, as others there are: expected all matrices of the blocks, or "
                          "none of them",
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

}  // namespace phalanx
