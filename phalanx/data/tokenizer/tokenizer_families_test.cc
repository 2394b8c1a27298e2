#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "phalanx/data/tokenizer/bpe_model.h"
#include "phalanx/data/tokenizer/bpe_tokenizer.h"

namespace phalanx::data {
namespace {

using nlohmann::json;

/// What the `tokenizers` package did with tokenizers of each kind (scripts/make_tokenizer_golden.py).
const json& families() {
  static const json file = json::parse(std::ifstream(PHALANX_DATA_TESTDATA "/tokenizer_families.json"));
  return file;
}

BpeTokenizer family(const std::string& name) {
  return BpeTokenizer::from_json(families()[name]["tokenizer"].dump(), name + ".json");
}

std::uint32_t hash_of(std::string_view bytes) {
  std::uint32_t hash = 0x811C9DC5;
  for (const char byte : bytes) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x01000193;
  return hash;
}

std::string fingerprint(const BpeTokenizer& tokenizer, const std::string& text) {
  auto ids = tokenizer.encode(text, {.add_special_tokens = true});
  const auto plain = tokenizer.encode(text);
  ids.insert(ids.end(), plain.begin(), plain.end());
  std::string data(reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(TokenId));
  return fmt::format("{:08x}", hash_of(data + tokenizer.decode(plain))).substr(0, 6);
}

class TokenizerFamilyTest : public testing::TestWithParam<const char*> {};

TEST_P(TokenizerFamilyTest, IdsAndTextAreThoseOfThePackage) {
  const json& golden = families()[GetParam()];
  const BpeTokenizer tokenizer = family(GetParam());
  const BpeTokenizer again = BpeTokenizer::from_json(tokenizer.to_json(), "written");
  const auto samples = families()["samples"].get<std::vector<std::string>>();
  const auto hashes = golden["hashes"].get<std::string>();
  ASSERT_GE(samples.size(), 400u);
  for (int pass = 0; pass < 2; ++pass) {  // the second time from the cache
    for (std::size_t i = 0; i < samples.size(); ++i) {
      EXPECT_EQ(fingerprint(tokenizer, samples[i]), hashes.substr(6 * i, 6))
          << "sample " << i << " '" << samples[i]
          << "': " << testing::PrintToString(tokenizer.encode(samples[i], {.add_special_tokens = true})) << " '"
          << tokenizer.decode(tokenizer.encode(samples[i])) << "'";
      EXPECT_EQ(fingerprint(again, samples[i]), hashes.substr(6 * i, 6)) << samples[i];
    }
  }
}

TEST_P(TokenizerFamilyTest, StreamedTextIsTheTextDecodedWhole) {
  const BpeTokenizer tokenizer = family(GetParam());
  for (const auto& text : families()["samples"].get<std::vector<std::string>>()) {
    const auto ids = tokenizer.encode(text);
    StreamingDecoder decoder(tokenizer);
    std::string streamed;
    for (const TokenId id : ids) {
      const std::string part = decoder.add(id);
      EXPECT_NO_THROW(json(part).dump()) << "not whole characters, of '" << text << "'";
      streamed += part;
    }
    EXPECT_EQ(streamed + decoder.finish(), tokenizer.decode(ids));
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, TokenizerFamilyTest,
                         testing::Values("gpt2", "llama3", "qwen", "llama2", "llama2_metaspace", "mistral", "gemma",
                                         "across_words", "unknown", "split_kinds", "fused"),
                         [](const auto& kind) { return std::string(kind.param); });

}  // namespace
}  // namespace phalanx::data
