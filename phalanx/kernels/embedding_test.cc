#include "phalanx/kernels/embedding.h"

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstdint>

namespace phalanx::kernels {
namespace {

// A sum of 4,096 equal contributions in 16 bits would stop growing on the way.
TEST(Embedding, GradientsOfFrequentIdsAreSumsInFloat32) {
  constexpr std::int64_t kTokens = 4096;
  constexpr double kPart = 1.0 / 128;
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf, at::kFloat}) {
    const at::Tensor weight = at::ones({8, 4}, type).requires_grad_();
    const at::Tensor ids = at::full({kTokens}, 3, at::kLong);
    for (const double times : {1.0, 2.0}) {  // the second pass adds to the first one's gradient
      torch::autograd::backward({kernels::embedding(weight, ids)}, {at::full({kTokens, 4}, kPart, type)});
      EXPECT_EQ(weight.grad().scalar_type(), type);
      EXPECT_EQ(weight.grad()[3][1].item<double>(), times * kTokens * kPart) << type;
      EXPECT_EQ(weight.grad().abs().sum().item<double>(), times * 4 * kTokens * kPart) << type;
    }
    const at::Tensor with_graph = torch::autograd::grad({kernels::embedding(weight, ids)}, {weight},
                                                        {at::full({kTokens, 4}, kPart, type)}, /*retain_graph=*/true,
                                                        /*create_graph=*/true)[0];
    EXPECT_EQ(with_graph[3][1].item<double>(), kTokens * kPart) << type;
  }
}

}  // namespace
}  // namespace phalanx::kernels
