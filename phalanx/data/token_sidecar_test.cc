// What is known about a file of ids besides the ids: PREFIX.json, a stated type, what the content itself shows.
#include "phalanx/data/token_sidecar.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/testing/folder_test.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/data/token_file_writer.h"

namespace phalanx::data {
namespace {

template <typename T>
std::string bytes_of_ids(const std::vector<std::uint32_t>& ids, bool big_endian = false) {
  std::string bytes;
  for (const std::uint32_t id : ids) {
    const T value = static_cast<T>(id);
    std::string one(sizeof(T), '\0');
    std::memcpy(one.data(), &value, sizeof value);
    bytes += big_endian ? std::string(one.rbegin(), one.rend()) : one;
  }
  return bytes;
}

std::vector<std::uint32_t> random_ids(std::uint32_t vocab, int count, std::uint32_t seed = 1) {
  std::mt19937 random(seed);
  std::vector<std::uint32_t> ids;
  for (int i = 0; i < count; ++i) ids.push_back(random() % vocab);
  return ids;
}

class RawIdsTest : public FolderTest {
 protected:
  std::string said_of(const std::string& name, const std::string& bytes, TokenFileOptions options = {}) {
    write(name, bytes);
    return said_of(name, options);
  }
  std::string said_of(const std::string& name, TokenFileOptions options = {}) {
    try {
      const TokenFile file(path(name), options);
      return "accepted as " + file.description();
    } catch (const Error& error) {
      return error.what();
    }
  }
};

TEST_F(RawIdsTest, IdsOfAnotherTypeAreSeen) {
  for (const std::uint32_t vocab : {65U, 4096U, 50257U}) {
    const TokenFileOptions options{.vocab_size = vocab};
    const auto ids = random_ids(vocab, 500);
    EXPECT_THAT(said_of("a.bin", bytes_of_ids<std::uint16_t>(ids), options), HasSubstr("uint16, 500 tokens"));
    EXPECT_THAT(said_of("a.bin", bytes_of_ids<std::uint32_t>(ids), options),
                AllOf(HasSubstr("1 of 2 tokens are 0 throughout"), HasSubstr("uint32"), HasSubstr("dataset_dtype")));
    EXPECT_THAT(said_of("a.bin", bytes_of_ids<std::int64_t>(ids), options), HasSubstr("int64"));
    EXPECT_THAT(said_of("a.bin", bytes_of_ids<std::uint32_t>(ids, true), options), HasSubstr("big-endian"));
    EXPECT_THAT(said_of("a.bin", bytes_of_ids<std::int64_t>(ids)),  // no vocabulary known
                AllOf(HasSubstr("int64; state the type"), HasSubstr("\"type\": \"int64\"")));
  }
  // Ids above 65535 under a model for which half of one is a valid id.
  const auto large = random_ids(128256, 500);
  EXPECT_THAT(said_of("a.bin", bytes_of_ids<std::uint32_t>(large), {.vocab_size = 65536}),
              AllOf(HasSubstr("every second token is below 2"), HasSubstr("uint32")));
  EXPECT_THAT(said_of("a.bin", bytes_of_ids<std::uint32_t>(large), {.vocab_size = 128256}), HasSubstr("uint32, 500"));
  EXPECT_THAT(said_of("a.bin", bytes_of_ids<std::int64_t>(large), {.vocab_size = 128256}), HasSubstr("int64"));
  EXPECT_THAT(said_of("a.bin", bytes_of_ids<std::uint16_t>(random_ids(50257, 500)), {.vocab_size = 128256}),
              AllOf(HasSubstr("outside the vocabulary"), HasSubstr("the ids fit if they are uint16")));
  EXPECT_THAT(said_of("a.bin", bytes_of_ids<std::uint8_t>(random_ids(256, 500)), {.vocab_size = 256}),
              HasSubstr("the ids fit if they are uint8"));
  EXPECT_THAT(said_of("a.bin", bytes_of_ids<std::uint16_t>(random_ids(1000, 500), true), {.vocab_size = 1000}),
              HasSubstr("big-endian uint16"));
  EXPECT_THAT(said_of("a.bin", bytes_of_ids<float>(random_ids(50, 500)), {.vocab_size = 65536}),
              HasSubstr("floating-point"));
  const std::string zeros(8000, '\0');
  EXPECT_THAT(said_of("a.bin", zeros),
              HasSubstr("every byte that was looked at is 0, as in a file that was made and never written"));
  EXPECT_THAT(said_of("a.bin", zeros, {.type = TokenType::u16}), HasSubstr("uint16, 4,000 tokens"));
}

TEST_F(RawIdsTest, AStatedTypeIsBelieved) {
  const auto ids = random_ids(4096, 500);
  EXPECT_THAT(said_of("a.bin", bytes_of_ids<std::uint32_t>(ids), {.type = TokenType::u32}), HasSubstr("uint32, 500"));
  EXPECT_THAT(said_of("a.bin", {.type = TokenType::u16}), HasSubstr("uint16, 1,000 tokens"));
  write("a.json", R"({"format": "phalanx.tokens", "type": "int64", "vocab_size": 4096})");
  EXPECT_THAT(said_of("a.bin", bytes_of_ids<std::int64_t>(ids)), HasSubstr("int64, 500 tokens"));
  EXPECT_THAT(said_of("a.bin", {.type = TokenType::u32}),
              AllOf(HasSubstr("stated as uint32"), HasSubstr("a.json says int64")));
  // A text is a stream of bytes if its type is stated so.
  EXPECT_THAT(said_of("t.bin", "Once upon a time there was", {.vocab_size = 256, .type = TokenType::u8}),
              HasSubstr("uint8, 26 tokens"));
  TokenFileWriter writer(path("m"), {.vocab_size = 100});
  writer.add_document(std::vector<std::int32_t>{1, 2, 3});
  writer.finish();
  EXPECT_THAT(said_of("m", {.type = TokenType::u32}), HasSubstr("but its index says uint16"));
}

TEST_F(RawIdsTest, OtherKindsOfFilesAreRefusedWithWhatToDo) {
  using namespace std::string_literals;
  const std::string rest(2000, '\x01');
  EXPECT_THAT(said_of("a.bin", "Once upon a time there was a text\n"),
              AllOf(HasSubstr("a.bin: this is text"), HasSubstr("phalanx tokenize"), HasSubstr("--output")));
  EXPECT_THAT(said_of("a.npy", "\x93NUMPY\x01\0v\0{'descr': '<i8', 'fortran_order': False"s + rest),
              AllOf(HasSubstr("NumPy array"), HasSubstr("elements '<i8'"), HasSubstr(".tofile(")));
  EXPECT_THAT(said_of("a.bin", "\x1f\x8b\x08\0\0\0\0\0\0\x03"s + rest),
              AllOf(HasSubstr("gzip data"), HasSubstr("gunzip -c"), HasSubstr("phalanx tokenize")));
  EXPECT_THAT(said_of("a.bin", "\x28\xb5\x2f\xfd"s + rest), HasSubstr("zstd -d"));
  EXPECT_THAT(said_of("a.bin", "PAR1"s + rest), AllOf(HasSubstr("Parquet"), HasSubstr("phalanx tokenize")));
  EXPECT_THAT(said_of("a.bin", "PK\x03\x04"s + rest), AllOf(HasSubstr("ZIP"), HasSubstr("unpack")));
  EXPECT_THAT(said_of("a.bin", "\x40\0\0\0\0\0\0\0{\"a\": "s + rest), HasSubstr("safetensors"));
  EXPECT_THAT(said_of("a.bin", "\xff\xff\xff\xff\x78\0\0\0\x10\0\0\0"s + rest),
              AllOf(HasSubstr("an Arrow file"), HasSubstr("phalanx tokenize")));
  EXPECT_THAT(said_of("a.bin", "%PDF-1.7\n"s + rest), HasSubstr("a PDF: expected token ids"));
}

TEST_F(RawIdsTest, ASidecarThatDescribesAnotherFileIsRefused) {
  const auto write_ids = [&](std::int32_t last) {
    TokenFileWriter writer(path("m"), {.vocab_size = 100, .tokenizer = "tok1:abc"});
    writer.add_document(std::vector<std::int32_t>{1, 2, 3});
    writer.add_document(std::vector<std::int32_t>{4, last});
    writer.finish();
  };
  write_ids(5);
  const TokenFile file(path("m"), {.vocab_size = 100});
  ASSERT_TRUE(file.sidecar());
  EXPECT_EQ(file.sidecar()->tokenizer, "tok1:abc");
  EXPECT_EQ(file.sidecar()->vocab_size, 100);
  EXPECT_EQ(file.sidecar()->content, file.content_hash());
  const std::string of_five = read_file(path("m.json"));
  write_ids(6);
  EXPECT_THAT(said_of("m"), HasSubstr("2 documents"));
  write("m.json", of_five);  // same sizes, other ids
  EXPECT_THAT(said_of("m"), AllOf(HasSubstr("m.json: \"content\" is"), HasSubstr("it describes another file")));
  const auto with = [&](const char* key, const nlohmann::json& value) {
    write_ids(5);
    nlohmann::json json = nlohmann::json::parse(of_five);
    json[key] = value;
    write("m.json", json.dump());
    return said_of("m", {.vocab_size = 100});
  };
  EXPECT_THAT(with("tokens", 6), HasSubstr("\"tokens\" is 6, but"));
  EXPECT_THAT(with("documents", 1), HasSubstr("\"documents\" is 1"));
  EXPECT_THAT(with("type", "int32"), HasSubstr("\"type\" is int32"));
  EXPECT_THAT(with("type", "float"), HasSubstr("expected uint8"));
  EXPECT_THAT(with("tokens", "many"), HasSubstr("\"tokens\": expected a number"));
  EXPECT_THAT(with("version", 3), HasSubstr("later version"));
  EXPECT_THAT(with("vocab_size", 101),
              AllOf(HasSubstr("a tokenizer of 101 ids"), HasSubstr("more than the model's vocab_size of 100")));
  EXPECT_THAT(with("document_end", "end"), HasSubstr("\"document_end\": expected an id, or \"none\", found \"end\""));
  EXPECT_THAT(with("document_end", 100), HasSubstr("expected an id below \"vocab_size\", 100, or \"none\", found 100"));
  EXPECT_THAT(with("special_tokens", 1), HasSubstr("\"special_tokens\": expected true or false, found 1"));
  EXPECT_THAT(with("document_end", -1), HasSubstr("\"document_end\": expected an id"));
  EXPECT_THAT(with("vocab_size", 6), HasSubstr("accepted"));  // ids up to 5
  EXPECT_THAT(with("vocab_size", 5),
              AllOf(HasSubstr("token 5 at position 4, but "), HasSubstr("m.json says that its vocabulary has 5 ids")));
}

TEST_F(RawIdsTest, TheSidecarSaysWhatEndsDocuments) {
  for (const std::optional<std::int64_t> end : {std::optional<std::int64_t>(), {0}, {7}, {kNoDocumentEnd}}) {
    TokenFileWriter writer(path("m"), {.vocab_size = 100, .document_end = end});
    writer.add_document(std::vector<std::int32_t>{1, 2, 3});
    writer.finish();
    EXPECT_EQ(TokenFile(path("m")).sidecar()->document_end, end);
  }
}

TEST_F(RawIdsTest, SomebodyElsesJsonIsLeftAlone) {
  write("m.json", R"([{"text": "mine"}])");
  EXPECT_THROW(TokenFileWriter(path("m"), {.vocab_size = 100}), DataError);
  EXPECT_EQ(read_file(path("m.json")), R"([{"text": "mine"}])");
  EXPECT_THAT(said_of("m.bin", bytes_of_ids<std::uint16_t>({1, 2, 3})), HasSubstr("accepted"));
}

TEST_F(RawIdsTest, TheHashIsOfAllOfASmallFileAndOfBlocksOfALargeOne) {
  std::string small(1000, '\x01');
  const auto hash = [](const std::string& bytes) {
    return hash_of_ids(TokenType::u16, std::as_bytes(std::span(bytes.data(), bytes.size())));
  };
  const std::string before = hash(small);
  small[500] = '\x02';
  EXPECT_NE(hash(small), before);
  std::string large(std::size_t{6} << 20, '\x01');
  const std::string whole = hash(large);
  const std::size_t in_the_middle = (large.size() - (std::size_t{1} << 14)) / 255 * 128;  // where a block begins
  for (const std::size_t at : {std::size_t{0}, in_the_middle, large.size() - 1}) {
    std::string other = large;
    other[at] = '\x02';
    EXPECT_NE(hash(other), whole);
  }
  EXPECT_NE(hash(large.substr(2)), whole);
}

}  // namespace
}  // namespace phalanx::data
