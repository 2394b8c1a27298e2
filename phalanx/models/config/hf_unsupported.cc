#include "phalanx/models/config/hf_unsupported.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "phalanx/base/error.h"
#include "phalanx/base/json_text.h"
#include "phalanx/models/config/hf_config.h"
#include "phalanx/models/config/hf_families.h"
#include "phalanx/models/config/llama_config.h"

namespace phalanx::models {
namespace {

template <std::size_t N>
using Keys = std::array<std::string_view, N>;

template <std::size_t N>
bool is_among(std::string_view key, const Keys<N>& keys) {
  return std::ranges::find(keys, key) != keys.end();
}

constexpr double kInitializerRange = 0.02;  // of initial weights here

// Keys of transformers itself: for generation, a training loop or a task head. No logit depends on them.
constexpr Keys<39> kHarmless = {"architectures",
                                "model_type",
                                "torch_dtype",
                                "dtype",
                                "transformers_version",
                                "use_cache",
                                "bos_token_id",
                                "eos_token_id",
                                "pad_token_id",
                                "unk_token_id",
                                "sep_token_id",
                                "decoder_start_token_id",
                                "_name_or_path",
                                "name_or_path",
                                "pretraining_tp",
                                "task_specific_params",
                                "n_ctx",
                                "id2label",
                                "label2id",
                                "return_dict",
                                "output_attentions",
                                "output_hidden_states",
                                "gradient_checkpointing",
                                "_attn_implementation",
                                "attn_implementation",
                                "tokenizer_class",
                                "problem_type",
                                "router_aux_loss_coef",
                                "finetuning_task",
                                "_commit_hash",
                                "is_decoder",
                                "is_encoder_decoder",
                                "tie_encoder_decoder",
                                "chunk_size_feed_forward",
                                "torchscript",
                                "ep_size",
                                "seq_aux",
                                "aux_loss_alpha",
                                "qk_head_dim"};
constexpr Keys<4> kRead = {"vocab_size", "tie_word_embeddings", "quantization_config", "initializer_range"};
constexpr Keys<20> kReadOfLlama = {"hidden_size",
                                   "intermediate_size",
                                   "num_hidden_layers",
                                   "num_attention_heads",
                                   "num_key_value_heads",
                                   "head_dim",
                                   "max_position_embeddings",
                                   "rope_theta",
                                   "rope_scaling",
                                   "rope_parameters",
                                   "partial_rotary_factor",
                                   "rms_norm_eps",
                                   "hidden_act",
                                   "attention_bias",
                                   "mlp_bias",
                                   "output_router_logits",
                                   "num_experts",
                                   "num_local_experts",
                                   "is_causal",
                                   "router_jitter_noise"};
constexpr Keys<4> kReadOfRope = {"rope_type", "type", "rope_theta", "partial_rotary_factor"};
constexpr Keys<3> kReadOfLlama3Rope = {"low_freq_factor", "high_freq_factor", "original_max_position_embeddings"};
constexpr Keys<7> kReadOfYarn = {"attention_factor",
                                 "beta_fast",
                                 "beta_slow",
                                 "mscale",
                                 "mscale_all_dim",
                                 "truncate",
                                 "original_max_position_embeddings"};
constexpr Keys<4> kReadOfLongrope = {"attention_factor", "short_factor", "long_factor",
                                     "original_max_position_embeddings"};
constexpr Keys<12> kReadOfGpt2 = {"is_causal",
                                  "n_embd",
                                  "n_layer",
                                  "n_head",
                                  "n_inner",
                                  "n_positions",
                                  "layer_norm_epsilon",
                                  "activation_function",
                                  "scale_attn_weights",
                                  "scale_attn_by_inverse_layer_idx",
                                  "reorder_and_upcast_attn",
                                  "add_cross_attention"};
constexpr Keys<3> kDropoutOfGpt2 = {"resid_pdrop", "embd_pdrop", "attn_pdrop"};
constexpr double kGpt2Dropout = 0.1;  // if the file does not say

bool says_nothing(const nlohmann::json& value) {
  const bool is_empty_text =
      value.is_string() && value.get_ref<const std::string&>().empty();  // json::empty() is false
  return value.is_null() || value == false || value == 0 || is_empty_text || (value.is_structured() && value.empty());
}

std::string brief(const nlohmann::json& value) { return value.dump(-1, ' ', /*ensure_ascii=*/true).substr(0, 60); }

void add(std::string& list, const std::string& item) {
  if (!list.empty()) list += ", ";
  list += item;
}

bool is_read(LlamaFamily family, std::string_view key) {
  if (is_among(key, kRead)) return true;
  if (family == LlamaFamily::gpt2) return is_among(key, kReadOfGpt2);
  const auto& own = hf_family(family).keys;
  // Read from its own key, if there is one.
  if (key == "hidden_act" && hf_family(family).activation_key != key) return false;
  return is_among(key, kReadOfLlama) || std::ranges::find(own, key) != own.end();
}

/// "original_max_position_embeddings" outside the rotary settings.
bool reads_original_length(const nlohmann::json& json) {
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (!json.contains(key) || !json.at(key).is_object()) continue;
    const auto& rope = json.at(key);
    const auto type = rope.value("rope_type", rope.value("type", nlohmann::json("default")));
    if (type == "yarn" || type == "longrope" || type == "su" || type == "llama3") return true;
  }
  return false;
}

/// Which of its keys matter depends on its type.
void add_unread_of_rope(std::string& unread, const std::string& name,
                        const nlohmann::json& rope,  // NOLINT(misc-no-recursion): two levels
                        LlamaFamily family) {
  if (!rope.is_object()) return;
  auto type = rope.value("rope_type", rope.value("type", nlohmann::json("default")));
  if (family == LlamaFamily::phi3 && (type == "su" || type == "yarn")) type = "longrope";
  for (const auto& [key, value] : rope.items()) {
    if (value.is_object() && traits_of(family).layers_have_thetas) {
      add_unread_of_rope(unread, fmt::format("{}.{}", name, key), value, family);
      continue;
    }
    const bool is_read = is_among(key, kReadOfRope) || (key == "factor" && type != "default") ||
                         (type == "llama3" && is_among(key, kReadOfLlama3Rope)) ||
                         (type == "yarn" && is_among(key, kReadOfYarn)) ||
                         (type == "longrope" && is_among(key, kReadOfLongrope));
    if (!is_read && !says_nothing(value)) add(unread, fmt::format("{}.{} {}", name, key, brief(value)));
  }
}

bool names_architecture(const nlohmann::json& names, LlamaFamily family) {
  return names.is_array() && std::ranges::find(names, nlohmann::json(hf_architecture(family))) != names.end();
}

}  // namespace

std::string hf_unsupported(const std::string& text, const std::string& file) {
  const auto json = parse_json_object<CheckpointError>(text, file);
  const auto type = json.find("model_type");
  const bool has_type = type != json.end() && type->is_string();
  const LlamaFamily family =
      (has_type ? family_from_name(type->get<std::string>()) : std::nullopt).value_or(LlamaFamily::llama);
  const bool is_gpt2 = family == LlamaFamily::gpt2;
  std::string dropout, initial, unread;
  if (is_gpt2) {
    for (const std::string_view key : kDropoutOfGpt2) {
      if (!json.contains(key)) add(dropout, fmt::format("{} {}", key, kGpt2Dropout));
    }
  }
  for (const auto& [key, value] : json.items()) {
    const bool is_dropout = key.find("dropout") != key.npos || key.ends_with("_pdrop");
    const bool is_of_a_head = key.starts_with("summary_") || key == "classifier_dropout";
    if (says_nothing(value) || is_of_a_head) continue;
    if (is_dropout) {
      add(dropout, fmt::format("{} {}", key, brief(value)));
    } else if (key == "initializer_range" && value != kInitializerRange) {
      initial =
          fmt::format("initializer_range {} (initial weights are drawn with {})", brief(value), kInitializerRange);
    } else if (key == "rope_scaling" || key == "rope_parameters") {
      if (!is_gpt2) add_unread_of_rope(unread, key, value, family);
    } else if (key == "original_max_position_embeddings" && !is_gpt2 && reads_original_length(json)) {
      continue;
    } else if (key == "architectures" && !names_architecture(value, family)) {
      add(unread, fmt::format("architectures {} (read as {})", brief(value), hf_architecture(family)));
    } else if (!is_read(family, key) && !is_among(key, kHarmless)) {
      add(unread, fmt::format("{} {}", key, brief(value)));
    }
  }
  if (!dropout.empty()) dropout += " (there is no dropout)";
  std::string not_honoured = dropout;
  if (!initial.empty()) add(not_honoured, initial);
  std::string line;
  if (!not_honoured.empty()) line += "not honoured: " + not_honoured;
  if (!unread.empty()) line += (line.empty() ? "not read: " : "; not read: ") + unread;
  return line.empty() ? line : fmt::format("{}: {}", file, line);
}

}  // namespace phalanx::models
