// Matrices that are saved in 8 bits with a scale for each block of 128 x 128, as those of DeepSeek-V3's release.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "phalanx/base/error.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/checkpoint/weights.h"

namespace phalanx::scaled_weights_test {
namespace {

using testing::HasSubstr;

constexpr std::int64_t kRows = 200, kColumns = 130;

class ScaledWeightsTest : public testing::Test {
 protected:
  ScaledWeightsTest()
      : eight_bits_(at::randn({kRows, kColumns}).to(at::kFloat8_e4m3fn)),
        scales_(at::tensor({0.5, 3.0, 0.25, 7.0}, at::TensorOptions(at::kFloat)).view({2, 2})),
        expected_(eight_bits_.to(at::kFloat).clone()) {
    expected_.slice(0, 0, 128).slice(1, 0, 128).mul_(0.5);
    expected_.slice(0, 0, 128).slice(1, 128).mul_(3.0);
    expected_.slice(0, 128).slice(1, 0, 128).mul_(0.25);
    expected_.slice(0, 128).slice(1, 128).mul_(7.0);
  }
  std::filesystem::path file() const { return scratch_.path() / "model.safetensors"; }
  void write(const std::vector<NamedTensor>& tensors) const {
    export_weights(file(), tensors, {}, posix_file_system());
  }
  static LoadWeightsOptions options() {
    return {.scales_in_file = [](const std::string& name) { return name + "_scale_inv"; }};
  }

  TempDirectory scratch_{"scaled_weights"};
  at::Tensor eight_bits_, scales_, expected_;
};

TEST_F(ScaledWeightsTest, BlocksAreMultipliedByTheirScales) {
  write({{"w", eight_bits_}, {"w_scale_inv", scales_}, {"norm", at::tensor({1.5f})}});
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const at::Tensor whole = at::zeros({kRows, kColumns}, at::TensorOptions(type)), norm = at::zeros({1});
    load_weights(file(), {{"w", whole}, {"norm", norm}}, options());
    EXPECT_TRUE(at::equal(whole, expected_.to(type)));
    EXPECT_EQ(norm.item<float>(), 1.5F);
  }
}

TEST_F(ScaledWeightsTest, EachRankScalesItsPart) {
  write({{"w", eight_bits_}, {"w_scale_inv", scales_}});
  for (const int dim : {0, 1}) {
    for (int rank = 0; rank < 3; ++rank) {
      const ShardSpec spec("w", {kRows, kColumns}, DataType::f32, MeshShape({{"tp", 3}}), {.splits = {{"tp", dim}}});
      const Box box = spec.local_box(rank);
      const at::Tensor part = at::zeros(box.shape, at::TensorOptions(at::kFloat));
      load_weights(file(), {{"w", part, std::make_shared<Shard>(Shard{spec, rank})}}, options());
      EXPECT_TRUE(at::equal(part, expected_.narrow(dim, box.offsets[static_cast<std::size_t>(dim)],
                                                   box.shape[static_cast<std::size_t>(dim)])))
          << dim << ", " << rank;
    }
  }
}

TEST_F(ScaledWeightsTest, MissingAndWrongScalesAreNamed) {
  const at::Tensor whole = at::zeros({kRows, kColumns});
  const auto error = [&] {
    return error_text<CheckpointError>([&] { load_weights(file(), {{"w", whole}}, options()); });
  };
  write({{"w", eight_bits_}});
  EXPECT_THAT(error(), HasSubstr("w_scale_inv"));
  write({{"w", eight_bits_}, {"w_scale_inv", at::zeros({2, 1})}});
  EXPECT_THAT(error(), testing::AllOf(HasSubstr("w_scale_inv"), HasSubstr("[2, 2]"), HasSubstr("[2, 1]")));
  write({{"w", expected_}, {"w_scale_inv", scales_}});  // scales of a matrix that is not in 8 bits
  EXPECT_THAT(error(), HasSubstr("w_scale_inv"));
}

}  // namespace
}  // namespace phalanx::scaled_weights_test
