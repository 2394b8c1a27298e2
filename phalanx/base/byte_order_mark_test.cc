#include "phalanx/base/byte_order_mark.h"

#include <gtest/gtest.h>

#include <string>

#include "phalanx/base/error.h"
#include "phalanx/base/json_text.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx {
namespace {

using std::string_literals::operator""s;

std::string refused(const std::string& text) {
  return error_text<DataError>([&] { text_after_mark<DataError>(text, "f.txt"); });
}

TEST(ByteOrderMarkTest, Utf8IsPassedOverAndOthersAreRefusedWithWhatToDo) {
  EXPECT_EQ(text_after_mark<DataError>("\xEF\xBB\xBFone", "f"), "one");
  EXPECT_EQ(text_after_mark<DataError>("one\xEF\xBB\xBF", "f"), "one\xEF\xBB\xBF");
  EXPECT_EQ(text_after_mark<DataError>("", "f"), "");
  EXPECT_EQ(text_after_mark<DataError>("\xEF\xBB", "f"), "\xEF\xBB");
  EXPECT_THAT(refused("\xFF\xFEo\0"s), HasSubstr("f.txt: this is UTF-16LE text: expected UTF-8"));
  EXPECT_THAT(refused("\xFE\xFF\0o"s), HasSubstr("UTF-16BE"));
  EXPECT_THAT(refused("\xFF\xFE\0\0o\0\0\0"s), HasSubstr("UTF-32LE"));
  EXPECT_THAT(refused("\0\0\xFE\xFF\0\0\0o"s), HasSubstr("iconv -f UTF-32 -t UTF-8"));
}

TEST(ByteOrderMarkTest, JsonIsReadByTheSameRule) {
  EXPECT_EQ(parse_json_object<DataError>("\xEF\xBB\xBF{\"a\": 1}", "f")["a"], 1);
  nlohmann::json json;
  EXPECT_THAT(json_object_fault("\xFF\xFE{\0}\0"s, json).value_or(""), HasSubstr("UTF-16LE text: expected UTF-8"));
}

}  // namespace
}  // namespace phalanx
