#include "phalanx/testing/sim_device/torch/sim_backend.h"

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/add.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "phalanx/base/testing/error_text.h"
#include "phalanx/kernels/autocast.h"
#include "phalanx/testing/sim_device/torch/testing/sim_test.h"

namespace phalanx {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

class SimTensors : public SimTest {
 protected:
  at::Tensor numbers(std::int64_t count) { return at::arange(count, on_sim()); }
  static std::vector<float> values(const at::Tensor& tensor) {
    const at::Tensor host = tensor.to(at::kCPU, at::kFloat).contiguous();
    return {host.const_data_ptr<float>(), host.const_data_ptr<float>() + host.numel()};
  }
};

TEST_F(SimTensors, OperatorsRunOnTheDevice) {
  const at::Tensor x = at::full({4}, 3.0, on_sim());
  EXPECT_EQ(x.device().str(), "sim:0");
  const at::Tensor sum = at::add(x, x).sum();
  EXPECT_EQ(waits(), 0);
  EXPECT_EQ(sum.item<float>(), 24);
  EXPECT_THAT(sim.runtime.host_waits().by_site(),
              ElementsAre(Pair(AllOf(HasSubstr("item"), HasSubstr("TestBody")), 1)));
  EXPECT_THAT(sim.runtime.launches_by_kernel(), ::testing::Contains(Pair("aten::add.Tensor", 1)));
}

TEST_F(SimTensors, ConvolutionsAndTheirGradientsAreTheCpus) {
  const at::Tensor x = at::randn({2, 3, 8, 8}), weight = at::randn({4, 3, 3, 3});
  const auto gradient_on = [&](c10::Device where) {
    const at::Tensor w = weight.clone().to(where).requires_grad_();  // a leaf of its own
    at::conv2d(x.to(where), w, {}, 1, 1).square().sum().backward();
    return w.grad().cpu();
  };
  EXPECT_TRUE(at::equal(gradient_on(device), gradient_on(at::kCPU)));
}

TEST_F(SimTensors, ViewsShareMemory) {
  const at::Tensor x = numbers(12);
  const at::Tensor view = x.view({3, 4}).transpose(0, 1).narrow(0, 1, 2).select(1, 2);  // x[9], x[10]
  EXPECT_EQ(view.storage().data(), x.storage().data());
  view.add_(100);
  EXPECT_THAT(values(x), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 109, 110, 11));
  const std::vector<at::Tensor> parts = x.split(6);
  parts[1].zero_();
  EXPECT_THAT(values(x), ElementsAre(0, 1, 2, 3, 4, 5, 0, 0, 0, 0, 0, 0));
  EXPECT_THAT(values(x.unbind()[5]), ElementsAre(5));
  EXPECT_THAT(values(x.as_strided({2}, {3}, 1)), ElementsAre(1, 4));
  EXPECT_THAT(values(x.expand({2, 12}).sum(0)), ElementsAre(0, 2, 4, 6, 8, 10, 0, 0, 0, 0, 0, 0));
}

TEST_F(SimTensors, OutputsAreResized) {
  at::Tensor out = at::empty({0}, on_sim());
  at::mm_out(out, at::ones({2, 3}, on_sim()), at::ones({3, 5}, on_sim()));
  EXPECT_EQ(out.sizes(), (std::vector<std::int64_t>{2, 5}));
  EXPECT_EQ(out.sum().item<float>(), 30);
  EXPECT_EQ(at::arange(5.0, on_sim()).numel(), 5);
  EXPECT_EQ(at::arange(7.0, on_sim()).numel(), 7);
  at::Tensor grown = at::ones({4}, on_sim());
  grown.resize_({6});
  EXPECT_EQ(grown.narrow(0, 0, 4).sum().item<float>(), 4);
}

TEST_F(SimTensors, ShapesThatDependOnDataWait) {
  const at::Tensor x = numbers(6);
  const at::Tensor rows = at::ones({2}, on_sim().dtype(at::kLong));
  EXPECT_EQ(at::index_select(x, 0, rows).numel(), 2);
  EXPECT_EQ(x.index({rows}).numel(), 2);
  EXPECT_EQ(std::get<0>(at::topk(x, 3)).numel(), 3);
  EXPECT_EQ(waits(), 0);
  EXPECT_EQ(at::nonzero(x).size(0), 5);
  EXPECT_EQ(x.index({x.gt(1)}).numel(), 4);
  EXPECT_TRUE(at::equal(x, numbers(6)));
  EXPECT_EQ(waits(), 3);
  EXPECT_THAT(sim.runtime.host_waits().by_site(),
              ::testing::Contains(Pair(HasSubstr("aten::nonzero (its result's shape depends on data)"), 1)));
}

TEST_F(SimTensors, CopiesWaitUnlessTheyArePinnedAndNonBlocking) {
  const at::Tensor host = at::ones({100}).pin_memory();
  EXPECT_TRUE(host.is_pinned());
  const at::Tensor x = host.to(device, /*non_blocking=*/true);
  const at::Tensor back = at::empty({100}, at::TensorOptions().pinned_memory(true));
  back.copy_(x.mul(2), /*non_blocking=*/true);
  EXPECT_EQ(waits(), 0);
  sim.runtime.synchronize_device(0, "test");
  EXPECT_EQ(back.sum().item<float>(), 200);
  sim.runtime.host_waits().clear();
  at::ones({100}).to(device, /*non_blocking=*/true);  // from pageable memory
  host.to(device);
  at::empty({100}).copy_(x, /*non_blocking=*/true);  // to pageable memory
  EXPECT_EQ(waits(), 3);
}

TEST_F(SimTensors, DevicesCopyToEachOther) {
  const at::Tensor x = at::full({3}, 2.0, on_sim(1));
  EXPECT_EQ(x.device().index(), 1);
  const at::Tensor y = x.to(device);
  x.zero_();
  EXPECT_EQ(waits(), 0);
  EXPECT_THAT(values(y), ElementsAre(2, 2, 2));
}

TEST_F(SimTensors, OtherDevicesAreRefused) {
  EXPECT_THAT(error_text<c10::Error>([&] { at::add(numbers(4), at::ones({4})); }),
              HasSubstr("a tensor of shape [4] is on cpu, expected sim:0"));
  EXPECT_THAT(error_text<c10::Error>([&] { at::add(numbers(4), at::ones({4}, on_sim(1))); }),
              HasSubstr("tensors are on sim:0 and sim:1"));
  EXPECT_THAT(values(at::add(numbers(2), at::ones({}))), ElementsAre(1, 2));
}

TEST_F(SimTensors, AnOperatorThatFailsFailsItsDevice) {
  const at::Tensor far = at::full({1}, 100, on_sim().dtype(at::kLong));
  const at::Tensor picked = at::index_select(numbers(4), 0, far);
  EXPECT_THAT(error_text([&] { picked.sum().item(); }), HasSubstr("sim:0: 'aten::index_select' failed on stream 0"));
  sim.runtime.clear_failure(0);
  EXPECT_EQ(numbers(4).sum().item<float>(), 6);
}

TEST_F(SimTensors, AFullDeviceIsOutOfMemory) {
  sim.memory.set_capacity(5, 40 << 20);
  EXPECT_THAT(error_text<c10::OutOfMemoryError>([&] { at::empty({16 << 20}, on_sim(5)); }),
              HasSubstr("sim:5 is out of memory: 67108864 bytes wanted"));
  EXPECT_EQ(at::ones({1 << 20}, on_sim(5)).sum().item<float>(), 1 << 20);
  sim.memory.set_capacity(5, sim_device::DeviceMemory::kBytesPerDevice);
}

TEST_F(SimTensors, RandomNumbersComeFromTheGenerator) {
  const auto draw = [&](at::Generator generator) { return at::randn({100}, generator, on_sim()); };
  at::Generator generator = at::globalContext().defaultGenerator(device);
  generator.set_current_seed(7);
  const at::Tensor state = generator.get_state();
  const at::Tensor first = draw(generator), second = draw(generator);
  EXPECT_FALSE(at::equal(first, second));
  generator.set_state(state);
  EXPECT_TRUE(at::equal(first, at::randn({100}, on_sim())));  // the default generator
  EXPECT_TRUE(at::equal(second, draw(generator)));
  at::Generator copy = generator.clone();
  EXPECT_TRUE(at::equal(draw(copy), draw(generator)));
  const float kept = at::dropout(at::ones({10000}, on_sim()), 0.5, /*train=*/true).mean().item<float>();
  EXPECT_NEAR(kept, 1, 0.05);
  sim.runtime.host_waits().clear();
  at::rand({10}, on_sim()).bernoulli_(0.5);
  EXPECT_EQ(waits(), 0);
}

TEST_F(SimTensors, ForeachOperatorsAreOneLaunch) {
  const std::vector<at::Tensor> xs = {numbers(3), at::ones({2, 2}, on_sim())};
  sim.runtime.clear_launches();
  const std::vector<at::Tensor> norms = at::_foreach_norm(xs, 2);
  at::_foreach_mul_(xs, norms[1]);
  at::_foreach_add_(xs, 1.0);
  EXPECT_EQ(sim.runtime.launches(0), 3);
  EXPECT_EQ(waits(), 0);
  EXPECT_FLOAT_EQ(norms[0].item<float>(), std::sqrt(5.0F));
  EXPECT_THAT(values(xs[0]), ElementsAre(1, 3, 5));
}

TEST_F(SimTensors, FusedAdamWLeavesWeightsWhereInfWasFound) {
  const auto one = [&](double value) { return std::vector<at::Tensor>{at::full({3}, value, on_sim())}; };
  const auto w = one(1), g = one(8), m = one(0), v = one(0);
  const std::vector<at::Tensor> steps = {at::ones({}, on_sim())};
  const at::Tensor scale = at::full({1}, 2.0, on_sim()), found = at::ones({1}, on_sim());
  const auto step = [&] {
    at::_fused_adamw_(w, g, m, v, {}, steps, 0.1, 0.9, 0.99, 0.0, 1e-8, false, false, scale, found);
  };
  sim.runtime.clear_launches();
  step();
  EXPECT_EQ(sim.runtime.launches(0), 1);
  EXPECT_THAT(values(w[0]), ElementsAre(1, 1, 1));
  found.zero_();
  step();
  EXPECT_NEAR(values(w[0])[0], 0.9, 1e-6);
}

TEST_F(SimTensors, AutocastFollowsCudasRules) {
  const at::Tensor x = at::ones({4, 4}, on_sim()).requires_grad_();
  const kernels::AutocastScope scope(at::kPrivateUse1, {.enabled = true, .dtype = at::kBFloat16});
  const at::Tensor product = at::mm(x, x);
  EXPECT_EQ(product.scalar_type(), at::kBFloat16);
  const at::Tensor probabilities = at::softmax(product, 1);
  EXPECT_EQ(probabilities.scalar_type(), at::kFloat);
  EXPECT_EQ(at::mul(x, 2).scalar_type(), at::kFloat);
  product.sum().backward();
  EXPECT_EQ(x.grad().scalar_type(), at::kFloat);
  EXPECT_THAT(values(x.grad().flatten()), ::testing::Each(8));
}

using SimTensorsDeathTest = SimTensors;
TEST_F(SimTensorsDeathTest, TheHostCannotReadATensor) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const at::Tensor x = at::ones({4}, on_sim(2));
  EXPECT_EXIT((void)*static_cast<const volatile float*>(x.const_data_ptr()), ::testing::KilledBySignal(SIGSEGV),
              "touched memory of simulated device 2");
}

}  // namespace
}  // namespace phalanx
