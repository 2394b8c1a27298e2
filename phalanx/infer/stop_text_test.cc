#include "phalanx/infer/stop_text.h"

#include <gtest/gtest.h>

#include "phalanx/base/error.h"
#include "phalanx/data/tokenizer/bpe_model.h"

namespace phalanx::infer {
namespace {

data::BpeTokenizer bytes() {
  data::BpeModel model;
  for (int byte = 0; byte < 256; ++byte) model.tokens.emplace_back(1, static_cast<char>(byte));
  return data::BpeTokenizer(model);
}

/// Byte by byte, what comes out at each; "|" and what finish() gives.
std::string text_in_steps(const std::string& text, const std::vector<std::string>& stops) {
  const data::BpeTokenizer tokenizer = bytes();
  StopText stop(tokenizer, stops);
  std::string steps;
  for (const data::TokenId token : tokenizer.encode(text)) {
    steps += stop.add(token) + ".";
    if (stop.stopped()) return steps + "!" + stop.finish();
  }
  return steps + "|" + stop.finish();
}

TEST(StopText, HoldsBackWhatMayBecomeAStopString) {
  EXPECT_EQ(text_in_steps("abcd", {}), "a.b.c.d.|");
  EXPECT_EQ(text_in_steps("abXYcd", {"XY"}), "a.b...!");
  EXPECT_EQ(text_in_steps("abXcd", {"XY"}), "a.b..Xc.d.|");
  EXPECT_EQ(text_in_steps("abX", {"XY"}), "a.b..|X");
  // The first of several; one that begins anew inside of what was held back.
  EXPECT_EQ(text_in_steps("aXXY", {"XY", "ZZ"}), "a..X..!");
  EXPECT_EQ(text_in_steps("a12b", {"12b", "2"}), "a..1.!");
}

TEST(StopText, CharactersComeWhole) {
  EXPECT_EQ(text_in_steps("é!", {"?"}), ".é.!.|");
  EXPECT_EQ(text_in_steps("aé", {"é"}), "a...!");
}

TEST(StopText, AnEmptyStopStringIsAnError) {
  const data::BpeTokenizer tokenizer = bytes();
  EXPECT_THROW(StopText(tokenizer, {"a", ""}), ConfigError);
}

}  // namespace
}  // namespace phalanx::infer
