// Finds and loads what generation needs: the model's shape, its weights, its tokenizer.
//
// `path` is one of
// - a run's folder or its checkpoint folder (the newest complete step is taken), or one of the step-N directories: the
//   shape is in the manifest, the tokenizer beside the checkpoint, in the run's folder, or where the run was told to
//   find it;
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

namespace phalanx::models {
class Llama;
}

namespace phalanx::infer {

struct ModelFiles {
  std::filesystem::path weights;  // step directory, or Hugging Face directory
  bool hugging_face = false;
  models::LlamaConfig config;
  std::optional<std::string> tokenizer;       // a tokenizer.json that exists
  std::string not_honoured;                   // what config.json says and is not done, in one line; logged on loading
  std::string tokenizer_fingerprint;          // of the one that its run was trained with; empty: not known
  std::optional<std::int64_t> document_end;   // the token that ended the documents of its run (data/token_file.h)
  std::vector<std::string> tokenizer_places;  // where one was looked for, for messages
  std::vector<std::int64_t> end_tokens;       // those that end a text, as generation_config.json or config.json says
  // Set by who asks for it: load config.json's model although Phalanx wrote these weights and says in their header that
  // they are of another. Else that is a CheckpointError of whatever loads them.
  bool allow_model_mismatch = false;
};

/// CheckpointError says what is missing or malformed.
ModelFiles find_model(const std::filesystem::path& path);

/// `path`, where given; else what was found. DataError says where one was looked for, or that it is another one, by
/// content, than the model's: that of its training run, or of its Hugging Face directory. With `allow_mismatch` that is
/// a warning.
data::BpeTokenizer load_tokenizer(const ModelFiles& files, const std::string& path = "", bool allow_mismatch = false);

/// The same for a file of token ids that names its tokenizer. Of both: a line in the log where either is not known.
void check_tokens(const ModelFiles& files, const data::TokenFile& tokens, bool allow_mismatch = false);

/// The tokens that end a text: what the model's directory says, else the tokenizer's own.
std::vector<std::int64_t> end_tokens(const ModelFiles& files, const std::optional<data::BpeTokenizer>& tokenizer);

std::shared_ptr<models::Llama> load_model(const ModelFiles& files, c10::Device device,
                                          c10::ScalarType dtype = c10::ScalarType::Float);

/// This rank's part of it: of pp parts by layers the mesh's, of each matrix what tp leaves. Reads no more than that.
/// ConfigError where the plan does not divide the model. Collective: what is wrong with one rank's files is the same
/// error on all.
///
///   const ParallelPlan plan{.pp = 2, .dp_replicate = 2, .tp = 2};
///   const DeviceMesh mesh(world, plan.axes());
///   auto part = infer::load_model_shard(files, plan, mesh, device);
///   infer::Generator generator(*part, {.stages = mesh.communicator("pp")});
std::shared_ptr<models::Llama> load_model_shard(const ModelFiles& files, const ParallelPlan& plan,
                                                const DeviceMesh& mesh, c10::Device device,
                                                c10::ScalarType dtype = c10::ScalarType::Float);

}  // namespace phalanx::infer
