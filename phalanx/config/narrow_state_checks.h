// What 16-bit weights and moments go together with: the rules of [training] dtype, and [optimizer] state_dtype and
// master_weights. Part of config_checks.cc.
#pragma once

#include <fmt/format.h>

#include "phalanx/base/error.h"
#include "phalanx/config/config.h"

namespace phalanx::config {

/// check(keys, body): runs the body, which may throw ConfigError, unless one of the keys is wrong in itself.
template <class Check>
void check_narrow_state(const TrainConfig& config, const Check& check) {
  const auto& optimizer = config.optimizer;
  const auto& training = config.training;
  const bool is_narrow = training.dtype == "bfloat16";
  check({"optimizer.name", "optimizer.state_dtype", "training.dtype"}, [&] {
    if (optimizer.name == "AdamW" || (!is_narrow && optimizer.state_dtype == "float32")) return;
    throw ConfigError(
        fmt::format("{} is \"bfloat16\", but [optimizer] name is \"{}\": only AdamW steps state of 16 bits; expected "
                    "name = \"AdamW\", or \"float32\" there",
                    is_narrow ? "[training] dtype" : "[optimizer] state_dtype", optimizer.name));
  });
  check({"training.dtype", "optimizer.master_weights"}, [&] {
    if (is_narrow || optimizer.master_weights) return;
    throw ConfigError(
        "[optimizer] master_weights is false, but [training] dtype is \"float32\": float32 weights have no master; "
        "expected master_weights = true, or dtype = \"bfloat16\"");
  });
  if (!is_narrow) return;
  check({"training.dtype", "training.mixed_precision_param"}, [&] {
    if (training.mixed_precision_param == "bfloat16") return;
    throw ConfigError(fmt::format(
        "[training] dtype is \"bfloat16\", but mixed_precision_param is \"{}\": weights are used in the type "
        "in which they are kept; set mixed_precision_param = \"bfloat16\"",
        training.mixed_precision_param));
  });
  const auto refuse = [&](const char* key, bool is_set, const std::string& setting, const char* why, const char* off) {
    check({"training.dtype", key}, [&] {
      if (!is_set) return;
      throw ConfigError(fmt::format("[training] dtype is \"bfloat16\", but {}: {}; expected {}, or dtype = \"float32\"",
                                    setting, why, off));
    });
  };
  refuse("ema.decay", config.ema.decay > 0, fmt::format("[ema] decay is {}", config.ema.decay),
         "an average is kept in the type of the weights, where small changes would be lost", "decay = 0");
  refuse("lora.rank", config.lora.rank > 0, fmt::format("[lora] rank is {}", config.lora.rank),
         "adapters are trained in float32 ([lora] base_dtype sets the type of their base)", "rank = 0");
  refuse("dpo.preferences", !config.dpo.preferences.empty(), "[dpo] tunes on preferences",
         "their reference was compared with one rank in float32 state alone", "no preferences");
  refuse("training.enable_cpu_offload", training.enable_cpu_offload, "enable_cpu_offload is true",
         "offloaded weights are kept in float32", "enable_cpu_offload = false");
  refuse("model.converters", !config.model.converters.empty(), "[model] converters asks for float8",
         "float8 products are made from float32 weights", "no converter");
}

}  // namespace phalanx::config
