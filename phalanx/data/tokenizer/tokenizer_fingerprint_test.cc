#include "phalanx/data/tokenizer/tokenizer_fingerprint.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "phalanx/base/file.h"
#include "phalanx/data/tokenizer/bpe_trainer.h"

namespace phalanx::data {
namespace {

using nlohmann::json;

std::string fingerprint_of(const json& file) {
  return tokenizer_fingerprint(BpeTokenizer::from_json(file.dump(), "t.json"));
}

json small_tokenizer() {
  BpeTrainer trainer({.vocab_size = 262});
  trainer.add("the cat sat on the mat, the cat sat on the mat");
  return json::parse(trainer.train().to_json());
}

TEST(TokenizerFingerprintTest, DoesNotDependOnHowTheFileIsWritten) {
  const json file = small_tokenizer();
  const std::string id = fingerprint_of(file);
  EXPECT_EQ(id.size(), 5u + 32u);
  EXPECT_EQ(tokenizer_fingerprint(BpeTokenizer::from_json(file.dump(4, ' ', true))), id);
  EXPECT_EQ(tokenizer_fingerprint(BpeTokenizer::from_json("\xEF\xBB\xBF" + file.dump())), id);
  json other = file;
  other["truncation"] = {{"max_length", 512}};
  other["padding"] = {{"pad_id", 0}};
  other["model"].erase("ignore_merges");
  other["model"].erase("dropout");
  for (json& merge : other["model"]["merges"]) {
    const std::string line = merge;
    const std::size_t space = line.find(' ');
    merge = {line.substr(0, space), line.substr(space + 1)};
  }
  EXPECT_EQ(fingerprint_of(other), id);
}

TEST(TokenizerFingerprintTest, EveryChangeOfMeaningIsAnotherTokenizer) {
  const json file = small_tokenizer();
  std::set<std::string> all = {fingerprint_of(file)};
  std::size_t count = 1;
  const auto change = [&](const char* what, const auto& edit) {
    json other = file;
    edit(other);
    all.insert(fingerprint_of(other));
    EXPECT_EQ(all.size(), ++count) << what;
  };
  change("ids of two tokens", [](json& f) { std::swap(f["model"]["vocab"]["!"], f["model"]["vocab"]["A"]); });
  change("order of merges", [](json& f) { std::swap(f["model"]["merges"][0], f["model"]["merges"][1]); });
  change("one merge less", [](json& f) { f["model"]["merges"].erase(f["model"]["merges"].size() - 1); });
  change("an added token", [](json& f) {
    f["added_tokens"].push_back({{"id", 300}, {"content", "<x>"}, {"special", true}});
  });
  change("the same, not special", [](json& f) {
    f["added_tokens"].push_back({{"id", 300}, {"content", "<x>"}, {"special", false}, {"normalized", false}});
  });
  change("lstrip", [](json& f) { f["added_tokens"][0]["lstrip"] = true; });
  change("ignore_merges", [](json& f) { f["model"]["ignore_merges"] = true; });
  change("normalizer", [](json& f) { f["normalizer"] = {{"type", "NFC"}}; });
  change("another normalizer", [](json& f) { f["normalizer"] = {{"type", "NFKC"}}; });
  change("prefix space", [](json& f) { f["pre_tokenizer"]["add_prefix_space"] = true; });
  change("split", [](json& f) {
    const json split = {
        {"type", "Split"}, {"pattern", {{"Regex", "\\d"}}}, {"behavior", "Isolated"}, {"invert", false}};
    f["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {split, f["pre_tokenizer"]}}};
  });
  // Two templates of one length, so that each token counts.
  const auto begin_with = [&](json& f, const char* token, int id) {
    f["post_processor"] = {
        {"type", "TemplateProcessing"},
        {"single",
         {{{"SpecialToken", {{"id", token}, {"type_id", 0}}}}, {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}}},
        {"pair", json::array()},
        {"special_tokens", {{token, {{"id", token}, {"ids", {id}}, {"tokens", {token}}}}}}};
  };
  change("template", [&](json& f) { begin_with(f, "<|endoftext|>", 0); });
  change("another template", [&](json& f) { begin_with(f, "!", f["model"]["vocab"]["!"].get<int>()); });
  change("unk_token", [](json& f) { f["model"]["unk_token"] = "!"; });
  change("fuse_unk", [](json& f) { f["model"]["fuse_unk"] = true; });
}

TEST(TokenizerFingerprintTest, AFileWrittenAgainIsTheSameTokenizer) {
  int files = 0;
  const json families = json::parse(read_file(PHALANX_DATA_TESTDATA "/tokenizer_families.json"));
  for (const auto& [name, family] : families.items()) {
    if (!family.is_object() || !family.contains("tokenizer")) continue;
    const BpeTokenizer tokenizer = BpeTokenizer::from_json(family["tokenizer"].dump());
    EXPECT_EQ(tokenizer_fingerprint(BpeTokenizer::from_json(tokenizer.to_json())), tokenizer_fingerprint(tokenizer))
        << name;
    ++files;
  }
  EXPECT_GE(files, 10);
}

TEST(TokenizerFingerprintTest, OnlyWhatIsKnownDiffers) {
  EXPECT_TRUE(are_other_tokenizers("tok1:a", "tok1:b"));
  EXPECT_FALSE(are_other_tokenizers("tok1:a", "tok1:a"));
  EXPECT_FALSE(are_other_tokenizers("", "tok1:b"));
  EXPECT_FALSE(are_other_tokenizers("tok2:a", "tok1:b"));
}

}  // namespace
}  // namespace phalanx::data
