// A label outside the vocabulary on a device, where the host does not wait to look at it: NaN, not a plausible number.
#include "phalanx/parallel/tensor/vocab_parallel.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>

#include "phalanx/base/ignored_label.h"
#include "phalanx/comm/communicator.h"
#include "phalanx/testing/sim_device/torch/testing/sim_ranks.h"
#include "phalanx/testing/sim_device/torch/testing/sim_test.h"

namespace phalanx {
namespace {

class VocabParallelLabels : public SimTest {};

TEST_F(VocabParallelLabels, OneOutsideOfTheVocabularyMakesTheLossAndItsTokensGradientNan) {
  constexpr std::int64_t kIds = 8, kTokens = 600, kPlace = 550;  // in the second block of tokens
  for (const std::int64_t label : {std::int64_t{3}, kIgnoredLabel, kIds, std::int64_t{-1}}) {
    const bool is_outside = label == kIds || label == -1;
    run_sim_ranks(2, /*over_nccl=*/true, [&](const std::shared_ptr<Communicator>& world) {
      const c10::Device device = sim_device::SimBackend::device(world->rank());
      const VocabShard part{.first = world->rank() * kIds / 2, .count = kIds};
      const at::Tensor h = at::ones({kTokens, 4}).to(device).requires_grad_();
      const at::Tensor weight = at::ones({kIds / 2, 4}).mul(0.1).to(device).requires_grad_();
      at::Tensor labels = at::arange(kTokens, at::kLong).remainder(kIds);
      labels.narrow(0, kPlace, 1).fill_(label);
      labels = labels.to(device);
      const at::Tensor loss = vocab_parallel_cross_entropy(h, weight, labels, part, world, kTokens);
      loss.backward();
      EXPECT_EQ(std::isnan(loss.item<float>()), is_outside) << label;
      const at::Tensor is_nan = at::isnan(h.grad().to(at::kCPU)).any(1);
      EXPECT_EQ(is_nan[kPlace].item<bool>(), is_outside) << label;
      EXPECT_EQ(is_nan.sum().item<std::int64_t>(), is_outside ? 1 : 0) << label;
      const at::Tensor losses = vocab_parallel_token_losses(h, weight, labels, part, world).to(at::kCPU);
      EXPECT_EQ(at::isnan(losses).sum().item<std::int64_t>(), is_outside ? 1 : 0) << label;
    });
  }
}

}  // namespace
}  // namespace phalanx
