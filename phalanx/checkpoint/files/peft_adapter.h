// Adapters on disk, in the format of the PEFT library: a folder with adapter_config.json and adapter_model.safetensors.
// It does not use torch.
//
//   const PeftAdapter adapter = read_peft_adapter("run/adapter");
//   require_base(adapter, "Llama-3.2-1B");                              // the base that it was trained on
//   add_lora(model, adapter.lora);
//
// PEFT calls a layer's A "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight". Which layers have adapters
// is read from these names. An adapter that Phalanx has saved also has the fingerprint of its base's weights
// (weights_identity.h) in the header of its safetensors file.
//
// Where the files' layer is several of ours (models/config/file_layers.h), each of these has an A and a B of its own.
// In PEFT's format their A's are one below the other, their B's blocks of a matrix that is zero elsewhere, and the rank
// and alpha of that layer are so many times the others', in rank_pattern and alpha_pattern. An adapter of PEFT with one
// A for the whole layer is taken, too: each part then begins with this A.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "phalanx/models/config/llama_config.h"
#include "phalanx/models/config/lora_config.h"

namespace phalanx {

inline constexpr const char* kAdapterConfigName = "adapter_config.json";
inline constexpr const char* kAdapterWeightsName = "adapter_model.safetensors";
/// If the output layer has an adapter, PEFT saves a copy of its weight, too.
inline constexpr const char* kOutputInAdapter = "base_model.model.lm_head.base_layer.weight";

struct PeftAdapter {
  std::filesystem::path folder;
  models::LoraOptions lora;                                 // target_modules are the layers' names in PEFT's file
  nlohmann::json base;                                      // the fingerprint of its base; null if nothing says it
  std::map<std::string, std::int64_t> ranks;                // rows of A, by a layer's name in PEFT's file
  std::map<std::string, double> other_ranks, other_alphas;  // by last names of layers that are several of ours
  bool fan_in_fan_out = false;
  bool has_output_weight = false;  // under kOutputInAdapter

  std::filesystem::path weights() const { return folder / kAdapterWeightsName; }
};

/// Throws CheckpointError for a folder without an adapter, and for kinds of adapters that Phalanx does not have. Such a
/// kind is any key of adapter_config.json that is not known to leave the numbers as they are, and is not null, false or
/// empty: DoRA, trained biases or whole modules, ranks or alphas that differ by layer (but of layers that are several
/// of ours), initial values (PiSSA, OLoRA) that change the base.
PeftAdapter read_peft_adapter(const std::filesystem::path& folder);

/// Identifies an adapter by the content of both of its files: {"bytes": 98304, "hash": ..., "config": hash}. Throws
/// CheckpointError if one is missing.
nlohmann::json adapter_identity(const std::filesystem::path& folder);

/// The layers of `model` that have adapters by options that a file gives. Throws CheckpointError that begins with
/// `where` if they do not fit the model.
std::vector<std::string> layers_with_adapters(const models::LlamaConfig& model, const models::LoraOptions& lora,
                                              const std::string& where);

/// The layers of `model` that `adapter` is for, ours, in the model's order. Throws CheckpointError for one that `model`
/// does not have, or that has no adapters here; for other ranks and alphas than those said above; and for
/// fan_in_fan_out unless `model` is a GPT-2.
std::vector<std::string> layers_of_adapter(const models::LlamaConfig& model, const PeftAdapter& adapter);

/// Throws CheckpointError if the weights at `base` are not those that the adapter was trained on; with `allow_mismatch`
/// that is a warning. If nothing says on which it was trained, that is logged. `flag` allows it; empty: nothing does.
void require_base(const PeftAdapter& adapter, const std::filesystem::path& base, bool allow_mismatch,
                  const std::string& flag = "--allow-base-mismatch");

/// "model.layers.0.self_attn.q_proj.lora_A" -> "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight".
std::string peft_name(const std::string& parameter_in_file);

/// The text of adapter_config.json. `base` is the path or name of the base model, for PEFT; empty: not said.
std::string peft_config_text(const models::LlamaConfig& model, const models::LoraOptions& lora,
                             const std::string& base);

/// The options as JSON, for a checkpoint's metadata, and back. Throws CheckpointError, which begins with `where`.
nlohmann::json lora_metadata(const models::LoraOptions& lora);
models::LoraOptions lora_from_metadata(const nlohmann::json& json, const std::string& where);

/// The key of the base's fingerprint in a checkpoint's metadata and in an adapter's header.
inline constexpr const char* kBaseInMetadata = "base";
inline constexpr const char* kLoraInMetadata = "lora";

}  // namespace phalanx
