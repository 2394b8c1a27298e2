// The loss of an output layer with an adapter is that of logits to which the adapter's product was added.
#include "phalanx/kernels/low_rank.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <vector>

#include "phalanx/base/ignored_label.h"
#include "phalanx/kernels/linear_cross_entropy.h"

namespace phalanx::kernels {
namespace low_rank_test {

using Tensors = std::vector<at::Tensor>;

struct LossCase {
  const char* name;
  at::ScalarType type = at::kFloat;
  bool trains_weight = false;
  bool narrow = false;  // the weight
  std::optional<double> divisor = 500.0;
  double z_loss_weight = 0;
  bool weighted = false;
};

// So many rows that their logits do not exist all at once.
TEST(LowRank, IsAddedToTheLogitsOfALoss) {
  at::manual_seed(3);
  constexpr std::int64_t kRows = 600, kDim = 24, kVocab = 70, kRank = 3;
  const std::vector<LossCase> cases = {{.name = "frozen"},
                                       {.name = "all", .trains_weight = true, .z_loss_weight = 0.03, .weighted = true},
                                       {.name = "mean", .divisor = std::nullopt},
                                       {.name = "narrow", .narrow = true},
                                       {.name = "by operators", .type = at::kDouble, .z_loss_weight = 0.03}};
  for (const LossCase& one : cases) {
    SCOPED_TRACE(one.name);
    const auto random = [&](at::IntArrayRef shape, double times) { return (at::randn(shape) * times).to(one.type); };
    Tensors leaves = {random({2, kRows / 2, kDim}, 1), random({kVocab, kDim}, 0.3), random({kRank, kDim}, 0.3),
                      random({kVocab, kRank}, 0.3)};
    if (one.narrow) leaves[1] = leaves[1].to(at::kBFloat16);
    for (std::size_t i = 0; i < leaves.size(); ++i) leaves[i].set_requires_grad(i != 1 || one.trains_weight);
    at::Tensor labels = at::randint(kVocab, {2, kRows / 2}, at::kLong);
    labels[0][5] = kIgnoredLabel;
    const at::Tensor weights = one.weighted ? at::rand({2, kRows / 2}) - 0.3 : at::Tensor();
    const auto wide = [&] { return leaves[1].to(one.type); };
    const auto expected_logits = [&] {
      return at::matmul(leaves[0], wide().t()) + at::matmul(at::matmul(leaves[0], leaves[2].t()), leaves[3].t()) * 2.0;
    };
    const auto low = [&] { return LowRank{at::matmul(leaves[0], leaves[2].t()) * 2.0, leaves[3]}; };
    const auto taken = [&](const at::Tensor& loss) {
      (loss * 3).backward();
      Tensors gradients;
      for (at::Tensor& leaf : leaves) {
        gradients.push_back(leaf.grad().defined() ? leaf.grad().clone() : at::Tensor());
        leaf.mutable_grad().reset();
      }
      return gradients;
    };
    const at::Tensor expected = cross_entropy(expected_logits(), labels, one.divisor, one.z_loss_weight, weights);
    const at::Tensor found =
        linear_cross_entropy(leaves[0], leaves[1], labels, one.divisor, one.z_loss_weight, weights, low());
    EXPECT_NEAR(found.item<double>(), expected.item<double>(), 1e-5 * std::abs(expected.item<double>()));
    const Tensors of_expected = taken(expected), of_found = taken(found);
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      ASSERT_EQ(of_found[i].defined(), leaves[i].requires_grad()) << i;
      if (leaves[i].requires_grad()) {
        EXPECT_TRUE(at::allclose(of_found[i], of_expected[i], 1e-4, 1e-6)) << i;
      }
    }
    EXPECT_TRUE(at::allclose(linear_token_losses(leaves[0], leaves[1], labels, low()),
                             token_losses(expected_logits(), labels), 1e-5, 1e-5));
  }
}

// The input of the output layer has no gradient if nothing before it is trained.
TEST(LowRank, HasItsGradientsWhereTheInputHasNone) {
  const at::Tensor x = at::randn({4, 6}), weight = at::randn({9, 6}), labels = at::randint(9, {4}, at::kLong);
  const at::Tensor a = at::randn({2, 6}).requires_grad_(), b = at::randn({9, 2}).requires_grad_();
  linear_cross_entropy(x, weight, labels, 4.0, 0, {}, {at::matmul(x, a.t()), b}).backward();
  const at::Tensor da = a.grad().clone(), db = b.grad().clone();
  a.mutable_grad().reset();
  b.mutable_grad().reset();
  cross_entropy(at::matmul(x, weight.t()) + at::matmul(at::matmul(x, a.t()), b.t()), labels, 4.0).backward();
  EXPECT_TRUE(at::allclose(da, a.grad(), 1e-4, 1e-6));
  EXPECT_TRUE(at::allclose(db, b.grad(), 1e-4, 1e-6));
}

}  // namespace low_rank_test
}  // namespace phalanx::kernels
