// A factor that lies on the device, such as 1/tokens, keeps its bits where it multiplies tensors of 16 bits.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/kernels/autocast.h"
#include "phalanx/kernels/linear_cross_entropy.h"
#include "phalanx/nn/dropout.h"
#include "phalanx/optim/grad_norm.h"
#include "phalanx/optim/muon.h"
#include "phalanx/optim/sgd.h"
#include "phalanx/parallel/tensor/vocab_parallel.h"
#include "phalanx/tensor/scale_in_place.h"
#include "phalanx/testing/sim_device/torch/testing/sim_ranks.h"
#include "phalanx/testing/sim_device/torch/testing/sim_test.h"

namespace phalanx {
namespace {

constexpr double kThird = 1.0 / 3, kRoundedThird = 0.333984375;  // in bfloat16
// Of means of thousands of elements, each of which is rounded to the nearest: far below one rounding of 0.4 %.
constexpr double kTolerance = 2e-4;

class DeviceFactor : public SimTest {
 protected:
  static at::Tensor normal(at::IntArrayRef sizes, std::int64_t seed) {
    return at::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(seed)));
  }
  at::Tensor third() const { return at::full({}, kThird).to(device); }

  static double size_of(const at::Tensor& x) {
    return x.detach().to(at::kCPU).to(at::kDouble).abs().sum().item<double>();
  }
};

TEST_F(DeviceFactor, ATensOperatorsRoundIt) {
  const at::Tensor x = normal({64, 64}, 1).to(at::kBFloat16);
  EXPECT_NEAR(size_of(x.to(device).mul_(third())) / size_of(x), kRoundedThird, kTolerance);
  EXPECT_NEAR(size_of(third() * x.to(device)) / size_of(x), kRoundedThird, kTolerance);
  // A number, or a tensor on the host, is not converted.
  EXPECT_NEAR(size_of(x.to(device).mul_(kThird)) / size_of(x), kThird, kTolerance);
  EXPECT_NEAR(size_of(x.to(device).mul_(at::full({}, kThird))) / size_of(x), kThird, kTolerance);
}

TEST_F(DeviceFactor, OursDoNot) {
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf, at::kFloat}) {
    const at::Tensor x = normal({64, 64}, 1).to(type).to(device);
    const at::Tensor found = scaled(x, third());
    EXPECT_EQ(found.scalar_type(), type);
    EXPECT_NEAR(size_of(found) / size_of(x), kThird, type == at::kHalf ? 2e-5 : kTolerance);
    EXPECT_NEAR(size_of(scaled(x, third().to(at::kDouble))) / size_of(x), kThird, kTolerance);
    const at::Tensor y = x.clone();
    scale_in_place(y, third());
    EXPECT_TRUE(at::equal(y.cpu(), found.cpu()));
    for (const at::Tensor& z : {x.clone(), x.cpu().clone()}) {
      scale_in_place(z, kThird);
      EXPECT_TRUE(at::equal(z.cpu(), found.cpu())) << type << z.device();
    }
  }
  const at::Tensor scalar = at::full({}, 3.0, at::kBFloat16).to(device);
  scale_in_place(scalar, third());
  EXPECT_EQ(scalar.cpu().item<float>(), 1.0F);
}

// The gradients of a loss with a divisor, of which a third is asked for, beside fp32 on the CPU.
TEST_F(DeviceFactor, OfAHeadInSixteenBits) {
  constexpr std::int64_t kRows = 96, kDim = 64, kVocab = 128;
  const at::Tensor labels = at::arange(kRows, at::kLong);
  const auto gradients = [&](c10::Device where, at::ScalarType x_type, at::ScalarType weight_type,
                             std::optional<double> divisor) {
    const at::Tensor x = normal({kRows, kDim}, 1).to(x_type).to(where).requires_grad_();
    const at::Tensor weight = normal({kVocab, kDim}, 2).mul(0.1).to(weight_type).to(where).requires_grad_();
    const kernels::AutocastScope autocast(where.type(), {.enabled = where == device, .dtype = at::kBFloat16});
    (kernels::linear_cross_entropy(x, weight, labels.to(where), divisor) * kThird).backward();
    return std::pair(size_of(x.grad()), size_of(weight.grad()));
  };
  for (const std::optional<double> divisor : {std::optional(96.0), std::optional(100.0), std::optional<double>()}) {
    const auto expected = gradients(at::kCPU, at::kFloat, at::kFloat, divisor);
    for (const at::ScalarType weight_type : {at::kBFloat16, at::kFloat}) {
      const auto found = gradients(device, at::kBFloat16, weight_type, divisor);
      // The logits are of 16 bits, too, which changes a sum by less than a rounded factor does.
      EXPECT_NEAR(found.first / expected.first, 1.0, 1e-3) << weight_type;
      EXPECT_NEAR(found.second / expected.second, 1.0, 1e-3) << weight_type;
    }
  }
}

TEST_F(DeviceFactor, OfAHeadThatIsSplitOverRanks) {
  constexpr std::int64_t kRows = 96, kDim = 64, kVocab = 128;
  const auto gradients = [&](const std::shared_ptr<Communicator>& world, at::ScalarType weight_type, double factor) {
    const c10::Device where = sim_device::SimBackend::device(world->rank());
    const VocabShard part{.first = world->rank() * kVocab / 2, .count = kVocab};
    const at::Tensor h = normal({kRows, kDim}, 1).to(weight_type).to(where).requires_grad_();
    const at::Tensor weight =
        normal({kVocab, kDim}, 2).narrow(0, part.first, kVocab / 2).mul(0.1).to(weight_type).to(where).requires_grad_();
    const at::Tensor labels = at::arange(kRows, at::kLong).to(where);
    (vocab_parallel_cross_entropy(h, weight, labels, part, world, 96.0) * factor).backward();
    return std::pair(size_of(h.grad()), size_of(weight.grad()));
  };
  run_sim_ranks(2, /*over_nccl=*/true, [&](const std::shared_ptr<Communicator>& world) {
    for (const at::ScalarType type : {at::kBFloat16, at::kFloat}) {
      const auto whole = gradients(world, type, 1.0), part = gradients(world, type, kThird);
      EXPECT_NEAR(part.first / whole.first, kThird, kTolerance) << type;
      EXPECT_NEAR(part.second / whole.second, kThird, kTolerance) << type;
    }
  });
}

TEST_F(DeviceFactor, OfClippedGradientsInSixteenBits) {
  for (const c10::Device where : {device, c10::Device(at::kCPU)}) {
    const at::Tensor w = normal({64, 64}, 1).to(at::kBFloat16).to(where).requires_grad_();
    const at::Tensor grad = normal({64, 64}, 2).to(at::kBFloat16);
    w.mutable_grad() = grad.clone().to(where);
    const double norm = grad.to(at::kDouble).norm().item<double>();
    clip_grad_norm({{"w", w}}, norm / 3);
    EXPECT_NEAR(size_of(w.grad()) / size_of(grad), kThird, kTolerance) << where;
  }
}

TEST_F(DeviceFactor, OfDropoutInSixteenBits) {
  nn::Dropout dropout(0.1);  // 1 / 0.9 is 0.16 % less in bfloat16
  dropout.rng_state("a", {.seed = 1});
  for (const c10::Device where : {device, c10::Device(at::kCPU)}) {
    const at::Tensor x = normal({64, 64}, 1).to(at::kBFloat16);
    const at::Tensor y = nn::call(dropout, x.to(where)).cpu();
    EXPECT_NEAR(size_of(y) / size_of(x * y.ne(0)), 1 / 0.9, 2 * kTolerance) << where;
  }
}

// Of optimizers that compute in 16 bits: without masters, and by libtorch's operators.
TEST_F(DeviceFactor, OfAnOptimizersStepInSixteenBits) {
  const at::Tensor grad = normal({64, 64}, 2).to(at::kBFloat16);
  const auto stepped = [&](at::Tensor w) {
    w.requires_grad_();
    w.mutable_grad() = grad.to(device);
    return std::vector<NamedTensor>{{"w", w}};
  };
  const at::Tensor zeros = at::zeros({64, 64}, grad.options()).to(device);
  Sgd sgd(stepped(zeros), {.master_weights = false});
  sgd.step(1.0, {.grad_factor_tensor = third()});
  EXPECT_NEAR(size_of(sgd.parameters().front().tensor) / size_of(grad), kThird, kTolerance);

  // Muon's update has the same length whatever the factor is; its momentum has not.
  Muon muon(stepped(normal({64, 64}, 1).to(at::kBFloat16).to(device)), {.momentum = 0.5, .master_weights = false});
  muon.step(1e-2, {.grad_factor_tensor = third()});
  TrainState state;
  muon.collect_state(state);
  ASSERT_EQ(state.tensors.size(), 1);
  EXPECT_NEAR(size_of(state.tensors.front().tensor) / size_of(grad), 0.5 * kThird, kTolerance);
}

}  // namespace
}  // namespace phalanx
