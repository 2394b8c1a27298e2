#include "phalanx/infer/model_files.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <system_error>
#include <unordered_set>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/json_reader.h"
#include "phalanx/base/log.h"
#include "phalanx/checkpoint/adapter_weights.h"
#include "phalanx/checkpoint/checkpoint_reader.h"
#include "phalanx/checkpoint/expert_biases.h"
#include "phalanx/checkpoint/files/checkpoint_list.h"
#include "phalanx/checkpoint/files/manifest.h"
#include "phalanx/checkpoint/files/weight_files.h"
#include "phalanx/checkpoint/files/weight_index.h"
#include "phalanx/checkpoint/files/weights_description.h"
#include "phalanx/checkpoint/hf_weights.h"
#include "phalanx/checkpoint/nf4_layers.h"
#include "phalanx/checkpoint/nf4_weights.h"
#include "phalanx/checkpoint/rank_group.h"
#include "phalanx/data/token_sidecar.h"
#include "phalanx/data/tokenizer/tokenizer_fingerprint.h"
#include "phalanx/models/config/file_layers.h"
#include "phalanx/models/config/hf_config.h"
#include "phalanx/models/config/hf_unsupported.h"
#include "phalanx/models/config/llama_json.h"
#include "phalanx/models/config/model_dimensions.h"
#include "phalanx/models/config/model_identity.h"
#include "phalanx/models/config/parameter_kinds.h"
#include "phalanx/models/expert_bias.h"
#include "phalanx/models/llama.h"
#include "phalanx/models/llama_parallel.h"
#include "phalanx/models/lora.h"
#include "phalanx/nn/init.h"

namespace phalanx::infer {
namespace {

bool is_file(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::is_regular_file(path, error);
}

void look_for_tokenizer(ModelFiles& files, const std::vector<std::filesystem::path>& folders) {
  for (const auto& folder : folders) {
    const auto place = folder.filename() == "tokenizer.json" ? folder : folder / "tokenizer.json";
    files.tokenizer_places.push_back(place.string());
    if (!files.tokenizer && is_file(place)) files.tokenizer = place.string();
  }
}

ModelFiles find_hugging_face_model(const std::filesystem::path& path) {
  ModelFiles files{.weights = path, .hugging_face = true};
  const auto config = path / "config.json";
  const std::string text = read_file(config, models::kMaxHfConfigBytes);
  files.config = models::llama_config_from_hf(text, config.string());
  files.not_honoured = models::hf_unsupported(text, config.string());
  look_for_tokenizer(files, {path});
  files.end_tokens = models::hf_end_tokens_in(path);
  for (const std::int64_t token : files.end_tokens) {
    if (token < files.config.vocab_size) continue;
    if (!files.not_honoured.empty()) files.not_honoured += "; ";
    files.not_honoured +=
        fmt::format("{}: eos_token_id {} is no token of the model (vocab_size {}): no text ends by it", path.string(),
                    token, files.config.vocab_size);
  }
  for (const WeightsDescription& told : describe_weights(path)) {  // Phalanx's own exports have it
    if (files.tokenizer_fingerprint.empty()) {
      files.tokenizer_fingerprint = tokenizer_in_metadata(told.metadata);
    }
    if (!files.document_end) files.document_end = document_end_in_metadata(told.metadata);
  }
  return files;
}

}  // namespace

ModelFiles find_model(const std::filesystem::path& path) {
  if (is_file(path / "config.json")) return find_hugging_face_model(path);
  if (is_file(path / kSingleWeightsName) || is_file(path / kWeightIndexName)) {
    throw CheckpointError(fmt::format(
        "{} has weights but no config.json that says of what model: expected a Hugging Face directory, or a "
        "checkpoint of `phalanx train`",
        path.string()));
  }
  ModelFiles files{.weights = resolve_checkpoint(path)};
  const CheckpointReader reader(files.weights);
  const auto metadata = nlohmann::json::parse(reader.manifest().metadata);
  const auto where = (files.weights / kManifestName).string();
  if (!metadata.contains("model") || !metadata["model"].is_object())
    throw CheckpointError(
        fmt::format("{} does not say the model's shape (metadata.model): it was not saved by `phalanx train`", where));
  files.config = models::llama_from_metadata(metadata["model"], where + ": metadata.model");
  if (const auto lora = metadata.find(kLoraInMetadata); lora != metadata.end()) {
    files.lora = lora_from_metadata(*lora, where + ": metadata.lora");
    layers_with_adapters(files.config, files.lora, where + ": metadata.lora");
  }
  const auto checkpoints = std::filesystem::absolute(files.weights).lexically_normal().parent_path();
  std::vector<std::filesystem::path> folders{files.weights, checkpoints, checkpoints.parent_path()};
  const JsonReader<CheckpointError> read(metadata, where + ": metadata");
  if (const auto assets = read.get_or<std::string>("hf_assets_path", ""); !assets.empty()) folders.emplace_back(assets);
  look_for_tokenizer(files, folders);
  if (files.tokenizer)
    files.end_tokens = models::hf_end_tokens_in(std::filesystem::path(*files.tokenizer).parent_path());
  files.tokenizer_fingerprint = tokenizer_in_metadata(reader.manifest().metadata);
  files.document_end = document_end_in_metadata(reader.manifest().metadata);
  return files;
}

void take_adapter(ModelFiles& files, const std::filesystem::path& folder, bool allow_base_mismatch) {
  const PeftAdapter adapter = read_peft_adapter(folder);
  if (files.lora.rank > 0) {
    throw CheckpointError(
        fmt::format("{} is of a run that trains adapters, and holds them: expected the base of {} instead, or no other "
                    "adapter",
                    files.weights.string(), folder.string()));
  }
  layers_of_adapter(files.config, adapter);
  require_base(adapter, files.weights, allow_base_mismatch);
  files.lora = adapter.lora;
  files.adapter = folder;
  files.allows_other_base = allow_base_mismatch;
  // A base that bitsandbytes has quantised stays as it is.
  if (files.hugging_face && !BitsAndBytesFiles(files.weights).names().empty()) {
    files.lora.base_dtype = "nf4";
    try {
      models::lora_layers(files.config, files.lora, files.weights.string());
    } catch (const ConfigError& error) {
      throw CheckpointError(
          fmt::format("{}; its matrices are in 4 bits: use the model in 16 or 32 bits here", error.what()));
    }
  }
}

namespace {

void require_same_tokenizer(const std::string& expected, const std::string& found, const std::string& model,
                            const std::string& what, bool allow_mismatch) {
  if (!data::are_other_tokenizers(expected, found)) {
    if (expected != found) {  // one is unknown, or of another version
      log::info(fmt::format("the tokenizer of {} ({}) and that of the model in {} ({}) could not be compared", what,
                            found.empty() ? "not said" : found, model, expected.empty() ? "not said" : expected));
    }
    return;
  }
  const std::string text =
      fmt::format("{} is of the tokenizer {}, but the model in {} was trained with {}", what, found, model, expected);
  if (!allow_mismatch) {
    throw DataError(text +
                    ": its ids would mean other texts; name the model's own, or go on all the same by "
                    "--allow-tokenizer-mismatch");
  }
  log::warn_once(text + ": gone on all the same, as --allow-tokenizer-mismatch says");
}

/// If the model does not record it: that of the tokenizer.json in its Hugging Face directory, unless `path` is that.
std::string fingerprint_of_model(const ModelFiles& files, const std::string& path) {
  if (!files.tokenizer_fingerprint.empty() || !files.hugging_face || !files.tokenizer) {
    return files.tokenizer_fingerprint;
  }
  std::error_code error;
  if (!path.empty() && std::filesystem::equivalent(path, *files.tokenizer, error)) return "";
  return data::fingerprint_of_file(*files.tokenizer);  // "": then the given one is accepted
}

}  // namespace

void check_tokens(const ModelFiles& files, const data::TokenFile& tokens, bool allow_mismatch) {
  const std::string found = tokens.sidecar() ? tokens.sidecar()->tokenizer : std::string();
  const std::string expected = fingerprint_of_model(files, "");
  if (found.empty() && expected.empty()) {
    log::info(fmt::format("nothing says by which tokenizers {} and the model in {} were made: not compared",
                          tokens.path(), files.weights.string()));
    return;
  }
  require_same_tokenizer(expected, found, files.weights.string(), tokens.path(), allow_mismatch);
}

data::BpeTokenizer load_tokenizer(const ModelFiles& files, const std::string& path, bool allow_mismatch) {
  if (!path.empty() || files.tokenizer) {
    const std::string place = path.empty() ? *files.tokenizer : path;
    data::BpeTokenizer tokenizer = data::BpeTokenizer::load(place);
    const std::string expected = path.empty() ? files.tokenizer_fingerprint : fingerprint_of_model(files, path);
    require_same_tokenizer(expected, data::tokenizer_fingerprint(tokenizer), files.weights.string(), place,
                           allow_mismatch);
    return tokenizer;
  }
  std::string places;
  for (const auto& place : files.tokenizer_places) places += "\n  " + place;
  throw DataError(fmt::format("no tokenizer found; give --tokenizer FILE. Looked for:{}", places));
}

std::vector<std::int64_t> end_tokens(const ModelFiles& files, const std::optional<data::BpeTokenizer>& tokenizer) {
  std::vector<std::int64_t> ends = files.end_tokens;
  if (const auto own = tokenizer ? tokenizer->end_of_text() : std::nullopt; own && ends.empty()) ends = {*own};
  if (const auto& trained = files.document_end;
      trained && !ends.empty() && std::ranges::find(ends, *trained) == ends.end()) {
    log::warn_once(fmt::format(
        "the documents that the model in {} was trained on end {}, but its texts by token {}, as the files beside its "
        "tokenizer say: it may never end one; write the right eos_token_id into generation_config.json",
        files.weights.string(), data::document_end_text(*trained), fmt::join(ends, ", ")));
  }
  return ends;
}

namespace {

/// The description that Phalanx wrote into the header of weights has priority over a config.json that was changed
/// since.
void compare_with_headers(const ModelFiles& files) {
  for (const WeightsDescription& told : describe_weights(files.weights)) {
    const auto differences = models::model_differences(told.model, files.config);
    if (differences.empty()) continue;
    const std::string text =
        fmt::format("{} describes another model than the one whose weights are in {}:{}",
                    (files.weights / "config.json").string(), told.source, models::model_differences_text(differences));
    if (!files.allow_model_mismatch) {
      throw CheckpointError(
          text + "\nput the weights' own config.json there; --allow-model-mismatch takes this one all the same");
    }
    log::warn_once(text);
  }
}

void check_config(const ModelFiles& files) {
  try {
    files.config.validate();
  } catch (const ConfigError& error) {
    throw CheckpointError(fmt::format("{}: {}", files.weights.string(), error.what()));
  }
  const bool has_4_bits = files.hugging_face && !BitsAndBytesFiles(files.weights).names().empty();
  if (has_4_bits && !files.lora.has_nf4_base()) {
    throw CheckpointError(fmt::format(
        "{} holds matrices in 4 bits, of bitsandbytes: such a model is the base of adapters alone; expected "
        "an adapter as well (--adapter), or the model in 16 or 32 bits",
        files.weights.string()));
  }
  refuse_more_parameters_than_bytes(files.weights, models::least_bytes(files.config, files.lora),
                                    (files.weights / (files.hugging_face ? "config.json" : kManifestName)).string());
}

/// The activations' type is that of the adapters, too.
void add_adapters(models::Llama& model, const ModelFiles& files, c10::ScalarType dtype) {
  models::add_lora(model, files.lora, dtype);
  models::store_in_nf4(model, files.lora);
  model.set_activation_dtype(dtype);
}

/// What is not in 4 bits is rounded to 16, as where adapters are trained on such a base.
void round_to_bfloat16(const std::vector<NamedTensor>& tensors, const ModelFiles& files) {
  const at::NoGradGuard no_grad;
  bool is_other = false;
  for (const NamedTensor& one : tensors) {
    if (!one.tensor.is_floating_point()) continue;
    const at::Tensor rounded = one.tensor.to(at::kBFloat16).to(one.tensor.scalar_type());
    is_other = is_other || !at::equal(rounded, one.tensor);
    one.tensor.copy_(rounded);
  }
  if (!is_other) return;
  log::info(
      fmt::format("{}: what is not in 4 bits there is rounded to bfloat16, as in training with lora.base_dtype = "
                  "\"nf4\"",
                  files.weights.string()));
}

LoadedWeights load_4_bit_base(const ModelFiles& files, const std::vector<NamedTensor>& wanted,
                              const LoadWeightsOptions& options) {
  const std::vector<std::string> layers = models::nf4_layers(files.config, files.lora);
  const auto in_4_bits = std::make_shared<const BitsAndBytesFiles>(files.weights);
  std::unordered_set<std::string> matrices;
  for (const std::string& layer : layers) matrices.insert(models::file_layer_name(files.config, layer) + ".weight");
  LoadWeightsOptions of_others = options;
  of_others.elsewhere = [known = options.elsewhere, in_4_bits, matrices](const std::string& name) {
    return (known && known(name)) || matrices.contains(name) || in_4_bits->is_part(name);
  };
  const std::vector<NamedTensor> others = without_nf4_parts(layers, wanted);
  LoadedWeights loaded = load_weights(files.weights, others, of_others);
  round_to_bfloat16(others, files);
  load_nf4_layers(files.weights, layers, wanted, options);
  return loaded;
}

void load_into(models::Llama& model, const ModelFiles& files) {
  const bool whole = model.part().is_whole(files.config);
  LoadWeightsOptions options;
  if (files.hugging_face) {
    options = whole ? hf_weights(files.config) : hf_weights_of_part(files.config);
  } else if (!whole) {
    // A part of the model does not read the weights of the other parts.
    options.elsewhere = [shapes = models::llama_weight_shapes(files.config)](const std::string& name) {
      return shapes.contains(weight_of_nf4_scales(name)) || models::is_lora_name(name) || models::is_expert_bias(name);
    };
  }
  const std::vector<NamedTensor> parameters = nn::named_parameters(model);
  std::vector<NamedTensor> wanted = files.adapter.empty() ? parameters : base_among(parameters);
  if (files.config.has_expert_biases() || holds_expert_biases(files.weights)) {
    std::ranges::copy(models::make_expert_biases(model), std::back_inserter(wanted));
  }
  LoadedWeights loaded;
  if (files.hugging_face && files.lora.has_nf4_base()) {
    loaded = load_4_bit_base(files, wanted, options);
  } else {
    loaded = load_weights(files.weights, wanted, options);
  }
  if (!files.adapter.empty()) {
    load_adapter(read_peft_adapter(files.adapter), files.config, parameters,
                 {.all = whole, .allow_other_base = files.allows_other_base});
  }
  if (!loaded.ignored.empty()) {
    log::info(fmt::format("{}: not read: {}", files.weights.string(), brief_names(loaded.ignored)));
  }
  if (!files.not_honoured.empty()) log::info(files.not_honoured);
  if (files.hugging_face) compare_with_headers(files);  // after errors of single tensors, which are more informative
  model.eval();
}

}  // namespace

std::shared_ptr<models::Llama> load_model(const ModelFiles& files, c10::Device device, c10::ScalarType dtype) {
  check_config(files);
  auto model =
      std::make_shared<models::Llama>(files.config, nn::TensorOptionsOfModule{.dtype = dtype, .device = device});
  add_adapters(*model, files, dtype);
  load_into(*model, files);
  return model;
}

std::shared_ptr<models::Llama> load_model_shard(const ModelFiles& files, const ParallelPlan& plan,
                                                const DeviceMesh& mesh, c10::Device device, c10::ScalarType dtype) {
  const RankGroup ranks(mesh.world());
  ranks.run_collectively([&] {
    check_config(files);
    return std::string();
  });
  const auto& config = files.config;
  check(plan, models::model_dimensions(config, plan.tp, config.max_seq_len), mesh.world()->size(),
        {.tp = "--tp", .pp = "--pp"});
  models::LlamaPart part = models::full_llama(config);
  if (plan.pp > 1) {
    part = models::balance_llama(config, static_cast<int>(plan.pp), config.max_seq_len)
               .at(static_cast<std::size_t>(mesh.coordinate("pp")));
  }
  auto model =
      std::make_shared<models::Llama>(config, part, nn::TensorOptionsOfModule{.dtype = dtype, .device = device});
  add_adapters(*model, files, dtype);
  if (plan.tp > 1) models::parallelize_llama(*model, mesh, {.sequence_parallel = false});
  ranks.run_collectively([&] {  // each reads its own part, and may be the only one with an error
    load_into(*model, files);
    return std::string();
  });
  return model;
}

}  // namespace phalanx::infer
