// Finds and loads what generation needs: the model's shape, its weights, its tokenizer.
//
// `path` is one of
// - a run's folder or its checkpoint folder (the newest complete step is used), or one of the step-N directories. The
//   shape is in the manifest. The tokenizer is beside the checkpoint, in the run's folder, or where the run's
//   configuration said;
// - a Hugging Face directory: config.json, safetensors, tokenizer.json.
//
//   auto files = infer::find_model("outputs/checkpoint");
//   auto model = infer::load_model(files, at::kCPU);
//   if (files.tokenizer) auto tokenizer = data::BpeTokenizer::load(*files.tokenizer);
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/data/token_file.h"
#include "phalanx/data/tokenizer/bpe_tokenizer.h"
#include "phalanx/layout/parallel_plan.h"
#include "phalanx/mesh/device_mesh.h"
#include "phalanx/models/config/llama_config.h"
#include "phalanx/models/config/lora_config.h"

namespace phalanx::models {
class Llama;
}

namespace phalanx::infer {

struct ModelFiles {
  std::filesystem::path weights;  // step directory, or Hugging Face directory
  bool hugging_face = false;
  models::LlamaConfig config;
  std::optional<std::string> tokenizer;       // a tokenizer.json that exists
  std::string not_honoured;                   // settings of config.json that are ignored, in one line; logged on load
  std::string tokenizer_fingerprint;          // of the tokenizer its run was trained with; empty: unknown
  std::optional<std::int64_t> document_end;   // the token that ended the documents of its run (data/token_file.h)
  std::vector<std::string> tokenizer_places;  // paths searched for a tokenizer, for messages
  std::vector<std::int64_t> end_tokens;       // those that end a text, from generation_config.json or config.json
  models::LoraOptions lora;        // the adapters' that are among the weights of a run's checkpoint, or in `adapter`
  std::filesystem::path adapter;   // a folder as PEFT saves it; empty: none. Set by take_adapter()
  bool allows_other_base = false;  // for `adapter`. Set by take_adapter()
  // Set by the caller: load config.json's model although Phalanx wrote these weights and their header names another
  // model. Else whatever loads them throws CheckpointError.
  bool allow_model_mismatch = false;
};

/// Throws CheckpointError that says what is missing or malformed.
ModelFiles find_model(const std::filesystem::path& path);

/// From now on the model has this adapter (checkpoint/files/peft_adapter.h). Matrices that bitsandbytes has quantised
/// (NF4) stay in 4 bits; without an adapter they are refused at loading. Throws CheckpointError if there is none, if
/// it was trained on another base, unless that is allowed, and if the model is a run's with adapters of its own.
void take_adapter(ModelFiles& files, const std::filesystem::path& folder, bool allow_base_mismatch);

/// Loads the tokenizer at `path`; if that is empty, the one that was found. Throws DataError that lists the paths
/// searched if there is none. Also throws it if the tokenizer differs, by content, from the model's: that of its
/// training run, or of its Hugging Face directory. With `allow_mismatch` that is a warning.
data::BpeTokenizer load_tokenizer(const ModelFiles& files, const std::string& path = "", bool allow_mismatch = false);

/// The same for a file of token ids that names its tokenizer. Both functions log a line if either tokenizer is unknown.
void check_tokens(const ModelFiles& files, const data::TokenFile& tokens, bool allow_mismatch = false);

/// The tokens that end a text: those of the model's directory, else the tokenizer's own.
std::vector<std::int64_t> end_tokens(const ModelFiles& files, const std::optional<data::BpeTokenizer>& tokenizer);

std::shared_ptr<models::Llama> load_model(const ModelFiles& files, c10::Device device,
                                          c10::ScalarType dtype = c10::ScalarType::Float);

/// Collective. Loads this rank's part of the model: its pipeline stage of the mesh, and its tensor-parallel part of
/// each matrix. It reads no more than that. Throws ConfigError if the plan does not divide the model. An error in one
/// rank's files is the same error on all ranks.
///
///   const ParallelPlan plan{.pp = 2, .dp_replicate = 2, .tp = 2};
///   const DeviceMesh mesh(world, plan.axes());
///   auto part = infer::load_model_shard(files, plan, mesh, device);
///   infer::Generator generator(*part, {.stages = mesh.communicator("pp")});
std::shared_ptr<models::Llama> load_model_shard(const ModelFiles& files, const ParallelPlan& plan,
                                                const DeviceMesh& mesh, c10::Device device,
                                                c10::ScalarType dtype = c10::ScalarType::Float);

}  // namespace phalanx::infer
