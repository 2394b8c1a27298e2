// 16-bit parameters that are updated through float32 masters.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <map>
#include <memory>

#include "phalanx/optim/adadelta.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/optim/lion.h"
#include "phalanx/optim/sgd.h"
#include "phalanx/optim/widen.h"

namespace phalanx {
namespace {

using MakeStepper = std::function<std::unique_ptr<Optimizer>(std::vector<NamedTensor>)>;

const std::vector<MakeStepper>& steppers() {
  static const std::vector<MakeStepper> all = {
      [](auto parameters) { return std::make_unique<AdamW>(std::move(parameters)); },
      [](auto parameters) {
        return std::make_unique<Sgd>(std::move(parameters), SgdOptions{.momentum = 0.9, .weight_decay = 0.01});
      },
  };
  return all;
}

at::Tensor waves(std::int64_t count, double frequency, at::ScalarType dtype) {
  return at::sin(at::arange(count, at::TensorOptions(at::kFloat)).mul(frequency)).to(dtype);
}

at::Tensor state_of(const Optimizer& optimizer, const std::string& name) {
  TrainState state;
  optimizer.collect_state(state);
  for (const auto& tensor : state.tensors) {
    if (tensor.name == "optimizer." + name) return tensor.tensor;
  }
  return {};
}

bool equal_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), static_cast<std::size_t>(a.numel() * a.itemsize())) == 0;
}

constexpr std::int64_t kElements = 40'003;  // several parts and a remainder

TEST(MasterWeights, TakeTheStepsOfFloat32) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    for (const auto& make : steppers()) {
      const auto narrow = waves(kElements, 0.7, dtype).requires_grad_();
      const auto wide = narrow.detach().to(at::kFloat).requires_grad_();
      const auto optimizer = make({{"w", narrow}}), reference = make({{"w", wide}});
      for (int step = 0; step < 4; ++step) {
        narrow.mutable_grad() = waves(kElements, 0.3 + step, dtype);
        wide.mutable_grad() = narrow.grad().to(at::kFloat);
        optimizer->step(1e-3);
        reference->step(1e-3);
        ASSERT_TRUE(equal_bytes(state_of(*optimizer, "w.master"), wide.detach())) << dtype << " step " << step;
        ASSERT_TRUE(equal_bytes(narrow.detach(), wide.detach().to(dtype))) << dtype << " step " << step;
      }
    }
  }
}

// Every element, in whole vectors and behind them. A third has no value in 16 bits.
TEST(MasterWeights, WithoutThemEachStepIsThatOfFloat32ButForRounding) {
  const std::vector<MakeStepper> makes = {
      [](auto parameters) { return std::make_unique<Sgd>(std::move(parameters), SgdOptions{.master_weights = false}); },
      [](auto parameters) {
        return std::make_unique<Sgd>(std::move(parameters),
                                     SgdOptions{.momentum = 0.9, .weight_decay = 0.01, .master_weights = false});
      },
      [](auto parameters) {
        return std::make_unique<Lion>(std::move(parameters), LionOptions{.master_weights = false});
      },
      [](auto parameters) {
        return std::make_unique<Adadelta>(std::move(parameters),
                                          AdadeltaOptions{.eps = 1.0, .weight_decay = 0.3, .master_weights = false});
      }};
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    for (std::size_t number = 0; number < makes.size(); ++number) {
      const auto narrow = waves(kElements, 0.7, dtype).requires_grad_();
      const auto wide = narrow.detach().to(at::kFloat).requires_grad_();
      const auto optimizer = makes[number]({{"w", narrow}}), reference = makes[number]({{"w", wide}});
      for (int step = 0; step < 3; ++step) {
        const at::NoGradGuard no_grad;
        wide.copy_(narrow);
        narrow.mutable_grad() = waves(kElements, 0.3 + step, dtype);
        wide.mutable_grad() = narrow.grad().to(at::kFloat);
        optimizer->step(1.0 / 3, {.grad_factor = 1.0 / 3});
        reference->step(1.0 / 3, {.grad_factor = 1.0 / 3});
        ASSERT_TRUE(equal_bytes(narrow.detach(), wide.detach().to(dtype))) << dtype << " optimizer " << number;
        ASSERT_FALSE(at::equal(wide.detach(), wide.detach().to(dtype).to(at::kFloat))) << "or it would say nothing";
      }
      TrainState states, references;
      optimizer->collect_state(states);
      reference->collect_state(references);
      ASSERT_EQ(states.tensors.size(), references.tensors.size());
      for (std::size_t i = 0; i < states.tensors.size(); ++i) {
        EXPECT_TRUE(equal_bytes(states.tensors[i].tensor, references.tensors[i].tensor)) << states.tensors[i].name;
      }
    }
  }
}

TEST(MasterWeights, AreRoundedAsLibtorchRounds) {
  std::vector<std::uint32_t> bits;  // of every 16-bit value: itself, ties and their neighbours, both ways
  for (std::uint32_t upper = 0; upper < 0x10000; ++upper) {
    for (const std::uint32_t lower : {0x0U, 0x1U, 0x7FFFU, 0x8000U, 0x8001U, 0xFFFFU})
      bits.push_back(upper << 16 | lower);
  }
  const auto count = static_cast<std::int64_t>(bits.size());
  const auto values = at::zeros({count}, at::TensorOptions(at::kFloat));
  std::memcpy(values.mutable_data_ptr(), bits.data(), bits.size() * sizeof(float));
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const auto narrowed = at::zeros({count}, dtype);
    const auto widened = at::zeros({count}, at::TensorOptions(at::kFloat));
    narrow(dtype, bits.size(), values.const_data_ptr<float>(), narrowed.mutable_data_ptr());
    widen(dtype, bits.size(), narrowed.const_data_ptr(), widened.mutable_data_ptr<float>());
    const auto numbers = values.eq(values);  // any NaN is as good as another
    EXPECT_TRUE(equal_bytes(narrowed.masked_select(numbers), values.to(dtype).masked_select(numbers))) << dtype;
    EXPECT_TRUE(equal_bytes(widened.masked_select(numbers), values.to(dtype).to(at::kFloat).masked_select(numbers)));
    EXPECT_TRUE(narrowed.ne(narrowed).equal(numbers.logical_not())) << dtype;
    // A master that rounds to its value is unchanged.
    const auto masters = values.clone();
    adopt_changes(dtype, bits.size(), narrowed.const_data_ptr(), masters.mutable_data_ptr<float>());
    EXPECT_TRUE(equal_bytes(masters, values)) << dtype;
    const auto doubled = narrowed.mul(2);
    adopt_changes(dtype, bits.size(), doubled.const_data_ptr(), masters.mutable_data_ptr<float>());
    EXPECT_TRUE(at::equal(masters.to(dtype).masked_select(numbers), doubled.masked_select(numbers))) << dtype;
  }
}

TEST(MasterWeights, KeepUpdatesThatSixteenBitsWouldLose) {
  const auto with = at::ones({8}, at::kBFloat16).requires_grad_(), without = with.detach().clone().requires_grad_();
  Sgd kept({{"w", with}}), lost({{"w", without}}, {.master_weights = false});
  for (int step = 0; step < 100; ++step) {
    with.mutable_grad() = at::ones({8}, at::kBFloat16);
    without.mutable_grad() = at::ones({8}, at::kBFloat16);
    kept.step(1e-3);
    lost.step(1e-3);
  }
  EXPECT_NEAR(with[3].item<double>(), 0.9, 2e-3);
  EXPECT_EQ(without[3].item<double>(), 1);  // 1 - 0.001 rounds to 1
}

TEST(MasterWeights, APartGetsTheBitsOfTheWhole) {
  const auto whole = waves(kElements, 0.7, at::kBFloat16).requires_grad_();
  const std::vector<std::int64_t> ends = {0, 1, 777, 777, 16'385, kElements};
  std::vector<NamedTensor> parts;
  for (std::size_t i = 0; i + 1 < ends.size(); ++i) {
    const auto part = whole.detach().narrow(0, ends[i], ends[i + 1] - ends[i]).clone().requires_grad_();
    parts.push_back({std::to_string(i), part});
  }
  for (const auto& make : steppers()) {
    const auto reference = make({{"w", whole}}), optimizer = make(parts);
    for (int step = 0; step < 3; ++step) {
      whole.mutable_grad() = waves(kElements, 0.3 + step, at::kBFloat16);
      for (std::size_t i = 0; i < parts.size(); ++i) {
        parts[i].tensor.mutable_grad() = whole.grad().narrow(0, ends[i], ends[i + 1] - ends[i]);
      }
      reference->step(1e-2, {.grad_factor = 0.3});
      optimizer->step(1e-2, {.grad_factor = 0.3});
    }
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const auto expected = state_of(*reference, "w.master").narrow(0, ends[i], ends[i + 1] - ends[i]);
      EXPECT_TRUE(equal_bytes(state_of(*optimizer, parts[i].name + ".master"), expected)) << i;
    }
  }
}

TEST(MasterWeights, WhatSomebodyElseWroteIsTakenOver) {
  const auto w = at::full({3}, 1.0, at::kBFloat16).requires_grad_();
  Sgd optimizer({{"w", w}});
  w.mutable_grad() = at::ones({3}, at::kBFloat16);
  optimizer.step(1e-3);  // the master is 0.999, w still 1
  {
    const at::NoGradGuard no_grad;
    w[1] = 5;  // as loaded weights do
  }
  optimizer.step(1e-3);
  const auto master = state_of(optimizer, "w.master");
  EXPECT_FLOAT_EQ(master[0].item<float>(), 0.998F);  // retains what 16 bits cannot represent
  EXPECT_FLOAT_EQ(master[1].item<float>(), 4.999F);
  EXPECT_EQ(w[1].item<float>(), 5);
}

TEST(MasterWeights, AreStateOfTheParametersLayoutInFloat32) {
  const auto shard = std::make_shared<const Shard>(
      Shard{ShardSpec("w", {5, 4}, DataType::bf16, MeshShape({{"dp", 2}}), Placement::parse("dp:S(0){3, 2}")), 1});
  AdamW optimizer({{"w", at::ones({2, 4}, at::kBFloat16), shard}, {"b", at::ones({4})}});
  TrainState state;
  optimizer.collect_state(state);
  std::map<std::string, NamedTensor> by_name;
  for (const auto& tensor : state.tensors) by_name.emplace(tensor.name, tensor);
  EXPECT_EQ(by_name.count("optimizer.b.master"), 0U);
  for (const std::string what : {"master", "exp_avg", "exp_avg_sq"}) {
    const NamedTensor& tensor = by_name.at("optimizer.w." + what);
    EXPECT_EQ(tensor.tensor.scalar_type(), at::kFloat) << what;
    ASSERT_NE(tensor.shard, nullptr) << what;
    EXPECT_EQ(tensor.shard->spec.text(), "'w' float32[5, 4] on (dp=2): dp:S(0){3, 2}") << what;
    EXPECT_EQ(tensor.shard->rank, 1) << what;
  }
}

TEST(MasterWeights, ResumeBitwise) {
  for (const auto& make : steppers()) {
    const auto w = waves(100, 0.7, at::kBFloat16).requires_grad_(),
               v = at::zeros({100}, at::kBFloat16).requires_grad_();
    const auto optimizer = make({{"w", w}});
    const auto step = [](Optimizer& stepped, const at::Tensor& parameter, int number) {
      parameter.mutable_grad() = waves(100, 0.3 + number, at::kBFloat16);
      stepped.step(1e-3);
    };
    for (int i = 0; i < 3; ++i) step(*optimizer, w, i);
    const auto resumed = make({{"w", v}});
    TrainState saved, loaded;
    optimizer->collect_state(saved);
    resumed->collect_state(loaded);
    {
      const at::NoGradGuard no_grad;
      v.copy_(w);
      for (std::size_t i = 0; i < saved.tensors.size(); ++i) loaded.tensors[i].tensor.copy_(saved.tensors[i].tensor);
    }
    for (int i = 3; i < 6; ++i) {
      step(*optimizer, w, i);
      step(*resumed, v, i);
    }
    EXPECT_TRUE(equal_bytes(state_of(*resumed, "w.master"), state_of(*optimizer, "w.master")));
  }
}

TEST(MasterWeights, LayoutInMemoryDoesNotMatter) {
  for (const auto& make : steppers()) {
    const auto plain = waves(35, 0.7, at::kHalf).view({5, 7}).requires_grad_();
    const auto wide = at::full({5, 9}, 3.0, at::kHalf);
    const auto part = wide.narrow(1, 1, 7);
    part.copy_(plain.detach());
    const auto turned = plain.detach().t().contiguous().t().requires_grad_();
    for (const auto& tensor : {plain, part, turned}) tensor.mutable_grad() = waves(35, 0.3, at::kHalf).view({5, 7});
    const auto optimizer = make({{"plain", plain}, {"part", part}, {"turned", turned}});
    for (int step = 0; step < 3; ++step) optimizer->step(0.01);
    EXPECT_TRUE(at::equal(part, plain));
    EXPECT_TRUE(at::equal(turned, plain));
    EXPECT_TRUE(at::equal(wide.select(1, 8), at::full({5}, 3.0, at::kHalf)));
  }
}

}  // namespace
}  // namespace phalanx
