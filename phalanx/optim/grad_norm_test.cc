#include "phalanx/optim/grad_norm.h"

#include <ATen/Parallel.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/optim/sum_of_squares.h"

namespace phalanx {
namespace {

NamedTensor with_gradient(const std::string& name, const at::Tensor& grad) {
  auto tensor = at::ones(grad.sizes(), grad.options()).requires_grad_();
  tensor.mutable_grad() = grad;
  return {name, tensor};
}

TEST(GradNorm, FollowsTorchsClipping) {
  const auto golden = nlohmann::json::parse(std::ifstream(std::string(PHALANX_OPTIM_TESTDATA) + "/optim_golden.json"));
  for (const auto& expected : golden.at("clip")) {
    std::vector<NamedTensor> parameters;
    for (const auto& [name, shape] : golden.at("shapes").items()) {
      const auto grad = at::tensor(golden.at("gradients").at(0).at(name).get<std::vector<float>>());
      parameters.push_back(with_gradient(name, grad.view(shape.get<std::vector<std::int64_t>>()).mul(3)));
    }
    const GradNorm norm = clip_grad_norm(parameters, expected.at("max_norm"));
    EXPECT_NEAR(norm.value(), expected.at("norm").get<double>(), 1e-6 * norm.value());
    EXPECT_TRUE(norm.is_finite());
    for (const auto& [name, tensor, shard] : parameters) {
      const auto grad = at::tensor(expected.at("gradients").at(name).get<std::vector<float>>());
      EXPECT_TRUE(at::allclose(tensor.grad().flatten(), grad, /*rtol=*/1e-6, /*atol=*/1e-8)) << name;
    }
  }
}

TEST(GradNorm, ATinyNormIsClippedByTorchsFormula) {
  const std::vector<NamedTensor> parameters = {with_gradient("a", at::full({1}, 1e-6))};
  clip_grad_norm(parameters, 1e-9);
  EXPECT_NEAR(parameters[0].tensor.grad().item<double>(), 1e-6 * 1e-9 / (1e-6 + 1e-6), 1e-16);
}

TEST(GradNorm, ClosedForm) {
  // 1 + 2 + ... + n squared = n (n + 1) (2n + 1) / 6, exact in float64.
  const double n = 100'003;  // several blocks and a tail
  const std::vector<NamedTensor> parameters = {with_gradient("a", at::arange(1, n + 1, at::kFloat))};
  EXPECT_DOUBLE_EQ(grad_norm(parameters).value(), std::sqrt(n * (n + 1) * (2 * n + 1) / 6));
}

TEST(GradNorm, DoesNotDependOnTheNumberOfThreads) {
  const std::vector<NamedTensor> parameters = {with_gradient("a", at::sin(at::arange(1'000'000, at::kFloat))),
                                               with_gradient("b", at::sin(at::arange(77'777, at::kFloat).mul(3)))};
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const double one = grad_norm(parameters).value();
  at::set_num_threads(2);
  const double two = grad_norm(parameters).value();
  at::set_num_threads(threads);
  EXPECT_EQ(one, two);
}

TEST(GradNorm, SumOfSquaresKeepsItsOrder) {
  // 2^30 is lost beside 2^90 in float64 unless the lanes are added exactly as written: lane 0 + lane 8, then +
  // lane 4...
  std::vector<float> values(17, 0.0F);
  values[0] = std::ldexp(1.0F, 45);  // lane 0, squared 2^90
  values[8] = 1.0F;                  // absorbed by lane 0
  values[16] = 3.0F;                 // the tail, added last, absorbed too
  EXPECT_EQ(sum_of_squares(values.data(), values.size()), std::ldexp(1.0, 90));
  values[0] = 0.0F;
  EXPECT_EQ(sum_of_squares(values.data(), values.size()), 10.0);
  EXPECT_EQ(sum_of_squares(values.data(), 0), 0.0);
}

TEST(GradNorm, MixesDtypesAndSkipsMissingGradients) {
  std::vector<NamedTensor> parameters = {with_gradient("f32", at::full({4}, 1.0)),
                                         with_gradient("f64", at::full({4}, 2.0, at::kDouble)),
                                         // Each value is in float16's range; the norm, 4 * 60000, is not.
                                         with_gradient("f16", at::full({16}, 60000.0, at::kHalf)),
                                         {"none", at::ones({3}).requires_grad_()}};
  const double expected = std::sqrt(4.0 + 16.0 + 16.0 * 60000.0 * 60000.0);
  const GradNorm norm = clip_grad_norm(parameters, 1.0);
  EXPECT_NEAR(norm.value(), expected, 1e-6 * expected);
  EXPECT_NEAR(parameters[0].tensor.grad()[0].item<double>(), 1.0 / expected, 1e-6 / expected);
  EXPECT_NEAR(parameters[1].tensor.grad()[0].item<double>(), 2.0 / expected, 1e-6 / expected);
  EXPECT_FALSE(parameters[3].tensor.grad().defined());
}

TEST(GradNorm, NothingToMeasureIsZero) {
  const std::vector<NamedTensor> parameters = {{"none", at::ones({3}).requires_grad_()}};
  EXPECT_EQ(grad_norm(parameters).value(), 0.0);
  EXPECT_EQ(clip_grad_norm(parameters, 1.0).value(), 0.0);
}

TEST(GradNorm, ANormThatIsNotFiniteIsReportedAndChangesNothing) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    const auto grad = at::tensor({3.0F, bad, 4.0F});
    const std::vector<NamedTensor> parameters = {with_gradient("a", grad)};
    const GradNorm norm = clip_grad_norm(parameters, 1.0);
    EXPECT_FALSE(norm.is_finite());
    EXPECT_EQ(grad[0].item<float>(), 3.0F);
    EXPECT_EQ(grad[2].item<float>(), 4.0F);
  }
}

TEST(GradNorm, RefusesAMaximumThatIsNotPositive) {
  const std::vector<NamedTensor> parameters = {with_gradient("a", at::ones({3}))};
  for (const double bad : {0.0, -1.0, std::nan("")}) {
    EXPECT_THAT(error_text<ConfigError>([&] { clip_grad_norm(parameters, bad); }),
                HasSubstr("expected a positive number"));
  }
  EXPECT_EQ(clip_grad_norm(parameters, std::numeric_limits<double>::infinity()).value(), std::sqrt(3.0));
}

}  // namespace
}  // namespace phalanx
