#include "phalanx/data/tokenizer/special_tokens.h"

#include <gtest/gtest.h>

#include <string>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/data/tokenizer/bpe_model.h"
#include "phalanx/data/tokenizer/bpe_trainer.h"

namespace phalanx::data {
namespace {

class SpecialTokensTest : public ::testing::Test {
 protected:
  SpecialTokensTest() {
    BpeTrainer trainer({.vocab_size = 262, .special_tokens = {"<|endoftext|>", "<a>", "<b>", "</s>", "<pad>", "<x>"}});
    trainer.train().save(file("tokenizer.json"));
  }
  std::string file(const std::string& name) const { return (folder_.path() / name).string(); }
  void write(const std::string& name, const std::string& text) const { replace_file(file(name), text); }
  BpeTokenizer load() const { return BpeTokenizer::load(folder_.path().string()); }

  TempDirectory folder_{"special-tokens"};
};

TEST_F(SpecialTokensTest, GivesAllTextsToChatTemplates) {
  write("special_tokens_map.json", R"({"eos_token": "<b>", "unk_token": "<x>", "additional_special_tokens": ["<a>"]})");
  write("tokenizer_config.json", R"({"eos_token": {"content": "</s>"}, "bos_token": null, "pad_token": "<pad>"})");
  const std::map<std::string, std::string> expected = {
      {"eos_token", "</s>"}, {"pad_token", "<pad>"}, {"unk_token", "<x>"}};
  EXPECT_EQ(special_token_texts(folder_.path()), expected);
  EXPECT_EQ(special_token_texts(file("tokenizer.json")), expected);
}

TEST_F(SpecialTokensTest, WhatTheFilesSayComesBeforeAGuessByName) {
  EXPECT_EQ(load().end_of_text(), load().id_of("<|endoftext|>"));
  write("generation_config.json", R"({"eos_token_id": [1, 3], "bos_token_id": null})");
  EXPECT_EQ(load().end_of_text(), 1);
  EXPECT_EQ(special_tokens_beside(folder_.path()).eos.id, 1);
  write("special_tokens_map.json", R"({"eos_token": "<b>", "pad_token": "<pad>"})");
  EXPECT_EQ(load().end_of_text(), load().id_of("<b>"));
  write("tokenizer_config.json", R"({"eos_token": {"content": "<x>", "lstrip": false}, "bos_token": "<a>"})");
  EXPECT_EQ(load().end_of_text(), load().id_of("<x>"));
  EXPECT_EQ(BpeTokenizer::load(file("tokenizer.json")).end_of_text(), load().id_of("<x>"));
  EXPECT_EQ(load().model().begin_of_text, load().id_of("<a>"));
  EXPECT_EQ(load().model().padding, load().id_of("<pad>"));
  write("tokenizer_config.json", R"({"eos_token": null, "bos_token": ""})");
  EXPECT_EQ(load().end_of_text(), load().id_of("<b>"));
  EXPECT_EQ(load().model().begin_of_text, std::nullopt);
}

TEST_F(SpecialTokensTest, WhatCannotBeIsRefusedByFileAndKey) {
  const auto refused = [&](const std::string& text, const std::string& message) {
    write("tokenizer_config.json", text);
    try {
      load();
      ADD_FAILURE() << text;
    } catch (const DataError& error) {
      EXPECT_THAT(error.what(), HasSubstr(file("tokenizer_config.json") + ": " + message));
    }
  };
  refused(R"({"eos_token": 3})", "\"eos_token\" is 3: expected a token's text");
  refused(R"({"eos_token": "<none>"})", "\"eos_token\" is '<none>', which is no token of " + file("tokenizer.json"));
  refused("[", "not valid JSON");
  // An id beyond the tokenizer's says nothing; one that a padded model has.
  write("tokenizer_config.json", "{}");
  write("generation_config.json", R"({"eos_token_id": 5000})");
  EXPECT_EQ(load().end_of_text(), load().id_of("<|endoftext|>"));
}

}  // namespace
}  // namespace phalanx::data
