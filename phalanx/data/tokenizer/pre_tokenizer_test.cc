#include "phalanx/data/tokenizer/pre_tokenizer.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/data/tokenizer/byte_level.h"
#include "phalanx/data/tokenizer/unicode.h"

namespace phalanx::data {
namespace {

std::vector<std::string> by_hand(std::string_view text) {
  std::vector<std::string> pieces;
  while (!text.empty()) {
    const std::size_t length = gpt2_piece(text);
    pieces.emplace_back(text.substr(0, length));
    text.remove_prefix(length);
  }
  return pieces;
}

std::vector<std::string> pieces_of(const std::vector<PreTokenizerStep>& steps, std::string_view text) {
  const PreTokenizer splitter(steps);
  PreTokenizer::Scratch scratch = splitter.make_scratch();
  std::vector<std::string> pieces;
  splitter.split({text}, scratch, [&](std::string_view piece) { pieces.emplace_back(piece); });
  return pieces;
}

SplitStep regex_step(std::string_view pattern, SplitBehavior behavior = SplitBehavior::isolated, bool invert = false) {
  return {{.text = std::string(pattern), .is_regex = true}, behavior, invert};
}

/// Through PCRE2, even for the pattern with a hand-written matcher: a group keeps it from being recognised.
std::vector<std::string> by_regex(std::string_view text, std::string_view pattern) {
  return pieces_of({regex_step("(?:" + std::string(pattern) + ")")}, text);
}

TEST(SplitTest, HandWrittenMatcherIsTheRegularExpression) {
  std::mt19937 rng(11);
  // Characters that old Unicode tables know, so that any PCRE2 agrees; classes and borders of all kinds.
  const std::vector<std::string> characters = {
      " ",      " ",       "  ",     "\n",     "\t",     "\r\n",   "\v",     "\f",
      "\u00a0", "\u2003",  "\u3000", "\u0085", "\u2028", "'",      "'s",     "'t",
      "'re",    "'ve",     "'m",     "'ll",    "'d",     "'S",     "'r",     "'l",
      "'v",     "a",       "Z",      "e",      "l",      "r",      "v",      "ß",
      "é",      "Ω",       "ж",      "漢",     "カ",     "한",     "א",      "ع",
      "ह",      "a\u0301", "𝔘",      "0",      "9",      "½",      "²",      "٣",
      "४",      "Ⅷ",       "𝟙",      ".",      "_",      "-",      "!",      "(",
      "€",      "→",       "😀",      "\u200d", "\u0301", "\ufe0f", "\u200b", std::string(1, '\0'),
      "\x7f",   "\x1c"};
  int pieces = 0;
  for (int i = 0; i < 4000; ++i) {
    std::string text;
    const std::size_t few = 1 + rng() % characters.size();
    for (std::size_t n = rng() % 30; n > 0; --n) text += characters[rng() % (i % 2 ? characters.size() : few)];
    const auto expected = by_regex(text, kGpt2Pattern);
    ASSERT_EQ(by_hand(text), expected) << bytes_to_printable(text);
    pieces += static_cast<int>(expected.size());
  }
  EXPECT_GT(pieces, 20000);
}

TEST(SplitTest, PiecesAreWhatThePatternSays) {
  EXPECT_EQ(by_hand("Hello, it's  x\n\n y "),
            (std::vector<std::string>{"Hello", ",", " it", "'s", " ", " x", "\n\n", " y", " "}));
  EXPECT_EQ(by_hand("   "), (std::vector<std::string>{"   "}));
  EXPECT_EQ(by_hand("a1_b"), (std::vector<std::string>{"a", "1", "_", "b"}));
  EXPECT_EQ(by_hand(""), (std::vector<std::string>{}));
}

TEST(SplitTest, InvalidBytesAreSignsAndNothingIsLost) {
  EXPECT_EQ(by_hand("ab\xff\xfe.c"), (std::vector<std::string>{"ab", "\xff\xfe.", "c"}));
  EXPECT_EQ(by_hand(" \xe2\x82"), (std::vector<std::string>{" \xe2\x82"}));
  std::mt19937 rng(5);
  for (int i = 0; i < 300; ++i) {
    std::string text;
    for (std::size_t n = rng() % 80; n > 0; --n) text += static_cast<char>(rng());
    std::string joined, regex_joined;
    for (const auto& piece : by_hand(text)) joined += piece;
    for (const auto& piece : by_regex(text, kGpt2Pattern)) regex_joined += piece;
    EXPECT_EQ(joined, text);
    EXPECT_EQ(regex_joined, text);
  }
}

TEST(SplitTest, SeveralPatternsCutOneAfterAnother) {
  EXPECT_EQ(pieces_of({regex_step(R"(\d{2})"), ByteLevelStep{}}, "ab12345 cd"),
            (std::vector<std::string>{"ab", "12", "34", "5", " cd"}));
  // An empty match cuts too; one right behind another match is none.
  EXPECT_EQ(by_regex("aébxxc", "x*"), (std::vector<std::string>{"a", "é", "b", "xx", "c"}));
  EXPECT_EQ(by_regex("aBcDE", "(?=[A-Z])"), (std::vector<std::string>{"a", "Bc", "D", "E"}));
}

TEST(SplitTest, ClassesAreThoseOfThePackage) {
  // \w: marks, connectors, circled letters and the fractions of Latin-1, no other numbers; \s: not U+180E.
  EXPECT_EQ(pieces_of({regex_step(R"(\w+)", SplitBehavior::removed)}, "a\u0301_‿Ⓐ½²9 ①⅓\u200d"),
            (std::vector<std::string>{" ①⅓\u200d"}));
  EXPECT_EQ(pieces_of({regex_step(R"([\s]|\s)", SplitBehavior::removed)}, "a\u180eb\u0085\u3000\u2028\v"),
            (std::vector<std::string>{"a\u180eb"}));
  EXPECT_EQ(pieces_of({regex_step(R"(\S+)", SplitBehavior::removed)}, "a\u180eb \u0085"),
            (std::vector<std::string>{" \u0085"}));
  // ^ and $ are about lines, the dot is not.
  EXPECT_EQ(by_regex("ab\nab", "^a|b$"), (std::vector<std::string>{"a", "b", "\n", "a", "b"}));
  EXPECT_EQ(pieces_of({regex_step(".", SplitBehavior::removed)}, "ab\nab"), (std::vector<std::string>{"\n"}));
}

TEST(SplitTest, BadPatternsAreErrorsNotCrashes) {
  EXPECT_THROW(SplitRegex("(unclosed"), DataError);
  EXPECT_THROW(SplitRegex("[z-a]"), DataError);
  EXPECT_THROW(SplitRegex(R"(\bx)"), DataError);  // another meaning in the package
  EXPECT_THROW(PatternFinder({.text = ""}), DataError);
  // Exponential backtracking meets the match limit.
  EXPECT_THROW(by_regex(std::string(60, 'a'), "^(a+)+[bc]"), DataError);
}

TEST(UnicodeTest, ClassesOfCharacters) {
  EXPECT_EQ(class_of('a'), CharClass::letter);
  EXPECT_EQ(class_of(0x1D518), CharClass::letter);  // 𝔘
  EXPECT_EQ(class_of(0xBD), CharClass::number);     // ½
  EXPECT_EQ(class_of(0x1D7D9), CharClass::number);  // 𝟙
  EXPECT_EQ(class_of(0x3000), CharClass::space);
  EXPECT_EQ(class_of(0x180E), CharClass::other);  // a space only in old Unicode
  EXPECT_EQ(class_of('_'), CharClass::other);
  EXPECT_EQ(class_of(0x10FFFF), CharClass::other);
  EXPECT_EQ(class_of(0xFFFFFFFF), CharClass::other);
}

TEST(ByteLevelTest, PrintableFormIsABijection) {
  std::string all;
  for (int byte = 0; byte < 256; ++byte) all += static_cast<char>(byte);
  EXPECT_EQ(printable_to_bytes(bytes_to_printable(all)), all);
  EXPECT_EQ(bytes_to_printable(" \n"), "ĠĊ");
  EXPECT_EQ(printable_to_bytes("漢"), std::nullopt);
  EXPECT_EQ(printable_to_bytes("a b"), std::nullopt);  // a space is written Ġ
}

}  // namespace
}  // namespace phalanx::data
