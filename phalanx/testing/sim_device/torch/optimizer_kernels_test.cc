// The gradient norm and AdamW on a device, by Phalanx's own kernels: the numbers of the CPU.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sin.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "phalanx/optim/adamw.h"
#include "phalanx/optim/grad_norm.h"
#include "phalanx/testing/sim_device/torch/testing/sim_test.h"

namespace phalanx {
namespace {

class OptimizerKernels : public SimTest {
 protected:
  static at::Tensor wave(double frequency, std::vector<std::int64_t> shape, at::ScalarType dtype = at::kFloat) {
    std::int64_t count = 1;
    for (const std::int64_t size : shape) count *= size;
    return at::sin(at::arange(count, at::TensorOptions(at::kFloat)).mul(frequency)).view(shape).to(dtype);
  }
  static NamedTensor with_gradient(const std::string& name, const at::Tensor& grad) {
    at::Tensor parameter = grad.detach().clone().requires_grad_();
    parameter.mutable_grad() = grad;
    return {name, parameter};
  }
};

TEST_F(OptimizerKernels, TheNormIsTheCpusForAllTypesAndLayouts) {
  const std::vector<at::Tensor> grads = {wave(0.3, {40, 50}),
                                         wave(0.5, {1000}, at::kBFloat16),
                                         wave(0.7, {30}, at::kHalf),
                                         wave(0.9, {7}, at::kDouble),
                                         wave(0.2, {6, 5}).t(),               // dense
                                         wave(0.4, {6, 8}).narrow(1, 0, 3)};  // with gaps
  std::vector<NamedTensor> on_cpu, on_device;
  for (std::size_t i = 0; i < grads.size(); ++i) {
    const std::string name = "w" + std::to_string(i);
    on_cpu.push_back(with_gradient(name, grads[i]));
    const at::Tensor whole = i == 5 ? wave(0.4, {6, 8}).to(device).narrow(1, 0, 3) : grads[i].to(device);
    on_device.push_back(with_gradient(name, whole));
  }
  EXPECT_FALSE(on_device[5].tensor.grad().is_non_overlapping_and_dense());
  sim.runtime.host_waits().clear();
  const GradNorm norm = grad_norm(on_device);
  EXPECT_EQ(sim.runtime.host_waits().total(), 0U);
  EXPECT_NEAR(norm.value(), grad_norm(on_cpu).value(), 1e-12 * norm.value());
  EXPECT_EQ(sim.runtime.launches_by_kernel()["squares"], 3U);  // float32, bfloat16 and float16
}

// Two weight decays, gradients of two types, and a factor that lies on the device: bit by bit the CPU's steps.
TEST_F(OptimizerKernels, AdamWIsTheCpusToTheBit) {
  const auto run = [&](at::Device where) {
    std::vector<NamedTensor> parameters;
    for (const char* name : {"weight", "bias"}) {
      parameters.push_back({name, wave(0.3, {33, 7}).to(where).requires_grad_()});
    }
    AdamW adamw(parameters, {.weight_decay = 0.1, .no_decay = {"bias"}});
    for (int step = 0; step < 4; ++step) {
      parameters[0].tensor.mutable_grad() = wave(0.7 + step, {33, 7}).to(where);
      parameters[1].tensor.mutable_grad() = wave(0.9 + step, {33, 7}).to(where);
      adamw.step(1e-2, {.grad_factor_tensor = at::full({}, 0.25, at::TensorOptions(at::kDouble).device(where))});
    }
    return std::vector<at::Tensor>{parameters[0].tensor.detach().cpu(), parameters[1].tensor.detach().cpu()};
  };
  const auto expected = run(at::kCPU), found = run(device);
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(at::equal(found[i], expected[i])) << i;
  EXPECT_EQ(sim.runtime.launches_by_kernel()["adamw"], 8U);  // 4 steps of two weight decays
  EXPECT_EQ(sim.runtime.launches_by_kernel().count("aten::_fused_adamw_"), 0U);
}

// By libtorch's operators, whose float32 step may differ in the last bit: then a number of 16 bits has a neighbour.
// Whole parameters, and parts that are cut along both dimensions; no wait of the host.
TEST_F(OptimizerKernels, StateOf16BitsIsRoundedAsOnTheCpu) {
  const ShardSpec spec("w", {66, 28}, DataType::bf16, MeshShape({{"dp", 2}, {"tp", 2}}),
                       Placement::parse("tp:S(1), dp:S(0)"));
  for (const bool is_part : {false, true}) {
    for (const bool has_master : {false, true}) {
      const auto run = [&](at::Device where) {
        const auto shard = is_part ? std::make_shared<const Shard>(Shard{spec, 3}) : nullptr;
        const at::Tensor w = wave(0.3, {33, 14}, at::kBFloat16).to(where).requires_grad_();
        AdamW adamw(
            {{"w", w, shard}},
            {.master_weights = has_master, .state_dtype = at::kBFloat16, .stochastic_rounding = true, .seed = 5});
        std::vector<at::Tensor> grads;
        for (int step = 0; step < 3; ++step) grads.push_back(wave(0.7 + step, {33, 14}, at::kBFloat16).to(where));
        sim.runtime.host_waits().clear();
        for (const at::Tensor& grad : grads) {
          w.mutable_grad() = grad;
          adamw.step(1e-2);
        }
        EXPECT_EQ(sim.runtime.host_waits().total(), 0U);
        TrainState state;
        adamw.collect_state(state);
        std::vector<at::Tensor> found = {w.detach().cpu().to(at::kFloat)};
        for (const NamedTensor& one : state.tensors) found.push_back(one.tensor.cpu().to(at::kFloat));
        return found;
      };
      const auto expected = run(at::kCPU), found = run(device);
      ASSERT_EQ(found.size(), expected.size());
      for (std::size_t i = 0; i < expected.size(); ++i) {
        const at::Tensor off = found[i].sub(expected[i]).abs();
        // Of 462. A neighbour in bfloat16 is 0.2 % off or more; a master in float32 differs in its last bits.
        EXPECT_LE(off.gt(expected[i].abs().mul(1e-5).add(1e-8)).sum().item<std::int64_t>(), 5) << i;
        EXPECT_TRUE(off.le(expected[i].abs().mul(1.0 / 64).add(1e-6)).all().item<bool>()) << i;
      }
    }
  }
}

TEST_F(OptimizerKernels, ClippingInTheStepIsClippingBeforeIt) {
  const auto run = [&](bool folds) {
    const at::Tensor w = wave(0.3, {500}).to(device).requires_grad_();
    AdamW adamw({{"w", w}});
    EXPECT_TRUE(adamw.scales_gradients_itself());
    w.mutable_grad() = wave(0.7, {500}).to(device) * 8;
    if (folds) {
      const GradNorm norm = grad_norm(adamw.parameters());
      adamw.step(1e-2, {.grad_factor_tensor = clip_factor(norm.on_device(), 1.0)});
    } else {
      clip_grad_norm(adamw.parameters(), 1.0);
      adamw.step(1e-2);
    }
    return w.detach().cpu();
  };
  EXPECT_TRUE(at::equal(run(true), run(false)));
}

}  // namespace
}  // namespace phalanx
