#include "cli/front/checkpoint_command.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/testing/command_fixture.h"
#include "phalanx/base/file.h"
#include "phalanx/base/folder_lock.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/checkpoint/testing/small_step.h"
#include "phalanx/data/testing/small_data.h"
#include "phalanx/data/tokenizer/tokenizer_fingerprint.h"
#include "phalanx/models/config/hf_config.h"
#include "phalanx/models/config/llama_json.h"

namespace phalanx::cli {
namespace {

using checkpoint_testing::counting;
using checkpoint_testing::flip_bit;
using checkpoint_testing::small_state;
using checkpoint_testing::write_small_step;

class CheckpointCommandTest : public CommandTest {
 protected:
  CheckpointCommandTest() : CommandTest({"checkpoint", "", "", checkpoint_command}) {}
};

TEST_F(CheckpointCommandTest, InspectShowsAllOfIt) {
  write_small_step(path("run"), 20, small_state(1), 2);
  EXPECT_EQ(run({"inspect", path("run")}), 0) << error_;
  EXPECT_THAT(out_, AllOf(HasSubstr("/run/step-20\n"), HasSubstr("step      20\n"),
                          HasSubstr("state     3 tensors, 52 elements, 968 B in 2 files\n"), HasSubstr("seed = 7\n"),
                          HasSubstr("\"dim\": 4"), HasSubstr("shard-00002-model-00001-of-00001.safetensors")));
  // Half of the 200 bytes ends in the middle of the norm.
  EXPECT_THAT(out_, ContainsRegex("model.embedding.weight +F32 +\\[6, 4\\] +96 B +1 +1\n"));
  EXPECT_THAT(out_, ContainsRegex("optimizer.embedding.weight.exp_avg +F32 +\\[6, 4\\] +96 B +1 +1\n"));
  EXPECT_THAT(out_, ContainsRegex("model.norm.weight +BF16 +\\[4\\] +8 B +2 +2\n"));
  EXPECT_EQ(error_, "");
}

TEST_F(CheckpointCommandTest, ARunsFolderStandsForItsCheckpoints) {
  write_small_step(path("run/states"), 10, small_state(1));
  write_small_step(path("run/states"), 20, small_state(1));
  write_small_step(path("run/states/abandoned-1"), 30, small_state(1));
  EXPECT_EQ(run({"inspect", path("run")}), 1) << "of a folder without run.json only \"checkpoint\" is looked into";
  write_file(path("run/run.json"), "{}");
  EXPECT_EQ(run({"inspect", path("run")}), 0) << error_;
  EXPECT_THAT(out_, HasSubstr("/run/states/step-20\n"));
  EXPECT_EQ(run({"verify", path("run"), "--quiet"}), 0) << error_;
  EXPECT_THAT(out_, AllOf(HasSubstr("step-20: sound: "), HasSubstr("step-10: sound: "), Not(HasSubstr("step-30"))));
  write_small_step(path("run/other"), 20, small_state(1));
  EXPECT_EQ(run({"inspect", path("run")}), 1);
  EXPECT_THAT(error_,
              HasSubstr("run has several folders with checkpoints: expected one of them, " + path("run/other")));
}

TEST_F(CheckpointCommandTest, NothingIsWrittenIntoALivingRunsFolder) {
  write_small_step(path("run/checkpoint"), 20, small_state(1));
  write_small_step(path("source"), 30, small_state(1));
  const auto in_use =
      AllOf(HasSubstr(path("run") + " is in use by process " + std::to_string(::getpid()) + " on host "),
            HasSubstr("choose another OUT"));
  const std::vector<Arguments> commands = {{"reshard", path("source"), path("run/checkpoint"), "--ranks", "2"},
                                           {"consolidate", path("source"), path("run/hf")},
                                           {"consolidate", path("source"), path("run/weights.safetensors"), "--all"}};
  {
    const FolderLock lock(path("run"));
    for (const Arguments& command : commands) {
      EXPECT_EQ(run(command), 1);
      EXPECT_THAT(error_, in_use);
      EXPECT_FALSE(std::filesystem::exists(command[2] + "/step-30"));
    }
    // Commands that only read still work, and so do those that write elsewhere.
    EXPECT_EQ(run({"verify", path("run/checkpoint"), "--quiet"}), 0) << error_;
    EXPECT_EQ(run({"reshard", path("run/checkpoint"), path("elsewhere"), "--ranks", "2", "--quiet"}), 0) << error_;
  }
  for (const Arguments& command : commands) EXPECT_EQ(run(command), 0) << error_;
}

TEST_F(CheckpointCommandTest, VerifyNamesAllDamagedFilesAndTensors) {
  const auto step = write_small_step(path("run"), 20, small_state(1), 3);
  write_small_step(path("run"), 10, small_state(1), 1);
  EXPECT_EQ(run({"verify", path("run"), "--quiet"}), 0);
  EXPECT_THAT(out_, AllOf(HasSubstr("step-20: sound: "), HasSubstr("in 3 files, 3 tensors\n"),
                          HasSubstr("step-10: sound: "), HasSubstr("in 1 file, 3 tensors\n")));
  EXPECT_EQ(error_, "");

  const std::string first = "shard-00001-model-00001-of-00001.safetensors", third = "shard-00003" + first.substr(11);
  flip_bit(step / first, read_file(step / first).size() - 1);
  std::filesystem::remove(step / third);
  EXPECT_EQ(run({"verify", path("run")}), 1);
  EXPECT_THAT(out_, AllOf(HasSubstr(first + ": bytes 0 to "), HasSubstr("do not match their hash; they hold tensor "),
                          HasSubstr("tensor \"model.embedding.weight\""), HasSubstr(third + ": "),
                          HasSubstr("step-20: DAMAGED in 2 places"), HasSubstr("step-10: sound")));
  EXPECT_THAT(error_, HasSubstr("verifying step-20"));  // progress

  flip_bit(step / "manifest.json", 60);
  EXPECT_EQ(run({"verify", step.string()}), 1);
  EXPECT_THAT(out_, AllOf(HasSubstr("manifest.json: damaged"), HasSubstr("DAMAGED: its manifest")));
}

TEST_F(CheckpointCommandTest, DiffComparesWhateverTheFiles) {
  write_small_step(path("a"), 1, small_state(1), 1);
  write_small_step(path("b"), 1, small_state(1), 4);
  EXPECT_EQ(run({"diff", path("a"), path("b"), "-q"}), 0);
  EXPECT_THAT(out_, HasSubstr("the same: 3 tensors, 2 integers\n"));

  auto other = small_state(1);
  other[0].values[13] += 0.5;                    // row 3, column 1
  other[1].dtype = safetensors::Dtype::f32;      // the same values
  other[2] = counting("optimizer.new", {3}, 1);  // one tensor removed, one added
  other.push_back(counting("model.norm.bias", {4}, 1));
  write_small_step(path("c"), 2, other, 2);
  EXPECT_EQ(run({"diff", path("a"), path("c"), "-q"}), 1);
  EXPECT_THAT(
      out_,
      AllOf(HasSubstr("step: 1 and 2\n"), HasSubstr("only in a: \"optimizer.embedding.weight.exp_avg\" F32 [6, 4]\n"),
            HasSubstr("only in b: \"model.norm.bias\" F32 [4]\n"),
            HasSubstr("\"model.embedding.weight\": 1 of 24 elements differ, max |a - b| = 0.5 at [3, 1]\n"),
            HasSubstr("\"model.norm.weight\": a is BF16, b is F32; the values are the same\n"),
            HasSubstr("2 tensors in both: 0 the same, 2 not; 1 only in a, 2 only in b\n")));
  EXPECT_EQ(run({"diff", path("a"), path("c")}), 1);
  EXPECT_THAT(error_, HasSubstr("comparing"));
}

TEST_F(CheckpointCommandTest, ConsolidateWritesPlainFiles) {
  write_small_step(path("run"), 1, small_state(1), 3);
  ASSERT_EQ(run({"consolidate", path("run"), path("w.safetensors"), "--dtype", "bf16", "-q"}), 0) << error_;
  EXPECT_THAT(out_, HasSubstr("w.safetensors: 2 tensors, 56 B in 1 file\n"));
  const safetensors::File file(path("w.safetensors"));
  ASSERT_EQ(file.tensors().size(), 2u);
  EXPECT_EQ(file.find("embedding.weight")->dtype, safetensors::Dtype::bf16);
  EXPECT_EQ(file.find("embedding.weight")->shape, (std::vector<std::int64_t>{6, 4}));

  ASSERT_EQ(run({"consolidate", path("run"), path("hf"), "--all", "--max-file-size", "100", "-q"}), 0) << error_;
  EXPECT_THAT(out_, HasSubstr("hf: 3 tensors, 200 B in 4 files\n"));
  EXPECT_THAT(read_file(path("hf/model.safetensors.index.json")),
              HasSubstr("\"optimizer.embedding.weight.exp_avg\": \"model-00003-of-00003.safetensors\""));
}

// The weights of a Llama, and the metadata that `phalanx train` saves about the model.
const models::LlamaConfig kTinyLlama{
    .dim = 8, .n_layers = 1, .n_heads = 2, .n_kv_heads = 1, .ffn_hidden = 12, .vocab_size = 10, .max_seq_len = 16};
std::vector<checkpoint_testing::SmallTensor> llama_state() {
  std::vector<checkpoint_testing::SmallTensor> state;
  for (const auto& [name, shape] : models::llama_parameter_shapes(kTinyLlama)) {
    state.push_back(counting("model." + name, shape, static_cast<double>(state.size())));
  }
  state.push_back(counting("optimizer.norm.weight.exp_avg", {8}, 1));
  return state;
}
const std::string kLlamaMetadata = nlohmann::json({{"model", models::llama_metadata(kTinyLlama)}}).dump();

TEST_F(CheckpointCommandTest, ConsolidateWritesWhatHuggingFaceReads) {
  write_small_step(path("run"), 1, llama_state(), 3, kLlamaMetadata);
  ASSERT_EQ(run({"consolidate", path("run"), path("hf"), "--hf", "--dtype", "bf16", "-q"}), 0) << error_;
  EXPECT_THAT(out_, AllOf(HasSubstr("hf: 12 tensors, "), HasSubstr("in 3 files\n")));
  EXPECT_THAT(read_file(path("hf/generation_config.json")), HasSubstr("\"eos_token_id\": null"));
  const safetensors::File file(path("hf/model.safetensors"));
  ASSERT_EQ(file.tensors().size(), 12U);
  EXPECT_EQ(file.find("model.layers.0.self_attn.k_proj.weight")->shape, (std::vector<std::int64_t>{4, 8}));
  EXPECT_EQ(file.find("lm_head.weight")->dtype, safetensors::Dtype::bf16);
  const std::string config = read_file(path("hf/config.json"));
  EXPECT_THAT(config, HasSubstr("\"torch_dtype\": \"bfloat16\""));
  EXPECT_EQ(models::llama_config_from_hf(config, "config.json"), kTinyLlama);

  ASSERT_EQ(run({"consolidate", path("run"), path("parts"), "--hf", "--max-file-size", "700", "-q"}), 0) << error_;
  EXPECT_THAT(read_file(path("parts/model.safetensors.index.json")),
              HasSubstr("\"model.embed_tokens.weight\": \"model-000"));
  EXPECT_THAT(read_file(path("parts/config.json")), HasSubstr("\"torch_dtype\": \"float32\""));

  ASSERT_EQ(run({"consolidate", path("run"), path("half"), "--hf", "--dtype", "f16", "-q"}), 0) << error_;
  EXPECT_THAT(read_file(path("half/config.json")), HasSubstr("\"torch_dtype\": \"float16\""));
}

TEST_F(CheckpointCommandTest, AnotherTokenizerIsNotPutBesideTheWeights) {
  const auto write_tokenizer = [&](const std::string& folder, const std::string& text) {
    std::filesystem::create_directories(path(folder));
    const data::BpeTokenizer tokenizer = data::small_tokenizer(text);
    tokenizer.save(path(folder + "/tokenizer.json"));
    return data::tokenizer_fingerprint(tokenizer);
  };
  const std::string own = write_tokenizer("own", "the cat sat on the mat. "),
                    other = write_tokenizer("other", "abcdefg");
  ASSERT_NE(own, other);
  auto metadata = nlohmann::json::parse(kLlamaMetadata);
  metadata["hf_assets_path"] = path("own");
  metadata["run"] = {{"tokenizer", {{"fingerprint", own}}}};
  write_small_step(path("run"), 1, llama_state(), 1, metadata.dump());
  EXPECT_EQ(run({"consolidate", path("run"), path("hf"), "--hf", "-q"}), 0) << error_;
  const auto refused =
      AllOf(HasSubstr("tokenizer.json is the tokenizer " + other), HasSubstr("was trained with " + own),
            HasSubstr("--assets"), HasSubstr("--allow-tokenizer-mismatch"));
  EXPECT_EQ(run({"consolidate", path("run"), path("no"), "--hf", "-q", "--assets", path("other")}), 1);
  EXPECT_THAT(error_, refused);
  std::filesystem::copy_file(path("other/tokenizer.json"), path("own/tokenizer.json"),
                             std::filesystem::copy_options::overwrite_existing);
  EXPECT_EQ(run({"consolidate", path("run"), path("no"), "--hf", "-q"}), 1) << "it was replaced where the run had it";
  EXPECT_THAT(error_, refused);
  EXPECT_FALSE(std::filesystem::exists(path("no")));
  EXPECT_EQ(run({"consolidate", path("run"), path("yes"), "--hf", "-q", "--allow-tokenizer-mismatch"}), 0) << error_;
  EXPECT_EQ(run({"consolidate", path("run"), path("x.safetensors"), "-q", "--allow-tokenizer-mismatch"}), 2);
}

// The tokenizer folder that the run named may have no tokenizer (any more).
TEST_F(CheckpointCommandTest, ATokenizerBesideTheCheckpointIsFoundAndNoneIsSaid) {
  std::filesystem::create_directories(path("named"));
  auto metadata = nlohmann::json::parse(kLlamaMetadata);
  metadata["hf_assets_path"] = path("named");
  write_small_step(path("run"), 1, llama_state(), 1, metadata.dump());
  EXPECT_EQ(run({"consolidate", path("run"), path("bare"), "--hf", "-q"}), 0);
  EXPECT_THAT(error_,
              AllOf(HasSubstr("without a tokenizer"), HasSubstr("there is no tokenizer.json in " + path("named"))));
  data::small_tokenizer("the cat sat on the mat. ").save(path("run/tokenizer.json"));
  EXPECT_EQ(run({"consolidate", path("run"), path("whole"), "--hf", "-q"}), 0);
  EXPECT_THAT(error_, Not(HasSubstr("without a tokenizer")));
  EXPECT_TRUE(std::filesystem::exists(path("whole/tokenizer.json")));
}

TEST_F(CheckpointCommandTest, WhatIsNoLlamaIsNoHuggingFaceModel) {
  auto lacking = llama_state(), different = llama_state(), more = llama_state();
  std::erase_if(lacking, [](const auto& tensor) { return tensor.name == "model.norm.weight"; });
  for (auto& tensor : different) {
    if (tensor.name == "model.norm.weight") tensor = counting(tensor.name, {9}, 1);
  }
  more.push_back(counting("model.layers.1.attention.wq.weight", {8, 8}, 1));
  auto other = nlohmann::json::parse(kLlamaMetadata), impossible = other;
  other["model"]["name"] = "gpt";
  impossible["model"]["n_heads"] = 3;
  struct Case {
    std::vector<checkpoint_testing::SmallTensor> state;
    std::string metadata;
    std::string message;
  };
  const std::vector<Case> cases = {
      {llama_state(), "{}", "does not say the model's shape (metadata.model)"},
      {llama_state(), R"({"model": {"dim": 8}})", "manifest.json: metadata.model has no \"n_layers\""},
      {llama_state(), other.dump(), "\"name\" is \"gpt\": expected one of llama, mistral"},
      {llama_state(), impossible.dump(), "head_dim = dim / n_heads must be whole"},
      {lacking, kLlamaMetadata, "\"model.norm.weight\" is missing (expected F32 [8])"},
      {different, kLlamaMetadata, "\"model.norm.weight\": expected F32 [8], found F32 [9]"},
      {more, kLlamaMetadata, "\"model.layers.1.attention.wq.weight\" is unexpected"},
      {small_state(1), kLlamaMetadata, "does not hold the model that its metadata describes"}};
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const std::string folder = path("run" + std::to_string(i));
    write_small_step(folder, 1, cases[i].state, 1, cases[i].metadata);
    EXPECT_EQ(run({"consolidate", folder, path("hf"), "--hf", "-q"}), 1) << cases[i].message;
    EXPECT_THAT(error_, AllOf(HasSubstr("phalanx checkpoint: "), HasSubstr(cases[i].message)));
    EXPECT_FALSE(std::filesystem::exists(path("hf")));
  }
  write_small_step(path("good"), 1, llama_state(), 1, kLlamaMetadata);
  EXPECT_EQ(run({"consolidate", path("good"), path("w.safetensors"), "--hf", "-q"}), 1);
  EXPECT_THAT(error_, HasSubstr("is one file, but config.json is to stand beside it: name a directory"));
  EXPECT_EQ(run({"consolidate", path("good"), path("hf"), "--hf", "--all"}), 2);
  EXPECT_THAT(error_, HasSubstr("--all and --hf"));
}

TEST_F(CheckpointCommandTest, ReshardKeepsTheState) {
  write_small_step(path("run"), 5, small_state(1), 3);
  ASSERT_EQ(run({"reshard", path("run"), path("new"), "--ranks", "2"}), 0) << error_;
  EXPECT_THAT(out_, AllOf(HasSubstr("new/step-5: 3 tensors, "), HasSubstr("in 2 files\n")));
  EXPECT_EQ(run({"diff", path("run"), path("new"), "-q"}), 0);
  EXPECT_EQ(run({"verify", path("new"), "-q"}), 0);
}

TEST_F(CheckpointCommandTest, HelpExplains) {
  EXPECT_EQ(run({"--help"}), 0);
  EXPECT_THAT(out_, AllOf(HasSubstr("usage: phalanx checkpoint inspect DIR"), HasSubstr("--max-file-size")));
  EXPECT_EQ(run({"verify", "--help"}), 0);
  EXPECT_EQ(run({}), 2);
  EXPECT_THAT(error_, HasSubstr("usage: "));
}

TEST_F(CheckpointCommandTest, WrongInputIsOneErrorAndTheRightStatus) {
  const auto step = write_small_step(path("run"), 1, small_state(1));
  const auto broken = write_small_step(path("broken"), 1, small_state(1));
  flip_bit(broken / "shard-00001-model-00001-of-00001.safetensors", 40);
  write_small_step(path("optimizer"), 1, {counting("optimizer.x", {2}, 1)});
  std::filesystem::create_directories(path("nothing"));
  const std::string run_folder = path("run"), out = path("out"), file = path("x.safetensors");
  struct Case {
    Arguments arguments;
    int status;
    std::string message;
  };
  const std::vector<Case> cases = {
      {{"inspekt", run_folder}, 2, "unknown subcommand 'inspekt' (did you mean 'inspect'?)"},
      {{"inspect"}, 2, "`phalanx checkpoint inspect` needs DIR"},
      {{"inspect", run_folder, "x"}, 2, "unexpected argument 'x'"},
      {{"inspect", run_folder, "--all"}, 2, "unknown option '--all'"},
      {{"inspect", path("gone")}, 1, "gone is not a directory"},
      {{"inspect", path("nothing")}, 1, "nothing holds no complete checkpoint"},
      {{"inspect", path("broken")}, 1, "do not match their hash"},
      {{"verify", path("nothing")}, 1, "nothing holds no complete checkpoint"},
      {{"verify", path("gone")}, 1, "gone is not a directory"},
      {{"verify", run_folder, "--quite"}, 2, "unknown option '--quite' (did you mean '--quiet'?)"},
      {{"diff", run_folder}, 2, "needs A and B"},
      {{"diff", run_folder, path("nothing")}, 1, "nothing holds no complete checkpoint"},
      {{"diff", run_folder, path("broken")}, 1, "do not match their hash"},
      {{"consolidate", run_folder}, 2, "needs DIR and OUT"},
      {{"consolidate", run_folder, out, "--dtype", "int8"}, 2, "--dtype is 'int8': expected bf16"},
      {{"consolidate", run_folder, out, "--max-file-size", "big"}, 2, "--max-file-size: 'big' is no size"},
      {{"consolidate", run_folder, out, "--max-file-size", "0"}, 2, "--max-file-size is 0"},
      {{"consolidate", run_folder, file, "--max-file-size", "1G"}, 1, "to write several, name a directory"},
      {{"consolidate", run_folder, run_folder}, 1, "run exists already"},
      {{"consolidate", path("optimizer"), file}, 1, "holds no model weights"},
      {{"consolidate", path("broken"), file}, 1, "do not match their hash"},
      {{"reshard", run_folder, out}, 2, "--ranks N is missing"},
      {{"reshard", run_folder, out, "--ranks", "0"}, 2, "--ranks is 0: expected 1"},
      {{"reshard", run_folder, out, "--ranks", "two"}, 2, "--ranks is 'two': expected a whole number"},
      {{"reshard", run_folder, run_folder, "--ranks", "2"}, 1, "step-1 exists already"},
  };
  for (const Case& test : cases) {
    EXPECT_EQ(run(test.arguments), test.status) << test.message;
    EXPECT_THAT(error_, AllOf(HasSubstr("phalanx checkpoint: "), HasSubstr(test.message)));
    EXPECT_EQ(out_, "") << test.message;
    EXPECT_FALSE(std::filesystem::exists(out));
    EXPECT_FALSE(std::filesystem::exists(file));
  }
}

TEST_F(CheckpointCommandTest, WhatTheJsonLibrarySaysIsToldInOurWords) {
  ::testing::internal::CaptureStderr();
  const auto reads = [](const Arguments&) { return nlohmann::json::object().at("steps").get<int>(); };
  EXPECT_EQ(run_command({"report", "", "", reads}, {}), 1);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "phalanx report: a JSON file is malformed: its key 'steps' is missing\n");
}

}  // namespace
}  // namespace phalanx::cli
