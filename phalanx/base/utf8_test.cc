#include "phalanx/base/utf8.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

namespace phalanx {
namespace {

TEST(Utf8, DecodesExactlyTheValidForms) {
  EXPECT_EQ(first_char("a").code_point, 0x61u);
  EXPECT_EQ(first_char("é").code_point, 0xE9u);
  EXPECT_EQ(first_char("漢").length, 3);
  EXPECT_EQ(first_char("😀").code_point, 0x1F600u);
  for (const char* bad : {"\x80", "\xc0\x80", "\xc1\xbf", "\xe0\x9f\xbf", "\xed\xa0\x80", "\xf0\x8f\xbf\xbf",
                          "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xc3", "\xe2\x82"}) {
    EXPECT_EQ(first_char(bad).length, 0) << ::testing::PrintToString(bad);
  }
  std::string out;
  for (const std::uint32_t c : {0x24u, 0xE9u, 0x6F22u, 0x1F600u}) append_utf8(c, out);
  EXPECT_EQ(out, "$é漢😀");
  EXPECT_EQ(unfinished_tail("a\xe2\x82"), 2u);
  EXPECT_EQ(unfinished_tail("a\xe0\x80"), 0u);  // no continuation makes it valid
  EXPECT_EQ(unfinished_tail("\xf0"), 1u);
  EXPECT_EQ(unfinished_tail("\xf0\x9f\x98\x80"), 0u);
  EXPECT_EQ(unfinished_tail(""), 0u);
  EXPECT_EQ(unfinished_tail("\x80\x80\x80\x80"), 0u);
}

}  // namespace
}  // namespace phalanx
