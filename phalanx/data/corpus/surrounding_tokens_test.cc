#include "phalanx/data/corpus/surrounding_tokens.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "phalanx/base/testing/folder_test.h"
#include "phalanx/data/corpus/corpus.h"
#include "phalanx/data/testing/small_data.h"
#include "phalanx/data/token_file.h"

namespace phalanx::data {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class SurroundingTokensTest : public FolderTest {
 protected:
  static SurroundingTokens around(const std::vector<TokenId>& prefix, const std::vector<TokenId>& suffix,
                                  const SurroundingOptions& options) {
    return surrounding_tokens(with_template(small_tokenizer("the lazy dog"), prefix, suffix), options);
  }
};

TEST_F(SurroundingTokensTest, AreThoseOfTheTemplateThenTheEnd) {
  const SurroundingTokens both = around({5}, {6}, {.end = 9});
  EXPECT_THAT(both.before, ElementsAre(5));
  EXPECT_THAT(both.after, ElementsAre(6, 9));
  EXPECT_THAT(around({5}, {6}, {}).after, ElementsAre(6));
  EXPECT_THAT(around({5}, {6}, {.special_tokens = false, .end = 9}).before, IsEmpty());
  EXPECT_THAT(around({5}, {6}, {.special_tokens = false, .end = 9}).after, ElementsAre(9));
}

TEST_F(SurroundingTokensTest, HaveTheEndOnce) {
  EXPECT_THAT(around({5}, {9}, {.end = 9}).after, ElementsAre(9));
  EXPECT_THAT(around({5}, {9, 6}, {.end = 9}).after, ElementsAre(9, 6, 9));
  EXPECT_THAT(around({9}, {}, {.end = 9}).before, ElementsAre(9)) << "a beginning is no end";
}

// A text of several chunks, which are encoded one by one, among others.
TEST_F(SurroundingTokensTest, AreAroundEachDocumentOfATokenFile) {
  std::string large;
  while (large.size() < (9U << 20U)) large += fmt::format("line {} of a long file\n\n", large.size() % 1000);
  const std::vector<std::string> texts = {"the lazy dog", large, "dog"};
  std::vector<std::string> paths;
  for (const std::string& text : texts) paths.push_back(write(fmt::format("{}.txt", paths.size()), text));
  const BpeTokenizer plain = small_tokenizer("the lazy dog");
  const BpeTokenizer tokenizer = with_template(plain, {*plain.id_of("t"), *plain.id_of("h")}, {*plain.id_of("z")});
  for (const bool special : {true, false}) {
    const std::string prefix = path(special ? "with" : "without");
    encode_corpus(list_corpus(paths).documents, tokenizer, prefix, {.special_tokens = special, .threads = 2});
    const TokenFile file(prefix);
    ASSERT_EQ(file.document_count(), 3);
    for (std::size_t i = 0; i < texts.size(); ++i) {
      const TokenRange range = file.document(static_cast<std::int64_t>(i));
      std::vector<std::int64_t> ids(static_cast<std::size_t>(range.size()));
      file.read(range.begin, ids);
      std::vector<TokenId> expected =
          tokenizer.encode(texts[i], {.added_tokens = false, .add_special_tokens = special});
      expected.push_back(*tokenizer.end_of_text());
      EXPECT_TRUE(std::vector<TokenId>(ids.begin(), ids.end()) == expected) << i << special;
    }
  }
}

}  // namespace
}  // namespace phalanx::data
