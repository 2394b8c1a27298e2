#include "phalanx/infer/model_files.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/checkpoint/checkpoint_manager.h"
#include "phalanx/checkpoint/files/hf_model.h"
#include "phalanx/checkpoint/files/saved_state.h"
#include "phalanx/checkpoint/files/weights_description.h"
#include "phalanx/checkpoint/weights.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/data/testing/small_data.h"
#include "phalanx/data/tokenizer/bpe_model.h"
#include "phalanx/data/tokenizer/tokenizer_fingerprint.h"
#include "phalanx/infer/generator.h"
#include "phalanx/models/config/hf_config.h"
#include "phalanx/models/config/hf_names.h"
#include "phalanx/models/config/llama_json.h"
#include "phalanx/models/config/testing/tiny_hf_config.h"
#include "phalanx/models/expert_bias.h"
#include "phalanx/models/llama.h"
#include "phalanx/nn/init.h"

namespace phalanx::infer {
namespace {

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

std::shared_ptr<models::Llama> tiny_model(const models::LlamaConfig& config = kTiny) {
  auto model = std::make_shared<models::Llama>(config);
  nn::initialise(*model, 5);
  return model;
}

std::shared_ptr<models::Llama> tied_model() {
  auto config = kTiny;
  config.tie_embeddings = true;
  return tiny_model(config);
}

nlohmann::json tied_hf_config(bool ties) {
  auto description = models::tiny_hf_config();
  description["tie_word_embeddings"] = ties;
  return description;
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
  return error_text([&] { find_model(path); });
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

// They say where a token goes, so a model without them is another one.
TEST(ModelFiles, BiasesOfExpertsAreUsed) {
  const TempDirectory scratch("model");
  models::LlamaConfig config = kTiny;
  config.family = models::LlamaFamily::mixtral;
  config.experts = 4;
  config.experts_per_token = 1;
  const auto model = tiny_model(config);
  const at::Tensor tokens = at::arange(10).view({1, 10});
  const at::Tensor without = nn::call(*model, tokens);
  TrainState state;
  state.tensors = with_prefix("model.", nn::named_parameters(*model));
  const std::vector<NamedTensor> biases = models::make_expert_biases(*model);
  ASSERT_EQ(biases.size(), 1U);
  EXPECT_EQ(biases[0].name, "layers.0.moe.expert_bias");
  biases[0].tensor[2].fill_(1);  // every token goes there
  for (const NamedTensor& one : with_prefix("model.", biases)) state.tensors.push_back(one);
  const nlohmann::json metadata = {{"model", models::llama_metadata(config)}};
  CheckpointManager(scratch.path() / "run").save(state, 3, metadata.dump());
  const auto loaded = load_model(find_model(scratch.path() / "run"), at::kCPU);
  const at::Tensor expected = nn::call(*model, tokens);
  EXPECT_FALSE(expected.equal(without));
  EXPECT_TRUE(nn::call(*loaded, tokens).equal(expected));
  // Hugging Face's format has no place for them.
  EXPECT_THAT(error_text<CheckpointError>([&] {
                SavedState saved(scratch.path() / "run" / "step-3");
                consolidate_for_hf(saved, scratch.path() / "hf");
              }),
              HasSubstr("biases by which experts are chosen"));
}

TEST(ModelFiles, ATokenizerOtherThanTheRunsIsRefused) {
  const TempDirectory scratch("model");
  const auto path = [&](const char* name) { return (scratch.path() / name).string(); };
  const auto mine = data::small_tokenizer("the cat sat on the mat, the cat"),
             other = data::small_tokenizer("xyxyxy zzzz");
  auto metadata = tiny_metadata();
  metadata["run"] = {{"version", 1}, {"tokenizer", {{"fingerprint", data::tokenizer_fingerprint(mine)}}}};
  save_run(scratch.path() / "run" / "checkpoint", metadata);
  const ModelFiles files = find_model(scratch.path() / "run" / "checkpoint");
  mine.save(path("mine.json"));
  other.save(path("other.json"));
  EXPECT_EQ(load_tokenizer(files, path("mine.json")).vocab_size(), mine.vocab_size());
  EXPECT_THAT(
      error_text<DataError>([&] { load_tokenizer(files, path("other.json")); }),
      AllOf(HasSubstr("other.json is of the tokenizer tok1:"),
            HasSubstr("was trained with " + files.tokenizer_fingerprint), HasSubstr("--allow-tokenizer-mismatch")));
  EXPECT_NO_THROW(load_tokenizer(files, path("other.json"), /*allow_mismatch=*/true));
  for (const auto* tokenizer : {&mine, &other}) {
    const auto tokens = data::small_token_file(path("ids"), data::tokenizer_fingerprint(*tokenizer));
    const std::string refusal = error_text<DataError>([&] { check_tokens(files, tokens); });
    EXPECT_EQ(refusal.empty(), tokenizer == &mine);
    if (tokenizer == &other) {
      EXPECT_THAT(refusal, HasSubstr("ids.bin is of the tokenizer"));
    }
    EXPECT_NO_THROW(check_tokens(files, tokens, /*allow_mismatch=*/true));
  }
}

TEST(ModelFiles, WhatIsNotKnownOfTokenizersIsSaid) {
  const TempDirectory scratch("model");
  const auto mine = data::small_tokenizer("the cat sat on the mat, the cat");
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
  const auto tokens = data::small_token_file(scratch.path() / "ids");
  EXPECT_THAT(said([&] { check_tokens(files, tokens); }), HasSubstr("nothing says by which tokenizers"));
  files.tokenizer_fingerprint = data::tokenizer_fingerprint(mine);
  EXPECT_THAT(said([&] { check_tokens(files, tokens); }), HasSubstr("ids.bin (not said) and that of the model"));
  EXPECT_EQ(said([&] { load_tokenizer(files); }), "");
}

TEST(ModelFiles, TiedEmbeddingsStayTied) {
  const auto model = tied_model();
  auto metadata = tiny_metadata();
  metadata["model"]["tie_embeddings"] = true;
  const TempDirectory scratch("model");
  TrainState state;
  state.tensors = with_prefix("model.", nn::named_parameters(*model));
  CheckpointManager(scratch.path()).save(state, 3, metadata.dump());
  const auto files = find_model(scratch.path());
  EXPECT_EQ(files.config, model->config());
  EXPECT_TRUE(same_weights(*load_model(files, at::kCPU), *model));
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
  EXPECT_THAT(files.tokenizer_places, Contains((scratch.path() / "assets" / "tokenizer.json").string()));
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
  EXPECT_THAT(error_text<CheckpointError>([&] { load_model(files, at::kCPU); }),
              AllOf(HasSubstr("config.json describes another model"), HasSubstr("model.safetensors"),
                    HasSubstr("rope.theta"), HasSubstr("54321.0"), HasSubstr("--allow-model-mismatch")));
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

TEST(ModelFiles, AHuggingFaceDirectoryIsAModelToo) {
  const TempDirectory scratch("model");
  write_file(scratch.path() / "config.json", models::tiny_hf_config().dump());
  const auto model = tiny_model();
  export_weights(scratch.path() / "model.safetensors", nn::named_parameters(*model),
                 {.key_mapping = models::llama_hf_name}, posix_file_system());
  const auto files = find_model(scratch.path());
  EXPECT_TRUE(files.hugging_face);
  EXPECT_EQ(files.config, kTiny);
  EXPECT_TRUE(same_weights(*load_model(files, at::kCPU), *model));
}

TEST(ModelFiles, ASwappedTokenizerInAnExportedDirectoryIsRefused) {
  const TempDirectory scratch("model");
  const auto mine = data::small_tokenizer("the cat sat on the mat, the cat"),
             other = data::small_tokenizer("xyxyxy zzzz");
  write_file(scratch.path() / "config.json", models::tiny_hf_config().dump());
  auto metadata = tiny_metadata();
  metadata["run"] = {{"version", 1}, {"tokenizer", {{"fingerprint", data::tokenizer_fingerprint(mine)}}}};
  export_weights(
      scratch.path() / "model.safetensors", nn::named_parameters(*tiny_model()),
      {.key_mapping = models::llama_hf_name, .metadata = {{"phalanx", metadata_for_weights(metadata.dump())}}},
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
  const auto model = tied_model();
  write_file(scratch.path() / "config.json", tied_hf_config(true).dump());
  auto tensors = nn::named_parameters(*model);
  tensors.push_back({"output.weight", model->tok_embeddings->weight.detach().clone()});
  tensors.push_back({"inv_freq", model->norm->weight.detach().clone()});
  const auto name = [](const std::string& fqn) {
    return fqn == "inv_freq" ? "model.layers.0.self_attn.rotary_emb.inv_freq" : models::llama_hf_name(fqn);
  };
  export_weights(scratch.path() / "model.safetensors", tensors, {.key_mapping = name}, posix_file_system());
  const auto files = find_model(scratch.path());
  EXPECT_TRUE(files.config.tie_embeddings);
  EXPECT_TRUE(same_weights(*load_model(files, at::kCPU), *model));
}

// A file whose output matrix differs from its embeddings is not of a model that ties them.
TEST(ModelFiles, AnOutputMatrixOfItsOwnIsNotDropped) {
  const TempDirectory scratch("model");
  const auto model = tied_model();
  write_file(scratch.path() / "config.json", tied_hf_config(true).dump());
  auto tensors = nn::named_parameters(*model);
  tensors.push_back({"output.weight", model->tok_embeddings->weight.detach().clone()});
  tensors.back().tensor[30][0].add_(1);
  export_weights(scratch.path() / "model.safetensors", tensors, {.key_mapping = models::llama_hf_name},
                 posix_file_system());
  const auto files = find_model(scratch.path());
  EXPECT_THAT(error_text<CheckpointError>([&] { load_model(files, at::kCPU); }),
              AllOf(HasSubstr("\"model.embed_tokens.weight\" and \"lm_head.weight\" are one matrix"),
                    HasSubstr("\"tie_word_embeddings\": false")));
  // With that setting it is a model like any other.
  write_file(scratch.path() / "config.json", tied_hf_config(false).dump());
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
    FileTensorView found =
        fqn == "mask" ? FileTensorView("h.0.attn.bias") : models::hf_tensor_view(model.config(), fqn);
    if (name_in_file) found.name = name_in_file(found.name);
    return found;
  };
  auto tensors = nn::named_parameters(model);
  if (name_in_file) tensors.push_back({"mask", model.norm->weight.detach().clone()});
  export_weights(folder / "model.safetensors", tensors, {.key_mapping = place}, posix_file_system());
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

// A part of the model does not read tensors of other parts. Tensors that belong to no part are still an error.
TEST(ModelFiles, ATensorThatNoPartKnowsIsRefused) {
  models::Llama model(small_gpt2(32));
  nn::initialise(model, 5);
  const TempDirectory scratch("model");
  write_gpt2(scratch.path(), model,
             [](const std::string& name) { return name == "h.0.attn.bias" ? "h.0.attn.other" : name; });
  const ModelFiles files = find_model(scratch.path());
  run_local_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
    const ParallelPlan plan{.pp = 2};
    EXPECT_THAT(
        error_text<CheckpointError>([&] { load_model_shard(files, plan, DeviceMesh(world, plan.axes()), at::kCPU); }),
        HasSubstr("\"h.0.attn.other\" is unexpected"));
  });
}

TEST(ModelFiles, TheEndOfATextIsWhatTheDirectorySays) {
  // generation_config.json before config.json before the tokenizer.
  const TempDirectory scratch("model");
  nlohmann::json config = models::tiny_hf_config();
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

TEST(ModelFiles, AnEndThatTheDocumentsDidNotHaveIsSaid) {
  ModelFiles files{.weights = "run/step-1", .end_tokens = {3}};
  const auto said = [&](std::optional<std::int64_t> trained) {
    files.document_end = trained;
    testing::internal::CaptureStderr();
    EXPECT_THAT(end_tokens(files, std::nullopt), ElementsAre(3));
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(said(std::nullopt), "");
  EXPECT_EQ(said(3), "");
  EXPECT_THAT(said(5), AllOf(HasSubstr("run/step-1 was trained on end by token 5, but its texts by token 3")));
  EXPECT_THAT(said(data::kNoDocumentEnd), HasSubstr("end by no token"));
}

TEST(ModelFiles, AModelLargerThanItsFilesIsRefusedBeforeItTakesMemory) {
  const TempDirectory scratch("model");
  auto config = models::tiny_hf_config();
  config.update({{"hidden_size", 65536}, {"num_hidden_layers", 1000}, {"vocab_size", 1 << 30}});
  config.erase("head_dim");
  write_file(scratch.path() / "config.json", config.dump());
  export_weights(scratch.path() / "model.safetensors", nn::named_parameters(*tiny_model()), {}, posix_file_system());
  EXPECT_THAT(error_text<CheckpointError>([&] { load_model(find_model(scratch.path()), at::kCPU); }),
              AllOf(HasSubstr("config.json: tells of a model of "), HasSubstr("not of this model")));
}

// As with GPT-2's own 50257 ids: each rank of a tensor-parallel group has the full embedding and output.
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
      const auto part = load_model_shard(files, plan, mesh, at::kCPU);
      Generator generator(*part, {.stages = plan.pp > 1 ? mesh.communicator("pp") : nullptr});
      EXPECT_EQ(generator.generate({request})[0].tokens, expected) << plan.text();
    });
  }
}

}  // namespace
}  // namespace phalanx::infer
