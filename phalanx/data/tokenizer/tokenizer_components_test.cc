#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/data/tokenizer/bpe_model.h"
#include "phalanx/data/tokenizer/bpe_tokenizer.h"
#include "phalanx/data/tokenizer/normalizer.h"

namespace phalanx::data {
namespace {

using Json = nlohmann::json;

constexpr const char* kName = "some/tokenizer.json";

Json file_of(const char* family) {
  static const Json file = Json::parse(std::ifstream(PHALANX_DATA_TESTDATA "/tokenizer_families.json"));
  return file[family]["tokenizer"];
}

std::string load_error(const std::string& text) {
  return error_text<DataError>([&] { BpeTokenizer::from_json(text, kName); });
}

/// A vocabulary of characters: a few letters, merges, <unk>, and bytes where asked for.
Json characters(const std::vector<std::string>& tokens, const Json& settings = Json::object()) {
  Json vocab = Json::object();
  for (const std::string& token : tokens) vocab[token] = vocab.size();
  Json model = {{"type", "BPE"}, {"vocab", vocab}, {"merges", Json::array()}};
  model.update(settings);
  return {{"model", model}, {"decoder", {{"type", "Fuse"}}}};
}

std::vector<TokenId> ids_of(const Json& file, const std::string& text) {
  return BpeTokenizer::from_json(file.dump(), kName).encode(text);
}

TEST(TokenizerComponentsTest, WhatIsNotSupportedOrMalformedIsAnErrorThatNamesFileAndKey) {
  struct Case {
    const char* family;
    const char* pointer;  // where the value is put
    Json value;
    std::string message;
  };
  const Json absent(Json::value_t::discarded);
  const std::vector<Case> cases = {
      {"llama2", "/normalizer/type", "Precompiled", "normalizer: 'Precompiled' is not supported: supported are NFC"},
      {"llama2", "/normalizer", "NFC", "normalizer: expected an object, found \"NFC\""},
      {"llama2", "/normalizer/normalizers", absent, "normalizer.normalizers: missing"},
      {"llama2", "/normalizer/normalizers", 7, "normalizer.normalizers: expected an array, found 7"},
      {"llama2", "/normalizer/normalizers/0/type", "Nmt", "normalizer.normalizers[0]: 'Nmt' is not supported"},
      {"llama2", "/normalizer/normalizers/0/type", absent, "normalizer.normalizers[0].type: missing"},
      {"llama2", "/normalizer/normalizers/0/prepend", 3,
       "normalizer.normalizers[0].prepend: expected a string, found 3"},
      {"llama2", "/normalizer/normalizers/1/pattern", absent, "normalizer.normalizers[1].pattern: missing"},
      {"llama2",
       "/normalizer/normalizers/1/pattern",
       {{"Glob", "*"}},
       "normalizer.normalizers[1].pattern: '{\"Glob\":\"*\"}' is not supported: supported are {\"Regex\""},
      {"llama2", "/normalizer/normalizers/1/pattern/String", "",
       "normalizer.normalizers[1].pattern.String: the pattern is empty"},
      {"llama2", "/normalizer/normalizers/1/content", absent, "normalizer.normalizers[1].content: missing"},
      {"unknown", "/normalizer/normalizers/2/strip_left", "no",
       "normalizer.normalizers[2].strip_left: expected true or false"},
      {"unknown", "/normalizer/normalizers/3/pattern/Regex", R"(a\b)",
       "normalizer.normalizers[3].pattern.Regex: the split pattern 'a\\b' holds '\\b', which is not supported"},
      {"llama2_metaspace", "/pre_tokenizer/replacement", "ab",
       "pre_tokenizer.replacement: expected one character, found 'ab'"},
      {"llama2_metaspace", "/pre_tokenizer/replacement", absent, "pre_tokenizer.replacement: missing"},
      {"llama2_metaspace", "/pre_tokenizer/prepend_scheme", "sometimes",
       "pre_tokenizer.prepend_scheme: 'sometimes' is not supported: supported are always, first, never"},
      {"llama2_metaspace", "/pre_tokenizer/split", 1, "pre_tokenizer.split: expected true or false, found 1"},
      {"gemma", "/pre_tokenizer/behavior", absent, "pre_tokenizer.behavior: missing"},
      {"gemma", "/pre_tokenizer/invert", 0, "pre_tokenizer.invert: expected true or false"},
      {"split_kinds", "/pre_tokenizer/pretokenizers/0/pattern/Regex", "(",
       "pre_tokenizer.pretokenizers[0].pattern.Regex: the split pattern '(' is not valid at character 1"},
      {"llama2", "/model/unk_token", "<none>", "model.unk_token: '<none>' is not in model.vocab"},
      {"llama2", "/model/fuse_unk", "x", "model.fuse_unk: expected true or false"},
      {"llama2", "/model/byte_fallback", 2, "model.byte_fallback: expected true or false"},
      {"qwen", "/model/byte_fallback", true, "model.byte_fallback: 'true' is not supported"},
      {"llama2", "/added_tokens/0/single_word", 1, "added_tokens[0].single_word: expected true or false"},
      {"llama2", "/post_processor/single", absent, "post_processor.single: missing"},
      {"llama2", "/post_processor/single", Json::array(), "post_processor.single: holds the text 0 times"},
      {"llama2", "/post_processor/single/1/Sequence/id", "B",
       "post_processor.single[1].Sequence.id: 'B' is not supported"},
      {"llama2", "/post_processor/single/0", Json::object(), "post_processor.single[0].SpecialToken: missing"},
      {"llama2", "/post_processor/single/0/SpecialToken/id", "<x>",
       "post_processor.single[0].SpecialToken.id: '<x>' is not in post_processor.special_tokens"},
      {"llama2", "/post_processor/special_tokens/<s>/ids", "1",
       "post_processor.special_tokens['<s>'].ids: expected an array"},
      {"llama2", "/post_processor/special_tokens/<s>/ids/0", -4,
       "post_processor.special_tokens['<s>'].ids: id -4 is outside"},
      {"llama2", "/post_processor/special_tokens/<s>/ids/0", 620,
       "post_processor.special_tokens['<s>'].ids: 620 is the id of no token"},
      {"llama2", "/post_processor/special_tokens", 1, "'<s>' is not in post_processor.special_tokens"},
      {"llama3", "/post_processor/processors/1/type", "RobertaProcessing",
       "post_processor.processors[1]: 'RobertaProcessing' is not supported: supported are TemplateProcessing"},
      {"llama2", "/decoder/decoders/0/type", "CTC",
       "decoder.decoders[0]: 'CTC' is not supported: supported are ByteLevel"},
      {"llama2", "/decoder/decoders/3/content", "", "decoder.decoders[3].content: expected one character"},
      {"llama2", "/decoder/decoders/3/start", -1,
       "decoder.decoders[3].start: expected a number from 0 to 65535, found -1"},
      {"llama2", "/decoder/decoders/3/stop", 1, "decoder: steps in this order are not supported: after ByteFallback"},
      {"llama2", "/decoder/decoders/2", {{"type", "Metaspace"}, {"replacement", "_"}}, "decoder: steps in this order"},
      {"qwen", "/decoder", {{"type", "Fuse"}}, "decoder: has no ByteLevel, but pre_tokenizer is ByteLevel"},
      {"qwen",
       "/decoder",
       {{"type", "Sequence"}, {"decoders", {{{"type", "Fuse"}}, {{"type", "ByteLevel"}}}}},
       "decoder: "},
  };
  for (const Case& test : cases) {
    Json file = file_of(test.family);
    const Json::json_pointer pointer(test.pointer);
    if (test.value.is_discarded()) {
      file.at(pointer.parent_pointer()).erase(pointer.back());
    } else {
      file[pointer] = test.value;
    }
    EXPECT_THAT(load_error(file.dump()), AllOf(HasSubstr("some/tokenizer.json: "), HasSubstr(test.message)))
        << test.family << test.pointer;
  }
}

TEST(TokenizerComponentsTest, DamagedFilesAreReadOrRefusedNeverMore) {
  // Cut short anywhere, bytes and whole values changed: what loads must also work.
  const std::string text = "Hello  <mask> wörld ▁ 12 \xff\U0001F600 x";
  std::mt19937 rng(7);
  int refused = 0, read = 0;
  const auto try_out = [&](const std::string& damaged) {
    try {
      const BpeTokenizer tokenizer = BpeTokenizer::from_json(damaged, kName);
      ++read;
      for (const TokenId id : tokenizer.encode(text, {.add_special_tokens = true}))
        EXPECT_LT(id, tokenizer.vocab_size());
      tokenizer.decode(tokenizer.encode(text));
      BpeTokenizer::from_json(tokenizer.to_json(), kName);
    } catch (const DataError& error) {
      EXPECT_THAT(error.what(), HasSubstr(kName));
      ++refused;
    }
  };
  const std::vector<Json> strange = {nullptr,
                                     true,
                                     -1,
                                     1.5,
                                     1u << 31,
                                     "",
                                     "x",
                                     "\\",
                                     "(?<!a*)",
                                     Json::array(),
                                     Json::object(),
                                     Json::array({nullptr}),
                                     Json{{"type", "Sequence"}},
                                     Json{{"type", "ByteLevel"}}};
  for (const char* family :
       {"llama2", "llama2_metaspace", "mistral", "gemma", "qwen", "llama3", "unknown", "split_kinds"}) {
    const Json file = file_of(family);
    const std::string good = file.dump();
    for (int i = 0; i < 25; ++i) try_out(good.substr(0, rng() % good.size()));
    for (int i = 0; i < 40; ++i) {
      std::string damaged = good;
      damaged[rng() % damaged.size()] = static_cast<char>(32 + rng() % 95);
      try_out(damaged);
    }
    Json small = file;  // without what fills the file, so that the changes meet the rest
    small["model"].erase("vocab");
    small["model"].erase("merges");
    std::vector<Json::json_pointer> places;
    const Json flat = small.flatten();
    for (const auto& [pointer, value] : flat.items()) {
      for (Json::json_pointer place(pointer); !place.empty(); place = place.parent_pointer()) places.push_back(place);
    }
    for (int i = 0; i < 60; ++i) {
      Json damaged = file;
      damaged[places[rng() % places.size()]] = strange[rng() % strange.size()];
      try_out(damaged.dump());
    }
  }
  EXPECT_GT(refused, 300);
  EXPECT_GT(read, 100);
}

// Each replacement makes a hundred times as much text: unchecked, ten bytes would become 10^14.
TEST(TokenizerComponentsTest, ANormalizerThatGrowsTextWithoutEndIsRefused) {
  Json file = file_of("llama2");
  const Json grow = {{"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", std::string(100, 'a')}};
  file["normalizer"] = {{"type", "Sequence"}, {"normalizers", Json::array({grow, grow, grow, grow, grow, grow})}};
  const BpeTokenizer tokenizer = BpeTokenizer::from_json(file.dump());
  EXPECT_NO_THROW(tokenizer.encode("bcd"));
  EXPECT_THAT(error_text<DataError>([&] { tokenizer.encode("aaaaaaaaaa"); }),
              HasSubstr("replacements make more than 66176 bytes of a text of 10: expected"));
  file = file_of("llama2");
  file["decoder"] = {{"type", "Sequence"}, {"decoders", Json::array({grow, grow, grow, grow, grow, grow})}};
  EXPECT_THAT(error_text<DataError>([&] { BpeTokenizer::from_json(file.dump(), kName); }),
              HasSubstr(std::string(kName) + ": the tokenizer's replacements make more than "));
}

TEST(TokenizerComponentsTest, UnknownCharactersFallBackToBytesThenToTheUnknownToken) {
  // Ids: <unk> 0, a 1, <0xC3> 2, <0xA9> 3.
  const std::vector<std::string> tokens = {"<unk>", "a", "<0xC3>", "<0xA9>"};
  EXPECT_EQ(ids_of(characters(tokens), "abé"), (std::vector<TokenId>{1}));
  EXPECT_EQ(ids_of(characters(tokens, {{"unk_token", "<unk>"}}), "abba"), (std::vector<TokenId>{1, 0, 0, 1}));
  EXPECT_EQ(ids_of(characters(tokens, {{"unk_token", "<unk>"}, {"fuse_unk", true}}), "abba"),
            (std::vector<TokenId>{1, 0, 1}));
  EXPECT_EQ(ids_of(characters(tokens, {{"unk_token", "<unk>"}, {"byte_fallback", true}}), "éa"),
            (std::vector<TokenId>{2, 3, 1}));
  // The package writes a waiting unknown token after the bytes of the next character.
  EXPECT_EQ(ids_of(characters(tokens, {{"unk_token", "<unk>"}, {"byte_fallback", true}}), "bé"),
            (std::vector<TokenId>{2, 3, 0}));
  // Bytes that are no UTF-8 are unknown characters, and come back where their tokens exist.
  const Json file = characters(tokens, {{"unk_token", "<unk>"}, {"byte_fallback", true}});
  EXPECT_EQ(ids_of(file, "a\xc3\xff"), (std::vector<TokenId>{1, 2, 0}));
}

TEST(TokenizerComponentsTest, ByteTokensAreStreamedAsWholeCharacters) {
  const BpeTokenizer tokenizer = BpeTokenizer::from_json(file_of("llama2").dump());
  const auto byte = [&](int value) { return *tokenizer.id_of(fmt::format("<0x{:02X}>", value)); };
  StreamingDecoder decoder(tokenizer);
  EXPECT_EQ(decoder.add(*tokenizer.id_of("▁")), "");  // the prefix of the text, no space
  for (const int start : {0xF0, 0x9F, 0x98}) EXPECT_EQ(decoder.add(byte(start)), "");
  EXPECT_EQ(decoder.add(byte(0x80)), "😀");
  EXPECT_EQ(decoder.add(*tokenizer.id_of("▁")), " ");
  EXPECT_EQ(decoder.add(byte(0xC3)), "");
  EXPECT_EQ(decoder.add(100000), "");  // no token has it, and nothing is lost by it
  EXPECT_EQ(decoder.add(*tokenizer.id_of("a")),
            "\xc3"
            "a");
  EXPECT_EQ(decoder.finish(), "");
}

TEST(TokenizerComponentsTest, TemplateTokensAreAddedOnlyWhereAskedFor) {
  const BpeTokenizer tokenizer = BpeTokenizer::from_json(file_of("llama2_metaspace").dump());  // <s> $A </s>
  const auto plain = tokenizer.encode("the");
  std::vector<TokenId> around = plain;
  around.insert(around.begin(), *tokenizer.id_of("<s>"));
  around.push_back(*tokenizer.id_of("</s>"));
  EXPECT_EQ(tokenizer.encode("the", {.add_special_tokens = true}), around);
  EXPECT_EQ(tokenizer.encode("", {.add_special_tokens = true}).size(), 2u);
  EXPECT_EQ(tokenizer.decode(around, {.skip_special_tokens = true}), "the");
  EXPECT_EQ(tokenizer.end_of_text(), tokenizer.id_of("</s>"));
  // Text that looks like a special token stays text where added tokens are off.
  const auto text = tokenizer.encode("</s>", {.added_tokens = false});
  EXPECT_EQ(std::count(text.begin(), text.end(), around.back()), 0);
}

TEST(NormalizerTest, InvalidBytesPassThroughEveryStep) {
  const auto normalized = [](std::vector<NormalizerStep> steps, std::string_view text) {
    const Normalizer normalizer(std::move(steps));
    Normalizer::Scratch scratch = normalizer.make_scratch();
    return std::string(normalizer.apply(text, scratch).text);
  };
  EXPECT_EQ(normalized({NormalFormStep{NormalForm::nfc}}, "e\u0301\xff\xc3 e\u0301"), "é\xff\xc3 é");
  EXPECT_EQ(normalized({NormalFormStep{NormalForm::nfkd}}, "ﬁ\xe2\x82é"),
            "fi\xe2\x82"
            "e\u0301");
  EXPECT_EQ(normalized({LowercaseStep{}}, "A\xffİΣ"), "a\xffi\u0307σ");
  EXPECT_EQ(normalized({StripSpacesStep{}}, " \u3000\xff x \xc3\n "), "\xff x \xc3");
  EXPECT_EQ(normalized({StripSpacesStep{.left = false}}, "  x  "), "  x");
  EXPECT_EQ(normalized({StripSpacesStep{}}, " \n "), "");
  EXPECT_EQ(normalized({ReplaceStep{{"é"}, "e"}, PrependStep{">"}}, "é\xc3é"),
            ">e\xc3"
            "e");
  EXPECT_EQ(normalized({PrependStep{">"}}, ""), "");
}

}  // namespace
}  // namespace phalanx::data
