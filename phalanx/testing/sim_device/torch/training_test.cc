// A small transformer trains on a simulated device as on the CPU, bit for bit, and the host never waits.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/add.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/full.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include <chrono>
#include <thread>

#include "phalanx/testing/sim_device/torch/testing/sim_test.h"

namespace phalanx {
namespace {

using namespace std::chrono_literals;
using ::testing::IsEmpty;

constexpr std::int64_t kBatch = 4, kSequence = 32, kDim = 64, kHeads = 4, kVocabulary = 64, kLayers = 2;

// Custom functions run on the backward's stream, too.
struct Doubled : torch::autograd::Function<Doubled> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& x) {
    return at::mul(x, 2.0);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 torch::autograd::variable_list grads) {
    return {at::mul(grads[0], 2.0)};
  }
};

struct NetOptions {
  bool rms_norm = true;
  at::ScalarType dtype = at::kFloat;
};

class SmallTransformer {
 public:
  SmallTransformer(c10::Device device, NetOptions options) : device_(device), options_(options) {
    generator_.set_current_seed(7);
    add({kVocabulary, kDim});
    for (int layer = 0; layer < kLayers; ++layer) {
      add_ones();
      add({3 * kDim, kDim});
      add({kDim, kDim});
      add_ones();
      add({4 * kDim, kDim});
      add({kDim, 4 * kDim});
    }
    add_ones();
    add({kVocabulary, kDim});
  }

  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets) const {
    auto next = parameters_.begin();
    // CUDA sums 16-bit gradients of embeddings in float32, where ATen's CPU kernel does not.
    const bool widens = device_.is_cpu() && options_.dtype == at::kBFloat16;
    const auto wide = [&](const at::Tensor& one) { return widens ? one.to(at::kFloat) : one; };
    const auto linear = [&](const at::Tensor& x) { return at::linear(x, *next++); };
    const auto norm = [&](const at::Tensor& x) {
      const at::Tensor& weight = *next++;
      return options_.rms_norm ? at::rms_norm(x, {kDim}, weight, 1e-5) : at::layer_norm(x, {kDim}, weight, {}, 1e-5);
    };
    at::Tensor x = at::embedding(wide(*next++), tokens).to(options_.dtype);  // [batch, sequence, dim]
    for (int layer = 0; layer < kLayers; ++layer) {
      const at::Tensor heads = linear(norm(x)).view({kBatch, kSequence, 3, kHeads, kDim / kHeads});
      const at::Tensor qkv = heads.permute({2, 0, 3, 1, 4});  // [3, batch, heads, sequence, dim / heads]
      const at::Tensor attended = at::scaled_dot_product_attention(qkv.select(0, 0), qkv.select(0, 1), qkv.select(0, 2),
                                                                   {}, 0.0, /*is_causal=*/true);
      x = at::add(x, linear(attended.transpose(1, 2).reshape({kBatch, kSequence, kDim})));
      x = at::add(x, Doubled::apply(linear(at::gelu(linear(norm(x))))));
    }
    return at::cross_entropy_loss(linear(norm(x)).view({-1, kVocabulary}), targets.view({-1}));
  }

  void step() {
    std::vector<at::Tensor> weights, grads;
    for (at::Tensor& parameter : parameters_) {
      weights.push_back(parameter.detach());
      grads.push_back(parameter.grad());
      parameter.mutable_grad().reset();
    }
    at::_foreach_add_(steps_, 1.0);
    at::_fused_adamw_(weights, grads, first_, second_, {}, steps_, 1e-2, 0.9, 0.95, 0.1, 1e-8, false, false);
  }

 private:
  void add(at::IntArrayRef sizes) { add(at::mul(at::randn(sizes, generator_, at::kFloat), 0.1)); }
  void add_ones() { add(at::full({kDim}, 1.0)); }
  void add(const at::Tensor& values) {
    parameters_.push_back(values.to(device_, options_.dtype).requires_grad_());
    first_.push_back(at::zeros_like(parameters_.back()).detach());
    second_.push_back(at::zeros_like(parameters_.back()).detach());
    steps_.push_back(at::zeros({}, at::TensorOptions(at::kFloat).device(device_)));
  }

  c10::Device device_;
  NetOptions options_;
  at::Generator generator_ = at::detail::createCPUGenerator();
  std::vector<at::Tensor> parameters_, first_, second_, steps_;
};

at::Tensor batch(c10::Device device, std::uint64_t number) {
  const at::Generator generator = at::detail::createCPUGenerator(number);
  const at::Tensor tokens = at::randint(kVocabulary, {kBatch, kSequence}, generator, at::kLong);
  return device.is_cpu() ? tokens : tokens.pin_memory();
}

class SimTraining : public SimTest {
 protected:
  std::vector<at::Tensor> train(c10::Device where, NetOptions options, int steps = 20) {
    SmallTransformer net(where, options);
    std::vector<at::Tensor> batches;
    for (int i = 0; i <= steps; ++i) batches.push_back(batch(where, static_cast<std::uint64_t>(i)));
    sim.runtime.host_waits().clear();
    std::vector<at::Tensor> losses;
    for (std::size_t i = 0; i < static_cast<std::size_t>(steps); ++i) {
      const at::Tensor loss =
          net.loss(batches[i].to(where, /*non_blocking=*/true), batches[i + 1].to(where, /*non_blocking=*/true));
      loss.backward();
      net.step();
      losses.push_back(loss.detach());
    }
    return losses;
  }
  static std::vector<float> read_back(const std::vector<at::Tensor>& losses) {
    const at::Tensor all = at::stack(losses).to(at::kCPU, at::kFloat);
    return {all.const_data_ptr<float>(), all.const_data_ptr<float>() + all.numel()};
  }
};

class SimTrainingOf : public SimTraining, public ::testing::WithParamInterface<NetOptions> {};

TEST_P(SimTrainingOf, IsTheCpusBitForBitWithoutAWait) {
  const std::vector<float> expected = read_back(train(at::kCPU, GetParam()));
  sim.runtime.set_delays({.longest = 100us, .seed = 11});
  const std::vector<at::Tensor> losses = train(device, GetParam());
  EXPECT_EQ(waits(), 0);
  EXPECT_EQ(read_back(losses), expected);
  EXPECT_EQ(waits(), 1);
  EXPECT_LT(expected.back(), expected.front());
}

INSTANTIATE_TEST_SUITE_P(Nets, SimTrainingOf,
                         ::testing::Values(NetOptions{}, NetOptions{.rms_norm = false},
                                           NetOptions{.dtype = at::kBFloat16},
                                           NetOptions{.rms_norm = false, .dtype = at::kBFloat16}),
                         [](const auto& info) {
                           return std::string(info.param.rms_norm ? "RmsNorm" : "LayerNorm") +
                                  (info.param.dtype == at::kFloat ? "Fp32" : "Bf16");
                         });

TEST_F(SimTraining, UnfusedAttentionIsTheCpusToo) {
  at::globalContext().setSDPUseFlash(false);
  const std::vector<float> expected = read_back(train(at::kCPU, {}));
  const std::vector<float> found = read_back(train(device, {}));
  at::globalContext().setSDPUseFlash(true);
  EXPECT_EQ(found, expected);
}

TEST_F(SimTraining, BackwardFollowsTheStreamOfForward) {
  const std::vector<float> expected = read_back(train(at::kCPU, {}));
  sim.runtime.synchronize_device(0, "test");
  const c10::impl::VirtualGuardImpl guard(at::kPrivateUse1);
  const c10::StreamGuard on_side(guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true));
  sim.runtime.set_delays({.longest = 100us, .seed = 5});
  EXPECT_EQ(read_back(train(device, {})), expected);
}

TEST_F(SimTraining, RankThreadsHaveADeviceEach) {
  const std::vector<float> expected = read_back(train(at::kCPU, {}, 6));
  std::vector<std::vector<float>> found(4);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 4; ++rank) {
    ranks.emplace_back([&, rank] {
      at::set_num_threads(1);
      found[static_cast<std::size_t>(rank)] = read_back(train(sim_device::SimBackend::device(rank), {}, 6));
    });
  }
  for (std::thread& rank : ranks) rank.join();
  EXPECT_THAT(found, ::testing::Each(expected));
}

}  // namespace
}  // namespace phalanx
