#include "cli/worker/merge_worker.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <string>
#include <system_error>
#include <vector>

#include "cli/merge_arguments.h"
#include "phalanx/base/error.h"
#include "phalanx/base/folder_lock.h"
#include "phalanx/base/log.h"
#include "phalanx/checkpoint/adapter_weights.h"
#include "phalanx/checkpoint/expert_biases.h"
#include "phalanx/checkpoint/files/weights_description.h"
#include "phalanx/checkpoint/hf_weights.h"
#include "phalanx/checkpoint/weights.h"
#include "phalanx/infer/model_files.h"
#include "phalanx/models/expert_bias.h"
#include "phalanx/models/llama.h"
#include "phalanx/nn/init.h"
#include "phalanx/train/hf_export.h"

namespace phalanx::cli {
namespace {

void require_new_folder(const std::string& out) {
  std::error_code error;
  if (!std::filesystem::exists(out, error) || std::filesystem::is_empty(out, error)) return;
  throw CheckpointError(fmt::format("{} exists already, and is not empty: name a new directory", out));
}

/// What the weights say of themselves; empty: nothing.
std::string metadata_of(const infer::ModelFiles& files) {
  for (const WeightsDescription& told : describe_weights(files.weights)) {
    if (!told.metadata.empty() && told.metadata != "{}") return told.metadata;
  }
  return "";
}

/// The biases by which experts are chosen, which are no parameters of the model.
std::vector<NamedTensor> expert_biases(models::Llama& model, const infer::ModelFiles& files) {
  if (!files.config.has_expert_biases()) {
    if (!holds_expert_biases(files.weights)) return {};
    throw CheckpointError(fmt::format(
        "{} holds biases by which experts are chosen, for which Hugging Face's files of the family {} have no "
        "place: the merged model would choose other experts; expected a base without them",
        files.weights.string(), models::family_name(files.config.family)));
  }
  std::vector<NamedTensor> biases = models::make_expert_biases(model);
  LoadWeightsOptions options = files.hugging_face ? hf_weights(files.config) : LoadWeightsOptions();
  options.elsewhere = [](const std::string&) { return true; };
  load_weights(files.weights, biases, options);
  return biases;
}

}  // namespace

int merge_worker(const Arguments& arguments) {
  const MergeArguments parsed = parse_merge_arguments(arguments);
  require_new_folder(parsed.out);
  const OwnerLocks locks({parsed.out}, {.advice = "choose another OUT"});
  for (const std::string& line : locks.warnings()) log::warn(line);
  infer::ModelFiles files = infer::find_model(parsed.model);
  if (!parsed.adapter.empty()) infer::take_adapter(files, parsed.adapter, parsed.allow_base_mismatch);
  if (files.lora.rank == 0) {
    throw UsageError(fmt::format(
        "{} has no adapters: expected --adapter DIR, or the folder of a run that trains adapters", parsed.model));
  }
  const auto model = infer::load_model(files, at::kCPU);
  std::vector<NamedTensor> weights = merged_weights(nn::named_parameters(*model), files.config, files.lora);
  std::ranges::copy(expert_biases(*model, files), std::back_inserter(weights));
  const std::filesystem::path assets =
      files.tokenizer ? std::filesystem::path(*files.tokenizer).parent_path() : std::filesystem::path();
  const auto written = train::export_in_hf(parsed.out, files.config, weights,
                                           {.assets = assets,
                                            .metadata = metadata_of(files),
                                            .dtype = parsed.dtype,
                                            .max_file_bytes = parsed.max_file_bytes});
  if (!parsed.quiet) {
    fmt::print("{}: {} layers merged, {} in {}\n", parsed.out, models::lora_layers(files.config, files.lora).size(),
               parsed.dtype, written.size() == 1 ? "1 file" : fmt::format("{} files", written.size() - 1));
  }
  return 0;
}

}  // namespace phalanx::cli
