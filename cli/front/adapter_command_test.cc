// Adapters as a user meets them: trained on a base, used by `phalanx generate` and `eval` in several layouts, merged,
// and refused where they do not fit.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "cli/testing/program_fixture.h"
#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/data/testing/small_data.h"

namespace phalanx::cli {
namespace adapter_command_test {

class AdapterCommandTest : public program_testing::FolderSuite<AdapterCommandTest> {
 protected:
  /// A base after a few steps, and an adapter that was trained on it in tensor-parallel ranks.
  static void SetUpTestSuite() {
    make_folder("adapter_command");
    program_testing::write_periodic_tokens(file("tokens.bin"));
    write_file(file("run.toml"), program_testing::debug_run(file("tokens.bin")));
    write_file(file("prompts.jsonl"), "{\"ids\": [3, 14, 25]}\n{\"ids\": [7]}\n");
    for (const char* base : {"base", "other"}) {
      ASSERT_EQ(call("train " + file("run.toml") +
                     " --training.steps=3 --checkpoint.last_save_in_hf --job.dump_folder=" + file(base) +
                     (base == std::string("other") ? " --debug.seed=7" : "")),
                0)
          << error_;
    }
    ASSERT_EQ(call("train -n 2 " + file("run.toml") + " --training.steps=30 --parallelism.tensor_parallel_degree=2 " +
                   "--lora.rank=4 --lora.target_modules=q_proj,down_proj --checkpoint.initial_load_in_hf " +
                   "--checkpoint.last_save_in_hf --checkpoint.initial_load_path=" + file("base/hf") +
                   " --job.dump_folder=" + file("tuned")),
              0)
        << error_;
  }

  /// The ids that each prompt gets.
  static std::vector<nlohmann::json> generated(const std::string& arguments) {
    EXPECT_EQ(call("generate --prompts-file " + file("prompts.jsonl") + " --greedy --max-new-tokens 12 " + arguments),
              0)
        << error_;
    std::vector<nlohmann::json> ids;
    std::istringstream lines(out_);
    for (std::string line; std::getline(lines, line);) ids.push_back(nlohmann::json::parse(line)["ids"]);
    EXPECT_EQ(ids.size(), 2U);
    return ids;
  }
  static double loss(const std::string& arguments) {
    EXPECT_EQ(
        call("eval --tokens " + file("tokens.bin") + " --max-tokens 200 --json " + file("eval.json") + " " + arguments),
        0)
        << error_;
    return nlohmann::json::parse(read_file(file("eval.json")))["loss"];
  }
};

TEST_F(AdapterCommandTest, EveryWayToUseAnAdapterGivesTheSame) {
  const std::string base = "--checkpoint " + file("base/hf"), adapter = base + " --adapter " + file("tuned/adapter");
  ASSERT_EQ(call("checkpoint merge " + file("base/hf") + " " + file("merged") + " --adapter " + file("tuned/adapter")),
            0)
      << error_;
  EXPECT_THAT(out_, HasSubstr("4 layers merged"));
  ASSERT_EQ(call("checkpoint merge " + file("tuned") + " " + file("merged-run")), 0) << error_;
  EXPECT_EQ(read_file(file("merged/model.safetensors")).size(), read_file(file("base/hf/model.safetensors")).size());
  const auto expected = generated(adapter);
  EXPECT_NE(expected, generated(base));
  for (const std::string& way : {adapter + " -n 2 --tp 2", adapter + " -n 2 --pp 2", "--checkpoint " + file("tuned"),
                                 "-n 2 --pp 2 --checkpoint " + file("tuned"), "--checkpoint " + file("merged"),
                                 "--checkpoint " + file("merged-run"), "--checkpoint " + file("tuned/hf")}) {
    EXPECT_EQ(generated(way), expected) << way;
  }
  const double tuned = loss(adapter);
  EXPECT_GT(std::abs(tuned - loss(base)), 1e-3);
  EXPECT_NEAR(loss("-n 2 --tp 2 " + adapter), tuned, 1e-5);
  EXPECT_NEAR(loss("--checkpoint " + file("merged")), tuned, 1e-5);
}

TEST_F(AdapterCommandTest, WhatDoesNotFitIsRefused) {
  const std::string adapter = " --adapter " + file("tuned/adapter"),
                    prompt = " --prompts-file " + file("prompts.jsonl");
  EXPECT_EQ(call("generate --checkpoint " + file("other/hf") + adapter + prompt), 1);
  EXPECT_THAT(error_, HasSubstr("was trained on other weights"));
  EXPECT_EQ(call("generate --allow-base-mismatch --checkpoint " + file("other/hf") + adapter + prompt), 0) << error_;
  EXPECT_EQ(call("generate --checkpoint " + file("tuned") + adapter + prompt), 1);
  EXPECT_THAT(error_, HasSubstr("trains adapters, and holds them"));
  EXPECT_EQ(call("generate --checkpoint " + file("base/hf") + " --adapter " + file("base/hf") + prompt), 1);
  EXPECT_THAT(error_, HasSubstr("is no adapter: it has no adapter_config.json"));
  EXPECT_EQ(call("generate --allow-base-mismatch --checkpoint " + file("base/hf") + prompt), 2);
  EXPECT_EQ(call("checkpoint merge " + file("base/hf") + " " + file("new")), 2);
  EXPECT_THAT(error_, HasSubstr("has no adapters: expected --adapter DIR"));
  EXPECT_EQ(call("checkpoint merge " + file("base/hf")), 2);
  EXPECT_THAT(error_, HasSubstr("needs DIR and OUT"));
  EXPECT_EQ(call("checkpoint merge " + file("base/hf") + " " + file("other/hf") + adapter), 1);
  EXPECT_THAT(error_, HasSubstr("exists already, and is not empty"));
  EXPECT_EQ(call("checkpoint consolidate --hf " + file("tuned") + " " + file("new")), 1);
  EXPECT_THAT(error_, HasSubstr("`phalanx checkpoint merge` writes its base with them added"));
}

// A QLoRA run's checkpoint holds the base in 4 bits, and its adapters add to that.
TEST_F(AdapterCommandTest, AdaptersOnABaseInFourBitsAreUsedInEveryWay) {
  const std::string train = "train " + file("run.toml") + " --model.dim=128 --model.ffn_hidden=256 ";
  ASSERT_EQ(call(train + "--training.steps=3 --checkpoint.last_save_in_hf --job.dump_folder=" + file("wide")), 0)
      << error_;
  ASSERT_EQ(call(train + "-n 2 --training.steps=30 --parallelism.tensor_parallel_degree=2 --lora.rank=4 " +
                 "--lora.base_dtype=nf4 --checkpoint.initial_load_in_hf --checkpoint.last_save_in_hf " +
                 "--checkpoint.initial_load_path=" + file("wide/hf") + " --job.dump_folder=" + file("qlora")),
            0)
      << error_;
  ASSERT_EQ(call("checkpoint merge " + file("qlora") + " " + file("qlora-merged")), 0) << error_;
  const std::string run = "--checkpoint " + file("qlora"), merged = "--checkpoint " + file("qlora-merged"),
                    wide = "--checkpoint " + file("wide/hf");
  const auto expected = generated(run);
  EXPECT_NE(expected, generated(wide));
  for (const std::string& way : {"-n 2 --tp 2 " + run, "-n 2 --pp 2 " + run, merged, "-n 2 --tp 2 " + merged,
                                 "--checkpoint " + file("qlora/hf")}) {
    EXPECT_EQ(generated(way), expected) << way;
  }
  const double tuned = loss(run);
  for (const std::string& way : {"-n 2 --tp 2 " + run, "-n 2 --pp 2 " + run, merged}) {
    EXPECT_NEAR(loss(way), tuned, 1e-5) << way;
  }
  EXPECT_LT(tuned, loss(wide) - 0.1);
  // The same adapter on the base in float32 is near it, and not the same.
  const double on_wide = loss(wide + " --adapter " + file("qlora/adapter"));
  EXPECT_NEAR(on_wide, tuned, 0.1);
  EXPECT_GT(std::abs(on_wide - tuned), 1e-4);
}

// Their files keep queries, keys and values in one matrix, which has one adapter there.
TEST_F(AdapterCommandTest, AdaptersOfJoinedLayersAreUsedInEveryWay) {
  for (const std::string family : {"gpt2", "phi3"}) {
    const std::string train = "train " + file("run.toml") + " --model.name=" + family + " ";
    const std::string base = file(family) + "/hf", adapter = file(family + "-tuned") + "/adapter";
    ASSERT_EQ(call(train + "--training.steps=2 --checkpoint.last_save_in_hf --job.dump_folder=" + file(family)), 0)
        << error_;
    ASSERT_EQ(call(train + "--training.steps=40 --lora.rank=4 --checkpoint.initial_load_in_hf " +
                   "--checkpoint.initial_load_path=" + base + " --job.dump_folder=" + file(family + "-tuned")),
              0)
        << error_;
    ASSERT_EQ(call("checkpoint merge " + base + " " + file(family + "-merged") + " --adapter " + adapter), 0) << error_;
    const std::string with_adapter = "--checkpoint " + base + " --adapter " + adapter;
    const double tuned = loss(with_adapter);
    EXPECT_GT(std::abs(tuned - loss("--checkpoint " + base)), 1e-3) << family;
    for (const std::string& way :
         {"--checkpoint " + file(family + "-merged"), "--checkpoint " + file(family + "-tuned"),
          "-n 2 --tp 2 " + with_adapter, "-n 2 --pp 2 " + with_adapter}) {
      EXPECT_NEAR(loss(way), tuned, 1e-5) << family << ": " << way;
      EXPECT_EQ(generated(way), generated(with_adapter)) << family << ": " << way;
    }
  }
}

// They are no parameters of the model, and part of it all the same.
TEST_F(AdapterCommandTest, AMergedModelHasTheBiasesOfItsExperts) {
  const std::string train = "train " + file("run.toml") + " --model.name=deepseek_v3 --training.steps=2 ";
  ASSERT_EQ(call(train +
                 "--training.moe_router_enable_expert_bias --training.moe_router_bias_update_rate=0.1 "
                 "--checkpoint.last_save_in_hf --job.dump_folder=" +
                 file("mixture")),
            0)
      << error_;
  ASSERT_EQ(call(train + "--lora.rank=4 --checkpoint.initial_load_in_hf --checkpoint.initial_load_path=" +
                 file("mixture/hf") + " --job.dump_folder=" + file("mixture-tuned")),
            0)
      << error_;
  ASSERT_EQ(call("checkpoint merge " + file("mixture/hf") + " " + file("mixture-merged") + " --adapter " +
                 file("mixture-tuned/adapter")),
            0)
      << error_;
  ASSERT_EQ(call("checkpoint merge " + file("mixture-tuned") + " " + file("mixture-merged-run")), 0) << error_;
  const auto expected = generated("--checkpoint " + file("mixture/hf") + " --adapter " + file("mixture-tuned/adapter"));
  for (const char* merged : {"mixture-merged", "mixture-merged-run"}) {
    EXPECT_EQ(read_file(file(std::string(merged) + "/model.safetensors")).size(),
              read_file(file("mixture/hf/model.safetensors")).size());
    EXPECT_THAT(read_file(file(std::string(merged) + "/model.safetensors")), HasSubstr("e_score_correction_bias"));
    EXPECT_EQ(generated("--checkpoint " + file(merged)), expected) << merged;
  }
}

TEST_F(AdapterCommandTest, ANewRunGoesOnWithAnAdapter) {
  const auto train = [&](const std::string& more) {
    return call("train " + file("run.toml") + " --training.steps=1 --checkpoint.initial_load_in_hf " +
                "--checkpoint.initial_load_path=" + file("base/hf") + " --optimizer.lr=0 --job.dump_folder=" +
                file("again") + " --lora.initial_adapter=" + file("tuned/adapter") + " " + more);
  };
  EXPECT_EQ(train("--lora.rank=8 --lora.target_modules=q_proj,down_proj"), 1);
  EXPECT_THAT(error_, HasSubstr("has rank 4, alpha 16 and 4 layers, and this run rank 8, alpha 16 and 4 layers"));
  EXPECT_EQ(train(""), 2);
  EXPECT_THAT(error_, HasSubstr("[lora] initial_adapter is set, but rank is 0"));
  ASSERT_EQ(train("--lora.rank=4 --lora.target_modules=q_proj,down_proj"), 0) << error_;
  EXPECT_EQ(generated("--checkpoint " + file("again")),
            generated("--checkpoint " + file("base/hf") + " --adapter " + file("tuned/adapter")));
}

TEST_F(AdapterCommandTest, AJobIsOfOneAdapterAndAlpha) {
  std::filesystem::copy(file("tuned/adapter"), file("adapter"));
  const auto generate = [&] {
    return call("generate -n 2 --greedy --max-new-tokens 4 --prompts-file " + file("prompts.jsonl") + " --output " +
                file("job") + " --checkpoint " + file("base/hf") + " --adapter " + file("adapter"));
  };
  ASSERT_EQ(generate(), 0) << error_;
  ASSERT_EQ(generate(), 0) << error_;
  auto json = nlohmann::json::parse(read_file(file("adapter/adapter_config.json")));
  json["lora_alpha"] = 3;
  replace_file(file("adapter/adapter_config.json"), json.dump());
  EXPECT_EQ(generate(), 1);
  EXPECT_THAT(error_, AllOf(HasSubstr("is the folder of another job"), HasSubstr("adapter")));
}

TEST_F(AdapterCommandTest, ASampleIsDrawnWithoutDropoutInEveryLayout) {
  std::filesystem::create_directory(file("tok"));
  data::small_tokenizer("the cat sat on the mat. ").save(file("tok/tokenizer.json"));
  const auto sample = [&](const std::string& layout, const std::string& run) {
    EXPECT_EQ(
        call("train " + layout + " " + file("run.toml") + " --training.steps=1 --lora.rank=4 --lora.dropout=0.9 " +
             "--lora.no-zero_b --optimizer.lr=0 --training.global_batch_size=2 --training.local_batch_size=2 " +
             "--metrics.sample_prompt=the --metrics.sample_tokens=8 --model.hf_assets_path=" + file("tok") +
             " --checkpoint.initial_load_in_hf --checkpoint.initial_load_path=" + file("base/hf") +
             " --job.dump_folder=" + file(run)),
        0)
        << error_;
    return nlohmann::json::parse(read_file(file(run + "/run.json")))["sample"]["text"];
  };
  const auto alone = sample("", "sample-1");
  EXPECT_EQ(sample("-n 2 --parallelism.tensor_parallel_degree=2", "sample-tp"), alone);
  EXPECT_EQ(sample("-n 2 --parallelism.pipeline_parallel_degree=2", "sample-pp"), alone);
}

}  // namespace adapter_command_test
}  // namespace phalanx::cli
