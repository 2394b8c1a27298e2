#include "phalanx/base/svg.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/xml.h"

namespace phalanx {
namespace {

TEST(Svg, TextIsEscaped) {
  EXPECT_EQ(escape_markup("a<b> & \"c\" 'd'"), "a&lt;b&gt; &amp; &quot;c&quot; &#39;d&#39;");
  EXPECT_EQ(escape_markup("Grüße, 世界 \U0001F600"), "Grüße, 世界 \U0001F600");
  EXPECT_EQ(escape_markup("a\x01\x1b[0m\nb\tc"), "a\uFFFD\uFFFD[0m\nb\tc");
  // A single byte, a truncated character, an overlong one, a surrogate, and one beyond the last code point.
  EXPECT_EQ(escape_markup("\xFF<"), "\uFFFD&lt;");
  EXPECT_EQ(escape_markup("\xE4\xB8"), "\uFFFD\uFFFD");
  EXPECT_EQ(escape_markup("\xC0\xBC"), "\uFFFD\uFFFD");
  EXPECT_EQ(escape_markup("\xED\xA0\x80"), "\uFFFD\uFFFD\uFFFD");
  EXPECT_EQ(escape_markup("\xF4\x90\x80\x80"), "\uFFFD\uFFFD\uFFFD\uFFFD");
  EXPECT_EQ(escape_markup("\xEF\xBF\xBE"), "\uFFFD\uFFFD\uFFFD");  // U+FFFE, which is not a character
}

TEST(Svg, ASheetHasItsTitleAndContent) {
  const auto svg =
      parse_xml(svg_sheet({.width = 900, .height = 300.2, .title = "<A & B>"}, "<text x=\"1\">t</text>\n"));
  EXPECT_EQ(svg.name, "svg");
  EXPECT_EQ(svg.attributes.at("viewBox"), "0 0 900 300");
  EXPECT_EQ(svg.number("width"), 900);
  ASSERT_EQ(elements_of(svg, "title").size(), 1U);
  EXPECT_EQ(elements_of(svg, "title")[0]->text, "<A & B>");
  EXPECT_EQ(elements_of(svg, "text")[0]->text, "t");
}

TEST(Svg, StepsAreRound) {
  EXPECT_EQ(round_step(1), 1);
  EXPECT_EQ(round_step(1.1), 2);
  EXPECT_EQ(round_step(2.1), 5);
  EXPECT_EQ(round_step(5.1), 10);
  EXPECT_EQ(round_step(4000), 5000);
  EXPECT_DOUBLE_EQ(round_step(0.03), 0.05);
}

// The XML reader that tests of pictures use.
TEST(Xml, WhatIsNotWellFormedIsRefused) {
  EXPECT_EQ(parse_xml("<a b=\"1\"> x <c/></a>\n").children.size(), 1U);
  for (const char* wrong : {"<a>", "<a></b>", "<a></a><b/>", "<a b=\"1\" b=\"2\"/>", "<a>&</a>", "<a>&x;</a>",
                            "<a b=\"<\"/>", "<a b=1/>", "<a b=\"1\"c=\"2\"/>", "<a>\x01</a>", "a", ""}) {
    EXPECT_THROW(parse_xml(wrong), Error) << wrong;
  }
}

}  // namespace
}  // namespace phalanx
