#include "phalanx/checkpoint/files/hf_model.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string>
#include <system_error>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/log.h"
#include "phalanx/checkpoint/files/hf_files.h"
#include "phalanx/checkpoint/files/mismatch.h"
#include "phalanx/checkpoint/files/peft_adapter.h"
#include "phalanx/checkpoint/files/weights_description.h"
#include "phalanx/data/tokenizer/bpe_tokenizer.h"
#include "phalanx/data/tokenizer/tokenizer_fingerprint.h"
#include "phalanx/models/config/hf_names.h"
#include "phalanx/models/config/llama_json.h"
#include "phalanx/models/config/parameter_kinds.h"

namespace phalanx {
namespace {

using safetensors::Dtype;

models::LlamaConfig shape_of_model(const SavedState& saved) {
  const std::string where = (saved.folder() / kManifestName).string();
  const auto metadata = nlohmann::json::parse(saved.manifest().metadata);
  if (!metadata.contains("model") || !metadata["model"].is_object()) {
    throw CheckpointError(
        fmt::format("{} does not say the model's shape (metadata.model): it was not saved by `phalanx train`; without "
                    "it there can be no config.json",
                    where));
  }
  return models::llama_from_checkpoint(metadata["model"], where);
}

void require_weights_of(const models::LlamaConfig& config, const SavedState& saved) {
  constexpr std::string_view kPrefix = "model.";
  const auto shapes = models::llama_weight_shapes(config);
  Mismatches mismatches;
  for (const auto& [name, shape] : shapes) {
    const auto* found = saved.find(std::string(kPrefix) + name);
    const safetensors::TensorInfo wanted{
        .name = std::string(kPrefix) + name, .dtype = found ? found->dtype : Dtype::f32, .shape = shape};
    if (found == nullptr) {
      mismatches.missing(wanted);
    } else if (found->shape != shape) {
      mismatches.differs(wanted, {.name = found->name, .dtype = found->dtype, .shape = found->shape});
    }
  }
  for (const auto& tensor : saved.tensors()) {
    const bool is_of_model = tensor.name.starts_with(kPrefix) && shapes.contains(tensor.name.substr(kPrefix.size()));
    if (!is_of_model && models::is_expert_bias(tensor.name)) {
      throw CheckpointError(fmt::format(
          "{} has biases by which experts are chosen ({}): Hugging Face's files of this model have no place "
          "for them, and without them it is another model; `phalanx generate` reads the checkpoint itself",
          saved.folder().string(), tensor.name));
    }
    if (!tensor.name.starts_with(kPrefix) || is_of_model) continue;
    mismatches.unexpected({.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape});
  }
  mismatches.throw_if_any(
      fmt::format("{} does not hold the model that its metadata describes", saved.folder().string()));
}

std::string torch_name(Dtype dtype) {
  switch (dtype) {
    case Dtype::bf16:
      return "bfloat16";
    case Dtype::f16:
      return "float16";
    case Dtype::f64:
      return "float64";
    default:
      return "float32";
  }
}

/// The run's tokenizer: beside the checkpoint, in the run's folder, or where the run's configuration said.
std::filesystem::path assets_of_run(const SavedState& saved) {
  const auto metadata = nlohmann::json::parse(saved.manifest().metadata);
  const auto entry = metadata.find("hf_assets_path");
  const std::string told = entry != metadata.end() && entry->is_string() ? entry->get<std::string>() : std::string();
  const auto checkpoints = std::filesystem::absolute(saved.folder()).lexically_normal().parent_path();
  std::error_code error;
  std::filesystem::path named = told;
  if (!told.empty() && std::filesystem::is_regular_file(named, error)) return named;  // the tokenizer.json itself
  std::vector<std::filesystem::path> places{saved.folder(), checkpoints, checkpoints.parent_path()};
  if (!told.empty()) places.insert(places.begin(), named);
  for (const auto& folder : places) {
    if (std::filesystem::is_regular_file(folder / "tokenizer.json", error)) return folder;
  }
  if (!told.empty() && std::filesystem::exists(named, error)) return named;  // hf_files() reports what is missing
  if (!told.empty()) {
    log::warn(
        fmt::format("{}, where the run had its tokenizer (model.hf_assets_path), is not there: written without "
                    "it, and without a token that ends a text; name its folder with --assets",
                    told));
  }
  return {};
}

/// The tokenizer that is exported with the weights must be the one they were trained with. If either is unknown, this
/// is logged.
void require_own_tokenizer(const SavedState& saved, const std::filesystem::path& assets, bool allow_mismatch) {
  const auto folder = assets.filename() == "tokenizer.json" ? assets.parent_path() : assets;
  const auto path = folder / "tokenizer.json";
  std::error_code error;
  if (assets.empty() || !std::filesystem::is_regular_file(path, error)) return;
  const std::string trained = tokenizer_in_metadata(saved.manifest().metadata);
  const std::string found = data::fingerprint_of_file(path);  // if "", hf_files() reports why
  if (!data::are_other_tokenizers(trained, found)) {
    if (found != trained) {
      log::info(fmt::format("the tokenizer of {} ({}) could not be compared with that of the checkpoint ({})",
                            path.string(), found.empty() ? "not said" : found, trained.empty() ? "not said" : trained));
    }
    return;
  }
  const std::string text = fmt::format("{} is the tokenizer {}, but {} was trained with {}", path.string(), found,
                                       saved.folder().string(), trained);
  if (!allow_mismatch) {
    throw CheckpointError(text +
                          ": the model's ids would mean other texts; name the folder of its own by --assets, or write "
                          "it all the same by --allow-tokenizer-mismatch");
  }
  log::warn(text + ": written all the same, as --allow-tokenizer-mismatch says");
}

}  // namespace

WrittenFiles consolidate_for_hf(SavedState& saved, const std::filesystem::path& folder, ConsolidateOptions options,
                                const std::filesystem::path& assets, FileSystem& fs) {
  const models::LlamaConfig config = shape_of_model(saved);
  if (nlohmann::json::parse(saved.manifest().metadata).contains(kLoraInMetadata)) {
    throw CheckpointError(fmt::format(
        "{} is of a run that trains adapters ([lora]): `phalanx checkpoint merge` writes its base with them added",
        saved.folder().string()));
  }
  require_weights_of(config, saved);
  const Dtype dtype = options.dtype.value_or(saved.find("model.norm.weight")->dtype);
  options.key_mapping = [&](const std::string& name) { return models::hf_tensor_view(config, name); };
  const std::filesystem::path source = assets.empty() ? assets_of_run(saved) : assets;
  require_own_tokenizer(saved, source, options.allow_tokenizer_mismatch);
  options.beside = hf_files(config, torch_name(dtype), source);
  compare_end_tokens(options.beside, saved.manifest().metadata);
  return consolidate(saved, folder, options, fs);
}

}  // namespace phalanx
