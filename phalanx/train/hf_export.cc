#include "phalanx/train/hf_export.h"

#include <nlohmann/json.hpp>

#include "phalanx/base/file.h"
#include "phalanx/checkpoint/weights.h"

namespace phalanx::train {

std::filesystem::path export_in_hf(const std::filesystem::path& folder, const models::LlamaConfig& model,
                                   const std::vector<NamedTensor>& weights) {
  std::filesystem::create_directories(folder);
  export_weights(folder / "model.safetensors", weights, {.name_in_file = models::llama_hf_name}, posix_file_system());
  const nlohmann::json description = {{"architectures", {"LlamaForCausalLM"}},
                                      {"model_type", "llama"},
                                      {"hidden_size", model.dim},
                                      {"intermediate_size", model.ffn_hidden},
                                      {"num_hidden_layers", model.n_layers},
                                      {"num_attention_heads", model.n_heads},
                                      {"num_key_value_heads", model.n_kv_heads},
                                      {"head_dim", model.head_dim()},
                                      {"vocab_size", model.vocab_size},
                                      {"max_position_embeddings", model.max_seq_len},
                                      {"rope_theta", model.rope_theta},
                                      {"rms_norm_eps", model.norm_eps},
                                      {"tie_word_embeddings", model.tie_embeddings},
                                      {"hidden_act", "silu"},
                                      {"attention_bias", false},
                                      {"mlp_bias", false},
                                      {"torch_dtype", "float32"}};
  replace_file(folder / "config.json", description.dump(2) + "\n");
  return folder / "model.safetensors";
}

}  // namespace phalanx::train
