#include "phalanx/checkpoint/files/peft_adapter.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string_view>
#include <system_error>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/json_reader.h"
#include "phalanx/base/json_text.h"
#include "phalanx/base/log.h"
#include "phalanx/checkpoint/files/block_hash.h"
#include "phalanx/checkpoint/files/safetensors.h"
#include "phalanx/checkpoint/files/weights_description.h"
#include "phalanx/checkpoint/files/weights_identity.h"
#include "phalanx/models/config/file_layers.h"

namespace phalanx {
namespace {

constexpr std::string_view kPeftPrefix = "base_model.model.";
constexpr std::string_view kWeight = ".weight";
constexpr const char* kNameCharacters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_";
constexpr std::uint64_t kMaxConfigBytes = 1 << 20;
using Reader = JsonReader<CheckpointError>;

/// Keys that may have any value here. They say what the adapter is (read below), where it comes from, or to which
/// layers it was added, which the tensors' names tell. fan_in_fan_out is compared with the model (layers_of_adapter()).
/// megatron_core and qalora_group_size count only beside keys that are refused.
constexpr std::array kFreeKeys = {"auto_mapping",
                                  "base_model_name_or_path",
                                  "exclude_modules",
                                  "fan_in_fan_out",
                                  "inference_mode",
                                  "layers_pattern",
                                  "layers_to_transform",
                                  "lora_alpha",
                                  "lora_dropout",
                                  "megatron_core",
                                  "peft_version",
                                  "qalora_group_size",
                                  "r",
                                  "revision",
                                  "target_modules",
                                  "task_type",
                                  "use_rslora"};
/// Keys with values, besides null, false and empty ones, that mean plain LoRA.
const std::map<std::string, std::vector<nlohmann::json>, std::less<>> kPlainValues = {
    {"peft_type", {"LORA"}}, {"bias", {"none"}}, {"init_lora_weights", {true, "gaussian"}}};

/// Ranks and alphas of layers whose names match a pattern.
/// PEFT also writes some that match none of the adapter's layers.
constexpr std::array kPatternKeys = {"alpha_pattern", "rank_pattern"};
constexpr double kSameScale = 1e-9;  // alphas that are no whole numbers are rounded
constexpr const char* kNothing = "null, false or nothing";
constexpr const char* kMergeOthers =
    ", as Phalanx has plain LoRA alone; merge such an adapter with peft (merge_and_unload) and train on the result";

/// Any key that may mean another kind of adapter is refused, so that none is taken as plain LoRA.
void refuse_other_kinds(const nlohmann::json& json, const Reader& read) {
  read.get<std::string>("peft_type");
  for (const auto& [key, value] : json.items()) {
    if (std::ranges::find(kFreeKeys, std::string_view(key)) != kFreeKeys.end()) continue;
    if (std::ranges::find(kPatternKeys, std::string_view(key)) != kPatternKeys.end()) continue;
    const auto plain = kPlainValues.find(key);
    const bool is_known = plain != kPlainValues.end();
    if (is_known && std::ranges::find(plain->second, value) != plain->second.end()) continue;
    const bool is_empty =
        value.empty() || value == false || (value.is_string() && value.get_ref<const std::string&>().empty());
    if (is_empty && key != "peft_type") continue;
    std::string expected = kNothing;
    if (is_known) {
      std::vector<std::string> values;
      for (const nlohmann::json& one : plain->second) values.push_back(one.dump());
      expected = fmt::format("{}", fmt::join(values, " or "));
    }
    read.fail(key.c_str(), expected + kMergeOthers);
  }
}

/// PEFT's alpha of a layer that is so many of ours, with an A for each.
double joined_alpha(const models::LoraOptions& lora, std::int64_t parts) {
  const auto count = static_cast<double>(parts);
  return lora.alpha * (lora.use_rslora ? std::sqrt(count) : count);
}

std::string last_name(const std::string& name) { return name.substr(name.rfind('.') + 1); }

/// Patterns are regular expressions for the end of a layer's name. One that ends in a plain name which no layer has is
/// for none of them. One that is the last name of layers that are several of ours is kept. Any other may be for some
/// layers, and is refused.
void read_patterns(const nlohmann::json& json, const Reader& read, PeftAdapter& adapter) {
  for (const auto& [key, kept] :
       {std::pair(kPatternKeys[0], &adapter.other_alphas), {kPatternKeys[1], &adapter.other_ranks}}) {
    if (!json.contains(key) || json[key].empty()) continue;
    for (const auto& [pattern, value] : json[key].items()) {
      const std::string last = last_name(pattern);
      const bool has_no_choice = pattern.find_first_not_of(std::string(kNameCharacters) + ".*\\") == std::string::npos;
      const bool is_plain =
          has_no_choice && !last.empty() && last.find_first_not_of(kNameCharacters) == std::string::npos;
      const bool is_for_one = std::ranges::any_of(adapter.lora.target_modules,
                                                  [&](const std::string& layer) { return last_name(layer) == last; });
      const bool is_joined = std::ranges::find(models::kJoinedLayers, pattern) != models::kJoinedLayers.end();
      if (json[key].is_object() && is_for_one && is_joined && value.is_number()) {
        (*kept)[last] = value.get<double>();
      } else if (!json[key].is_object() || !is_plain || is_for_one) {
        read.fail(key, std::string(kNothing) + kMergeOthers);
      }
    }
  }
}

/// Of a layer that is several of ours: PEFT's rank and alpha must scale what it adds as those of the others do.
void require_scale(const PeftAdapter& adapter, const models::FileLayer& layer) {
  const std::string last = last_name(layer.name);
  const auto parts = static_cast<std::int64_t>(layer.ours.size());
  const auto said = [&](const std::map<std::string, double>& others, double all) {
    const auto found = others.find(last);
    return found == others.end() ? all : found->second;
  };
  const models::LoraOptions& lora = adapter.lora;
  const double rank = said(adapter.other_ranks, static_cast<double>(lora.rank));
  const double alpha = said(adapter.other_alphas, lora.alpha);
  const std::int64_t rows = adapter.ranks.at(layer.name);
  const double scale = models::LoraOptions{.rank = rows, .alpha = alpha, .use_rslora = lora.use_rslora}.scale();
  const bool is_one = rows == lora.rank, is_each = rows == parts * lora.rank;
  const bool is_same_scale = std::abs(scale / lora.scale() - 1) < kSameScale;
  if (rank == static_cast<double>(rows) && (is_one || is_each) && is_same_scale) return;
  throw CheckpointError(fmt::format(
      "{}: '{}' has a lora_A of {} rows, and {} gives it rank {} and alpha {}; expected {} rows with rank {} and alpha "
      "{}, one A for its {} parts, or {} rows with rank {} and alpha {}, an A for each of them{}",
      adapter.weights().string(), layer.name, rows, (adapter.folder / kAdapterConfigName).string(), rank, alpha,
      lora.rank, lora.rank, lora.alpha, parts, parts * lora.rank, parts * lora.rank, joined_alpha(lora, parts),
      kMergeOthers));
}

/// The layers' names as the file has them, without PEFT's prefix, and the rows of their A's.
std::map<std::string, std::int64_t> layers_in(const safetensors::File& file) {
  std::map<std::string, int> halves;
  std::map<std::string, std::int64_t> ranks;
  for (const safetensors::TensorInfo& info : file.tensors()) {
    std::string_view name = info.name;
    if (name == kOutputInAdapter) continue;
    const auto fail = [&](const std::string& why) {
      throw CheckpointError(fmt::format("{}: {} {}; expected names such as {}", file.path(),
                                        safetensors::quote_name(info.name), why,
                                        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"));
    };
    if (!name.starts_with(kPeftPrefix) || !name.ends_with(kWeight)) fail("is no part of an adapter of PEFT");
    name.remove_prefix(kPeftPrefix.size());
    name.remove_suffix(kWeight.size());
    if (!models::is_lora_name(std::string(name))) fail("is neither a lora_A nor a lora_B");
    const bool is_a = name.ends_with(models::kLoraA);
    name.remove_suffix(std::string_view(models::kLoraA).size());
    ++halves[std::string(name)];
    if (is_a) ranks[std::string(name)] = info.shape.empty() ? 0 : static_cast<std::int64_t>(info.shape.front());
  }
  for (const auto& [layer, count] : halves) {
    if (count != 2) throw CheckpointError(fmt::format("{}: {} has only one of lora_A and lora_B", file.path(), layer));
  }
  if (halves.empty()) throw CheckpointError(fmt::format("{} holds no adapter", file.path()));
  return ranks;
}

nlohmann::json base_in(const safetensors::File& file) {
  const auto text = file.header().metadata.find(kMetadataInHeader);
  if (text == file.header().metadata.end()) return nullptr;
  const auto json = parse_json_object<CheckpointError>(text->second, file.path());
  return json.value(kBaseInMetadata, nlohmann::json());
}

/// PEFT's alpha is a whole number as a rule.
nlohmann::ordered_json whole_if_possible(double number) {
  if (std::floor(number) == number) return static_cast<std::int64_t>(number);
  return number;
}

}  // namespace

PeftAdapter read_peft_adapter(const std::filesystem::path& folder) {
  PeftAdapter adapter;
  adapter.folder = folder;
  std::error_code error;
  const std::filesystem::path config = folder / kAdapterConfigName;
  for (const std::filesystem::path& path : {config, adapter.weights()}) {
    if (std::filesystem::is_regular_file(path, error)) continue;
    throw CheckpointError(fmt::format(
        "{} is no adapter: it has no {}; expected a folder as PEFT saves it, or adapter/ of a run with [lora]",
        folder.string(), path.filename().string()));
  }
  const auto json = parse_json_object<CheckpointError>(read_file(config, kMaxConfigBytes), config.string());
  const Reader read(json, config.string());
  refuse_other_kinds(json, read);
  const safetensors::File file(adapter.weights().string());
  adapter.ranks = layers_in(file);
  adapter.has_output_weight = file.find(kOutputInAdapter) != nullptr;
  adapter.lora = {.rank = read.get<std::int64_t>("r"),
                  .alpha = read.get<double>("lora_alpha"),
                  .dropout = read.get_or<double>("lora_dropout", 0.0),
                  .target_modules = {},
                  .use_rslora = read.get_or<bool>("use_rslora", false)};
  for (const auto& [layer, rank] : adapter.ranks) adapter.lora.target_modules.push_back(layer);
  adapter.fan_in_fan_out = read.get_or<bool>("fan_in_fan_out", false);
  read_patterns(json, read, adapter);
  if (adapter.lora.rank < 1) read.fail("r", "1 or more");
  if (!(adapter.lora.alpha > 0)) read.fail("lora_alpha", "a number above 0");
  if (!(adapter.lora.dropout >= 0 && adapter.lora.dropout < 1)) read.fail("lora_dropout", "0 or more, and below 1");
  adapter.base = base_in(file);
  return adapter;
}

nlohmann::json adapter_identity(const std::filesystem::path& folder) {
  nlohmann::json identity = weights_identity(folder / kAdapterWeightsName);
  identity["config"] = hash_of_text(read_file(folder / kAdapterConfigName, kMaxConfigBytes));
  return identity;
}

std::vector<std::string> layers_with_adapters(const models::LlamaConfig& model, const models::LoraOptions& lora,
                                              const std::string& where) {
  try {
    return models::lora_layers(model, lora, where);
  } catch (const ConfigError& error) {
    throw CheckpointError(error.what());
  }
}

std::vector<std::string> layers_of_adapter(const models::LlamaConfig& model, const PeftAdapter& adapter) {
  const std::string where = adapter.weights().string();
  std::set<std::string> names(adapter.lora.target_modules.begin(), adapter.lora.target_modules.end());
  std::vector<std::string> layers;
  models::LoraOptions all{.rank = adapter.lora.rank};
  if (!model.tie_embeddings) all.target_modules.emplace_back("output");
  const std::vector<std::string> known = layers_with_adapters(model, all, where);
  for (const std::string& layer : known) {
    if (names.contains(models::file_layer_name(model, layer))) layers.push_back(layer);
  }
  for (const models::FileLayer& layer : models::file_layers(model, layers)) {
    names.erase(layer.name);
    if (layer.ours.size() > 1) require_scale(adapter, layer);
  }
  if (!names.empty()) {
    throw CheckpointError(fmt::format(
        "{}: it has an adapter of '{}', a layer that this model does not have, or that has no adapters here; expected "
        "layers such as {}",
        where, *names.begin(), models::file_layer_name(model, known.front())));
  }
  if (adapter.fan_in_fan_out && !model.is_gpt2()) {
    throw CheckpointError(
        fmt::format("{}: \"fan_in_fan_out\" is true, as for the matrices of GPT-2's files, which are [in, out]: "
                    "expected null, false "
                    "or nothing for a model of the family {}, whose matrices are [out, in]",
                    (adapter.folder / kAdapterConfigName).string(), models::family_name(model.family)));
  }
  return layers;
}

void require_base(const PeftAdapter& adapter, const std::filesystem::path& base, bool allow_mismatch,
                  const std::string& flag) {
  if (adapter.base.is_null()) {
    log::info(fmt::format("nothing says on which base the adapter in {} was trained: not compared with {}",
                          adapter.folder.string(), base.string()));
    return;
  }
  const nlohmann::json found = weights_identity(base);
  if (found == adapter.base) return;
  const std::string text = fmt::format("the adapter in {} was trained on other weights ({}) than those of {} ({})",
                                       adapter.folder.string(), adapter.base.dump(), base.string(), found.dump());
  if (!allow_mismatch) {
    throw CheckpointError(
        fmt::format("{}: it would add to what it does not know; name the base that it was trained on{}", text,
                    flag.empty() ? "" : ", or go on all the same by " + flag));
  }
  log::warn(fmt::format("{}: gone on all the same, as {} says", text, flag));
}

std::string peft_name(const std::string& parameter_in_file) {
  return fmt::format("{}{}{}", kPeftPrefix, parameter_in_file, kWeight);
}

std::string peft_config_text(const models::LlamaConfig& model, const models::LoraOptions& lora,
                             const std::string& base) {
  const std::vector<std::string> layers = models::lora_layers(model, lora);
  // Last names alone, if they mean these layers and no others.
  std::set<std::string> last;
  for (const std::string& layer : layers) {
    last.insert(last_name(models::file_layer_name(model, layer)));
  }
  models::LoraOptions by_last = lora;
  by_last.target_modules.assign(last.begin(), last.end());
  std::vector<std::string> targets = by_last.target_modules;
  // A routed expert's matrices have the last names of any other net's.
  const bool means_experts =
      model.has_experts() && std::ranges::any_of(layers, [](const std::string& layer) {
        return layer.find(".attention.") == std::string::npos && layer.find('.') != std::string::npos;
      });
  if (means_experts || models::lora_layers(model, by_last) != layers) {
    targets.clear();
    for (const std::string& layer : layers) targets.push_back(models::file_layer_name(model, layer));
  }
  auto ranks = nlohmann::ordered_json::object(), alphas = ranks;
  for (const models::FileLayer& layer : models::file_layers(model, layers)) {
    const auto parts = static_cast<std::int64_t>(layer.ours.size());
    if (parts == 1) continue;
    ranks[last_name(layer.name)] = parts * lora.rank;
    alphas[last_name(layer.name)] = whole_if_possible(joined_alpha(lora, parts));
  }
  const nlohmann::ordered_json json = {
      {"peft_type", "LORA"},
      {"task_type", "CAUSAL_LM"},
      {"base_model_name_or_path", base.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(base)},
      {"r", lora.rank},
      {"lora_alpha", whole_if_possible(lora.alpha)},
      {"lora_dropout", lora.dropout},
      {"target_modules", targets},
      {"bias", "none"},
      {"fan_in_fan_out", model.is_gpt2()},
      {"use_rslora", lora.use_rslora},
      {"use_dora", false},
      {"rank_pattern", ranks},
      {"alpha_pattern", alphas},
      {"modules_to_save", nullptr},
      {"inference_mode", true}};
  return json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

nlohmann::json lora_metadata(const models::LoraOptions& lora) {
  return {{"rank", lora.rank},
          {"alpha", lora.alpha},
          {"dropout", lora.dropout},
          {"target_modules", lora.target_modules},
          {"base_dtype", lora.base_dtype},
          {"use_rslora", lora.use_rslora}};
}

models::LoraOptions lora_from_metadata(const nlohmann::json& json, const std::string& where) {
  const Reader read(json, where);
  auto base_dtype = read.get_or<std::string>("base_dtype", "float32");
  if (std::ranges::find(models::kBaseDtypes, base_dtype) == models::kBaseDtypes.end()) {
    read.fail("base_dtype", fmt::format("one of {}", fmt::join(models::kBaseDtypes, ", ")).c_str());
  }
  return {.rank = read.get<std::int64_t>("rank"),
          .alpha = read.get<double>("alpha"),
          .dropout = read.get<double>("dropout"),
          .target_modules = read.get<std::vector<std::string>>("target_modules"),
          .base_dtype = std::move(base_dtype),
          .use_rslora = read.get_or<bool>("use_rslora", false)};
}

}  // namespace phalanx
