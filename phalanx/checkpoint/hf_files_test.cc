#include "phalanx/checkpoint/files/hf_files.h"

#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/data/tokenizer/bpe_trainer.h"
#include "phalanx/models/config/hf_config.h"

namespace phalanx {
namespace {

using nlohmann::json;

const models::LlamaConfig kModelOfFiles{
    .dim = 8, .n_layers = 1, .n_heads = 2, .n_kv_heads = 1, .ffn_hidden = 12, .vocab_size = 300, .max_seq_len = 16};

class HfFilesTest : public ::testing::Test {
 protected:
  void write(const std::string& name, const std::string& text) const { replace_file(folder_.path() / name, text); }
  void write_tokenizer() const {
    data::BpeTrainer trainer({.vocab_size = 261, .special_tokens = {"<s>", "</s>", "<end>", "<pad>", "<|endoftext|>"}});
    trainer.train().save((folder_.path() / "tokenizer.json").string());
  }
  /// The files of the model with what is in the folder.
  std::map<std::string, std::string> files() const { return hf_files(kModelOfFiles, "bfloat16", folder_.path()); }
  /// bos, eos and pad as the two configurations say, which must agree.
  json tokens() const {
    const auto texts = files();
    json found;
    for (const char* file : {"config.json", "generation_config.json"}) {
      const json config = json::parse(texts.at(file));
      const json now = {config.at("bos_token_id"), config.at("eos_token_id"), config.at("pad_token_id")};
      if (!found.is_null()) {
        EXPECT_EQ(found, now);
      }
      found = now;
    }
    return found;
  }

  TempDirectory folder_{"hf-files"};
};

TEST_F(HfFilesTest, WithoutAnySourceTheTokensAreExplicitlyNone) {
  const auto texts = hf_files(kModelOfFiles, "float32", "");
  EXPECT_EQ(texts.size(), 2U);
  EXPECT_EQ(json::parse(texts.at("generation_config.json")),
            json({{"bos_token_id", nullptr}, {"eos_token_id", nullptr}, {"pad_token_id", nullptr}}));
  const json config = json::parse(texts.at("config.json"));
  EXPECT_TRUE(config.contains("eos_token_id") && config["eos_token_id"].is_null());
  EXPECT_EQ(models::llama_config_from_hf(texts.at("config.json"), "config.json"), kModelOfFiles);
  EXPECT_EQ(tokens(), json({nullptr, nullptr, nullptr}));  // of an empty folder
}

TEST_F(HfFilesTest, TheTokenizersTokensAreWrittenWhereTheSourceHasNone) {
  write_tokenizer();
  EXPECT_EQ(tokens(), json({nullptr, 4, nullptr}));
  const json made = json::parse(files().at("tokenizer_config.json"));
  EXPECT_EQ(made["eos_token"], "<|endoftext|>");
  EXPECT_TRUE(made["bos_token"].is_null() && made["pad_token"].is_null());
  EXPECT_EQ(made["tokenizer_class"], "PreTrainedTokenizerFast");
  EXPECT_EQ(made["model_max_length"], 16);
  const std::string own = R"({"bos_token": "<s>", "eos_token": {"content": "<end>"}, "pad_token": "<pad>"})";
  write("tokenizer_config.json", own);
  EXPECT_EQ(tokens(), json({0, 2, 3}));
  EXPECT_EQ(files().at("tokenizer_config.json"), own);
}

TEST_F(HfFilesTest, WithoutATokenizerOrAnEndThereIsAWarning) {
  const auto said = [](const std::function<void()>& write) {
    ::testing::internal::CaptureStderr();
    write();
    return ::testing::internal::GetCapturedStderr();
  };
  EXPECT_THAT(said([] { hf_files(kModelOfFiles, "float32", ""); }),
              HasSubstr("without a tokenizer, and without a token that ends a text (eos_token_id is null)"));
  EXPECT_THAT(said([&] { files(); }), HasSubstr("there is no tokenizer.json in " + folder_.path().string()));
  write_tokenizer();
  EXPECT_EQ(said([&] { files(); }), "");
  const auto trained_on = [&](const json& end) {
    return said([&] { compare_end_tokens(files(), json{{"run", {{"tokenizer", {{"document_end", end}}}}}}.dump()); });
  };
  EXPECT_EQ(trained_on(4), "");
  EXPECT_EQ(said([&] { compare_end_tokens(files(), ""); }), "");
  EXPECT_THAT(trained_on(2), HasSubstr("eos_token_id 4, but the documents that it was trained on end by token 2"));
  EXPECT_THAT(trained_on("none"), HasSubstr("end by no token"));
  write("generation_config.json", R"({"eos_token_id": [4, 2]})");
  EXPECT_EQ(trained_on(2), "");
}

TEST_F(HfFilesTest, TheSourcesTokensComeFirst) {
  write_tokenizer();
  write("config.json", R"({"bos_token_id": 7, "eos_token_id": [8, 9], "pad_token_id": null})");
  EXPECT_EQ(tokens(), json({7, json({8, 9}), nullptr}));
  write("generation_config.json", R"({"temperature": 0.6, "eos_token_id": [8, 9], "pad_token_id": 10})");
  EXPECT_EQ(tokens(), json({7, json({8, 9}), 10}));
  EXPECT_EQ(json::parse(files().at("generation_config.json"))["temperature"], 0.6);
  // A conversation's turn ends by another token than a text.
  write("generation_config.json", R"({"eos_token_id": 9})");
  EXPECT_EQ(json::parse(files().at("generation_config.json"))["eos_token_id"], 9);
  EXPECT_EQ(json::parse(files().at("config.json"))["eos_token_id"], json({8, 9}));
}

TEST_F(HfFilesTest, WhatIsNoTokenOfTheModelIsLeftOutAndSaid) {
  write("config.json", R"({"bos_token_id": 300, "eos_token_id": [1, 2.5], "pad_token_id": -1})");
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(tokens(), json({nullptr, nullptr, nullptr}));
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("config.json: \"pad_token_id\" is -1, no token of the model's vocabulary of 300"));
  // Nor does generation_config.json keep one, whether config.json says another or not.
  write("config.json", R"({"eos_token_id": 7})");
  write("generation_config.json", R"({"eos_token_id": [7, 300], "pad_token_id": 300})");
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(tokens(), json({nullptr, 7, nullptr}));
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("generation_config.json: \"eos_token_id\" is [7,300], no token"),
                    HasSubstr("generation_config.json: \"pad_token_id\" is 300, no token")));
  write("config.json", "{");
  EXPECT_THROW(files(), CheckpointError);
}

}  // namespace
}  // namespace phalanx
