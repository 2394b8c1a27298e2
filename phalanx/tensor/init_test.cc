#include "phalanx/tensor/init.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/tensor/counter_fill.h"
#include "phalanx/tensor/narrow_to_box.h"

namespace {

using phalanx::fill;
using phalanx::Init;

at::Tensor filled(at::IntArrayRef shape, const Init& init, std::uint64_t seed, const char* name,
                  std::int64_t begin = 0) {
  auto t = at::empty(shape, at::TensorOptions(at::kFloat));
  fill(t, init, seed, name, begin);
  return t;
}

TEST(Init, AnyRangeEqualsTheSliceOfTheWhole) {
  for (const Init& init : {Init::normal(0.5, 0.02), Init::uniform(-1.0, 3.0)}) {
    const auto whole = filled({5003}, init, 7, "w");
    for (const std::int64_t begin : {0, 1, 3, 255, 256, 257, 1000, 4099, 5002}) {
      for (const std::int64_t length : {1, 2, 5, 255, 257, 904}) {
        const std::int64_t n = std::min<std::int64_t>(length, 5003 - begin);
        EXPECT_TRUE(at::equal(filled({n}, init, 7, "w", begin), whole.narrow(0, begin, n))) << begin << " " << n;
      }
    }
  }
}

TEST(Init, RangesBeyondFourBillionElementsAreDistinct) {
  const std::int64_t far = std::int64_t{1} << 40;
  EXPECT_FALSE(at::equal(filled({64}, Init::normal(0, 1), 7, "w", far), filled({64}, Init::normal(0, 1), 7, "w")));
}

TEST(Init, DependsOnSeedAndNameOnly) {
  const auto a = filled({100}, Init::normal(0, 1), 1, "a");
  EXPECT_TRUE(at::equal(a, filled({10, 10}, Init::normal(0, 1), 1, "a").view({-1})));
  EXPECT_FALSE(at::equal(a, filled({100}, Init::normal(0, 1), 2, "a")));
  EXPECT_FALSE(at::equal(a, filled({100}, Init::normal(0, 1), 1, "b")));
}

TEST(Init, OtherDtypesAndStridesAreRoundedCopiesOfTheFloats) {
  const auto whole = filled({6, 10}, Init::normal(0, 1), 3, "w");
  auto half = at::empty({6, 10}, at::TensorOptions(at::kBFloat16));
  fill(half, Init::normal(0, 1), 3, "w");
  EXPECT_TRUE(at::equal(half, whole.to(at::kBFloat16)));
  auto transposed = at::empty({10, 6}, at::TensorOptions(at::kFloat)).t();
  fill(transposed, Init::normal(0, 1), 3, "w");
  EXPECT_TRUE(at::equal(transposed, whole));
}

TEST(Init, APartOfAnyDtypeAndStridesEqualsTheSliceOfTheWhole) {
  const auto whole = filled({100}, Init::normal(0, 1), 3, "w");
  auto half = at::empty({6, 10}, at::TensorOptions(at::kBFloat16));
  fill(half, Init::normal(0, 1), 3, "w", /*begin=*/40);
  EXPECT_TRUE(at::equal(half.view({-1}), whole.narrow(0, 40, 60).to(at::kBFloat16)));
  auto transposed = at::empty({10, 6}, at::TensorOptions(at::kFloat)).t();
  fill(transposed, Init::normal(0, 1), 3, "w", /*begin=*/40);
  EXPECT_TRUE(at::equal(transposed.reshape({-1}), whole.narrow(0, 40, 60)));
}

TEST(Init, AnyShardEqualsItsBoxOfTheWhole) {
  const std::vector<std::int64_t> shape = {6, 7, 10};
  const auto whole = filled(shape, Init::normal(0, 1), 3, "w");
  const phalanx::MeshShape mesh({{"dp", 2}, {"tp", 3}});
  for (const char* placement : {"replicated", "dp:S(0)", "tp:S(1)", "tp:S(2), dp:S(2)", "tp:S(1), dp:S(0)",
                                "tp:S(1){0, 6, 1}, dp:S(2){10, 0}"}) {
    const phalanx::ShardSpec spec("w", shape, phalanx::DataType::f32, mesh, phalanx::Placement::parse(placement));
    for (int rank = 0; rank < mesh.size(); ++rank) {
      const auto box = spec.local_box(rank);
      const auto expected = phalanx::narrow_to_box(whole, box);
      for (const auto dtype : {at::kFloat, at::kBFloat16}) {
        const auto shard = at::empty(box.shape, at::TensorOptions(dtype));
        phalanx::fill_shard(shard, Init::normal(0, 1), 3, spec, rank);
        EXPECT_TRUE(at::equal(shard, expected.to(dtype))) << spec.text() << " rank " << rank;
      }
    }
  }
}

TEST(Init, AShardMustBeTheRanksBoxAndNoAddend) {
  const phalanx::ShardSpec rows("w", {5, 2}, phalanx::DataType::f32, phalanx::MeshShape({{"dp", 2}}),
                                phalanx::Placement::parse("dp:S(0)"));
  const auto message = [](const at::Tensor& shard, const phalanx::ShardSpec& spec) {
    return phalanx::error_text([&] { phalanx::fill_shard(shard, Init::normal(0, 1), 1, spec, 1); });
  };
  EXPECT_EQ(message(at::empty({3, 2}), rows),
            "'w' float32[5, 2] on (dp=2): dp:S(0): rank 1 holds [3:5, 0:2]: expected a tensor of shape [2, 2], found "
            "[3, 2]");
  EXPECT_EQ(message(at::empty({5, 2}), rows.with(phalanx::Placement::parse("dp:P"))),
            "'w' float32[5, 2] on (dp=2): dp:P: a partial parameter cannot be initialised; replicate or split it");
}

TEST(Init, ALargeTensorOfAnotherDtypeIsFilledInStages) {
  constexpr std::int64_t kStage = 16 << 20;  // elements staged at once
  auto half = at::empty({kStage + 100}, at::TensorOptions(at::kBFloat16));
  fill(half, Init::uniform(0, 1), 3, "w");
  EXPECT_TRUE(
      at::equal(half.narrow(0, kStage, 100), filled({100}, Init::uniform(0, 1), 3, "w", kStage).to(at::kBFloat16)));
}

TEST(Init, DoesNotDependOnTheNumberOfThreads) {
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const auto one = filled({300'000}, Init::normal(0, 1), 5, "w");
  at::set_num_threads(3);
  const auto three = filled({300'000}, Init::normal(0, 1), 5, "w");
  at::set_num_threads(threads);
  EXPECT_TRUE(at::equal(one, three));
}

TEST(Init, ConstantsAreTheirValue) {
  EXPECT_TRUE(at::equal(filled({3}, Init::constant(0.25), 1, "w"), at::empty({3}).fill_(0.25)));
}

/// Largest distance between the sample's distribution and `cdf`, times sqrt(n); above 1.63 in 1 % of correct samples.
template <class Cdf>
double kolmogorov_smirnov(const at::Tensor& sample, const Cdf& cdf) {
  std::vector<float> v(sample.const_data_ptr<float>(), sample.const_data_ptr<float>() + sample.numel());
  std::sort(v.begin(), v.end());
  double worst = 0.0;
  const auto n = static_cast<double>(v.size());
  for (std::size_t i = 0; i < v.size(); ++i) {
    const double p = cdf(v[i]);
    worst = std::max({worst, std::abs(p - static_cast<double>(i) / n), std::abs(static_cast<double>(i + 1) / n - p)});
  }
  return worst * std::sqrt(n);
}

TEST(Init, NormalHasItsMeanDeviationAndShape) {
  const auto t = filled({400000}, Init::normal(2.0, 0.5), 11, "layers.0.attention.wq.weight");
  EXPECT_NEAR(t.mean().item<double>(), 2.0, 4 * 0.5 / std::sqrt(4e5));
  EXPECT_NEAR(t.std().item<double>(), 0.5, 0.003);
  EXPECT_LT(kolmogorov_smirnov(t, [](double x) { return 0.5 * std::erfc(-(x - 2.0) / 0.5 / std::sqrt(2.0)); }), 1.63);
  // Neighbours share a Box-Muller radius or a Philox block: they must still be uncorrelated, squares too.
  const auto z = (t - 2.0) / 0.5;
  for (const at::Tensor& v : {z, z * z - 1.0}) {
    EXPECT_NEAR((v.slice(0, 1) * v.slice(0, 0, -1)).mean().item<double>(), 0.0, 0.015);
  }
}

TEST(Init, UniformFillsItsInterval) {
  const auto t = filled({400000}, Init::uniform(-1.0, 3.0), 11, "u");
  EXPECT_GE(t.min().item<double>(), -1.0);
  EXPECT_LT(t.max().item<double>(), 3.0);
  EXPECT_LT(kolmogorov_smirnov(t, [](double x) { return (x + 1.0) / 4.0; }), 1.63);
}

TEST(Init, StreamsOfNeighbouringSeedsAndNamesAreUncorrelated) {
  const auto a = filled({100000}, Init::normal(0, 1), 1, "layers.0.w");
  for (const auto& b :
       {filled({100000}, Init::normal(0, 1), 2, "layers.0.w"), filled({100000}, Init::normal(0, 1), 1, "layers.1.w")}) {
    EXPECT_NEAR((a * b).mean().item<double>(), 0.0, 0.015);
  }
}

TEST(Init, TheSmallestDrawHasAFiniteLogarithm) {
  // Block 14883995 of key 0 begins with a word whose upper 24 bits are 0: the largest radius there is.
  std::vector<float> z(4);
  phalanx::fill_normal(0, std::uint64_t{14883995} * 4, z, 0.0f, 1.0f);
  EXPECT_NEAR(std::hypot(z[0], z[1]), std::sqrt(-2.0 * std::log(0x1p-25)), 1e-5);
}

TEST(Init, ASeedsStreamsStayWhatTheyAre) {
  // Computed independently of this code: FNV-1a of the name, splitmix64's finaliser, Philox. Another value here would
  // change the initial weights of every run.
  EXPECT_EQ(phalanx::stream_key(1, "tok_embeddings.weight"), 0xfb4566e32431c138U);
  const auto values = filled({4}, Init::uniform(0, 1), 1, "tok_embeddings.weight");
  const std::uint32_t words[] = {0xcd1d86a5, 0x50ae95f9, 0x65865c7a, 0xd20adb4c};
  for (int i = 0; i < 4; ++i) EXPECT_EQ(values[i].item<float>(), static_cast<float>(words[i] >> 8) * 0x1p-24f);
}

TEST(Init, PhiloxMatchesItsPublishedVectorAndNormalsTheLibrary) {
  // Random123's known answer for Philox4x32-10 with counter 0 and key 0: 6627e8d5 e169c58d bc57ac4c 9b00dbd8.
  const std::uint32_t words[4] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
  std::vector<float> u(4), z(4);
  phalanx::fill_uniform(0, 0, u, 0.0f, 1.0f);
  phalanx::fill_normal(0, 0, z, 0.0f, 1.0f);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(u[i], static_cast<float>(words[i] >> 8) * 0x1p-24f);
  for (int i = 0; i < 4; i += 2) {
    const double radius = std::sqrt(-2.0 * std::log(((words[i] >> 8) + 0.5) * 0x1p-24));
    const double angle = 2.0 * std::acos(-1.0) * (words[i + 1] >> 8) * 0x1p-24;
    EXPECT_NEAR(z[i], radius * std::cos(angle), 2e-6);
    EXPECT_NEAR(z[i + 1], radius * std::sin(angle), 2e-6);
  }
}

}  // namespace
