// Which adapters of PEFT are taken, by their adapter_config.json, and how an adapter is told from another one.
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <nlohmann/json.hpp>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/folder_test.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/checkpoint/adapter_weights.h"
#include "phalanx/checkpoint/weights.h"

namespace phalanx {
namespace adapter_kinds_test {

const models::LlamaConfig kModel{
    .dim = 8, .n_layers = 1, .n_heads = 2, .n_kv_heads = 1, .ffn_hidden = 12, .vocab_size = 16};
const models::LoraOptions kLora{.rank = 2, .alpha = 4, .target_modules = {"q_proj"}};

class AdapterKindsTest : public FolderTest {
 protected:
  std::string save(const std::string& name, const std::string& metadata = "") const {
    save_adapter(
        path(name), kModel, kLora,
        {{"layers.0.attention.wq.lora_A", at::ones({2, 8})}, {"layers.0.attention.wq.lora_B", at::ones({8, 2})}},
        {.base_name = "base", .metadata = metadata});
    return path(name);
  }
  /// The adapter with other entries in its adapter_config.json.
  std::string with(const nlohmann::json& entries) const {
    const std::string folder = save("changed");
    auto json = nlohmann::json::parse(read_file(folder + "/adapter_config.json"));
    json.update(entries);
    replace_file(folder + "/adapter_config.json", json.dump());
    return folder;
  }
  std::string refusal(const std::string& key, const nlohmann::json& value) const {
    return error_text<CheckpointError>([&] { read_peft_adapter(with({{key, value}})); });
  }
};

TEST_F(AdapterKindsTest, EveryKeyThatIsNotKnownToChangeNothingIsRefusedByName) {
  for (const char* method : {"pissa", "pissa_niter_4", "olora", "corda", "loftq", "mica", "eva", "new-one"}) {
    EXPECT_THAT(refusal("init_lora_weights", method), AllOf(HasSubstr(std::string("\"init_lora_weights\" is \"") +
                                                                      method + "\": expected true or \"gaussian\""),
                                                            HasSubstr("merge_and_unload")));
  }
  const std::vector<std::pair<std::string, nlohmann::json>> others = {{"alora_invocation_tokens", {1, 2}},
                                                                      {"use_qalora", true},
                                                                      {"layer_replication", {{0, 1}}},
                                                                      {"target_parameters", {"experts"}},
                                                                      {"use_dora", true},
                                                                      {"use_rslora", "yes"},
                                                                      {"rank_pattern", {{"q_proj", 4}}},
                                                                      {"lora_bias", true},
                                                                      {"modules_to_save", {"lm_head"}},
                                                                      {"a_later_key", 1},
                                                                      {"megatron_config", {{"a", 1}}},
                                                                      {"bias", "all"},
                                                                      {"peft_type", "LOHA"},
                                                                      {"peft_type", ""}};
  for (const auto& [key, value] : others) {
    EXPECT_THAT(refusal(key, value), HasSubstr("\"" + key + "\" is " + value.dump() + ": expected ")) << key;
  }
}

TEST_F(AdapterKindsTest, WhatPeftWritesOfPlainLoraIsTaken) {
  const nlohmann::json plain = {{"alora_invocation_tokens", nullptr},
                                {"alpha_pattern", nlohmann::json::object()},
                                {"auto_mapping", {{"base_model_class", "LlamaForCausalLM"}}},
                                {"corda_config", nullptr},
                                {"ensure_weight_tying", false},
                                {"exclude_modules", "k_proj"},
                                {"init_lora_weights", true},
                                {"layers_pattern", "layers"},
                                {"layers_to_transform", {0}},
                                {"loftq_config", nlohmann::json::object()},
                                {"megatron_config", nullptr},
                                {"megatron_core", "megatron.core"},
                                {"peft_version", "0.18.0"},
                                {"qalora_group_size", 16},
                                {"revision", "main"},
                                {"trainable_token_indices", nullptr},
                                {"use_qalora", false}};
  EXPECT_EQ(read_peft_adapter(with(plain)).lora.rank, 2);
  for (const nlohmann::json& value : {nlohmann::json("gaussian"), nlohmann::json(false)}) {
    EXPECT_EQ(read_peft_adapter(with({{"init_lora_weights", value}})).lora.alpha, 4);
  }
}

TEST_F(AdapterKindsTest, AnotherAlphaIsAnotherAdapterAndSoAreOtherValues) {
  const auto identity = adapter_identity(save("one"));
  EXPECT_EQ(adapter_identity(save("two")), identity);
  EXPECT_NE(adapter_identity(with({{"lora_alpha", 8}})), identity);
  save_adapter(
      path("two"), kModel, kLora,
      {{"layers.0.attention.wq.lora_A", at::zeros({2, 8})}, {"layers.0.attention.wq.lora_B", at::ones({8, 2})}},
      {.base_name = "base", .metadata = ""});
  EXPECT_NE(adapter_identity(path("two")), identity);
}

TEST_F(AdapterKindsTest, ErrorsNameTheFileAndGiveAdviceThatCanBeFollowed) {
  models::LlamaConfig smaller = kModel;
  smaller.family = models::LlamaFamily::gpt2;
  EXPECT_THAT(error_text<CheckpointError>([&] { layers_with_adapters(smaller, kLora, "file"); }),
              HasSubstr("file: target_modules: 'q_proj' matches none of the 7 linear layers"));
  export_weights(path("base.safetensors"), {{"w", at::ones({2})}}, {}, posix_file_system());
  const PeftAdapter adapter = read_peft_adapter(save("of_another", R"({"base": {"bytes": 1, "hash": "0"}})"));
  EXPECT_THAT(error_text<CheckpointError>([&] { require_base(adapter, path("base.safetensors"), false, ""); }),
              AllOf(HasSubstr("name the base that it was trained on"), Not(HasSubstr("--allow-base-mismatch"))));
}

}  // namespace adapter_kinds_test
}  // namespace phalanx
