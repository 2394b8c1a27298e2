// Loads and saves the values of adapters in PEFT's format (checkpoint/files/peft_adapter.h).
//
//   const PeftAdapter adapter = read_peft_adapter("run/adapter");
//   add_lora(model, adapter.lora);
//   load_adapter(adapter, model.config(), nn::named_parameters(model));
#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "phalanx/checkpoint/files/peft_adapter.h"
#include "phalanx/models/config/llama_config.h"
#include "phalanx/tensor/named.h"

namespace phalanx {

/// Those of the tensors that are parts of adapters, or those that are not.
std::vector<NamedTensor> adapters_among(const std::vector<NamedTensor>& tensors);
std::vector<NamedTensor> base_among(const std::vector<NamedTensor>& tensors);

struct LoadAdapterOptions {
  bool all = true;                // of the model's adapters are among the tensors
  bool allow_other_base = false;  // a copy of the output layer's weight in the file need not be the base's
};

/// Fills the adapters among `tensors`, converted to their types. A tensor with a shard reads its box. Throws
/// CheckpointError, before any is changed, if one is missing or has another shape; and, if `all` of the model's are
/// there, if the file has more. Some may be changed when it throws because of values: if a layer that is several of
/// ours has an A for each of them, and one part's B is not zero where it would use another's A; or if the file has
/// another weight of the output layer than `tensors`, whose base is loaded already.
void load_adapter(const PeftAdapter& adapter, const models::LlamaConfig& model, const std::vector<NamedTensor>& tensors,
                  const LoadAdapterOptions& how = {});

struct SaveAdapterOptions {
  std::string base_name;  // for PEFT: the path or name of the base model
  std::string metadata;   // of a checkpoint; its publishable part and the base's fingerprint go into the header
};

/// Writes the adapters among `tensors`, in float32. Creates the folder. The weights appear when they are complete.
/// Throws Error if a tensor is a rank's part of one, or if half of an adapter is not there.
void save_adapter(const std::filesystem::path& folder, const models::LlamaConfig& model,
                  const models::LoraOptions& lora, const std::vector<NamedTensor>& tensors,
                  const SaveAdapterOptions& options);

/// The base's tensors with what the adapters add, W + scale B A, in new memory where there is an adapter, in the
/// wider one of their types; a base in NF4 is fp32. In float32 these are the bits of PEFT's merge, whose products are
/// those of the files' layers.
/// Throws Error if any tensor is a rank's part of one, or if an adapter has no base.
std::vector<NamedTensor> merged_weights(const std::vector<NamedTensor>& tensors, const models::LlamaConfig& model,
                                        const models::LoraOptions& lora);

}  // namespace phalanx
