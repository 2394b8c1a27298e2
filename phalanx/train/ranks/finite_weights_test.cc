#include "phalanx/train/ranks/finite_weights.h"

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <limits>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/comm/backends/local_shm/local.h"

namespace phalanx::train {
namespace {

/// The error of each of three ranks, where `spoil` changes only the weights of rank 1.
std::vector<std::string> told(at::ScalarType dtype, const std::function<void(at::Tensor)>& spoil) {
  std::vector<std::string> messages(3);
  run_local_ranks(3, [&](const std::shared_ptr<Communicator>& world) {
    std::vector<NamedTensor> weights = {{.name = "empty", .tensor = at::zeros({0, 4}, dtype)},
                                        {.name = "norm", .tensor = at::ones({5}, dtype)},
                                        {.name = "matrix", .tensor = at::full({3, 4}, 2, dtype)}};
    if (world->rank() == 1) spoil(weights[2].tensor);
    messages[static_cast<std::size_t>(world->rank())] =
        error_text<Error>([&] { require_finite_weights(*world, weights, "step 3", "do this"); });
  });
  return messages;
}

TEST(FiniteWeights, OneElementOnOneRankIsToldToAll) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const std::string text = "step 3: the weight matrix is not finite on rank 1: nothing is saved; do this";
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const double value : {kInfinity, -kInfinity, std::numeric_limits<double>::quiet_NaN()}) {
      EXPECT_THAT(told(dtype, [&](at::Tensor matrix) { matrix[1][2] = value; }), Each(text)) << dtype;
    }
  }
}

TEST(FiniteWeights, TheLargestFiniteOnesAreNoFault) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const double largest = dtype == at::kHalf       ? 65504
                           : dtype == at::kBFloat16 ? 3.3895313892515355e38
                                                    : std::numeric_limits<float>::max();
    EXPECT_THAT(told(dtype, [&](at::Tensor matrix) { matrix.fill_(largest); }), Each("")) << dtype;
  }
}

}  // namespace
}  // namespace phalanx::train
