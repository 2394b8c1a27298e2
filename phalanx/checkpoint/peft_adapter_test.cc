// Adapters on disk in PEFT's format.
#include "phalanx/checkpoint/files/peft_adapter.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/folder_test.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/checkpoint/adapter_weights.h"
#include "phalanx/checkpoint/files/safetensors.h"
#include "phalanx/checkpoint/files/weights_identity.h"
#include "phalanx/checkpoint/weights.h"
#include "phalanx/models/config/llama_json.h"

namespace phalanx {
namespace peft_adapter_test {

models::LlamaConfig two_layers() {
  return {.dim = 8, .n_layers = 2, .n_heads = 2, .n_kv_heads = 1, .ffn_hidden = 12, .vocab_size = 16};
}

/// All parameters of a model with adapters, with values that differ.
std::vector<NamedTensor> tensors_of(const models::LlamaConfig& model, const models::LoraOptions& lora, double first) {
  std::vector<NamedTensor> all;
  const auto add = [&](const std::string& name, const std::vector<std::int64_t>& shape) {
    std::int64_t count = 1;
    for (const std::int64_t size : shape) count *= size;
    all.push_back({name, at::arange(count, at::TensorOptions(at::kFloat)).add(first).sin().view(shape)});
    first += 0.37;
  };
  const auto shapes = models::llama_parameter_shapes(model);
  for (const auto& [name, shape] : shapes) add(name, shape);
  for (const std::string& layer : models::lora_layers(model, lora)) {
    const auto& shape = shapes.at(layer + ".weight");
    add(layer + models::kLoraA, {lora.rank, shape[1]});
    add(layer + models::kLoraB, {shape[0], lora.rank});
  }
  return all;
}

class PeftAdapterTest : public FolderTest {
 protected:
  std::vector<NamedTensor> tensors(double first) const { return tensors_of(two_layers(), lora_, first); }
  std::string save_base(const std::string& name, double first) const {
    export_weights(path(name), base_among(tensors(first)), {}, posix_file_system());
    return path(name);
  }
  std::string save(const std::string& name, const std::string& metadata = "") const {
    save_adapter(path(name), two_layers(), lora_, tensors(1), {.base_name = "base-model", .metadata = metadata});
    return path(name);
  }
  void change_config(const std::string& folder, const std::string& key, const nlohmann::json& value) const {
    auto json = nlohmann::json::parse(read_file(folder + "/adapter_config.json"));
    json[key] = value;
    replace_file(folder + "/adapter_config.json", json.dump());
  }
  std::string refusal(const std::string& folder) const {
    return error_text<CheckpointError>([&] { read_peft_adapter(folder); });
  }

  const models::LoraOptions lora_{.rank = 3, .alpha = 6, .dropout = 0.25, .target_modules = {"q_proj", "down_proj"}};
};

TEST_F(PeftAdapterTest, IsReadAsItWasSaved) {
  const std::string folder = save("adapter");
  const PeftAdapter found = read_peft_adapter(folder);
  EXPECT_EQ(found.lora.rank, 3);
  EXPECT_EQ(found.lora.alpha, 6);
  EXPECT_EQ(found.lora.dropout, 0.25);
  EXPECT_EQ(models::lora_layers(two_layers(), found.lora), models::lora_layers(two_layers(), lora_));
  EXPECT_TRUE(found.base.is_null());
  const std::vector<NamedTensor> expected = adapters_among(tensors(1));
  std::vector<NamedTensor> loaded;
  for (const NamedTensor& one : expected) loaded.push_back({one.name, at::zeros(one.tensor.sizes())});
  load_adapter(found, two_layers(), loaded);
  for (std::size_t i = 0; i < loaded.size(); ++i) {
    EXPECT_TRUE(at::equal(loaded[i].tensor, expected[i].tensor)) << loaded[i].name;
  }
  const safetensors::File file((found.weights()).string());
  EXPECT_NE(file.find("base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"), nullptr);
  EXPECT_EQ(file.tensors().size(), 8U);
  const auto config = nlohmann::json::parse(read_file(folder + "/adapter_config.json"));
  EXPECT_EQ(config["target_modules"], nlohmann::json({"down_proj", "q_proj"}));
  EXPECT_EQ(config["lora_alpha"].dump(), "6");
  EXPECT_EQ(config["base_model_name_or_path"], "base-model");
}

TEST_F(PeftAdapterTest, OneOfALayerThatTheModelDoesNotHaveIsRefused) {
  PeftAdapter adapter = read_peft_adapter(save("adapter"));
  EXPECT_EQ(layers_of_adapter(two_layers(), adapter), models::lora_layers(two_layers(), lora_));
  for (const char* name : {"model.vision.q", "model.layers.7.self_attn.q_proj", "model.layers.*.self_attn.q_proj"}) {
    adapter.lora.target_modules = {"model.layers.0.self_attn.q_proj", name};
    EXPECT_THAT(error_text<CheckpointError>([&] { layers_of_adapter(two_layers(), adapter); }),
                AllOf(HasSubstr("adapter_model.safetensors"), HasSubstr(std::string("an adapter of '") + name + "'"),
                      HasSubstr("such as model.layers.0.self_attn.q_proj")));
  }
}

// PEFT means every layer whose name ends so, and experts have such names.
TEST_F(PeftAdapterTest, NamesOfNetsAreWholeBesideExperts) {
  const models::LlamaConfig model = models::llama_flavor("debug", models::LlamaFamily::deepseek_v3);
  const auto targets = [&](const std::string& target) {
    return nlohmann::json::parse(
        peft_config_text(model, {.rank = 2, .target_modules = {target}}, ""))["target_modules"];
  };
  EXPECT_EQ(targets("kv_b_proj"), nlohmann::json({"kv_b_proj"}));
  EXPECT_EQ(targets("model.layers.0.mlp.up_proj"), nlohmann::json({"model.layers.0.mlp.up_proj"}));
  for (const auto& name : targets("gate_proj")) EXPECT_THAT(name.get<std::string>(), StartsWith("model.layers."));
}

TEST_F(PeftAdapterTest, RankStabilisedOnesAreScaledByTheRootOfTheRank) {
  const models::LoraOptions options{.rank = 4, .alpha = 6, .use_rslora = true};
  EXPECT_EQ(options.scale(), 3.0);
  save("adapter");
  change_config(path("adapter"), "use_rslora", true);
  const PeftAdapter found = read_peft_adapter(path("adapter"));
  EXPECT_TRUE(found.lora.use_rslora);
  EXPECT_EQ(nlohmann::json::parse(peft_config_text(two_layers(), found.lora, ""))["use_rslora"], true);
  EXPECT_TRUE(lora_from_metadata(lora_metadata(found.lora), "test").use_rslora);
  nlohmann::json older = lora_metadata(found.lora);
  older.erase("use_rslora");
  EXPECT_FALSE(lora_from_metadata(older, "test").use_rslora);
}

TEST_F(PeftAdapterTest, LayersThatLastNamesDoNotTellApartHaveTheirWholeNames) {
  const models::LoraOptions one{.rank = 2, .target_modules = {"layers.1.attention.wq"}};
  const auto config = nlohmann::json::parse(peft_config_text(two_layers(), one, ""));
  EXPECT_EQ(config["target_modules"], nlohmann::json({"model.layers.1.self_attn.q_proj"}));
  EXPECT_TRUE(config["base_model_name_or_path"].is_null());
}

TEST_F(PeftAdapterTest, RefusesAnotherBase) {
  const std::string base = save_base("base.safetensors", 1), other = save_base("other.safetensors", 2);
  const nlohmann::json metadata = {{"base", weights_identity(base)}, {"hf_assets_path", "/secret"}};
  const PeftAdapter adapter = read_peft_adapter(save("adapter", metadata.dump()));
  require_base(adapter, base, /*allow_mismatch=*/false);
  std::filesystem::create_directory(path("moved"));
  std::filesystem::copy_file(base, path("moved/model.safetensors"));
  require_base(adapter, path("moved/model.safetensors"), /*allow_mismatch=*/false);
  EXPECT_THAT(error_text<CheckpointError>([&] { require_base(adapter, other, false); }),
              AllOf(HasSubstr("was trained on other weights"), HasSubstr("--allow-base-mismatch")));
  require_base(adapter, other, /*allow_mismatch=*/true);
  require_base(read_peft_adapter(save("unknown")), other, /*allow_mismatch=*/false);  // said in the log
  EXPECT_THAT(read_file(path("adapter/adapter_model.safetensors")), Not(HasSubstr("/secret")));
}

TEST_F(PeftAdapterTest, KindsThatPhalanxDoesNotHaveAreRefusedByName) {
  const std::vector<std::pair<std::string, nlohmann::json>> others = {{"peft_type", "LOHA"},
                                                                      {"use_dora", true},
                                                                      {"bias", "all"},
                                                                      {"rank_pattern", {{"q_proj", 4}}},
                                                                      {"modules_to_save", {"lm_head"}}};
  for (const auto& [key, value] : others) {
    const std::string folder = save("of_" + key);
    change_config(folder, key, value);
    EXPECT_THAT(refusal(folder), AllOf(HasSubstr("\"" + key + "\" is " + value.dump()), HasSubstr("merge_and_unload")));
  }
}

// PEFT writes such patterns for families whose experts it could adapt.
TEST_F(PeftAdapterTest, RanksAndAlphasOfOtherLayersAreLeftOut) {
  const std::string folder = save("adapter");
  for (const char* key : {"rank_pattern", "alpha_pattern"}) {
    change_config(folder, key, {{".*\\.gate_up_proj", 16}, {"up_proj", 2}});
    EXPECT_EQ(read_peft_adapter(folder).lora.rank, 3);
    for (const nlohmann::json& pattern : std::vector<nlohmann::json>{{{"q_proj", 4}},
                                                                     {{"layers.0.*q_proj", 4}},
                                                                     {{".*", 4}},
                                                                     {{"q_proj|a.b", 4}},
                                                                     {{"up_proj", 2}, {".*\\.down_proj", 4}},
                                                                     "q_proj"}) {
      change_config(folder, key, pattern);
      EXPECT_THAT(refusal(folder), AllOf(HasSubstr(key), HasSubstr("merge_and_unload"))) << pattern;
    }
    change_config(folder, key, nlohmann::json::object());
  }
}

TEST_F(PeftAdapterTest, DamagedOnesAreRefused) {
  EXPECT_THAT(refusal(path("nothing")), HasSubstr("it has no adapter_config.json"));
  const std::string folder = save("adapter");
  change_config(folder, "r", 0);
  EXPECT_THAT(refusal(folder), HasSubstr("\"r\" is 0: expected 1 or more"));
  change_config(folder, "r", 4);  // not that of the tensors
  EXPECT_THAT(error_text<CheckpointError>([&] {
                PeftAdapter adapter = read_peft_adapter(folder);
                load_adapter(adapter, two_layers(),
                             {{"layers.0.attention.wq.lora_A", at::zeros({4, 8})},
                              {"layers.0.attention.wq.lora_B", at::zeros({8, 4})}},
                             {.all = false});
              }),
              HasSubstr("lora_A"));
  replace_file(folder + "/adapter_config.json", "{");
  EXPECT_THAT(refusal(folder), HasSubstr("adapter_config.json"));
  save("half");
  const auto write = [&](const std::string& name) {
    export_weights(path("half/adapter_model.safetensors"), {{name, at::zeros({3, 8})}}, {}, posix_file_system());
  };
  write("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight");
  EXPECT_THAT(refusal(path("half")), HasSubstr("model.layers.0.self_attn.q_proj has only one of lora_A and lora_B"));
  write("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector.weight");
  EXPECT_THAT(refusal(path("half")), HasSubstr("is neither a lora_A nor a lora_B"));
  write("base_model.model.model.vision.q.lora_A.weight");
  EXPECT_THAT(refusal(path("half")), HasSubstr("model.vision.q has only one of lora_A and lora_B"));
  write("model.layers.0.self_attn.q_proj.lora_A.weight");
  EXPECT_THAT(refusal(path("half")), HasSubstr("is no part of an adapter of PEFT"));
}

// The transposed matrices of a GPT-2, which PEFT calls so, are transposed in its base alone.
TEST_F(PeftAdapterTest, FanInFanOutIsOfAGpt2) {
  const std::string folder = save("adapter");
  change_config(folder, "fan_in_fan_out", true);
  EXPECT_THAT(error_text<CheckpointError>([&] { layers_of_adapter(two_layers(), read_peft_adapter(folder)); }),
              AllOf(HasSubstr("adapter_config.json: \"fan_in_fan_out\" is true, as for the matrices of GPT-2's files"),
                    HasSubstr("expected null, false or nothing for a model of the family llama")));
}

TEST_F(PeftAdapterTest, HalvesAndPartsAreNeitherSavedNorMerged) {
  const auto refused = [&](const std::vector<NamedTensor>& list) {
    const std::string saving = error_text<Error>([&] { save_adapter(path("no"), two_layers(), lora_, list, {}); });
    EXPECT_EQ(error_text<Error>([&] { merged_weights(list, two_layers(), lora_); }), saving);
    return saving;
  };
  const auto without = [&](const std::string& name) {
    std::vector<NamedTensor> list = tensors(1);
    EXPECT_EQ(std::erase_if(list, [&](const NamedTensor& one) { return one.name == name; }), 1U) << name;
    return list;
  };
  EXPECT_THAT(refused(without("layers.0.attention.wq.lora_B")), HasSubstr("have no layers.0.attention.wq.lora_B"));
  EXPECT_THAT(refused(without("layers.0.attention.wq.lora_A")), HasSubstr("have no layers.0.attention.wq.lora_A"));
  std::vector<NamedTensor> list = tensors(1);
  NamedTensor& half = *std::ranges::find(list, "layers.0.attention.wq.lora_B", &NamedTensor::name);
  const ShardSpec rows(half.name, half.tensor.sizes().vec(), DataType::f32, MeshShape({{"tp", 2}}),
                       {.splits = {{"tp", 0}}});
  half.shard = std::make_shared<Shard>(rows, 1);
  half.tensor = half.tensor.narrow(0, 0, half.shard->box().shape[0]);
  EXPECT_THAT(refused(list), HasSubstr("wq.lora_B: this rank has only"));
  EXPECT_THAT(error_text<Error>([&] { merged_weights(without("layers.0.attention.wq.weight"), two_layers(), lora_); }),
              HasSubstr("layers.0.attention.wq has an adapter, but no weight"));
}

// PEFT saves the base's weight beside the adapter of an output layer, and would take it in place of the base's.
TEST_F(PeftAdapterTest, ACopyOfTheOutputLayerIsTheBases) {
  const models::LoraOptions lora{.rank = 3, .alpha = 6, .target_modules = {"lm_head"}};
  std::vector<NamedTensor> all = base_among(tensors(1));
  all.push_back({"output.lora_A", at::arange(24, at::kFloat).view({3, 8})});
  all.push_back({"output.lora_B", at::arange(48, at::kFloat).view({16, 3})});
  save_adapter(path("adapter"), two_layers(), lora, all, {.base_name = "base", .metadata = ""});
  const std::string file = path("adapter/adapter_model.safetensors");
  EXPECT_EQ(nlohmann::json::parse(read_file(path("adapter/adapter_config.json")))["target_modules"],
            nlohmann::json({"lm_head"}));
  at::Tensor& base = std::ranges::find(all, "output.weight", &NamedTensor::name)->tensor;
  const at::Tensor weight = base.clone();
  weight[0][0] = 1e-7;  // a number that float16 does not have
  const auto load = [&](const at::Tensor& of_base, const at::Tensor& copy, bool allow_other_base = false) {
    base = of_base;
    std::vector<NamedTensor> with_copy = {{"base_model.model.lm_head.lora_A.weight", at::zeros({3, 8})},
                                          {"base_model.model.lm_head.lora_B.weight", at::zeros({16, 3})}};
    with_copy.push_back({kOutputInAdapter, copy});
    export_weights(file, with_copy, {}, posix_file_system());
    const PeftAdapter adapter = read_peft_adapter(path("adapter"));
    EXPECT_THAT(layers_of_adapter(two_layers(), adapter), ElementsAre("output"));
    load_adapter(adapter, two_layers(), all, {.allow_other_base = allow_other_base});
  };
  const at::Tensor in_bfloat16 = weight.to(at::kBFloat16), in_float16 = weight.to(at::kHalf);
  const std::vector<at::Tensor> forms = {weight,
                                         in_bfloat16,
                                         in_float16,
                                         in_bfloat16.to(at::kFloat),
                                         in_float16.to(at::kFloat),
                                         in_bfloat16.to(at::kHalf)};
  for (std::size_t i = 0; i < forms.size(); ++i) {
    for (std::size_t k = 0; k < forms.size(); ++k) {
      SCOPED_TRACE(fmt::format("{}, {}", i, k));
      load(forms[i], forms[k]);
      const at::Tensor other = (forms[k].to(at::kFloat) * (1 + 0x1p-6)).to(forms[k].scalar_type());
      EXPECT_THAT(error_text<CheckpointError>([&] { load(forms[i], other); }),
                  AllOf(HasSubstr("another weight of the output layer"), HasSubstr("save_embedding_layers=False")));
      load(forms[i], other, /*allow_other_base=*/true);
    }
  }
  // A base in float16 that was rounded to bfloat16, as beside matrices in 4 bits.
  load(in_float16.to(at::kBFloat16), in_float16);
  load(in_float16, in_float16.to(at::kBFloat16));
  // Neither was rounded, or both to the same type.
  EXPECT_THAT(error_text<CheckpointError>([&] { load(weight, weight * (1 + 0x1p-20)); }), HasSubstr("another weight"));
  EXPECT_THAT(error_text<CheckpointError>([&] { load(in_bfloat16, (weight * (1 + 0x1p-8)).to(at::kBFloat16)); }),
              HasSubstr("another weight"));
  models::LlamaConfig tied = two_layers();
  tied.tie_embeddings = true;
  EXPECT_THAT(error_text<CheckpointError>([&] { layers_of_adapter(tied, read_peft_adapter(path("adapter"))); }),
              HasSubstr("an adapter of 'lm_head'"));
}

/// A model whose files keep several of our layers in one matrix.
class JoinedAdapterTest : public FolderTest, public ::testing::WithParamInterface<models::LlamaFamily> {
 protected:
  static models::LlamaConfig model() {
    models::LlamaConfig config = models::llama_flavor("debug", GetParam());
    config.n_layers = 1;
    return config;
  }
  static bool is_gpt2() { return GetParam() == models::LlamaFamily::gpt2; }
  static std::string joined() {
    return is_gpt2() ? "transformer.h.0.attn.c_attn" : "model.layers.0.self_attn.qkv_proj";
  }
  static std::string last() { return is_gpt2() ? "c_attn" : "qkv_proj"; }

  std::vector<NamedTensor> tensors() const { return tensors_of(model(), lora_, 0.37); }
  static at::Tensor find(const std::vector<NamedTensor>& list, const std::string& name) {
    return std::ranges::find(list, name, &NamedTensor::name)->tensor;
  }
  /// What load_adapter() makes of the folder.
  std::vector<NamedTensor> loaded() const {
    std::vector<NamedTensor> result;
    for (const NamedTensor& one : adapters_among(tensors()))
      result.push_back({one.name, at::zeros(one.tensor.sizes())});
    const PeftAdapter adapter = read_peft_adapter(path("adapter"));
    layers_of_adapter(model(), adapter);
    load_adapter(adapter, model(), result);
    return result;
  }
  void save() const { save_adapter(path("adapter"), model(), lora_, tensors(), {.base_name = "base", .metadata = ""}); }
  /// Replaces the adapter of the joined layer by this one.
  void replace_joined(const at::Tensor& a, const at::Tensor& b) const {
    std::vector<NamedTensor> others;
    const safetensors::File file(path("adapter/adapter_model.safetensors"));
    for (const auto& info : file.tensors()) others.push_back({info.name, at::zeros(info.shape)});
    load_weights(path("adapter/adapter_model.safetensors"), others);
    for (NamedTensor& one : others) {
      if (one.name == peft_name(joined() + ".lora_A")) one.tensor = a;
      if (one.name == peft_name(joined() + ".lora_B")) one.tensor = b;
    }
    export_weights(path("adapter/adapter_model.safetensors"), others, {}, posix_file_system());
  }
  void change_config(const std::string& key, const nlohmann::json& value) const {
    auto json = nlohmann::json::parse(read_file(path("adapter/adapter_config.json")));
    json[key] = value;
    replace_file(path("adapter/adapter_config.json"), json.dump());
  }
  std::string refusal() const {
    return error_text<CheckpointError>([&] { loaded(); });
  }

  const models::LoraOptions lora_{.rank = 2, .alpha = 6};
};

TEST_P(JoinedAdapterTest, IsSavedAsBlocksThatAddWhatThePartsAdd) {
  save();
  const auto all = tensors();
  const auto config = nlohmann::json::parse(read_file(path("adapter/adapter_config.json")));
  EXPECT_EQ(config["fan_in_fan_out"], is_gpt2());
  EXPECT_EQ(config["rank_pattern"][last()], 6);
  EXPECT_EQ(config["alpha_pattern"][last()].dump(), "18");
  EXPECT_EQ(config["rank_pattern"].size(), is_gpt2() ? 1U : 2U);
  EXPECT_EQ(config["target_modules"], is_gpt2() ? nlohmann::json({"c_attn", "c_fc", "c_proj"})
                                                : nlohmann::json({"down_proj", "gate_up_proj", "o_proj", "qkv_proj"}));
  std::vector<at::Tensor> expected;
  std::int64_t rows = 0;
  for (const char* part : {"wq", "wk", "wv"}) {
    const std::string layer = std::string("layers.0.attention.") + part;
    expected.push_back(at::matmul(find(all, layer + ".lora_B"), find(all, layer + ".lora_A")));
    rows += expected.back().size(0);
  }
  const std::vector<NamedTensor> halves = {{peft_name(joined() + ".lora_A"), at::zeros({6, model().dim})},
                                           {peft_name(joined() + ".lora_B"), at::zeros({rows, 6})}};
  load_weights(path("adapter/adapter_model.safetensors"), halves, {.elsewhere = [](const auto&) { return true; }});
  EXPECT_TRUE(at::equal(at::matmul(halves[1].tensor, halves[0].tensor), at::cat(expected)));
  const auto again = loaded();
  for (const NamedTensor& one : adapters_among(all)) {
    EXPECT_TRUE(at::equal(find(again, one.name), one.tensor)) << one.name;
  }
  // And so they are merged.
  const auto merged = merged_weights(all, model(), lora_);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const std::string weight = std::string("layers.0.attention.") + std::array{"wq", "wk", "wv"}.at(i) + ".weight";
    EXPECT_TRUE(at::equal(find(merged, weight), find(all, weight) + expected[i] * 3.0)) << weight;
  }
}

TEST_P(JoinedAdapterTest, OfPeftWithOneAGivesItToEachPart) {
  save();
  change_config("rank_pattern", nlohmann::json::object());
  change_config("alpha_pattern", nlohmann::json::object());
  if (!is_gpt2()) {  // gate and up, too
    EXPECT_THAT(refusal(),
                AllOf(HasSubstr("lora_A of 6 rows, and "), HasSubstr("adapter_config.json gives it rank 2 and alpha 6"),
                      HasSubstr("or 6 rows with rank 6 and alpha 18")));
    change_config("rank_pattern", {{"gate_up_proj", 4}});
    change_config("alpha_pattern", {{"gate_up_proj", 12}});
  }
  const auto all = tensors();
  const at::Tensor a = find(all, "layers.0.attention.wq.lora_A");
  const std::vector<at::Tensor> b = {find(all, "layers.0.attention.wq.lora_B"),
                                     find(all, "layers.0.attention.wk.lora_B"),
                                     find(all, "layers.0.attention.wv.lora_B")};
  replace_joined(a, at::cat(b));
  auto with_base = base_among(all);
  for (const NamedTensor& one : loaded()) with_base.push_back(one);
  const auto merged = merged_weights(with_base, model(), lora_);
  const at::Tensor expected = at::matmul(at::cat(b), a) * 3.0;
  std::int64_t row = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    const std::string layer = std::string("layers.0.attention.") + std::array{"wq", "wk", "wv"}.at(i);
    EXPECT_TRUE(at::equal(find(with_base, layer + ".lora_A"), a)) << layer;
    EXPECT_TRUE(at::equal(find(with_base, layer + ".lora_B"), b[i])) << layer;
    const at::Tensor weight = find(all, layer + ".weight");
    EXPECT_TRUE(at::equal(find(merged, layer + ".weight"), weight + expected.narrow(0, row, weight.size(0)))) << layer;
    row += weight.size(0);
  }
}

TEST_P(JoinedAdapterTest, ThatMixesThePartsOrScalesThemOtherwiseIsRefused) {
  save();
  const std::int64_t rows = model().dim + 2 * model().n_kv_heads * model().head_dim();
  const at::Tensor b = at::zeros({rows, 6});
  b[rows - 1][4] = 1;  // of v by its own A
  replace_joined(at::zeros({6, model().dim}), b);
  EXPECT_EQ(refusal(), "");
  b[rows - 1][3] = 1;  // of v by k's
  replace_joined(at::zeros({6, model().dim}), b);
  EXPECT_THAT(refusal(),
              AllOf(HasSubstr("'" + joined() + "' has an A of 6 rows for its 3 parts"),
                    HasSubstr("takes layers.0.attention.wv from rows 4 to 5"), HasSubstr("merge_and_unload")));
  const auto patterns = nlohmann::json::parse(read_file(path("adapter/adapter_config.json")));
  const auto with = [&](const char* key, double value) {
    auto changed = patterns[key];
    changed[last()] = value;
    change_config(key, changed);
    const std::string text = refusal();
    change_config(key, patterns[key]);
    return text;
  };
  EXPECT_THAT(with("alpha_pattern", 6), AllOf(HasSubstr("rank 6 and alpha 6; expected 2 rows with rank 2 and alpha 6"),
                                              HasSubstr("6 rows with rank 6 and alpha 18"), HasSubstr(joined())));
  EXPECT_THAT(with("rank_pattern", 2), AllOf(HasSubstr("lora_A of 6 rows, and "), HasSubstr("gives it rank 2")));
  replace_joined(at::zeros({3, model().dim}), at::zeros({rows, 3}));
  EXPECT_THAT(with("rank_pattern", 3), AllOf(HasSubstr("lora_A of 3 rows, and "), HasSubstr("gives it rank 3")));
}

INSTANTIATE_TEST_SUITE_P(Families, JoinedAdapterTest,
                         ::testing::Values(models::LlamaFamily::gpt2, models::LlamaFamily::phi3),
                         [](const auto& info) { return models::family_name(info.param); });

TEST_F(PeftAdapterTest, MergingAddsTheProductToTheLayersOfAdaptersAlone) {
  const std::vector<NamedTensor> all = tensors(1);
  const auto find = [](const std::vector<NamedTensor>& list, const std::string& name) {
    return std::ranges::find(list, name, &NamedTensor::name)->tensor;
  };
  const std::vector<NamedTensor> merged = merged_weights(all, two_layers(), lora_);
  EXPECT_EQ(merged.size(), base_among(all).size());
  for (const NamedTensor& one : merged) {
    const std::string layer = one.name.substr(0, one.name.rfind('.'));
    const bool is_adapted = layer.ends_with("attention.wq") || layer.ends_with("feed_forward.w2");
    at::Tensor expected = find(all, one.name);
    EXPECT_EQ(at::equal(one.tensor, expected), !is_adapted) << one.name;
    if (!is_adapted) continue;
    expected = expected + at::matmul(find(all, layer + ".lora_B"), find(all, layer + ".lora_A")) * 2.0;
    EXPECT_TRUE(at::equal(one.tensor, expected)) << one.name;
  }
}

}  // namespace peft_adapter_test
}  // namespace phalanx
