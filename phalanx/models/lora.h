// Low-rank adapters (LoRA) on the linear layers of a Llama: y = W x + scale B (A dropout(x)).
//
//   models::Llama model(config, {.without_memory = true});
//   add_lora(model, {.rank = 16, .alpha = 32, .target_modules = {"q_proj", "v_proj"}});
//   parallelize_llama(model, mesh);                      // adapters are cut with their layers
//   nn::initialise(model, seed);                         // A random, B zero: the model computes what its base does
//
// An adapter is two parameters of its layer, layers.N.attention.wq.lora_A [rank, in] and .lora_B [out, rank]. A part of
// a model gets the adapters of its own layers. Which parameters are trained is not decided here.
// REQUIRES: called before the model is split, sharded or attached to data parallelism.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "phalanx/models/config/lora_config.h"
#include "phalanx/models/llama.h"

namespace phalanx::models {

/// Does nothing if the rank is 0. ConfigError as of lora_layers().
/// `dtype`: of the adapters; unset: that of the weights.
void add_lora(Llama& model, const LoraOptions& options, std::optional<at::ScalarType> dtype = {});

/// Stores the weights of nf4_layers() in 4 bits, without values. Does nothing for another base.
/// ConfigError where rows are no whole blocks.
void store_in_nf4(Llama& model, const LoraOptions& options);

/// From now on the type of a frozen base is for storage alone: products, looked-up rows and hidden states have that of
/// `activations`.
void use_narrow_base(Llama& model, at::ScalarType activations);

}  // namespace phalanx::models
