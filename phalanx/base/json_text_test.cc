#include "phalanx/base/json_text.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "phalanx/base/error.h"
#include "phalanx/base/json_reader.h"
#include "phalanx/base/testing/error_text.h"

namespace phalanx {
namespace {

std::string fault_of(std::string_view text) {
  nlohmann::json json = "as it was";
  const auto fault = json_object_fault(text, json);
  EXPECT_EQ(fault.has_value(), json == "as it was") << text;
  return fault.value_or("");
}

TEST(JsonText, AnObjectIsRead) { EXPECT_EQ(parse_json_object<DataError>("{\"a\": [1, 2]}\r\n", "f")["a"][1], 2); }

TEST(JsonText, WhatIsWrongIsSaidWithItsPlace) {
  EXPECT_EQ(fault_of("{\n  \"a\": 1,\n  b\n}"),
            "not valid JSON at line 3, column 3: invalid literal; last read: '1,<U+000A>  b'; expected string literal");
  EXPECT_EQ(fault_of("hello\n"), "not valid JSON at column 1: invalid literal; last read: 'h'");
  const std::string cut = "it ends too soon; a file that was cut short?";
  EXPECT_EQ(fault_of("{\"a\": 1"), "not valid JSON at column 8: " + cut);
  EXPECT_EQ(fault_of("{"), "not valid JSON at column 2: " + cut);
  EXPECT_EQ(fault_of("{\"a\": "), "not valid JSON at column 7: " + cut);
  EXPECT_EQ(fault_of(""), "not valid JSON at column 1: " + cut);
  EXPECT_EQ(fault_of("{\"a\": 1e999}"), "not valid JSON: number overflow parsing '1e999'");
  EXPECT_EQ(fault_of("[1]"), "expected a JSON object, found array");
  EXPECT_EQ(fault_of("3"), "expected a JSON object, found number");
  EXPECT_EQ(fault_of(std::string(200'000, '[')), "its JSON nests deeper than 100 levels");
}

TEST(JsonText, AKeyThatIsThereTwiceIsRefused) {
  const std::string twice = "is there twice in one object: expected it once";
  EXPECT_EQ(fault_of(R"({"text": "a", "text": "b"})"), "its key \"text\" " + twice);
  EXPECT_EQ(fault_of(R"({"a": 1, "b": [{"c": 1, "d": {}, "c": 1}]})"), "its key \"c\" " + twice);
  EXPECT_EQ(fault_of("{\"a\xc3\xa9\": 1, \"a\xc3\xa9\": 2}"), "its key \"a??\" " + twice);
  for (const char* sound : {R"({"a": {"a": {"a": 1}}})", R"({"a": [{"b": 1}, {"b": 2}], "b": 3})",
                            R"({"a": {"b": 1}, "c": {"b": 1}, "b": {"a": 1}})"}) {
    EXPECT_EQ(fault_of(sound), "") << sound;
  }
}

TEST(JsonText, APointerOfGitLfsIsToldFromJson) {
  EXPECT_EQ(fault_of("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 497\n").substr(0, 28),
            "it is a Git LFS pointer that");
}

TEST(JsonText, MessagesAreShortAndPrintableWhateverTheTextIs) {
  const std::string hostile = "{\"" + std::string(100'000, 'a') + "\xff\x1b[31m";
  const std::string fault = fault_of(hostile);
  EXPECT_LT(fault.size(), 300u);
  for (const char c : fault_of("{\"\xff\x1b[31m\x07")) EXPECT_TRUE(c >= ' ' && c <= '~') << static_cast<int>(c);
}

TEST(JsonText, TheErrorIsTheCallersAndBeginsWithWhere) {
  try {
    parse_json_object<CheckpointError>("[]", "model/config.json");
    FAIL();
  } catch (const CheckpointError& error) {
    EXPECT_STREQ(error.what(), "model/config.json: expected a JSON object, found array");
  }
}

std::string value_fault(const std::function<void()>& read) {
  try {
    read();
  } catch (const nlohmann::json::exception& error) {
    return json_value_fault(error);
  }
  return "";
}

TEST(JsonText, WhatTheLibrarySaysOfAValueIsSaidInOurWords) {
  const nlohmann::json json = {{"rank", "x"}, {"list", {1}}};
  EXPECT_EQ(value_fault([&] { json.at("size"); }), "its key 'size' is missing");
  EXPECT_EQ(value_fault([&] { json.at("rank").get<int>(); }), "expected number, found string");
  EXPECT_EQ(value_fault([&] { json.at("list").at("x"); }).find("json.exception"), std::string::npos);
}

std::string reader_fault(const char* text, const std::function<void(const JsonReader<DataError>&)>& read) {
  const auto json = nlohmann::json::parse(text);
  return error_text<DataError>([&] { read(JsonReader<DataError>(json, "f")); });
}

TEST(JsonReader, FileKeyExpectedAndFoundAreSaid) {
  using Read = const JsonReader<DataError>&;
  const auto as_int = [](Read read) { read.get<int>("a"); };
  EXPECT_EQ(reader_fault("[1]", as_int), "f: expected a JSON object, found array");
  EXPECT_EQ(reader_fault("{}", as_int), "f has no \"a\"");
  EXPECT_EQ(reader_fault(R"({"a": "x"})", as_int), "f: \"a\" is \"x\": expected a whole number");
  for (const char* text : {R"({"a": 1.5})", R"({"a": 3000000000})", R"({"a": 18446744073709551615})", R"({"a": true})"})
    EXPECT_NE(reader_fault(text, as_int), "") << text;
  EXPECT_EQ(reader_fault(R"({"a": -1})", as_int), "");
  EXPECT_EQ(reader_fault(R"({"a": -1})", [](Read read) { read.get<std::uint64_t>("a"); }),
            "f: \"a\" is -1: expected a whole number of 0 or more");
  EXPECT_EQ(reader_fault(R"({"a": {}})", [](Read read) { read.array("a"); }), "f: \"a\" is {}: expected a list");
  EXPECT_EQ(reader_fault(R"({"a": []})", [](Read read) { read.object("a"); }), "f: \"a\" is []: expected an object");
  EXPECT_EQ(reader_fault(R"({"a": null})", [](Read read) { EXPECT_EQ(read.get_or<int>("a", 7), 7); }), "");
  EXPECT_NE(reader_fault(R"({"a": "x"})", [](Read read) { read.get_or<int>("a", 7); }), "");
}

}  // namespace
}  // namespace phalanx
