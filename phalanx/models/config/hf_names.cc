#include "phalanx/models/config/hf_names.h"

#include <fmt/format.h>

#include <array>
#include <cstdint>
#include <optional>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/models/config/hf_families.h"

namespace phalanx::models {
namespace {

constexpr std::array<std::pair<const char*, const char*>, 3> kOutside = {{
    {"tok_embeddings.weight", "model.embed_tokens.weight"},
    {"norm.weight", "model.norm.weight"},
    {"output.weight", "lm_head.weight"},
}};
constexpr std::array<std::pair<const char*, const char*>, 15> kInLayer = {{
    {"attention.wq.weight", "self_attn.q_proj.weight"},
    {"attention.wk.weight", "self_attn.k_proj.weight"},
    {"attention.wv.weight", "self_attn.v_proj.weight"},
    {"attention.wo.weight", "self_attn.o_proj.weight"},
    {"attention.wq.bias", "self_attn.q_proj.bias"},
    {"attention.wk.bias", "self_attn.k_proj.bias"},
    {"attention.wv.bias", "self_attn.v_proj.bias"},
    {"attention.q_norm.weight", "self_attn.q_norm.weight"},
    {"attention.k_norm.weight", "self_attn.k_norm.weight"},
    {"feed_forward.w1.weight", "mlp.gate_proj.weight"},
    {"feed_forward.w2.weight", "mlp.down_proj.weight"},
    {"feed_forward.w3.weight", "mlp.up_proj.weight"},
    {"moe.gate.weight", "block_sparse_moe.gate.weight"},
    {"attention_norm.weight", "input_layernorm.weight"},
    {"ffn_norm.weight", "post_attention_layernorm.weight"},
}};

// An expert's three matrices have the same names on both sides.
constexpr const char* kExperts = "moe.experts.";
constexpr const char* kHfExperts = "block_sparse_moe.experts.";

constexpr const char* kPhi3Attention = "self_attn.qkv_proj.weight";
constexpr const char* kPhi3FeedForward = "mlp.gate_up_proj.weight";

struct Gpt2TensorView {
  const char* ours;
  const char* theirs;
  FileTensorView::Form form = {};
};
constexpr FileTensorView::Form kTurned = {.transposed = true};
constexpr std::array<Gpt2TensorView, 5> kGpt2Outside = {{
    {"tok_embeddings.weight", "transformer.wte.weight"},
    {"pos_embeddings.weight", "transformer.wpe.weight"},
    {"norm.weight", "transformer.ln_f.weight"},
    {"norm.bias", "transformer.ln_f.bias"},
    {"output.weight", "lm_head.weight"},
}};
// In the files the matrices are [in, out], and queries, keys and values form one matrix.
constexpr std::array<Gpt2TensorView, 16> kGpt2InLayer = {{
    {"attention.wq.weight", "attn.c_attn.weight", {.transposed = true, .part = 0, .parts = 3}},
    {"attention.wk.weight", "attn.c_attn.weight", {.transposed = true, .part = 1, .parts = 3}},
    {"attention.wv.weight", "attn.c_attn.weight", {.transposed = true, .part = 2, .parts = 3}},
    {"attention.wq.bias", "attn.c_attn.bias", {.part = 0, .parts = 3}},
    {"attention.wk.bias", "attn.c_attn.bias", {.part = 1, .parts = 3}},
    {"attention.wv.bias", "attn.c_attn.bias", {.part = 2, .parts = 3}},
    {"attention.wo.weight", "attn.c_proj.weight", kTurned},
    {"attention.wo.bias", "attn.c_proj.bias"},
    {"feed_forward.w1.weight", "mlp.c_fc.weight", kTurned},
    {"feed_forward.w1.bias", "mlp.c_fc.bias"},
    {"feed_forward.w2.weight", "mlp.c_proj.weight", kTurned},
    {"feed_forward.w2.bias", "mlp.c_proj.bias"},
    {"attention_norm.weight", "ln_1.weight"},
    {"attention_norm.bias", "ln_1.bias"},
    {"ffn_norm.weight", "ln_2.weight"},
    {"ffn_norm.bias", "ln_2.bias"},
}};

/// Splits "<prefix><digits>.<rest>" into digits and rest. Empty strings if the name has another form.
std::pair<std::string, std::string> split_layer(const std::string& name, const std::string& prefix) {
  if (!name.starts_with(prefix)) return {};
  const std::size_t dot = name.find('.', prefix.size());
  if (dot == std::string::npos || dot == prefix.size()) return {};
  const std::string digits = name.substr(prefix.size(), dot - prefix.size());
  if (digits.find_first_not_of("0123456789") != std::string::npos) return {};
  return {digits, name.substr(dot + 1)};
}

FileTensorView phi3_tensor_view(const LlamaConfig& config, const std::string& name, const std::string& rest) {
  // One matrix of queries, keys and values, in units of the keys' rows; one of gate and up.
  const std::int64_t groups = config.n_heads / config.n_kv_heads, units = groups + 2;
  const auto in = [&](const char* whole, const FileTensorView::Form& form) {
    return FileTensorView(name.substr(0, name.size() - rest.size()) + whole, form);
  };
  if (rest == "self_attn.q_proj.weight") return in(kPhi3Attention, {.parts = units, .span = groups});
  if (rest == "self_attn.k_proj.weight") return in(kPhi3Attention, {.part = groups, .parts = units});
  if (rest == "self_attn.v_proj.weight") return in(kPhi3Attention, {.part = groups + 1, .parts = units});
  if (rest == "mlp.gate_proj.weight") return in(kPhi3FeedForward, {.part = 0, .parts = 2});
  if (rest == "mlp.up_proj.weight") return in(kPhi3FeedForward, {.part = 1, .parts = 2});
  return name;
}

/// One tensor lists the matrices of all experts, as [in, out]. Gate and up alternate in its columns.
std::optional<FileTensorView> gpt_oss_expert(const LlamaConfig& config, const std::string& layer,
                                             const std::string& rest) {
  const auto [number, parameter] = split_layer(rest, kExperts);
  if (number.empty()) return std::nullopt;
  const std::int64_t slice = std::stoll(number);
  const auto in = [&](const char* name, FileTensorView::Form form) {
    form.slice = slice;
    form.slices = config.experts;
    return FileTensorView(fmt::format("model.layers.{}.mlp.experts.{}", layer, name), form);
  };
  for (const auto& [ours, part] : {std::pair("w1", 0), {"w3", 1}}) {
    if (parameter == fmt::format("{}.weight", ours)) {
      return in("gate_up_proj", {.transposed = true, .part = part, .parts = 2, .alternate = true});
    }
    if (parameter == fmt::format("{}.bias", ours)) {
      return in("gate_up_proj_bias", {.part = part, .parts = 2, .alternate = true});
    }
  }
  if (parameter == "w2.weight") return in("down_proj", kTurned);
  if (parameter == "w2.bias") return in("down_proj_bias", {});
  return std::nullopt;
}

/// "<prefix><digits>.<rest>" with another prefix, if rest is a matrix of an expert; otherwise empty.
std::string expert_name(const std::string& name, const std::string& from, const std::string& to) {
  const auto [number, rest] = split_layer(name, from);
  if (rest != "w1.weight" && rest != "w2.weight" && rest != "w3.weight") return {};
  return fmt::format("{}{}.{}", to, number, rest);
}

FileTensorView gpt2_tensor_view(const std::string& fqn) {
  for (const auto& [ours, theirs, form] : kGpt2Outside) {
    if (fqn == ours) return {theirs, form};
  }
  const auto [layer, rest] = split_layer(fqn, "layers.");
  for (const auto& [ours, theirs, form] : kGpt2InLayer) {
    if (rest == ours) return {fmt::format("transformer.h.{}.{}", layer, theirs), form};
  }
  throw Error(fmt::format("'{}' is not a parameter of a GPT-2 model", fqn));
}

}  // namespace

FileTensorView hf_tensor_view(const LlamaConfig& config, const std::string& fqn) {
  if (config.family == LlamaFamily::gpt2) return gpt2_tensor_view(fqn);
  const auto [layer, rest] = split_layer(fqn, "layers.");
  if (config.family == LlamaFamily::gpt_oss) {
    if (const auto expert = gpt_oss_expert(config, layer, rest)) return *expert;
  }
  for (const auto& [ours, theirs] : hf_family(config.family).names) {
    if (rest == ours) return fmt::format("model.layers.{}.{}", layer, theirs);
    if (!ours.ends_with('.') || !rest.starts_with(ours)) continue;  // below: the number of an expert, and its matrix
    const auto [expert, matrix] = split_layer(rest, std::string(ours));
    for (const auto& [our_matrix, their_matrix] : kInLayer) {
      if ("feed_forward." + matrix != our_matrix) continue;
      const std::string_view last = std::string_view(their_matrix).substr(std::string_view("mlp.").size());
      return fmt::format("model.layers.{}.{}{}.{}", layer, theirs, expert, last);
    }
  }
  const std::string name = llama_hf_name(fqn);
  if (config.family != LlamaFamily::phi3 || layer.empty()) return name;
  return phi3_tensor_view(config, name, split_layer(name, "model.layers.").second);
}

std::string hf_optional_prefix(const LlamaConfig& config) {
  return config.family == LlamaFamily::gpt2 ? "transformer." : "";
}

bool hf_may_ignore(const LlamaConfig& config, const std::string& hf_name) {
  // GPT-2's older files contain the causal mask of each layer.
  const bool computed = config.family == LlamaFamily::gpt2
                            ? hf_name.ends_with(".attn.bias") || hf_name.ends_with(".attn.masked_bias")
                            : hf_name.ends_with("rotary_emb.inv_freq");
  // The layer that predicts a further token is behind the others.
  const auto layer = split_layer(hf_name, "model.layers.").first;
  if (config.family == LlamaFamily::deepseek_v3 && layer == std::to_string(config.n_layers)) return true;
  return computed || (config.tie_embeddings && hf_name == "lm_head.weight");
}

std::string llama_hf_name(const std::string& fqn) {
  for (const auto& [ours, theirs] : kOutside) {
    if (fqn == ours) return theirs;
  }
  const auto [layer, rest] = split_layer(fqn, "layers.");
  for (const auto& [ours, theirs] : kInLayer) {
    if (rest == ours) return fmt::format("model.layers.{}.{}", layer, theirs);
  }
  if (const std::string expert = expert_name(rest, kExperts, kHfExperts); !expert.empty()) {
    return fmt::format("model.layers.{}.{}", layer, expert);
  }
  throw Error(fmt::format("'{}' is not a parameter of a Llama model", fqn));
}

std::string llama_fqn_from_hf(const std::string& hf_name) {
  for (const auto& [ours, theirs] : kOutside) {
    if (hf_name == theirs) return ours;
  }
  const auto [layer, rest] = split_layer(hf_name, "model.layers.");
  for (const auto& [ours, theirs] : kInLayer) {
    if (rest == theirs) return fmt::format("layers.{}.{}", layer, ours);
  }
  if (const std::string expert = expert_name(rest, kHfExperts, kExperts); !expert.empty()) {
    return fmt::format("layers.{}.{}", layer, expert);
  }
  throw Error(fmt::format("'{}' is not a parameter of Hugging Face's LlamaForCausalLM", hf_name));
}

}  // namespace phalanx::models
