#include "phalanx/infer/model_files.h"

#include <ATen/core/Tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/checkpoint/checkpoint_manager.h"
#include "phalanx/checkpoint/hf_model.h"
#include "phalanx/checkpoint/saved_state.h"
#include "phalanx/checkpoint/weights.h"
#include "phalanx/checkpoint/weights_description.h"
#include "phalanx/comm/local.h"
#include "phalanx/data/bpe_model.h"
#include "phalanx/data/bpe_trainer.h"
#include "phalanx/data/token_file_writer.h"
#include "phalanx/data/tokenizer_fingerprint.h"
#include "phalanx/infer/generator.h"
#include "phalanx/models/hf_config.h"
#include "phalanx/models/hf_names.h"
#include "phalanx/models/llama.h"
#include "phalanx/models/llama_json.h"
#include "phalanx/nn/init.h"

namespace phalanx::infer {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

const models::LlamaConfig kTiny{.dim = 16,
                                .n_layers = 1,
                                .n_heads = 2,
                                .n_kv_heads = 1,
                                .ffn_hidden = 24,
                                .vocab_size = 31,
                                .max_seq_len = 12,
                                .rope_theta = 20000.0,
                                .norm_eps = 3e-5};  // no number that is a default

nlohmann::json tiny_metadata() {
  return {{"model",
           {{"dim", 16},
            {"n_layers", 1},
            {"n_heads", 2},
            {"n_kv_heads", 1},
            {"ffn_hidden", 24},
            {"vocab_size", 31},
            {"max_seq_len", 12},
            {"rope_theta", 20000.0},
            {"norm_eps", 3e-5},
            {"tie_embeddings", false}}}};
}

std::shared_ptr<models::Llama> tiny_model() {
  auto model = std::make_shared<models::Llama>(kTiny);
  nn::initialise(*model, 5);
  return model;
}

void save_run(const std::filesystem::path& folder, const nlohmann::json& metadata) {
  const auto model = tiny_model();
  TrainState state;
  state.tensors = with_prefix("model.", nn::named_parameters(*model));
  CheckpointManager(folder).save(state, 3, metadata.dump());
}

bool same_weights(const models::Llama& a, const models::Llama& b) {
  const auto x = nn::named_parameters(a), y = nn::named_parameters(b);
  return std::ranges::equal(x, y,
                            [](const auto& p, const auto& q) { return p.name == q.name && p.tensor.equal(q.tensor); });
}

std::string error_of(const std::filesystem::path& path) {
  try {
    find_model(path);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(ModelFiles, ARunsFolderGivesShapeWeightsAndTokenizer) {
  const TempDirectory scratch("model");
  save_run(scratch.path() / "run" / "checkpoint", tiny_metadata());
  for (const auto& path : {scratch.path() / "run" / "checkpoint", scratch.path() / "run" / "checkpoint" / "step-3"}) {
    const auto files = find_model(path);
    EXPECT_EQ(files.weights, scratch.path() / "run" / "checkpoint" / "step-3");
    EXPECT_EQ(files.config, kTiny);
    EXPECT_FALSE(files.tokenizer);
    EXPECT_TRUE(same_weights(*load_model(files, at::kCPU), *tiny_model()));
  }
  write_file(scratch.path() / "run" / "tokenizer.json", "{}");
  EXPECT_EQ(find_model(scratch.path() / "run" / "checkpoint").tokenizer,
            (scratch.path() / "run" / "tokenizer.json").string());
  write_file(scratch.path() / "run" / "config.json", R"({"eos_token_id": 4})");
  EXPECT_THAT(find_model(scratch.path() / "run" / "checkpoint").end_tokens, ElementsAre(4));
  write_file(scratch.path() / "run" / "generation_config.json", R"({"eos_token_id": [3, 5]})");
  EXPECT_THAT(find_model(scratch.path() / "run" / "checkpoint").end_tokens, ElementsAre(3, 5));
}

data::BpeTokenizer trained_tokenizer(const std::string& text) {
  data::BpeTrainer trainer({.vocab_size = 260});
  trainer.add(text);
  return trainer.train();
}

TEST(ModelFiles, ATokenizerOtherThanTheRunsIsRefused) {
  const TempDirectory scratch("model");
  const auto path = [&](const char* name) { return (scratch.path() / name).string(); };
  const auto mine = trained_tokenizer("the cat sat on the mat, the cat"), other = trained_tokenizer("xyxyxy zzzz");
  auto metadata = tiny_metadata();
  metadata["run"] = {{"version", 1}, {"tokenizer", {{"fingerprint", data::tokenizer_fingerprint(mine)}}}};
  save_run(scratch.path() / "run" / "checkpoint", metadata);
  const ModelFiles files = find_model(scratch.path() / "run" / "checkpoint");
  mine.save(path("mine.json"));
  other.save(path("other.json"));
  EXPECT_EQ(load_tokenizer(files, path("mine.json")).vocab_size(), mine.vocab_size());
  const auto refusal = [&](const auto& action) {
    try {
      action();
    } catch (const DataError& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_THAT(
      refusal([&] { load_tokenizer(files, path("other.json")); }),
      AllOf(HasSubstr("other.json is of the tokenizer tok1:"),
            HasSubstr("was trained with " + files.tokenizer_fingerprint), HasSubstr("--allow-tokenizer-mismatch")));
  EXPECT_NO_THROW(load_tokenizer(files, path("other.json"), /*allow_mismatch=*/true));
  for (const auto* tokenizer : {&mine, &other}) {
    data::TokenFileWriter writer(path("ids"),
                                 {.vocab_size = 260, .tokenizer = data::tokenizer_fingerprint(*tokenizer)});
    writer.add_document(std::vector<std::int32_t>{1, 2});
    writer.finish();
    const data::TokenFile tokens(path("ids"));
    EXPECT_THAT(refusal([&] { check_tokens(files, tokens); }),
                tokenizer == &mine ? HasSubstr("accepted") : HasSubstr("ids.bin is of the tokenizer"));
    EXPECT_NO_THROW(check_tokens(files, tokens, /*allow_mismatch=*/true));
  }
}

TEST(ModelFiles, WhatIsNotKnownOfTokenizersIsSaid) {
  const TempDirectory scratch("model");
  const auto mine = trained_tokenizer("the cat sat on the mat, the cat");
  save_run(scratch.path() / "run" / "checkpoint", tiny_metadata());
  mine.save((scratch.path() / "run" / "tokenizer.json").string());
  ModelFiles files = find_model(scratch.path() / "run" / "checkpoint");
  const auto said = [](const auto& action) {
    testing::internal::CaptureStderr();
    action();
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_THAT(said([&] { load_tokenizer(files); }),
              AllOf(HasSubstr("tokenizer.json (tok1:"), HasSubstr("(not said) could not be compared")));
  data::TokenFileWriter writer((scratch.path() / "ids").string(), {.vocab_size = 260});
  writer.add_document(std::vector<std::int32_t>{1, 2});
  writer.finish();
  const data::TokenFile tokens((scratch.path() / "ids").string());
  EXPECT_THAT(said([&] { check_tokens(files, tokens); }), HasSubstr("nothing says by which tokenizers"));
  files.tokenizer_fingerprint = data::tokenizer_fingerprint(mine);
  EXPECT_THAT(said([&] { check_tokens(files, tokens); }), HasSubstr("ids.bin (not said) and that of the model"));
  EXPECT_EQ(said([&] { load_tokenizer(files); }), "");
}

TEST(ModelFiles, TiedEmbeddingsStayTied) {
  auto config = kTiny;
  config.tie_embeddings = true;
  models::Llama model(config);
  nn::initialise(model, 5);
  auto metadata = tiny_metadata();
  metadata["model"]["tie_embeddings"] = true;
  const TempDirectory scratch("model");
  TrainState state;
  state.tensors = with_prefix("model.", nn::named_parameters(model));
  CheckpointManager(scratch.path()).save(state, 3, metadata.dump());
  const auto files = find_model(scratch.path());
  EXPECT_EQ(files.config, config);
  EXPECT_TRUE(same_weights(*load_model(files, at::kCPU), model));
}

TEST(ModelFiles, TheNearestTokenizerIsTaken) {
  const TempDirectory scratch("model");
  save_run(scratch.path() / "run" / "checkpoint", tiny_metadata());
  write_file(scratch.path() / "run" / "tokenizer.json", "{}");
  write_file(scratch.path() / "run" / "checkpoint" / "tokenizer.json", "{}");
  EXPECT_EQ(find_model(scratch.path() / "run" / "checkpoint").tokenizer,
            (scratch.path() / "run" / "checkpoint" / "tokenizer.json").string());
}

TEST(ModelFiles, TheTokenizerMayBeWhereTheRunWasTold) {
  const TempDirectory scratch("model");
  auto metadata = tiny_metadata();
  metadata["hf_assets_path"] = (scratch.path() / "assets").string();
  save_run(scratch.path() / "checkpoint", metadata);
  const auto files = find_model(scratch.path() / "checkpoint");
  EXPECT_FALSE(files.tokenizer);
  EXPECT_THAT(files.tokenizer_places, testing::Contains((scratch.path() / "assets" / "tokenizer.json").string()));
  std::filesystem::create_directory(scratch.path() / "assets");
  write_file(scratch.path() / "assets" / "tokenizer.json", "{}");
  EXPECT_EQ(find_model(scratch.path() / "checkpoint").tokenizer,
            (scratch.path() / "assets" / "tokenizer.json").string());
}

TEST(ModelFiles, WhatIsMissingIsSaid) {
  const TempDirectory scratch("model");
  EXPECT_THAT(error_of(scratch.path() / "absent"), HasSubstr("absent is not a directory"));
  EXPECT_THAT(error_of(scratch.path()), HasSubstr("holds no complete checkpoint"));
  save_run(scratch.path() / "bare", nlohmann::json::object());
  EXPECT_THAT(error_of(scratch.path() / "bare"), HasSubstr("does not say the model's shape"));
  auto metadata = tiny_metadata();
  metadata["model"].erase("n_heads");
  save_run(scratch.path() / "partial", metadata);
  EXPECT_THAT(error_of(scratch.path() / "partial"), HasSubstr("has no \"n_heads\""));
  metadata["model"]["n_heads"] = "two";
  save_run(scratch.path() / "mistyped", metadata);
  EXPECT_THAT(error_of(scratch.path() / "mistyped"), HasSubstr("\"n_heads\" is \"two\""));
}

// All shapes fit, but the results would be others.
TEST(ModelFiles, AConfigJsonThatWasChangedAfterTheExportIsAnErrorUnlessAskedFor) {
  const TempDirectory scratch("model");
  auto metadata = tiny_metadata();
  save_run(scratch.path() / "checkpoint", metadata);
  SavedState saved(scratch.path() / "checkpoint" / "step-3");
  const auto folder = scratch.path() / "hf";
  consolidate_for_hf(saved, folder);
  EXPECT_TRUE(same_weights(*load_model(find_model(folder), at::kCPU), *tiny_model()));
  auto config = nlohmann::json::parse(read_file(folder / "config.json"));
  config["rope_theta"] = 54321.0;
  write_file(folder / "config.json", config.dump());
  ModelFiles files = find_model(folder);
  try {
    load_model(files, at::kCPU);
    FAIL() << "loaded";
  } catch (const CheckpointError& error) {
    EXPECT_THAT(error.what(),
                testing::AllOf(HasSubstr("config.json describes another model"), HasSubstr("model.safetensors"),
                               HasSubstr("rope.theta"), HasSubstr("54321.0"), HasSubstr("--allow-model-mismatch")));
  }
  files.allow_model_mismatch = true;
  EXPECT_TRUE(same_weights(*load_model(files, at::kCPU), *tiny_model()));
}

TEST(ModelFiles, AShapeThatIsNotTheWeightsIsAnError) {
  const TempDirectory scratch("model");
  auto metadata = tiny_metadata();
  metadata["model"]["ffn_hidden"] = 32;
  save_run(scratch.path(), metadata);
  EXPECT_THROW(load_model(find_model(scratch.path()), at::kCPU), CheckpointError);
  metadata["model"]["ffn_hidden"] = 24;
  metadata["model"]["n_heads"] = 3;  // does not divide
  save_run(scratch.path(), metadata);
  EXPECT_THROW(load_model(find_model(scratch.path()), at::kCPU), CheckpointError);
}

nlohmann::json tiny_hf_config() {
  return {{"model_type", "llama"},
          {"hidden_size", 16},
          {"num_hidden_layers", 1},
          {"num_attention_heads", 2},
          {"num_key_value_heads", 1},
          {"intermediate_size", 24},
          {"vocab_size", 31},
          {"max_position_embeddings", 12},
          {"rms_norm_eps", 3e-5},
          {"rope_theta", 20000.0},
          {"tie_word_embeddings", false},
          {"rope_scaling", nullptr}};
}

TEST(ModelFiles, AHuggingFaceDirectoryIsAModelToo) {
  const TempDirectory scratch("model");
  write_file(scratch.path() / "config.json", tiny_hf_config().dump());
  const auto model = tiny_model();
  export_weights(scratch.path() / "model.safetensors", nn::named_parameters(*model),
                 {.place_in_file = models::llama_hf_name}, posix_file_system());
  const auto files = find_model(scratch.path());
  EXPECT_TRUE(files.hugging_face);
  EXPECT_EQ(files.config, kTiny);
  EXPECT_TRUE(same_weights(*load_model(files, at::kCPU), *model));
}

TEST(ModelFiles, ASwappedTokenizerInAnExportedDirectoryIsRefused) {
  const TempDirectory scratch("model");
  const auto mine = trained_tokenizer("the cat sat on the mat, the cat"), other = trained_tokenizer("xyxyxy zzzz");
  write_file(scratch.path() / "config.json", tiny_hf_config().dump());
  auto metadata = tiny_metadata();
  metadata["run"] = {{"version", 1}, {"tokenizer", {{"fingerprint", data::tokenizer_fingerprint(mine)}}}};
  export_weights(
      scratch.path() / "model.safetensors", nn::named_parameters(*tiny_model()),
      {.place_in_file = models::llama_hf_name, .metadata = {{"phalanx", metadata_for_weights(metadata.dump())}}},
      posix_file_system());
  mine.save((scratch.path() / "tokenizer.json").string());
  EXPECT_NO_THROW(load_tokenizer(find_model(scratch.path())));
  other.save((scratch.path() / "tokenizer.json").string());
  const ModelFiles files = find_model(scratch.path());
  EXPECT_EQ(files.tokenizer_fingerprint, data::tokenizer_fingerprint(mine));
  EXPECT_THROW(load_tokenizer(files), DataError);
  EXPECT_NO_THROW(load_tokenizer(files, "", /*allow_mismatch=*/true));
}

TEST(ModelFiles, AHuggingFaceFileMayHoldWhatFollowsFromTheRest) {
  const TempDirectory scratch("model");
  auto description = tiny_hf_config();
  description["tie_word_embeddings"] = true;
  write_file(scratch.path() / "config.json", description.dump());
  auto config = kTiny;
  config.tie_embeddings = true;
  models::Llama model(config);
  nn::initialise(model, 5);
  auto tensors = nn::named_parameters(model);
  tensors.push_back({"output.weight", model.tok_embeddings->weight.detach().clone()});
  tensors.push_back({"inv_freq", model.norm->weight.detach().clone()});
  const auto name = [](const std::string& fqn) {
    return fqn == "inv_freq" ? "model.layers.0.self_attn.rotary_emb.inv_freq" : models::llama_hf_name(fqn);
  };
  export_weights(scratch.path() / "model.safetensors", tensors, {.place_in_file = name}, posix_file_system());
  const auto files = find_model(scratch.path());
  EXPECT_TRUE(files.config.tie_embeddings);
  EXPECT_TRUE(same_weights(*load_model(files, at::kCPU), model));
}

// A file whose output matrix is another than its embeddings is not of a model that ties them.
TEST(ModelFiles, AnOutputMatrixOfItsOwnIsNotDropped) {
  const TempDirectory scratch("model");
  auto description = tiny_hf_config();
  description["tie_word_embeddings"] = true;
  write_file(scratch.path() / "config.json", description.dump());
  auto config = kTiny;
  config.tie_embeddings = true;
  models::Llama model(config);
  nn::initialise(model, 5);
  auto tensors = nn::named_parameters(model);
  tensors.push_back({"output.weight", model.tok_embeddings->weight.detach().clone()});
  tensors.back().tensor[30][0].add_(1);
  export_weights(scratch.path() / "model.safetensors", tensors, {.place_in_file = models::llama_hf_name},
                 posix_file_system());
  const auto files = find_model(scratch.path());
  const auto refused = [](const std::function<void()>& load) {
    try {
      load();
    } catch (const CheckpointError& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("\"model.embed_tokens.weight\" and \"lm_head.weight\" are one matrix"),
                                      HasSubstr("\"tie_word_embeddings\": false")));
      return 1;
    }
    return 0;
  };
  EXPECT_EQ(refused([&] { load_model(files, at::kCPU); }), 1);
  // As that says, it is a model like any other.
  description["tie_word_embeddings"] = false;
  write_file(scratch.path() / "config.json", description.dump());
  EXPECT_TRUE(load_model(find_model(scratch.path()), at::kCPU)->output->weight.equal(tensors.back().tensor));
}

models::LlamaConfig small_gpt2(std::int64_t vocab) {
  models::LlamaConfig config{.family = models::LlamaFamily::gpt2};
  config.dim = 16, config.n_layers = 2, config.n_heads = config.n_kv_heads = 4, config.ffn_hidden = 24;
  config.vocab_size = vocab, config.max_seq_len = 24, config.tie_embeddings = true;
  return config;
}

/// A directory of the model; `name_in_file`: from transformers' name, "" to leave the tensor out.
void write_gpt2(const std::filesystem::path& folder, const models::Llama& model,
                const std::function<std::string(const std::string&)>& name_in_file = {}) {
  write_file(folder / "config.json", models::llama_hf_config(model.config(), "float32"));
  const auto place = [&](const std::string& fqn) {
    PlaceInFile found = fqn == "mask" ? PlaceInFile("h.0.attn.bias") : models::hf_place(model.config(), fqn);
    if (name_in_file) found.name = name_in_file(found.name);
    return found;
  };
  auto tensors = nn::named_parameters(model);
  if (name_in_file) tensors.push_back({"mask", model.norm->weight.detach().clone()});
  export_weights(folder / "model.safetensors", tensors, {.place_in_file = place}, posix_file_system());
}

// As the files of the first GPT-2 are: without the prefix, with each layer's causal mask.
TEST(ModelFiles, Gpt2MayLackItsPrefixAndHaveItsMasks) {
  models::Llama model(small_gpt2(32));
  nn::initialise(model, 5);
  const auto without_prefix = [](const std::string& name) {
    return name.starts_with("transformer.") ? name.substr(12) : name;
  };
  const TempDirectory scratch("model");
  write_gpt2(scratch.path(), model, without_prefix);
  EXPECT_TRUE(same_weights(*load_model(find_model(scratch.path()), at::kCPU), model));
}

// A part leaves unread what is another's, not what is nobody's.
TEST(ModelFiles, ATensorThatNoPartKnowsIsRefused) {
  models::Llama model(small_gpt2(32));
  nn::initialise(model, 5);
  const TempDirectory scratch("model");
  write_gpt2(scratch.path(), model,
             [](const std::string& name) { return name == "h.0.attn.bias" ? "h.0.attn.other" : name; });
  const ModelFiles files = find_model(scratch.path());
  run_local_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
    const ParallelPlan plan{.pp = 2};
    try {
      load_part(files, plan, DeviceMesh(world, plan.axes()), at::kCPU);
      ADD_FAILURE() << "loaded";
    } catch (const CheckpointError& error) {
      EXPECT_THAT(error.what(), HasSubstr("\"h.0.attn.other\" is unexpected"));
    }
  });
}

TEST(ModelFiles, HuggingFacesDefaultsAreTakenForWhatIsNotSaid) {
  auto description = tiny_hf_config();
  for (const char* key : {"num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings"}) {
    description.erase(key);
  }
  const auto config = models::llama_config_from_hf(description.dump(), "config.json");
  EXPECT_EQ(config.n_kv_heads, config.n_heads);
  EXPECT_EQ(config.norm_eps, 1e-6);
  EXPECT_EQ(config.rope_theta, 10000.0);
  EXPECT_FALSE(config.tie_embeddings);
  description["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 5e5}};
  EXPECT_EQ(models::llama_config_from_hf(description.dump(), "config.json").rope_theta, 5e5);
}

std::string config_error(const nlohmann::json& config) {
  try {
    models::llama_config_from_hf(config.dump(), "config.json");
  } catch (const CheckpointError& failure) {
    return failure.what();
  }
  return "";
}

/// The description with one key changed.
std::string config_error(const char* key, const nlohmann::json& value, const char* type = "llama") {
  auto config = tiny_hf_config();
  config["model_type"] = type;
  config[key] = value;
  return config_error(config);
}

TEST(ModelFiles, TheEndOfATextIsWhatTheDirectorySays) {
  const auto ends = [](const std::string& text) { return models::hf_end_tokens(text, "f.json"); };
  EXPECT_THAT(ends(R"({"eos_token_id": 2})"), ElementsAre(2));
  EXPECT_THAT(ends(R"({"eos_token_id": [128001, 128009]})"), ElementsAre(128001, 128009));
  EXPECT_TRUE(ends(R"({"eos_token_id": null})").empty());
  EXPECT_TRUE(ends("{}").empty());
  const auto refused = [&](const std::string& text) -> std::string {
    try {
      ends(text);
    } catch (const CheckpointError& error) {
      return error.what();
    }
    return "";
  };
  for (const char* wrong : {R"({"eos_token_id": "x"})", R"({"eos_token_id": [1, -1]})", R"({"eos_token_id": 1.5})"}) {
    EXPECT_THAT(refused(wrong), HasSubstr("f.json: \"eos_token_id\" is")) << wrong;
  }
  EXPECT_THAT(refused("["), HasSubstr("f.json: not valid JSON at column 2"));

  // generation_config.json before config.json before the tokenizer.
  const TempDirectory scratch("model");
  nlohmann::json config = tiny_hf_config();
  write_file(scratch.path() / "config.json", config.dump());
  data::BpeModel words;
  words.tokens = {"a", "b"};
  words.added_tokens = {{.id = 2, .content = "<|endoftext|>"}};
  const data::BpeTokenizer tokenizer(words);
  EXPECT_THAT(end_tokens(find_model(scratch.path()), tokenizer), ElementsAre(2));
  EXPECT_TRUE(end_tokens(find_model(scratch.path()), std::nullopt).empty());
  config["eos_token_id"] = 7;
  write_file(scratch.path() / "config.json", config.dump());
  EXPECT_THAT(end_tokens(find_model(scratch.path()), tokenizer), ElementsAre(7));
  EXPECT_EQ(find_model(scratch.path()).not_honoured, "");
  config["eos_token_id"] = 700;
  write_file(scratch.path() / "config.json", config.dump());
  EXPECT_THAT(find_model(scratch.path()).not_honoured, HasSubstr("eos_token_id 700 is no token of the model"));
  write_file(scratch.path() / "generation_config.json", R"({"eos_token_id": [8, 9]})");
  EXPECT_THAT(end_tokens(find_model(scratch.path()), tokenizer), ElementsAre(8, 9));
  write_file(scratch.path() / "generation_config.json", "no JSON");
  EXPECT_THAT(error_of(scratch.path()), HasSubstr("generation_config.json: not valid JSON at column"));
}

TEST(ModelFiles, HuggingFaceModelsThatCannotBeRunAreRefusedByName) {
  EXPECT_EQ(config_error("torch_dtype", "bfloat16"), "");
  EXPECT_EQ(
      config_error("model_type", "gpt_neox"),
      "config.json: model_type \"gpt_neox\" is not supported; expected one of llama, mistral, qwen2, qwen3, gpt2, "
      "mixtral");
  EXPECT_THAT(config_error("hidden_act", "gelu"), HasSubstr("config.json: hidden_act \"gelu\" is not supported"));
  EXPECT_THAT(config_error("attention_bias", true), HasSubstr("\"attention_bias\": true is not supported"));
  EXPECT_THAT(config_error("mlp_bias", true), HasSubstr("\"mlp_bias\": true is not supported"));
  EXPECT_THAT(config_error("quantization_config", {{"bits", 4}}),
              HasSubstr("\"quantization_config\" is not supported"));
  EXPECT_THAT(config_error("num_local_experts", 8), HasSubstr("\"num_local_experts\" is not supported"));
  EXPECT_THAT(config_error("partial_rotary_factor", 0.5), HasSubstr("\"partial_rotary_factor\": 0.5"));
  EXPECT_THAT(config_error("rope_scaling", {{"rope_type", "yarn"}}),
              HasSubstr("rope_scaling of type \"yarn\" is not supported; expected default, linear, dynamic or llama3"));
  EXPECT_THAT(config_error("rope_parameters", {{"rope_type", "default"}, {"partial_rotary_factor", 0.25}}),
              HasSubstr("\"partial_rotary_factor\": 0.25 in rope_parameters"));
  EXPECT_THAT(config_error("layer_types", {"linear_attention"}, "qwen3"), HasSubstr("type \"linear_attention\""));
  auto some = tiny_hf_config();
  some.update({{"model_type", "qwen2"}, {"num_hidden_layers", 4}, {"use_sliding_window", true}, {"sliding_window", 4}});
  some["max_window_layers"] = 3;
  EXPECT_THAT(config_error(some), HasSubstr("a sliding window in 1 of 4 layers is not supported"));
}

// What GPT-2 and Mixtral may say that changes their results.
TEST(ModelFiles, WhatOtherFamiliesCannotDoIsRefusedByName) {
  const nlohmann::json gpt2 = {{"model_type", "gpt2"}, {"n_embd", 12},     {"n_layer", 1},
                               {"n_head", 4},          {"n_positions", 8}, {"vocab_size", 11}};
  const auto gpt2_error = [&](const char* key, const nlohmann::json& value) {
    auto description = gpt2;
    description[key] = value;
    return config_error(description);
  };
  EXPECT_EQ(config_error(gpt2), "");
  EXPECT_EQ(gpt2_error("activation_function", "gelu_pytorch_tanh"), "");
  EXPECT_EQ(gpt2_error("activation_function", "relu"),
            "config.json: activation_function \"relu\" is not supported; expected \"gelu_new\"");
  EXPECT_EQ(gpt2_error("scale_attn_weights", false),
            "config.json: \"scale_attn_weights\": false is not supported; expected true");
  for (const char* flag : {"scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"}) {
    EXPECT_EQ(gpt2_error(flag, true), fmt::format("config.json: \"{}\": true is not supported; expected false", flag));
  }
  EXPECT_THAT(gpt2_error("quantization_config", {{"bits", 8}}), HasSubstr("\"quantization_config\" is not supported"));
  EXPECT_THAT(gpt2_error("n_head", 5), AllOf(HasSubstr("dim = 12 and n_heads = 5"), HasSubstr("nearest")));
  auto without = gpt2;
  without.erase("n_positions");
  EXPECT_EQ(config_error(without), "config.json has no \"n_positions\"");

  auto mixtral = tiny_hf_config();
  mixtral.update({{"model_type", "mixtral"}, {"num_local_experts", 4}});
  const auto mixtral_error = [&](const char* key, const nlohmann::json& value) {
    auto description = mixtral;
    description[key] = value;
    return config_error(description);
  };
  EXPECT_EQ(config_error(mixtral), "");
  EXPECT_EQ(mixtral_error("num_experts_per_tok", 4), "");
  EXPECT_THAT(mixtral_error("num_experts_per_tok", 5),
              HasSubstr("experts = 4 and experts_per_token = 5: expected 1 to 4096"));
  EXPECT_THAT(mixtral_error("num_local_experts", 5000), HasSubstr("experts = 5000"));
  EXPECT_THAT(mixtral_error("num_experts_per_tok", 0), HasSubstr("experts_per_token = 0: expected 1 to 4096 experts"));
  EXPECT_EQ(mixtral_error("router_jitter_noise", 0.5),
            "config.json: \"router_jitter_noise\": 0.5 is not supported; expected 0");
  EXPECT_EQ(mixtral_error("output_router_logits", true),
            "config.json: \"output_router_logits\": true is not supported; expected false");
  mixtral.erase("num_local_experts");
  EXPECT_EQ(config_error(mixtral), "config.json has no \"num_local_experts\"");
}

TEST(ModelFiles, MalformedDescriptionsNameFileAndKey) {
  EXPECT_THAT(config_error("vocab_size", "many"), HasSubstr("config.json: \"vocab_size\" is \"many\""));
  EXPECT_THAT(config_error("hidden_size", 256.7), HasSubstr("\"hidden_size\" is 256.7"));
  EXPECT_THAT(config_error("hidden_size", std::uint64_t{1} << 63), HasSubstr("\"hidden_size\" is 9223372036854775808"));
  EXPECT_THAT(config_error("num_attention_heads", 0), AllOf(HasSubstr("config.json: "), HasSubstr("n_heads")));
  EXPECT_THAT(config_error("head_dim", 7), AllOf(HasSubstr("config.json: "), HasSubstr("head_dim = 7")));
  EXPECT_THAT(config_error("rope_scaling", 3), HasSubstr("\"rope_scaling\" is not an object"));
  EXPECT_THAT(config_error("rope_scaling", {{"type", "linear"}}), HasSubstr("rope_scaling has no \"factor\""));
  EXPECT_THAT(config_error("rope_scaling", {{"type", "linear"}, {"factor", 0.5}}), HasSubstr("expected 1 or above"));
  EXPECT_THAT(config_error("rope_scaling", {{"type", "dynamic"}, {"factor", 1e300}}),
              HasSubstr("\"factor\" is 1e+300"));
  EXPECT_THAT(config_error("rope_scaling", {{"rope_type", "llama3"},
                                            {"factor", 8},
                                            {"low_freq_factor", 4},
                                            {"high_freq_factor", 4},
                                            {"original_max_position_embeddings", 8}}),
              HasSubstr("expected 0 < low < high"));
  EXPECT_THAT(config_error("layer_types", {"full_attention", "full_attention"}, "qwen2"),
              HasSubstr("\"layer_types\" names 2 layers, but \"num_hidden_layers\" is 1"));
  EXPECT_THAT(config_error("sliding_window", -1, "mistral"), HasSubstr("sliding_window = -1"));
  auto no_groups = tiny_hf_config();
  no_groups["model_type"] = "mistral";
  no_groups.erase("num_key_value_heads");
  EXPECT_THAT(config_error(no_groups), HasSubstr("has no \"num_key_value_heads\""));
  EXPECT_THROW(models::llama_config_from_hf("[", "config.json"), CheckpointError);
}

// Numbers that would overflow, loop for years or take all memory; brackets that would overflow the stack.
TEST(ModelFiles, HostileDescriptionsAreRefusedAtOnce) {
  EXPECT_THAT(config_error("num_hidden_layers", std::int64_t{1} << 40),
              HasSubstr("n_layers = 1099511627776: expected at most 10000"));
  EXPECT_THAT(config_error("head_dim", std::int64_t{1} << 40), HasSubstr("head_dim = 1099511627776"));
  auto large = tiny_hf_config();
  large.update({{"hidden_size", 1 << 30}, {"num_attention_heads", 1 << 10}, {"num_hidden_layers", 1 << 13}});
  EXPECT_THAT(config_error(large), AllOf(HasSubstr("config.json: "), HasSubstr("parameters: expected at most 1e+15")));
  large = tiny_hf_config();
  large.update({{"hidden_size", 2147483647}, {"num_attention_heads", 1 << 30}});
  EXPECT_THAT(config_error(large), HasSubstr("n_heads = 1073741824; nearest: n_heads = 1"));
  for (const std::string key : {"model_type", "rope_scaling", "other"}) {
    const std::string deep = "{\"" + key + "\": " + std::string(200'000, '[') + std::string(200'000, ']') + "}";
    try {
      models::llama_config_from_hf(deep, "config.json");
      ADD_FAILURE() << "accepted " << key;
    } catch (const CheckpointError& failure) {
      EXPECT_THAT(failure.what(), HasSubstr("config.json: its JSON nests deeper than 100 levels"));
    }
  }
}

TEST(ModelFiles, AModelLargerThanItsFilesIsRefusedBeforeItTakesMemory) {
  const TempDirectory scratch("model");
  auto config = tiny_hf_config();
  config.update({{"hidden_size", 65536}, {"num_hidden_layers", 1000}, {"vocab_size", 1 << 30}});
  config.erase("head_dim");
  write_file(scratch.path() / "config.json", config.dump());
  export_weights(scratch.path() / "model.safetensors", nn::named_parameters(*tiny_model()), {}, posix_file_system());
  try {
    load_model(find_model(scratch.path()), at::kCPU);
    ADD_FAILURE() << "loaded";
  } catch (const CheckpointError& failure) {
    EXPECT_THAT(failure.what(), AllOf(HasSubstr("config.json: tells of a model of "), HasSubstr("not of this model")));
  }
}

// What older and newer files say differently.
TEST(ModelFiles, RotarySettingsMayStandInEitherPlace) {
  auto older = tiny_hf_config(), newer = tiny_hf_config();
  older["rope_scaling"] = {{"type", "linear"}, {"factor", 2.0}};
  newer.erase("rope_theta");
  newer["rope_parameters"] = {{"rope_type", "linear"}, {"factor", 2.0}, {"rope_theta", 20000.0}};
  const auto config = models::llama_config_from_hf(older.dump(), "config.json");
  EXPECT_EQ(config, models::llama_config_from_hf(newer.dump(), "config.json"));
  EXPECT_EQ(config.rope_scaling, (RopeScaling{.type = RopeScalingType::linear, .factor = 2.0}));
  EXPECT_EQ(config.max_seq_len, 12);
  older["rope_scaling"]["type"] = "dynamic";
  EXPECT_EQ(models::llama_config_from_hf(older.dump(), "config.json").max_seq_len, 24);
}

TEST(ModelFiles, TwoKeysThatSayTheSameThingMustAgree) {
  auto description = tiny_hf_config();
  const nlohmann::json linear = {{"rope_type", "linear"}, {"factor", 2.0}};
  description["rope_scaling"] = linear;
  description["rope_parameters"] = linear;
  EXPECT_EQ(config_error(description), "");
  description["rope_parameters"]["factor"] = 3.0;
  EXPECT_THAT(config_error(description), HasSubstr("\"rope_scaling\" and \"rope_parameters\" say different things"));
  description.erase("rope_scaling");
  description["rope_parameters"]["rope_theta"] = 5e5;
  EXPECT_THAT(config_error(description), HasSubstr("\"rope_theta\" is 20000, but 500000 in rope_parameters"));
  description["rope_parameters"] = {{"type", "linear"}, {"rope_type", "default"}, {"factor", 2.0}};
  EXPECT_THAT(config_error(description), HasSubstr("\"type\" is \"linear\", but \"rope_type\" is \"default\""));
  // Another turning for each kind of layer.
  description["rope_parameters"] = {{"full_attention", linear}, {"sliding_attention", {{"rope_type", "default"}}}};
  EXPECT_THAT(config_error(description), HasSubstr("rope_parameters of its own for \"full_attention\" layers"));
}

TEST(ModelFiles, AFamilysDefaultsAreTransformers) {
  auto description = tiny_hf_config();
  description["model_type"] = "mistral";
  EXPECT_EQ(models::llama_config_from_hf(description.dump(), "config.json").sliding_window, 4096);
  description["sliding_window"] = nullptr;
  EXPECT_EQ(models::llama_config_from_hf(description.dump(), "config.json").sliding_window, 0);
  description["model_type"] = "qwen3";
  EXPECT_EQ(models::llama_config_from_hf(description.dump(), "config.json").head_dim(), 128);
  description["model_type"] = "qwen2";
  EXPECT_EQ(models::llama_config_from_hf(description.dump(), "config.json").head_dim(), 8);
  description.erase("rope_theta");
  description.erase("rms_norm_eps");
  description.update({{"model_type", "mixtral"}, {"num_local_experts", 3}});
  const auto mixtral = models::llama_config_from_hf(description.dump(), "config.json");
  EXPECT_EQ(std::tuple(mixtral.rope_theta, mixtral.norm_eps, mixtral.experts, mixtral.experts_per_token),
            std::tuple(1e6, 1e-5, 3, 2));
  const auto gpt2 = models::llama_config_from_hf(
      R"({"model_type": "gpt2", "n_embd": 12, "n_layer": 1, "n_head": 4, "n_positions": 8, "vocab_size": 11})", "");
  EXPECT_EQ(std::tuple(gpt2.ffn_hidden, gpt2.norm_eps, gpt2.tie_embeddings), std::tuple(48, 1e-5, true));
}

TEST(ModelFiles, ACheckpointKnowsItsFamily) {
  models::LlamaConfig config = kTiny;
  config.family = models::LlamaFamily::qwen3;
  config.own_head_dim = 6;
  config.sliding_window = 4;
  config.rope_scaling = {.type = RopeScalingType::llama3,
                         .factor = 8.0,
                         .low_freq_factor = 2.0,
                         .high_freq_factor = 3.0,
                         .original_max_seq_len = 10};
  auto metadata = models::llama_metadata(config);
  EXPECT_EQ(models::llama_from_metadata(metadata, "here"), config);
  metadata["name"] = "gpt";
  EXPECT_THROW(models::llama_from_metadata(metadata, "here"), CheckpointError);
}

// As GPT-2's own 50257 ids are: each rank of a tensor group has embedding and output whole.
TEST(ModelFiles, AVocabularyThatRanksDoNotDivideIsLoadedInParts) {
  models::Llama whole(small_gpt2(31));
  nn::initialise(whole, 5);
  const TempDirectory scratch("model");
  write_gpt2(scratch.path(), whole);
  const Request request{.prompt = {3, 1, 30, 7}, .max_new_tokens = 12, .sampling = {.seed = 9}};
  const auto expected = Generator(whole).generate({request})[0].tokens;
  const ModelFiles files = find_model(scratch.path());
  for (const ParallelPlan& plan : {ParallelPlan{.tp = 2}, {.pp = 2, .tp = 2}}) {
    run_local_ranks(static_cast<int>(plan.ranks()), [&](const std::shared_ptr<Communicator>& world) {
      const DeviceMesh mesh(world, plan.axes());
      const auto part = load_part(files, plan, mesh, at::kCPU);
      Generator generator(*part, {.stages = plan.pp > 1 ? mesh.communicator("pp") : nullptr});
      EXPECT_EQ(generator.generate({request})[0].tokens, expected) << plan.text();
    });
  }
}

}  // namespace
}  // namespace phalanx::infer
