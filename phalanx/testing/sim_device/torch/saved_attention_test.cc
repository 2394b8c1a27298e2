// A checkpointed layer on a device that saves attention attends once, and has the bits of a layer that is not
// checkpointed: with each kernel that ATen may choose, with documents, windows and sinks.
#include "phalanx/kernels/saved_attention.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <memory>
#include <string>
#include <vector>

#include "phalanx/base/testing/error_text.h"
#include "phalanx/kernels/causal_attention.h"
#include "phalanx/parallel/activation_checkpoint.h"
#include "phalanx/testing/sim_device/torch/attention.h"
#include "phalanx/testing/sim_device/torch/testing/sim_test.h"

namespace phalanx::saved_attention_test {
namespace {

constexpr std::int64_t kBatch = 2, kSeq = 48, kHeads = 4, kKvHeads = 2, kHeadDim = 16;

struct AttentionCase {
  std::string name;
  at::SDPBackend kernel = at::SDPBackend::overrideable;
  at::ScalarType type = at::kBFloat16;
  std::int64_t window = 0;
  bool documents = false, sinks = false;
};

class SavedAttentionOnADevice : public SimTest, public ::testing::WithParamInterface<AttentionCase> {
 protected:
  void SetUp() override {
    sim_device::choose_attention_kernel(GetParam().kernel);
    at::manual_seed(3);
    x_ = at::randn({kBatch, kSeq, (kHeads + 2 * kKvHeads) * kHeadDim}).to(device, GetParam().type);
    dy_ = at::randn({kBatch, kHeads, kSeq, kHeadDim}).to(device, GetParam().type);
    if (GetParam().documents) {
      documents_ = std::make_shared<const DocumentBoundaries>(
          kSeq, std::vector<std::int32_t>{0, 17, kSeq, kSeq + 30, 2 * kSeq}, device);
    }
    if (GetParam().sinks) sinks_ = at::randn({kHeads}).to(device);
  }
  void TearDown() override { sim_device::choose_attention_kernel(at::SDPBackend::overrideable); }

  at::Tensor attention(const at::Tensor& x) const {
    const auto heads = [&](std::int64_t first, std::int64_t count) {
      return x.narrow(2, first * kHeadDim, count * kHeadDim).unflatten(2, {count, kHeadDim}).transpose(1, 2);
    };
    return kernels::causal_attention(heads(0, kHeads), heads(kHeads, kKvHeads), heads(kHeads + kKvHeads, kKvHeads),
                                     GetParam().window, documents_, sinks_);
  }

  struct Outcome {
    at::Tensor y, dx;
    std::uint64_t times = 0;  // that a kernel of the forward pass ran
  };
  template <class Run>
  Outcome outcome(const Run& run) {
    sim.runtime.clear_launches();
    const at::Tensor x = x_.detach().clone().requires_grad_();
    const at::Tensor y = run(x);
    torch::autograd::backward({y}, {dy_});
    Outcome result{y.detach().cpu(), x.grad().cpu()};
    for (const auto& [name, count] : sim.runtime.launches_by_kernel()) {
      const std::string text = name;
      const auto has = [&](const char* part) { return text.find(part) != std::string::npos; };
      if (has("attention") && !has("backward")) result.times += count;
    }
    return result;
  }

 private:
  at::Tensor x_, dy_, sinks_;
  std::shared_ptr<const DocumentBoundaries> documents_;
};

TEST_P(SavedAttentionOnADevice, AttendsOnceAndHasTheSameBits) {
  const auto attend = [this](const at::Tensor& x) { return attention(x); };
  const Outcome plain = outcome(attend);
  const Outcome recomputed = outcome([&](const at::Tensor& x) { return checkpoint(attend, x); });
  const Outcome saved = outcome([&](const at::Tensor& x) { return checkpoint(attend, x, op_sac_policy); });
  for (const Outcome& other : {recomputed, saved}) {
    EXPECT_TRUE(at::equal(other.y, plain.y));
    EXPECT_TRUE(at::equal(other.dx, plain.dx));
  }
  EXPECT_GT(plain.times, 0U);
  EXPECT_EQ(recomputed.times, 2 * plain.times);
  EXPECT_EQ(saved.times, plain.times);
}

using enum at::SDPBackend;

INSTANTIATE_TEST_SUITE_P(
    Kinds, SavedAttentionOnADevice,
    ::testing::Values(AttentionCase{.name = "overrideable"}, AttentionCase{.name = "flash", .kernel = flash_attention},
                      AttentionCase{.name = "cudnn", .kernel = cudnn_attention},
                      AttentionCase{.name = "float16", .kernel = flash_attention, .type = at::kHalf},
                      AttentionCase{.name = "window", .window = 9},
                      AttentionCase{.name = "documents", .documents = true},
                      AttentionCase{.name = "documents_window", .window = 9, .documents = true},
                      AttentionCase{.name = "sinks", .sinks = true},
                      AttentionCase{.name = "documents_sinks", .documents = true, .sinks = true}),
    [](const auto& info) { return info.param.name; });

// The doubles refuse what CUDA refuses.
TEST_F(SimTest, FlashAndCudnnAttentionTakeOnlyWhatCudaTakes) {
  for (const at::SDPBackend kernel : {flash_attention, cudnn_attention}) {
    sim_device::choose_attention_kernel(kernel);
    const at::Tensor wide = at::randn({1, 2, 8, 16}).to(device),
                     large = at::randn({1, 2, 8, 264}).to(device, at::kBFloat16);
    const auto policy_asked = [&](const at::Tensor& q) {
      return error_text<c10::Error>([&] {
        checkpoint(
            [](const at::Tensor& x) { return kernels::saved_attention(*kernels::savable_attention(x, x, x), x, x, x); },
            q, op_sac_policy);
      });
    };
    EXPECT_THAT(policy_asked(wide), ::testing::HasSubstr("attention takes no"));
    EXPECT_THAT(policy_asked(large), ::testing::HasSubstr("attention takes no"));
  }
  sim_device::choose_attention_kernel(overrideable);
}

}  // namespace
}  // namespace phalanx::saved_attention_test
