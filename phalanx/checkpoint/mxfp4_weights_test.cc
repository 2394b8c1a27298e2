// Matrices in MXFP4, as those of GPT-OSS's release.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ldexp.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>

#include "phalanx/base/error.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/checkpoint/files/mxfp4.h"
#include "phalanx/checkpoint/weights.h"

namespace phalanx::mxfp4_weights_test {
namespace {

using testing::HasSubstr;

constexpr std::int64_t kExperts = 3, kRows = 5, kColumns = 64;

/// The second of two matrices whose rows alternate, of the last expert.
FileTensorView view(const std::string& /*name*/) {
  return {"w", {.transposed = true, .part = 1, .parts = 2, .alternate = true, .slice = 2, .slices = kExperts}};
}

class Mxfp4WeightsTest : public testing::Test {
 protected:
  Mxfp4WeightsTest() {
    at::manual_seed(3);
    blocks_ = at::randint(256, {kExperts, 2 * kRows, kColumns / 32, 16}, at::kLong).to(at::kByte);
    scales_ = at::randint(120, 135, {kExperts, 2 * kRows, kColumns / 32}, at::kLong).to(at::kByte);
    // As transformers: the lower half of a byte first, each times a power of two.
    const at::Tensor values = at::tensor(
        {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0}, at::kFloat);
    const at::Tensor low = blocks_.bitwise_and(15).to(at::kLong), high = blocks_.bitwise_right_shift(4).to(at::kLong);
    const at::Tensor numbers =
        at::stack({values.index({low}), values.index({high})}, -1).flatten(-2);  // [.., blocks, 32]
    const at::Tensor exponents = scales_.to(at::kInt) - 127;
    const at::Tensor all = at::ldexp(numbers, exponents.unsqueeze(-1)).flatten(-2);  // [experts, 2 rows, columns]
    expected_ = all[2].slice(0, 1, std::nullopt, 2).contiguous();
  }
  std::filesystem::path file() const { return scratch_.path() / "model.safetensors"; }
  void write(const std::vector<NamedTensor>& tensors) const {
    export_weights(file(), tensors, {}, posix_file_system());
  }
  void load(const NamedTensor& tensor) const {
    load_weights(file(), {tensor}, {.key_mapping = view, .reads_mxfp4 = true});
  }
  std::string error(const NamedTensor& tensor) const {
    return error_text<CheckpointError>([&] { load(tensor); });
  }

  TempDirectory scratch_{"mxfp4_weights"};
  at::Tensor blocks_, scales_, expected_;
};

TEST_F(Mxfp4WeightsTest, AreNumbersOfFourBitsTimesPowersOfTwo) {
  write({{"w_blocks", blocks_}, {"w_scales", scales_}});
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const at::Tensor found = at::zeros({kRows, kColumns}, at::TensorOptions(type));
    load({"own", found});
    EXPECT_TRUE(at::equal(found.to(at::kFloat), expected_)) << c10::toString(type);
  }
}

TEST_F(Mxfp4WeightsTest, EachRankReadsItsPart) {
  write({{"w_blocks", blocks_}, {"w_scales", scales_}});
  for (const int dim : {0, 1}) {
    const int ranks = dim == 0 ? 5 : 4;  // the columns of two ranks begin in the middle of a block
    for (int rank = 0; rank < ranks; ++rank) {
      const ShardSpec spec("own", {kRows, kColumns}, DataType::f32, MeshShape({{"tp", ranks}}),
                           {.splits = {{"tp", dim}}});
      const Box box = spec.local_box(rank);
      const at::Tensor part = at::zeros(box.shape, at::TensorOptions(at::kFloat));
      load({"own", part, std::make_shared<Shard>(Shard{spec, rank})});
      EXPECT_TRUE(at::equal(part, expected_.narrow(dim, box.offsets[static_cast<std::size_t>(dim)],
                                                   box.shape[static_cast<std::size_t>(dim)])))
          << dim << ", " << rank;
    }
  }
}

TEST_F(Mxfp4WeightsTest, WhatDoesNotFitIsNamed) {
  const NamedTensor own{"own", at::zeros({kRows, kColumns})};
  write({{"w_blocks", blocks_}});
  EXPECT_THAT(error(own), HasSubstr("\"w_scales\" is missing"));
  write({{"w_blocks", blocks_}, {"w_scales", scales_.narrow(1, 0, 4).contiguous()}});
  EXPECT_THAT(error(own), testing::AllOf(HasSubstr("w_scales"), HasSubstr("[3, 10, 2]"), HasSubstr("[3, 4, 2]")));
  write({{"w_blocks", blocks_.to(at::kFloat)}, {"w_scales", scales_}});
  EXPECT_THAT(error(own), HasSubstr("w_blocks"));
  write({{"w_blocks", blocks_}, {"w_scales", scales_}, {"w", at::zeros({kExperts, kColumns, 2 * kRows})}});
  EXPECT_THAT(error(own), HasSubstr("w_blocks"));  // two kinds of one matrix
  write({{"w_blocks", blocks_}, {"w_scales", scales_}});
  EXPECT_THAT(error({"own", at::zeros({kRows, 48})}), HasSubstr("no matrix with rows of whole blocks of 32"));
  EXPECT_THAT(error_text<CheckpointError>([&] { load_weights(file(), {own}, {.key_mapping = view}); }),
              HasSubstr("\"w\" is missing"));
}

}  // namespace
}  // namespace phalanx::mxfp4_weights_test
