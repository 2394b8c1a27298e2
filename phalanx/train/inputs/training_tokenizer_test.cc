#include "phalanx/train/inputs/training_tokenizer.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/folder_test.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/data/testing/small_data.h"
#include "phalanx/data/token_file_writer.h"
#include "phalanx/data/tokenizer/bpe_trainer.h"
#include "phalanx/data/tokenizer/tokenizer_fingerprint.h"

namespace phalanx::train {
namespace {

class TrainingTokenizerTest : public FolderTest {
 protected:
  data::TokenFile file(const std::string& name, const std::string& fingerprint,
                       std::optional<std::int64_t> document_end = {}) const {
    data::TokenFileWriter writer(path(name),
                                 {.vocab_size = 260, .tokenizer = fingerprint, .document_end = document_end});
    writer.add_document(std::vector<std::int32_t>{1, 2, 3});
    writer.finish();
    return data::TokenFile(path(name));
  }
  std::string refused(std::int64_t vocab_size, const std::vector<const data::TokenFile*>& files) const {
    return error_text<ConfigError>([&] { training_tokenizer(config_, vocab_size, files); });
  }
  config::TrainConfig config_;
};

TEST_F(TrainingTokenizerTest, TheModelsAndTheDatasMustBeTheSame) {
  const auto mine = data::small_tokenizer("the cat sat on the mat, the cat sat"),
             other = data::small_tokenizer("xyxyxyxy zzzz");
  const std::string id = data::tokenizer_fingerprint(mine);
  const data::TokenFile same = file("same", id), wrong = file("wrong", data::tokenizer_fingerprint(other));
  EXPECT_EQ(training_tokenizer(config_, 260, {&same}).identity["fingerprint"], id);
  EXPECT_THAT(refused(260, {&same, &wrong}), AllOf(HasSubstr("wrong.bin was made with"), HasSubstr("same.json")));

  config_.model.hf_assets_path = folder();
  mine.save(path("tokenizer.json"));
  EXPECT_EQ(training_tokenizer(config_, 260, {&same}).identity["vocab_size"], 260);
  EXPECT_THAT(refused(260, {&wrong}),
              AllOf(HasSubstr("wrong.bin was made with the tokenizer tok1:"), HasSubstr("tokenizer.json is of " + id),
                    HasSubstr("allow_tokenizer_mismatch")));
  EXPECT_THAT(refused(259, {&same}), AllOf(HasSubstr("vocab_size is 259"), HasSubstr("has 260 ids")));
  const data::TokenFile unknown = file("unknown", "");
  EXPECT_THAT(training_tokenizer(config_, 260, {&unknown}).lines,
              ElementsAre(AllOf(HasSubstr("unknown.bin"), HasSubstr("could not be compared"))));

  config_.training.allow_tokenizer_mismatch = true;
  EXPECT_THAT(training_tokenizer(config_, 260, {&wrong}).lines, ElementsAre(HasSubstr("trained all the same")));
}

TEST_F(TrainingTokenizerTest, DocumentsOfARunEndByOneToken) {
  const auto mine = data::small_tokenizer("the cat sat on the mat, the cat sat");
  const std::string id = data::tokenizer_fingerprint(mine);
  const std::int64_t own = mine.end_of_text().value();
  const data::TokenFile ended = file("ended", id, own), other = file("other", id, 7),
                        bare = file("bare", id, data::kNoDocumentEnd), silent = file("silent", id);
  const TrainingTokenizer both = training_tokenizer(config_, 260, {&silent, &ended});
  EXPECT_EQ(both.identity["document_end"], own);
  EXPECT_THAT(both.lines, IsEmpty());
  EXPECT_EQ(training_tokenizer(config_, 260, {&bare}).identity["document_end"], "none");
  EXPECT_FALSE(training_tokenizer(config_, 260, {&silent}).identity.contains("document_end"));
  EXPECT_THAT(refused(260, {&ended, &other}),
              AllOf(HasSubstr("ended.bin end by token "), HasSubstr("other.bin by token 7: expected the same")));
  EXPECT_THAT(refused(260, {&other, &bare}), HasSubstr("bare.bin by no token"));

  config_.model.hf_assets_path = folder();
  mine.save(path("tokenizer.json"));
  EXPECT_THAT(training_tokenizer(config_, 260, {&ended}).lines, IsEmpty());
  EXPECT_THAT(training_tokenizer(config_, 260, {&other}).lines,
              ElementsAre(AllOf(HasSubstr("the documents end by token 7, but"), HasSubstr("tokenizer.json"))));
  config_.training.allow_tokenizer_mismatch = true;
  EXPECT_THAT(training_tokenizer(config_, 260, {&ended, &other}).lines, ElementsAre(HasSubstr("trained all the same")));
}

TEST_F(TrainingTokenizerTest, TextsOfARunHaveTheTokensOfTheTemplateOrNot) {
  const auto with = [&](const std::string& name, std::optional<bool> special, bool has_mask = false) {
    data::TokenFileWriter writer(path(name), {.vocab_size = 260, .has_mask = has_mask, .special_tokens = special});
    const std::vector<std::int32_t> ids = {1, 2, 3};
    has_mask ? writer.add_document(ids, std::vector<std::uint8_t>{0, 1, 1}) : writer.add_document(ids);
    writer.finish();
    return data::TokenFile(path(name));
  };
  const data::TokenFile has = with("has", true), lacks = with("lacks", false), silent = with("silent", {}),
                        chats = with("chats", false, /*has_mask=*/true);
  EXPECT_EQ(training_tokenizer(config_, 260, {&silent, &lacks}).special_tokens, false);
  EXPECT_EQ(training_tokenizer(config_, 260, {&silent}).special_tokens, std::nullopt);
  EXPECT_EQ(training_tokenizer(config_, 260, {&has, &chats}).special_tokens, true);
  EXPECT_THAT(refused(260, {&lacks, &has}),
              AllOf(HasSubstr("has.bin have the tokens of"), HasSubstr("lacks.bin do not: expected the same")));
  config_.training.allow_tokenizer_mismatch = true;
  EXPECT_THAT(training_tokenizer(config_, 260, {&has, &lacks}).lines, ElementsAre(HasSubstr("trained all the same")));
}

TEST_F(TrainingTokenizerTest, TextsAndConversationsEndEachByTheirOwnToken) {
  const std::string id = data::tokenizer_fingerprint(data::small_tokenizer("the cat sat on the mat"));
  const auto chats = [&](const std::string& name, std::int64_t end) {
    data::TokenFileWriter writer(path(name),
                                 {.vocab_size = 260, .tokenizer = id, .document_end = end, .has_mask = true});
    writer.add_document(std::vector<std::int32_t>{1, 2, 3}, std::vector<std::uint8_t>{0, 1, 1});
    writer.finish();
    return data::TokenFile(path(name));
  };
  const data::TokenFile texts = file("texts", id, 256), first = chats("first", 258), second = chats("second", 257);
  const TrainingTokenizer blend = training_tokenizer(config_, 260, {&first, &texts});
  EXPECT_THAT(blend.lines, IsEmpty());
  EXPECT_EQ(blend.identity["document_end"], 256) << "that of the texts";
  EXPECT_EQ(blend.ends_texts, 256);
  EXPECT_EQ(training_tokenizer(config_, 260, {&first}).identity["document_end"], 258);
  EXPECT_FALSE(training_tokenizer(config_, 260, {&first}).ends_texts.has_value());
  EXPECT_THAT(refused(260, {&texts, &first, &second}),
              AllOf(HasSubstr("first.bin end by token 258"), HasSubstr("second.bin by token 257")));
}

TEST_F(TrainingTokenizerTest, OneTokenizerHasOneSize) {
  const auto mine = data::small_tokenizer("the cat sat on the mat, the cat sat");
  config_.model.hf_assets_path = folder();
  mine.save(path("tokenizer.json"));
  data::TokenFileWriter writer(path("smaller"), {.vocab_size = 200, .tokenizer = data::tokenizer_fingerprint(mine)});
  writer.add_document(std::vector<std::int32_t>{1, 2, 3});
  writer.finish();
  const data::TokenFile smaller(path("smaller"));
  EXPECT_THAT(refused(260, {&smaller}), AllOf(HasSubstr("smaller.json: \"vocab_size\" is 200"), HasSubstr("says 260")));
}

TEST_F(TrainingTokenizerTest, AFolderWithoutATokenizerIsSaidWhereTheDataNameTheirs) {
  std::filesystem::create_directory(path("empty"));
  config_.model.hf_assets_path = path("empty");
  const data::TokenFile same = file("same", "tok1:a"), plain = file("plain", "");
  EXPECT_THAT(training_tokenizer(config_, 260, {&same}).lines, ElementsAre(HasSubstr("there is no " + path("empty"))));
  EXPECT_THAT(training_tokenizer(config_, 260, {&plain}).lines, IsEmpty());
}

TEST_F(TrainingTokenizerTest, WhatCannotBeComparedIsSaid) {
  const data::TokenFile plain = file("plain", "");
  const TrainingTokenizer none = training_tokenizer(config_, 260, {&plain});
  EXPECT_THAT(none.identity, IsEmpty());
  EXPECT_THAT(none.lines, IsEmpty());
  config_.model.hf_assets_path = folder();
  write_file(path("tokenizer.json"), R"({"model": {"type": "Unigram"}})");
  const data::TokenFile same = file("same", "tok1:a");
  const TrainingTokenizer unread = training_tokenizer(config_, 260, {&same});
  EXPECT_THAT(unread.lines, ElementsAre(AllOf(HasSubstr("could not be compared"), HasSubstr("Unigram"))));
  EXPECT_EQ(unread.identity["fingerprint"], "tok1:a");
}

}  // namespace
}  // namespace phalanx::train
