#include "cli/worker/merge_worker.h"

#include <fmt/format.h>

#include <filesystem>
#include <string>
#include <system_error>

#include "cli/merge_arguments.h"
#include "phalanx/base/error.h"
#include "phalanx/base/folder_lock.h"
#include "phalanx/base/log.h"
#include "phalanx/checkpoint/adapter_weights.h"
#include "phalanx/checkpoint/files/weights_description.h"
#include "phalanx/infer/model_files.h"
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
  const auto weights = merged_weights(nn::named_parameters(*model), files.lora);
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
