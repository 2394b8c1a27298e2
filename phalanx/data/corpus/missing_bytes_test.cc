#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "phalanx/data/tokenizer/bpe_tokenizer.h"

namespace phalanx::data {
namespace {

using nlohmann::json;

// A byte-level vocabulary of few bytes, and what the `tokenizers` package (0.23) makes of texts with it.
constexpr const char* kVocabulary =
    R"json({"<unk>": 0, "a": 1, "b": 2, "c": 3, "d": 4, "\u0120": 5, "ab": 6, "\u0120a": 7, "\u00c3": 8, "\u00a9": 9, "\u00c3\u00a9": 10, "\u0120ab": 11, "\n": 12, "zq": 13})json";
constexpr const char* kTexts =
    R"json(["ab ab", "a\u00e9bxyb", "xyz", "x", "\u00e9\u0000a", "a\nb", "\u6f22a\u6f22", "abxxab xab", "", "\u0001", "c\u00e9xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxabababababababababababababababababababababababababababababababababababababababab", "zq", "azqb"])json";
constexpr const char* kCases = R"json([
{"unk": null, "fuse": false, "ignore": false, "ids": [[6, 11], [1, 10, 2, 2], [], [], [10, 1], [1, 12, 2], [1], [6, 6, 11], [], [], [3, 10, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6], [], [6]], "texts": ["ab ab", "a\u00e9bb", "", "", "\u00e9a", "a\nb", "a", "abab ab", "", "", "c\u00e9abababababababababababababababababababababababababababababababababababababababab", "", "ab"]},
{"unk": "<unk>", "fuse": false, "ignore": false, "ids": [[6, 11], [1, 10, 2, 0, 0, 2], [0, 0, 0], [0], [10, 0, 1], [1, 12, 2], [0, 0, 0, 1, 0, 0, 0], [6, 0, 0, 6, 5, 0, 6], [], [0], [3, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6], [0, 0], [1, 0, 0, 2]], "texts": ["ab ab", "a\u00e9b<unk><unk>b", "<unk><unk><unk>", "<unk>", "\u00e9<unk>a", "a\nb", "<unk><unk><unk>a<unk><unk><unk>", "ab<unk><unk>ab <unk>ab", "", "<unk>", "c\u00e9<unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk><unk>abababababababababababababababababababababababababababababababababababababababab", "<unk><unk>", "a<unk><unk>b"]},
{"unk": "<unk>", "fuse": true, "ignore": false, "ids": [[6, 11], [1, 10, 2, 0, 2], [0], [0], [10, 0, 1], [1, 12, 2], [0, 1, 0], [6, 0, 6, 5, 0, 6], [], [0], [3, 10, 0, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6], [0], [1, 0, 2]], "texts": ["ab ab", "a\u00e9b<unk>b", "<unk>", "<unk>", "\u00e9<unk>a", "a\nb", "<unk>a<unk>", "ab<unk>ab <unk>ab", "", "<unk>", "c\u00e9<unk>abababababababababababababababababababababababababababababababababababababababab", "<unk>", "a<unk>b"]},
{"unk": "<unk>", "fuse": true, "ignore": true, "ids": [[6, 11], [1, 10, 2, 0, 2], [0], [0], [10, 0, 1], [1, 12, 2], [0, 1, 0], [6, 0, 6, 5, 0, 6], [], [0], [3, 10, 0, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6], [13], [1, 0, 2]], "texts": ["ab ab", "a\u00e9b<unk>b", "<unk>", "<unk>", "\u00e9<unk>a", "a\nb", "<unk>a<unk>", "ab<unk>ab <unk>ab", "", "<unk>", "c\u00e9<unk>abababababababababababababababababababababababababababababababababababababababab", "zq", "a<unk>b"]}
])json";

TEST(MissingBytesTest, BecomeTheUnknownTokenOrNothingAsInThePackage) {
  const auto texts = json::parse(kTexts).get<std::vector<std::string>>();
  for (const json& expected : json::parse(kCases)) {
    const json file = {{"version", "1.0"},
                       {"added_tokens", {{{"id", 12}, {"content", "\n"}, {"normalized", false}, {"special", false}}}},
                       {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}},
                       {"decoder", {{"type", "ByteLevel"}}},
                       {"model",
                        {{"type", "BPE"},
                         {"unk_token", expected["unk"]},
                         {"fuse_unk", expected["fuse"]},
                         {"ignore_merges", expected["ignore"]},
                         {"vocab", json::parse(kVocabulary)},
                         {"merges", {"a b", "Ġ a", "Ã ©", "Ġ ab"}}}}};
    // As it is, and as it is written.
    const BpeTokenizer read = BpeTokenizer::from_json(file.dump());
    for (const BpeTokenizer& tokenizer : {read, BpeTokenizer::from_json(read.to_json())}) {
      for (std::size_t i = 0; i < texts.size(); ++i) {
        const auto ids = tokenizer.encode(texts[i]);
        EXPECT_EQ(ids, expected["ids"][i].get<std::vector<TokenId>>()) << texts[i] << expected["unk"];
        EXPECT_EQ(tokenizer.decode(ids), expected["texts"][i].get<std::string>());
      }
    }
  }
}

}  // namespace
}  // namespace phalanx::data
