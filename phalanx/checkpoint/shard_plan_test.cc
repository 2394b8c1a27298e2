#include "phalanx/checkpoint/files/shard_plan.h"

#include <gtest/gtest.h>

#include <random>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx {
namespace {

using safetensors::Dtype;
using safetensors::TensorInfo;

std::uint64_t bytes_of_part(const TensorInfo& tensor, const ShardPart& part) {
  auto shape = tensor.shape;
  if (!shape.empty()) shape[0] = part.row_end - part.row_begin;
  return *safetensors::byte_size(tensor.dtype, shape);
}

TEST(ShardPlan, EveryRowIsWrittenOnceAndRanksShareTheBytes) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<TensorInfo> tensors(random() % 12);
    std::uint64_t total = 0, largest_row = 8;
    for (auto& tensor : tensors) {
      tensor.dtype = random() % 2 ? Dtype::f32 : Dtype::bf16;
      for (auto dims = random() % 4; dims > 0; --dims) tensor.shape.push_back(static_cast<std::int64_t>(random() % 9));
      const auto size = *safetensors::byte_size(tensor.dtype, tensor.shape);
      total += size;
      if (size > 0 && !tensor.shape.empty())
        largest_row = std::max<std::uint64_t>(largest_row, size / static_cast<std::uint64_t>(tensor.shape[0]));
    }
    const int world = 1 + static_cast<int>(random() % 9);
    std::vector<std::vector<int>> written(tensors.size());
    std::vector<int> mentioned(tensors.size(), 0);
    for (std::size_t i = 0; i < tensors.size(); ++i)
      written[i].resize(tensors[i].shape.empty() ? 1 : tensors[i].shape[0]);
    for (int rank = 0; rank < world; ++rank) {
      std::uint64_t bytes = 0;
      for (const auto& part : plan_shard(tensors, rank, world)) {
        ++mentioned[part.tensor];
        bytes += bytes_of_part(tensors[part.tensor], part);
        for (auto row = part.row_begin; row < part.row_end; ++row) ++written[part.tensor][row];
      }
      EXPECT_LE(bytes, total / world + 1 + 2 * largest_row);
    }
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      EXPECT_THAT(written[i], Each(1));
      EXPECT_GE(mentioned[i], 1);
      if (written[i].empty()) {
        EXPECT_EQ(mentioned[i], 1);
      }
    }
  }
}

TEST(ShardPlan, CutsLargeTensorsAlongRows) {
  const std::vector<TensorInfo> tensors{{.name = "embedding", .shape = {100, 4}}, {.name = "norm", .shape = {4}}};
  const auto second = plan_shard(tensors, 1, 2);
  ASSERT_EQ(second.size(), 2u);
  EXPECT_EQ(second[0].tensor, 0u);
  EXPECT_EQ(second[0].row_begin, 51);  // (1616 bytes / 2) / 16 bytes a row, to the nearest
  EXPECT_EQ(second[1].row_end, 4);
}

TEST(ShardPlan, OffsetsGoThroughTheMetadata) {
  const SavedOffsets offsets{{"a", {3, 0}}, {"s", {}}};
  const auto header = safetensors::make_header(
      {{.name = "a", .dtype = Dtype::f32, .shape = {2, 5}}, {.name = "s", .dtype = Dtype::f32, .shape = {}}},
      sharding_metadata(offsets));
  EXPECT_EQ(header.metadata.at("DCP_SHARDING_INFO"), R"({"a":{"saved_offsets":[3,0]},"s":{"saved_offsets":[]}})");
  EXPECT_EQ(parse_saved_offsets("f", header), offsets);
}

TEST(ShardPlan, MalformedOffsetsAreRefused) {
  const auto with_info = [](const std::string& info) {
    return safetensors::make_header({{.name = "a", .dtype = Dtype::f32, .shape = {2, 5}}},
                                    {{"DCP_SHARDING_INFO", info}});
  };
  for (const char* info :
       {"", "[]", "{}", R"({"a":{}})", R"({"a":{"saved_offsets":[0]}})", R"({"a":{"saved_offsets":["0",0]}})",
        R"({"a":{"saved_offsets":[1e70,0]}})", R"({"a":{"saved_offsets":[18446744073709551615,0]}})",
        R"({"a":{"saved_offsets":{"x":0,"y":0}}})", R"({"a":{"saved_offsets":[-1,0]}})",
        R"({"a":{"saved_offsets":[9223372036854775807,0]}})"})
    EXPECT_THROW(parse_saved_offsets("f", with_info(info)), CheckpointError) << info;
  EXPECT_EQ(
      parse_saved_offsets("f", safetensors::make_header({{.name = "a", .dtype = Dtype::f32, .shape = {2, 5}}})).at("a"),
      (std::vector<std::int64_t>{0, 0}));
}

}  // namespace
}  // namespace phalanx
