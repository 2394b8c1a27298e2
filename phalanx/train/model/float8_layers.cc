#include "phalanx/train/model/float8_layers.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/name_patterns.h"
#include "phalanx/config/config_schema.h"
#include "phalanx/kernels/float8_linear.h"
#include "phalanx/models/config/parameter_kinds.h"

namespace phalanx::train {
namespace {

using kernels::Float8Cut;
using kernels::Float8LinearOptions;
using kernels::Float8Recipe;

constexpr std::int64_t kMultiple = 16;

Float8Recipe recipe_of(const config::TrainConfig& config) {
  return config.float8.recipe_name == "rowwise" ? Float8Recipe::rowwise : Float8Recipe::tensorwise;
}

std::string why_not(const std::string& name, const nn::Linear& layer, const config::TrainConfig& config) {
  for (const std::string& filter : config.float8.filter_fqns) {
    if (name.find(filter) != std::string::npos) return fmt::format("filter_fqns has \"{}\"", filter);
  }
  if (!name.starts_with("layers.")) return "the output";
  if (name.ends_with(".moe.gate")) return "a router";
  if (models::is_expert_parameter(name)) return "experts";
  const std::int64_t in = layer.options().in_features, out = layer.options().out_features;
  if (in % kMultiple != 0 || out % kMultiple != 0) {
    return fmt::format("{} x {}: a size is no multiple of {}", out, in, kMultiple);
  }
  return "";
}

struct Options {
  std::shared_ptr<const Float8LinearOptions> whole, rows, columns;

  Options(const config::TrainConfig& config, const DeviceMesh& mesh) {
    Float8LinearOptions options{.recipe = recipe_of(config), .emulate = config.float8.emulate};
    whole = std::make_shared<Float8LinearOptions>(options);
    if (!mesh.has("tp") || mesh.size("tp") == 1) return;
    options.max_over_ranks = [group = mesh.communicator("tp")](const at::Tensor& values) {
      group->all_reduce(values, {.op = ReduceOp::max}).wait();
    };
    options.cut = Float8Cut::rows;
    rows = std::make_shared<Float8LinearOptions>(options);
    options.cut = Float8Cut::columns;
    columns = std::make_shared<Float8LinearOptions>(options);
  }

  const std::shared_ptr<const Float8LinearOptions>& of(const nn::Linear& layer) const {
    if (layer.weight.size(0) < layer.options().out_features) return rows;
    return layer.weight.size(1) < layer.options().in_features ? columns : whole;
  }
};

struct Float8Choice {
  std::string name;  // "layers.0.attention.wq"
  nn::Linear* layer = nullptr;
  std::string why_not;  // empty: it is in float8
};

/// All linear layers of the model, or of a part of it.
std::vector<Float8Choice> float8_choices(const models::Llama& model, const config::TrainConfig& config) {
  std::vector<Float8Choice> choices;
  for (const auto& module : model.named_modules("", /*include_self=*/false)) {
    auto* const layer = dynamic_cast<nn::Linear*>(module.value().get());
    if (layer == nullptr) continue;
    choices.push_back({module.key(), layer, why_not(module.key(), *layer, config)});
  }
  return choices;
}

}  // namespace

void apply_float8(models::Llama& model, const config::TrainConfig& config, const DeviceMesh& mesh, at::Device device) {
  if (!config::uses_float8(config)) return;
  if (!config.float8.emulate) {
    if (const std::string problem = kernels::float8_problem(device, recipe_of(config)); !problem.empty()) {
      throw ConfigError(
          fmt::format("[model] converters asks for float8, but {} has no {} products of float8 numbers (GPUs have them "
                      "from compute "
                      "capability 8.9 on): remove it, or set [{}] emulate = true, which is slow\nlibtorch says: {}",
                      device.str(), config.float8.recipe_name, config::kFloat8Section, problem));
    }
  }
  const Options options(config, mesh);
  for (const Float8Choice& choice : float8_choices(model, config)) {
    if (!choice.why_not.empty()) continue;
    const at::Tensor& weight = choice.layer->weight;
    if (weight.size(0) % kMultiple != 0 || weight.size(1) % kMultiple != 0) {
      throw ConfigError(
          fmt::format("[model] converters asks for float8, but tensor_parallel_degree = {} leaves {} x {} of '{}' to a "
                      "rank: expected "
                      "multiples of {}; choose a smaller degree, or name it in [{}] filter_fqns",
                      mesh.size("tp"), weight.size(0), weight.size(1), choice.name, kMultiple, config::kFloat8Section));
    }
    choice.layer->set_float8(options.of(*choice.layer));
  }
}

WithoutFloat8::WithoutFloat8(const std::vector<nn::Module*>& modules) {
  for (nn::Module* module : modules) {
    for (const auto& inner : module->modules()) {
      auto* const layer = dynamic_cast<nn::Linear*>(inner.get());
      if (layer == nullptr || !layer->float8()) continue;
      taken_.emplace_back(layer, layer->float8());
      layer->set_float8(nullptr);
    }
  }
}

WithoutFloat8::~WithoutFloat8() {
  for (auto& [layer, how] : taken_) layer->set_float8(std::move(how));
}

std::string float8_text(const models::Llama& model, const config::TrainConfig& config, at::Device device) {
  if (!config::uses_float8(config)) return "";
  std::map<std::string, std::int64_t> in_float8;
  std::map<std::pair<std::string, std::string>, std::int64_t> others;
  std::int64_t count = 0, all = 0;
  for (const Float8Choice& choice : float8_choices(model, config)) {
    ++all;
    if (choice.why_not.empty()) ++count, ++in_float8[without_numbers(choice.name)];
    if (!choice.why_not.empty()) ++others[{without_numbers(choice.name), choice.why_not}];
  }
  std::vector<std::string> names, kept;
  for (const auto& [name, n] : in_float8) names.push_back(name);
  for (const auto& [name_and_reason, n] : others) {
    kept.push_back(fmt::format("{} ({})", name_and_reason.first, name_and_reason.second));
  }
  const bool is_stage = config.parallelism.pipeline_parallel_degree > 1;  // it has a part of the layers
  const bool is_emulated = config.float8.emulate || device.is_cpu();
  std::string text =
      fmt::format("{}{}, {} of {} linear layers{}: {}", config.float8.recipe_name,
                  is_emulated ? ", emulated by float32 products (slow)" : "", count, all,
                  is_stage ? " of this stage" : "", names.empty() ? "none" : fmt::format("{}", fmt::join(names, ", ")));
  if (!kept.empty()) {
    text += fmt::format("; in {}: {}", config.training.mixed_precision_param, fmt::join(kept, ", "));
  }
  for (const std::string& filter : config.float8.filter_fqns) {
    const auto choices = float8_choices(model, config);
    const bool is_used = std::ranges::any_of(
        choices, [&](const Float8Choice& choice) { return choice.name.find(filter) != std::string::npos; });
    if (!is_used && !is_stage) text += fmt::format("; filter_fqns has \"{}\", which is in no layer's name", filter);
  }
  return text;
}

}  // namespace phalanx::train
