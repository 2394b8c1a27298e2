#include "phalanx/checkpoint/files/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <limits>
#include <random>

#include "phalanx/base/error.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx::safetensors {
namespace {

std::string with_length(const std::string& json, std::size_t data_bytes, std::uint64_t length) {
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes + json + std::string(data_bytes, 'x');
}
std::string file_of(const std::string& json, std::size_t data_bytes) {
  return with_length(json, data_bytes, json.size());
}
Header parse_text(const std::string& bytes) {
  return parse_header("f.safetensors", std::as_bytes(std::span(bytes)), bytes.size());
}

struct Malformed {
  const char* what;
  std::string bytes;
  std::string reason;
};

std::vector<Malformed> malformed_files() {
  const auto tensor = [](const std::string& fields) { return "{\"a\":{" + fields + "}}"; };
  const std::string good = "\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]";
  return {
      {"empty file", "", "too few"},
      {"seven bytes", "1234567", "too few"},
      {"length past the end", with_length("{}", 0, 3), "given as 3 bytes, but the file has 10"},
      {"length over the limit", with_length("{}", 0, 100'000'001), "more than the 100000000"},
      {"a web page", "<!DOCTYPE html>\n<html>not found</html>\n", "the file begins with the text '<!DOCTYP'"},
      {"length of all ones", with_length("{}", 0, ~std::uint64_t{0}), "more than the 100000000"},
      {"empty header", with_length("", 4, 0), "does not begin with '{'"},
      {"leading space", file_of(" {}", 0), "does not begin with '{'"},
      {"byte order mark", file_of("\xEF\xBB\xBF{}", 0), "does not begin with '{'"},
      {"list", file_of("[]", 0), "does not begin with '{'"},
      {"unfinished JSON", file_of("{\"a\":", 0), "not valid JSON"},
      {"text after the object", file_of("{} {}", 0), "not valid JSON"},
      {"zero byte hiding text", file_of(std::string("{}\0garbage", 10), 0), "zero byte"},
      {"invalid UTF-8 name", file_of("{\"\xff\":{" + good + "}}", 8), "not valid JSON"},
      {"overlong UTF-8 name", file_of("{\"\xc0\xaf\":{" + good + "}}", 8), "not valid JSON"},
      {"lone surrogate", file_of("{\"\\ud800\":{" + good + "}}", 8), "not valid JSON"},
      {"tensor twice", file_of("{\"a\":{" + good + "},\"a\":{" + good + "}}", 8), "\"a\" appears twice"},
      {"metadata twice", file_of("{\"__metadata__\":{},\"__metadata__\":{}}", 0), "appears twice"},
      {"metadata key twice", file_of("{\"__metadata__\":{\"k\":\"1\",\"k\":\"2\"}}", 0), "key \"k\" appears twice"},
      {"metadata number", file_of("{\"__metadata__\":{\"k\":1}}", 0), "not a string"},
      {"metadata object", file_of("{\"__metadata__\":{\"k\":{}}}", 0), "not a string"},
      {"metadata list", file_of("{\"__metadata__\":[]}", 0), "not an object"},
      {"tensor is a number", file_of("{\"a\":1}", 0), "\"a\" is the number 1, not an object"},
      {"tensor is null", file_of("{\"a\":null}", 0), "\"a\" is null"},
      {"no dtype", file_of(tensor("\"shape\":[2],\"data_offsets\":[0,8]"), 8), "\"a\": no dtype"},
      {"no shape", file_of(tensor("\"dtype\":\"F32\",\"data_offsets\":[0,8]"), 8), "\"a\": no shape"},
      {"no offsets", file_of(tensor("\"dtype\":\"F32\",\"shape\":[2]"), 8), "\"a\": no data_offsets"},
      {"field twice", file_of(tensor("\"dtype\":\"F32\"," + good), 8), "dtype appears twice"},
      {"unknown field", file_of(tensor(good + ",\"stride\":[1]"), 8), "unknown field \"stride\""},
      {"unknown dtype", file_of(tensor("\"dtype\":\"F4\",\"shape\":[2],\"data_offsets\":[0,1]"), 1), "dtype \"F4\""},
      {"dtype is a number", file_of(tensor("\"dtype\":32,\"shape\":[2],\"data_offsets\":[0,8]"), 8),
       "dtype is the number"},
      {"shape is a number", file_of(tensor("\"dtype\":\"F32\",\"shape\":2,\"data_offsets\":[0,8]"), 8),
       "list of natural"},
      {"negative dimension", file_of(tensor("\"dtype\":\"F32\",\"shape\":[-2],\"data_offsets\":[0,8]"), 8), "-2"},
      {"fractional dimension", file_of(tensor("\"dtype\":\"F32\",\"shape\":[2.0],\"data_offsets\":[0,8]"), 8), "2.0"},
      {"dimension over 64 bits",
       file_of(tensor("\"dtype\":\"F32\",\"shape\":[99999999999999999999],\"data_offsets\":[0,8]"), 8),
       "shape contains"},
      {"dimension over 63 bits",
       file_of(tensor("\"dtype\":\"F32\",\"shape\":[9223372036854775808],\"data_offsets\":[0,8]"), 8), "too large"},
      {"product overflows to the right size",
       file_of(tensor("\"dtype\":\"F32\",\"shape\":[4611686018427387904,4],\"data_offsets\":[0,0]"), 0), "overflows"},
      {"product with a zero overflows",
       file_of(tensor("\"dtype\":\"F32\",\"shape\":[0,4611686018427387904,4],\"data_offsets\":[0,0]"), 0), "overflows"},
      {"nested shape", file_of(tensor("\"dtype\":\"F32\",\"shape\":[[2]],\"data_offsets\":[0,8]"), 8), "an array"},
      {"one offset", file_of(tensor("\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0]"), 8), "needs two"},
      {"three offsets", file_of(tensor("\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8,8]"), 8),
       "more than two"},
      {"backwards", file_of(tensor("\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,0]"), 8), "run backwards"},
      {"past the end", file_of(tensor("\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]"), 7), "pass the end"},
      {"wrong size", file_of(tensor("\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,8]"), 8), "needs 12"},
      {"hole at the start", file_of(tensor("\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]"), 12), "hole"},
      {"data after the last", file_of(tensor(good), 9), "end at byte 8, the data at 9"},
      {"hole between",
       file_of("{\"a\":{" + good + "},\"b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[9,10]}}", 10),
       "\"b\": begins"},
      {"overlap", file_of("{\"a\":{" + good + "},\"b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[7,8]}}", 8),
       "inside"},
      {"deep nesting", file_of(std::string("{\"a\":") + std::string(100'000, '['), 0), "an array"},
  };
}

TEST(SafetensorsHeader, EveryMalformedFileIsRefusedWithItsReason) {
  for (const auto& [what, bytes, reason] : malformed_files()) {
    try {
      parse_text(bytes);
      ADD_FAILURE() << what << " was accepted";
    } catch (const CheckpointError& error) {
      EXPECT_THAT(error.what(), HasSubstr("f.safetensors: malformed safetensors file: ")) << what;
      EXPECT_THAT(error.what(), HasSubstr(reason)) << what;
      EXPECT_LT(std::strlen(error.what()), 700u) << what;
    }
  }
}

TEST(SafetensorsHeader, AcceptsWhatTheFormatAllows) {
  EXPECT_TRUE(parse_text(file_of("{}", 0)).tensors.empty());
  EXPECT_TRUE(parse_text(file_of("{}    ", 0)).tensors.empty());
  const auto header = parse_text(file_of(
      R"({"__metadata__":{"format":"pt"},"late":{"dtype":"I64","shape":[],"data_offsets":[4,12]},)"
      R"("early":{"dtype":"BF16","shape":[2,1],"data_offsets":[0,4]},"none":{"dtype":"U8","shape":[3,0],"data_offsets":[4,4]}}  )",
      12));
  ASSERT_EQ(header.tensors.size(), 3u);
  EXPECT_EQ(header.tensors[0].name, "early");
  EXPECT_EQ(header.tensors[1].name, "none");
  EXPECT_EQ(header.tensors[2].name, "late");
  EXPECT_TRUE(header.tensors[2].shape.empty());
  EXPECT_EQ(header.metadata.at("format"), "pt");
}

TEST(SafetensorsHeader, WhatIsWrittenIsReadBackAndDataIsAligned) {
  const auto header = make_header({{.name = "byte", .dtype = Dtype::u8, .shape = {3}},
                                   {.name = "käse \"x\"", .dtype = Dtype::f64, .shape = {2, 2}},
                                   {.name = "scalar", .dtype = Dtype::f32, .shape = {}}},
                                  {{"note", "two\nlines"}});
  const std::string text = format_header(header);
  EXPECT_EQ(header.data_begin, text.size());
  EXPECT_EQ(header.data_begin % kDataAlignment, 0u);
  const auto read = parse_text(text + std::string(32 + 4 + 3, 'x'));
  ASSERT_EQ(read.tensors.size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(read.tensors[i].name, header.tensors[i].name);
    EXPECT_EQ(read.tensors[i].begin, header.tensors[i].begin);
    EXPECT_EQ(read.tensors[i].begin % element_size(read.tensors[i].dtype), 0u);
  }
  EXPECT_EQ(read.metadata, header.metadata);
}

TEST(SafetensorsHeader, RefusesToWriteWhatCannotBeRead) {
  EXPECT_THROW(make_header({{.name = "a"}, {.name = "a"}}), CheckpointError);
  EXPECT_THROW(make_header({{.name = "__metadata__"}}), CheckpointError);
  EXPECT_THROW(make_header({{.name = "\xff"}}), CheckpointError);
  EXPECT_THROW(make_header({{.name = "a", .shape = {std::numeric_limits<std::int64_t>::max(), 8}}}), CheckpointError);
}

TEST(SafetensorsHeader, EveryDtypeHasItsNameAndSize) {
  for (const std::string name : {"BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "U16", "I16", "F16", "BF16", "U32", "I32",
                                 "F32", "U64", "I64", "F64", "C64"}) {
    const auto dtype = dtype_from_name(name);
    ASSERT_TRUE(dtype) << name;
    EXPECT_EQ(name_of(*dtype), name);
    if (name[1] == '8') {
      EXPECT_EQ(element_size(*dtype), 1u) << name;
    } else if (name != "BOOL") {
      EXPECT_EQ(element_size(*dtype) * 8, std::stoul(name.substr(name.find_first_of("136")))) << name;
    }
  }
  EXPECT_FALSE(dtype_from_name("f32"));
}

std::string small_file() {
  const auto header = make_header({{.name = "w", .dtype = Dtype::f32, .shape = {2, 3}},
                                   {.name = "b", .dtype = Dtype::f32, .shape = {3}},
                                   {.name = "n", .dtype = Dtype::i64, .shape = {}}},
                                  {{"format", "pt"}});
  return format_header(header) + std::string(24 + 12 + 8, '\x01');
}

TEST(SafetensorsHeader, EveryTruncationIsRefused) {
  const auto whole = small_file();
  ASSERT_NO_THROW(parse_text(whole));
  for (std::size_t length = 0; length < whole.size(); ++length)
    EXPECT_THROW(parse_text(whole.substr(0, length)), CheckpointError) << length;
}

// Random damage either leaves a file that is consistent in itself or is refused; it never reads out of bounds.
TEST(SafetensorsHeader, RandomDamageNeverEscapesTheChecks) {
  const auto whole = small_file();
  std::mt19937 random(1);
  int refused = 0;
  for (int trial = 0; trial < 20'000; ++trial) {
    std::string bytes = whole;
    const int edits = 1 + static_cast<int>(random() % 3);
    for (int edit = 0; edit < edits; ++edit) {
      const auto at = random() % bytes.size();
      switch (random() % 4) {
        case 0:
          bytes[at] = static_cast<char>(random());
          break;
        case 1:
          bytes[at] = "0123456789[]{},:\"\\ \0-e."[random() % 24];
          break;
        case 2:
          bytes.erase(at, 1 + random() % 4);
          break;
        case 3:
          bytes.insert(at, bytes.substr(random() % bytes.size(), random() % 8));
          break;
      }
      if (bytes.empty()) bytes = "x";
    }
    try {
      const auto header = parse_text(bytes);
      std::uint64_t position = 0;
      for (const auto& tensor : header.tensors) {
        ASSERT_EQ(tensor.begin, position);
        ASSERT_EQ(byte_size(tensor.dtype, tensor.shape), tensor.size());
        position = tensor.end;
      }
      ASSERT_EQ(header.data_begin + position, bytes.size());
    } catch (const CheckpointError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 10'000);
}

TEST(SafetensorsFile, GivesTheBytesOfEachTensor) {
  const TempDirectory scratch("safetensors");
  const auto path = (scratch.path() / "a.safetensors").string();
  const auto header =
      make_header({{.name = "w", .dtype = Dtype::f32, .shape = {2}}, {.name = "u", .dtype = Dtype::u8, .shape = {1}}});
  const float values[2] = {1.5f, -2.0f};
  std::ofstream(path, std::ios::binary) << format_header(header)
                                        << std::string(reinterpret_cast<const char*>(values), sizeof values) << 'z';
  const File file(path);
  const auto* w = file.find("w");
  ASSERT_NE(w, nullptr);
  EXPECT_EQ(std::memcmp(file.bytes(*w).data(), values, sizeof values), 0);
  EXPECT_EQ(static_cast<char>(file.bytes(*file.find("u"))[0]), 'z');
  EXPECT_EQ(file.find("v"), nullptr);
}

TEST(SafetensorsFile, AMissingFileIsNamed) {
  try {
    File("/nonexistent/model.safetensors");
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("/nonexistent/model.safetensors"));
  }
}

TEST(SafetensorsNames, AreQuotedForMessages) {
  EXPECT_EQ(quote_name("wq"), "\"wq\"");
  EXPECT_EQ(quote_name("a\n\x01"), "\"a\\n\\u0001\"");
  EXPECT_LT(quote_name(std::string(100'000, 'x')).size(), 130u);
}

}  // namespace
}  // namespace phalanx::safetensors
