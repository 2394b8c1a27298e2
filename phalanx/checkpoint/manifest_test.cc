#include "phalanx/checkpoint/files/manifest.h"

#include <gtest/gtest.h>

#include <cstring>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/checkpoint/files/block_hash.h"

namespace phalanx {
namespace {

Manifest example_manifest() {
  return {.step = 120,
          .integers = {{"data.position", 960}, {"seed", -1}},
          .metadata = R"({"model":{"dim":256}})",
          .files = {{"a.safetensors", (1 << 20) + 1, {1, ~std::uint64_t{0}}, 7}, {"b.safetensors", 0, {}}}};
}

TEST(BlockHash, IsXxh3) {
  EXPECT_EQ(format_hash(hash_block({})), "2d06800538d394c2");  // published test value: XXH3_64bits of nothing, seed 0
}

TEST(Manifest, IsReadBackAsWritten) {
  const auto manifest = example_manifest();
  const auto read = parse_manifest("manifest.json", format_manifest(manifest));
  EXPECT_EQ(read.step, manifest.step);
  EXPECT_EQ(read.integers, manifest.integers);
  EXPECT_EQ(read.metadata, manifest.metadata);
  ASSERT_EQ(read.files.size(), 2u);
  EXPECT_EQ(read.files[0].name, "a.safetensors");
  EXPECT_EQ(read.files[0].size, manifest.files[0].size);
  EXPECT_EQ(read.files[0].block_hashes, manifest.files[0].block_hashes);
  EXPECT_EQ(read.files[0].header_hash, 7u);
  EXPECT_EQ(read.files[1].header_hash, std::nullopt);  // as of an earlier version
}

TEST(Manifest, EveryFlippedBitAndEveryTruncationIsDetected) {
  const std::string text = format_manifest(example_manifest());
  for (std::size_t i = 0; i < text.size(); ++i) {
    EXPECT_THROW(parse_manifest("m", text.substr(0, i)), CheckpointError) << "cut at " << i;
    for (int bit = 0; bit < 8; ++bit) {
      std::string damaged = text;
      damaged[i] = static_cast<char>(damaged[i] ^ (1 << bit));
      EXPECT_THROW(parse_manifest("m", damaged), CheckpointError) << "byte " << i << " bit " << bit;
    }
  }
}

/// A manifest whose checksum is right but whose contents were edited.
std::string edited_manifest(const std::string& from, const std::string& to) {
  std::string text = format_manifest(example_manifest());
  text.erase(0, text.find('\n') + 1);
  text.replace(text.find(from), from.size(), to);
  return "{\"checksum\": \"xxh3:" + format_hash(hash_block(std::as_bytes(std::span(text)))) + "\",\n" + text;
}

TEST(Manifest, WrongContentsUnderARightChecksumAreRefused) {
  const auto expect_reason = [](const std::string& text, const std::string& reason) {
    try {
      parse_manifest("step-1/manifest.json", text);
      ADD_FAILURE() << "accepted; expected: " << reason;
    } catch (const CheckpointError& error) {
      EXPECT_THAT(error.what(), HasSubstr("step-1/manifest.json: "));
      EXPECT_THAT(error.what(), HasSubstr(reason));
    }
  };
  expect_reason(edited_manifest("\"version\": 1", "\"version\": 2"), "version is 2; this program reads version 1");
  expect_reason(edited_manifest("phalanx-checkpoint", "something-else"), "not a manifest");
  expect_reason(edited_manifest("\"phalanx-checkpoint\"", std::string(200'000, '[') + std::string(200'000, ']')),
                "nests deeper than 100 levels");
  expect_reason(edited_manifest("\"version\": 1", "\"version\": 1.5"), "version is 1.5: expected a whole number");
  expect_reason(edited_manifest("\"size\":", "\"size\":1e70,\"was\":"), "size is 1e+70: expected a whole number");
  expect_reason(edited_manifest("\"size\":", "\"size\":-1,\"was\":"), "size is -1: expected 0 or more");
  expect_reason(edited_manifest("\"size\":", "\"size\":18446744073709551615,\"was\":"), "expected a whole number");
  expect_reason(edited_manifest("a.safetensors", "../escape"), "not a file name");
  expect_reason(edited_manifest("a.safetensors", ".."), "not a file name");
  expect_reason(edited_manifest("1048577", "1048576"), "has 2 hashes");
  expect_reason(edited_manifest("ffffffffffffffff", "fffffffffffffffg"), "malformed hash");
  expect_reason(edited_manifest("\"0000000000000007\"", "\"7\""), "malformed hash \"7\"");
  expect_reason(edited_manifest("\"step\": 120", "\"step\": \"x\""), "step is \"x\": expected a whole number");
  expect_reason(edited_manifest("\"files\"", "\"files_\""), "malformed manifest has no \"files\"");
  expect_reason(edited_manifest("\"integers\"", "\"integers_\""), "malformed manifest has no \"integers\"");
  expect_reason(edited_manifest("\"metadata\": {\"model\"", "\"metadata\": 3, \"x\": {\"model\""),
                "malformed manifest: \"metadata\" is 3: expected an object");
  expect_reason(edited_manifest("\"name\"", "\"name_\""), "an entry of \"files\" has no \"name\"");
  expect_reason(edited_manifest("\"0000000000000007\"", "7"), "malformed hash 7");
}

TEST(Manifest, MetadataMustBeAnObject) {
  auto manifest = example_manifest();
  for (const char* text : {"", "[]", "3", "{\"a\":"}) {
    manifest.metadata = text;
    EXPECT_THROW(format_manifest(manifest), CheckpointError) << text;
  }
}

}  // namespace
}  // namespace phalanx
