#include "phalanx/base/file_kind.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"

namespace phalanx::data {
namespace {

using std::string_literals::operator""s;

FileKind kind_of(const std::string& bytes) {
  return file_kind(std::string_view(bytes).substr(0, kFileKindProbe), bytes.size());
}

TEST(FileKindTest, KnownKindsAreSeenFromTheirFirstBytes) {
  const std::string rest(600, '\x01');
  std::string tar = "name"s + std::string(600, '\0');
  tar.replace(257, 5, "ustar");
  const std::vector<std::pair<std::string, FileKind>> cases = {
      {"\x93NUMPY\x01\0v\0{'descr': '<u2'"s + rest, FileKind::npy},
      {"\x1f\x8b\x08\0\0\0\0\0\0\x03"s + rest, FileKind::gzip},
      {"\x28\xb5\x2f\xfd"s + rest, FileKind::zstd},
      {"\x50\x2a\x4d\x18\x04\0\0\0"s + rest, FileKind::zstd},
      {"\xfd\x37zXZ\0"s + rest, FileKind::xz},
      {"BZh91AY&SY"s + rest, FileKind::bzip2},
      {"PK\x03\x04"s + rest, FileKind::zip},
      {"PAR1"s + rest, FileKind::parquet},
      {"ARROW1\0\0"s + rest, FileKind::arrow_file},
      {"\xff\xff\xff\xff\x78\0\0\0\x10\0\0\0"s + rest, FileKind::arrow_stream},
      {"\x40\0\0\0\0\0\0\0{\"a\": "s + rest, FileKind::safetensors},
      {"GGUF\x03\0\0\0"s + rest, FileKind::gguf},
      {"\x80\x04\x95\x10\0\0\0\0\0\0\0"s + rest, FileKind::pickle},
      {"\x80\x02}q\0"s + rest, FileKind::pickle},
      {"\x89HDF\r\n\x1a\n"s + rest, FileKind::hdf5},
      {"MMIDIDX\0\0"s + rest, FileKind::megatron_index},
      {tar, FileKind::tar},
      {"\xff\xfeO\0n\0c\0e\0 \0u\0p\0o\0n\0"s, FileKind::wide_text},
      {"Once upon a time there was\r\n\ta caf\xc3\xa9.\n", FileKind::text},
      {"Once upon a time there was a caf\xe9 in Latin-1.\n", FileKind::text},
      {"\xEF\xBB\xBFOnce upon a time there was", FileKind::text},
      {"{\"text\": \"a line of JSON\"}\n", FileKind::text},
      {"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976\n", FileKind::lfs_pointer},
      {"short", FileKind::unknown},
      {"", FileKind::unknown},
      {std::string(100, '\0'), FileKind::unknown},
  };
  for (const auto& [bytes, kind] : cases)
    EXPECT_EQ(kind_of(bytes), kind) << name_of(kind) << " " << bytes.substr(0, 12);
  // A text that the probe cuts inside a character.
  std::string cut(kFileKindProbe - 1, 'a');
  EXPECT_EQ(kind_of(cut + "\xc3\xa9 and so on"), FileKind::text);
}

TEST(FileKindTest, TokenIdsAreOfNoKnownKind) {
  std::mt19937 random(7);
  for (const int vocab : {65, 256, 4096, 50257, 65536}) {
    for (int file = 0; file < 200; ++file) {
      std::string bytes;
      for (int i = 0; i < 64; ++i) {
        const std::uint32_t id = random() % vocab;
        bytes += static_cast<char>(id & 255);
        bytes += static_cast<char>(id >> 8);
      }
      ASSERT_EQ(kind_of(bytes), FileKind::unknown) << vocab << ": " << name_of(kind_of(bytes));
    }
  }
}

TEST(FileKindTest, PlainTextIsWhatMayBeReadAsItIs) {
  const auto refusal = [](const std::string& contents) {
    return error_text<DataError>([&] { require_plain_text(contents, "f", "prompts, one a line"); });
  };
  EXPECT_EQ(refusal("Once upon a time there was\n"), "");
  EXPECT_EQ(refusal("short"), "");
  EXPECT_EQ(refusal(""), "");
  const std::string rest(600, '\x01');
  EXPECT_EQ(refusal("\x1f\x8b\x08\0\0\0\0\0\0\x03"s + rest),
            "f is gzip data: expected prompts, one a line; unpack it first by gunzip");
  EXPECT_EQ(refusal("PAR1" + rest), "f is a Parquet file: expected prompts, one a line");
  EXPECT_EQ(refusal("\x07\0\x08\0\x09\0"s), "f is binary: expected prompts, one a line");
  EXPECT_EQ(refusal("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976\n").substr(0, 31),
            "f: it is a Git LFS pointer that");
}

}  // namespace
}  // namespace phalanx::data
