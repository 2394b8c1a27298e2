// AdamW with moments, and parameters without masters, in 16 bits, rounded to nearest and stochastically.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/optim/stochastic_rounding.h"
#include "phalanx/optim/widen.h"
#include "phalanx/tensor/counter_fill.h"
#include "phalanx/tensor/narrow_to_box.h"

namespace phalanx::narrow_state_test {
namespace {

at::Tensor waves(std::int64_t count, double frequency, at::ScalarType dtype = at::kFloat) {
  return at::sin(at::arange(count, at::TensorOptions(at::kFloat)).mul(frequency)).to(dtype);
}

std::string bytes_of(const at::Tensor& tensor) {
  const at::Tensor whole = tensor.contiguous();
  return {static_cast<const char*>(whole.const_data_ptr()), whole.nbytes()};
}

bool equal_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && bytes_of(a) == bytes_of(b);
}

std::vector<std::uint16_t> rounded(RoundingKey key, std::uint64_t first, const std::vector<float>& values) {
  std::vector<std::uint16_t> result(values.size());
  round_stochastically(key, first, values.size(), values.data(), result.data());
  return result;
}

float value_of(std::uint16_t bits) { return __builtin_bit_cast(float, std::uint32_t{bits} << 16); }

at::Tensor state_of(const Optimizer& optimizer, const std::string& name) {
  TrainState state;
  optimizer.collect_state(state);
  for (const auto& tensor : state.tensors) {
    if (tensor.name == "optimizer." + name) return tensor.tensor;
  }
  return {};
}

AdamWOptions narrow_options(bool stochastic, at::ScalarType moments = at::kBFloat16) {
  return {.weight_decay = 0.1,
          .master_weights = false,
          .state_dtype = moments,
          .stochastic_rounding = stochastic,
          .seed = 3};
}

TEST(StochasticRounding, HasTheMeanOfTheExactValue) {
  constexpr std::size_t kCount = 1 << 16;
  for (const float share : {0.0F, 0.125F, 0.5F, 0.9F}) {
    for (const float sign : {1.0F, -1.0F}) {
      const float value = sign * (1 + share / 128);  // between 1 and its neighbour 1 + 1/128
      double sum = 0;
      std::size_t ups = 0, same_as_before = 0;
      std::vector<std::uint16_t> before;
      for (std::uint64_t step = 1; step <= 4; ++step) {
        const auto found = rounded(rounding_key(stream_key(7, "w"), step), 0, std::vector<float>(kCount, value));
        for (std::size_t i = 0; i < kCount; ++i) {
          const float one = value_of(found[i]);
          EXPECT_TRUE(one == sign || one == sign * (1 + 1.0F / 128)) << one;
          sum += one;
          ups += one != sign;
          same_as_before += !before.empty() && before[i] == found[i];
        }
        before = found;
      }
      const double draws = 4.0 * kCount, deviation = std::sqrt(draws * share * (1 - share));
      EXPECT_NEAR(static_cast<double>(ups), draws * share, 4 * deviation) << value;
      EXPECT_NEAR(sum / draws, value, 1e-4) << value;
      // Draws of two steps are independent.
      const double same = share * share + (1 - share) * (1 - share), pairs = 3.0 * kCount;
      EXPECT_NEAR(static_cast<double>(same_as_before), pairs * same, 4 * std::sqrt(pairs * same * (1 - same)) + 1e-9);
    }
  }
}

TEST(StochasticRounding, LeavesWhatBfloat16Has) {
  std::vector<float> values;
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) values.push_back(value_of(static_cast<std::uint16_t>(bits)));
  const auto found = rounded(rounding_key(5, 1), 0, values);
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (std::isnan(values[i])) {
      EXPECT_TRUE(std::isnan(value_of(found[i]))) << i;
    } else {
      EXPECT_EQ(found[i], i);
    }
  }
  const float quiet = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(value_of(rounded(rounding_key(5, 1), 0, {quiet})[0])));
}

TEST(StochasticRounding, DependsOnStepNameSeedAndIndexAlone) {
  const std::vector<float> values(1000, 1.001F);
  const auto key = [](std::uint64_t seed, const char* name, std::uint64_t step) {
    return rounding_key(stream_key(seed, name), step);
  };
  // Across the border at which an index has more than 32 bits.
  const std::uint64_t first = (std::uint64_t{1} << 32) - 500;
  const auto whole = rounded(key(1, "w", 9), first, values);
  for (const std::size_t from : {1U, 499U, 500U, 501U, 777U}) {
    const auto part =
        rounded(key(1, "w", 9), first + from, {values.begin() + static_cast<std::ptrdiff_t>(from), values.end()});
    EXPECT_EQ(part, std::vector<std::uint16_t>(whole.begin() + static_cast<std::ptrdiff_t>(from), whole.end()));
  }
  EXPECT_NE(rounded(key(2, "w", 9), first, values), whole);
  EXPECT_NE(rounded(key(1, "v", 9), first, values), whole);
  EXPECT_NE(rounded(key(1, "w", 10), first, values), whole);
  EXPECT_NE(rounded(key(1, "w", 9), first + (std::uint64_t{1} << 32), values), whole);
}

TEST(StochasticRounding, OperatorsOfLibtorchRoundAlike) {
  std::vector<float> values;
  for (std::uint32_t i = 0; i < 100'000; ++i) values.push_back(__builtin_bit_cast(float, i * 2654435761U));
  const std::uint64_t stream = stream_key(11, "w"), first = (std::uint64_t{1} << 32) - 30'000;
  const auto expected = rounded(rounding_key(stream, 12), first, values);
  const at::Tensor wide = at::tensor(values);
  const auto count = static_cast<std::int64_t>(values.size());
  const at::Tensor indices = at::arange(count, at::TensorOptions(at::kLong)).add(static_cast<std::int64_t>(first));
  const at::Tensor found = round_stochastically(stream, at::full({}, 12.0, at::kFloat), indices, wide);
  ASSERT_EQ(found.scalar_type(), at::kBFloat16);
  const auto* bits = static_cast<const std::uint16_t*>(found.const_data_ptr());
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (std::isnan(values[i])) {
      ASSERT_TRUE(std::isnan(value_of(bits[i]))) << i;
    } else {
      ASSERT_EQ(bits[i], expected[i]) << i;
    }
  }
}

// One step from known values: the float32 step, rounded.
TEST(NarrowState, AStepIsThatOfFloat32Rounded) {
  constexpr std::int64_t kCount = 40'003;
  for (const bool has_master : {true, false}) {
    for (const auto moments : {at::kFloat, at::kBFloat16}) {
      for (const auto grads : {at::kFloat, at::kBFloat16}) {
        const auto w = waves(kCount, 0.7, at::kBFloat16).requires_grad_();
        const auto wide = w.detach().to(at::kFloat).requires_grad_();
        AdamW optimizer({{"w", w}}, {.master_weights = has_master, .state_dtype = moments});
        AdamW reference({{"w", wide}}, {});
        w.mutable_grad() = waves(kCount, 0.3, grads);
        wide.mutable_grad() = w.grad().to(at::kFloat);
        optimizer.step(1e-2, {.grad_factor = 0.3});
        reference.step(1e-2, {.grad_factor = 0.3});
        EXPECT_TRUE(equal_bytes(w, wide.detach().to(at::kBFloat16)));
        for (const std::string what : {"w.exp_avg", "w.exp_avg_sq"}) {
          EXPECT_EQ(state_of(optimizer, what).scalar_type(), moments);
          EXPECT_TRUE(equal_bytes(state_of(optimizer, what), state_of(reference, what).to(moments))) << what;
        }
        EXPECT_EQ(state_of(optimizer, "w.master").defined(), has_master);
      }
    }
  }
}

TEST(NarrowState, StochasticRoundingKeepsSmallUpdates) {
  for (const bool stochastic : {false, true}) {
    const auto w = at::full({4096}, 1.0, at::kBFloat16).requires_grad_();
    AdamWOptions options = narrow_options(stochastic, at::kFloat);
    options.weight_decay = 0;
    AdamW optimizer({{"w", w}}, options);
    for (int step = 0; step < 100; ++step) {
      w.mutable_grad() = at::full({4096}, 1.0, at::kBFloat16);
      optimizer.step(1e-3);  // 1 - 0.001 rounds to 1
    }
    EXPECT_NEAR(w.to(at::kFloat).mean().item<double>(), stochastic ? 0.9 : 1.0, 2e-3);
  }
}

TEST(NarrowState, EveryCutHasTheBitsOfTheWhole) {
  constexpr std::int64_t kRows = 97, kColumns = 83;
  const std::vector<std::int64_t> shape = {kRows, kColumns};
  const auto initial = waves(kRows * kColumns, 0.7, at::kBFloat16).view(shape);
  const auto gradient = [&](int step) { return waves(kRows * kColumns, 0.3 + step).view(shape); };
  for (const auto moments : {at::kFloat, at::kBFloat16}) {
    const auto whole = initial.clone().requires_grad_();
    AdamW reference({{"w", whole}}, narrow_options(true, moments));
    for (int step = 0; step < 3; ++step) {
      whole.mutable_grad() = gradient(step);
      reference.step(1e-2);
    }
    for (const char* placement : {"dp:S(0)", "dp:S(1)", "tp:S(1), dp:S(0)", "tp:S(0), dp:S(1)"}) {
      const ShardSpec spec("w", shape, DataType::bf16, MeshShape({{"dp", 3}, {"tp", 2}}), Placement::parse(placement));
      for (int rank = 0; rank < 6; ++rank) {
        const auto shard = std::make_shared<const Shard>(Shard{spec, rank});
        const Box box = shard->box();
        const auto part_of = [&](const at::Tensor& tensor) { return narrow_to_box(tensor, box); };
        const auto w = part_of(initial).contiguous().clone().requires_grad_();
        AdamW optimizer({{"w", w, shard}}, narrow_options(true, moments));
        for (int step = 0; step < 3; ++step) {
          w.mutable_grad() = part_of(gradient(step)).contiguous();
          optimizer.step(1e-2);
        }
        EXPECT_TRUE(equal_bytes(w, part_of(whole.detach()))) << placement << " " << rank;
        EXPECT_TRUE(equal_bytes(state_of(optimizer, "w.exp_avg"), part_of(state_of(reference, "w.exp_avg"))));
        EXPECT_TRUE(equal_bytes(state_of(optimizer, "w.exp_avg_sq"), part_of(state_of(reference, "w.exp_avg_sq"))));
      }
    }
  }
}

TEST(NarrowState, LayoutInMemoryDoesNotMatter) {
  for (const bool has_master : {true, false}) {
    const auto plain = waves(35, 0.7, at::kBFloat16).view({5, 7}).requires_grad_();
    const auto turned = plain.detach().t().contiguous().t().requires_grad_();
    const auto part = at::full({5, 9}, 3.0, at::kBFloat16).narrow(1, 1, 7);
    part.copy_(plain.detach());
    std::vector<std::string> found;
    for (const auto& w : {plain, turned, part}) {
      AdamWOptions options = narrow_options(true);
      options.master_weights = has_master;
      AdamW optimizer({{"w", w}}, options);
      for (int step = 0; step < 3; ++step) {
        w.mutable_grad() = waves(35, 0.3 + step, at::kBFloat16).view({5, 7});
        optimizer.step(0.01);
      }
      found.push_back(bytes_of(w.detach()) + bytes_of(state_of(optimizer, "w.exp_avg")));
    }
    EXPECT_TRUE(found[1] == found[0]);
    EXPECT_TRUE(found[2] == found[0]);
  }
}

TEST(NarrowState, ResumesBitwise) {
  const auto step = [](Optimizer& optimizer, const at::Tensor& w, int number) {
    w.mutable_grad() = waves(100, 0.3 + number, at::kBFloat16);
    optimizer.step(1e-3);
  };
  const auto w = waves(100, 0.7, at::kBFloat16).requires_grad_(), v = at::zeros({100}, at::kBFloat16).requires_grad_();
  AdamW optimizer({{"w", w}}, narrow_options(true)), resumed({{"w", v}}, narrow_options(true));
  for (int i = 0; i < 3; ++i) step(optimizer, w, i);
  TrainState saved, loaded;
  optimizer.collect_state(saved);
  resumed.collect_state(loaded);
  {
    const at::NoGradGuard no_grad;
    v.copy_(w);
    for (std::size_t i = 0; i < saved.tensors.size(); ++i) loaded.tensors[i].tensor.copy_(saved.tensors[i].tensor);
  }
  for (int i = 3; i < 6; ++i) {
    step(optimizer, w, i);
    step(resumed, v, i);
  }
  EXPECT_TRUE(equal_bytes(v.detach(), w.detach()));
  EXPECT_TRUE(equal_bytes(state_of(resumed, "w.exp_avg_sq"), state_of(optimizer, "w.exp_avg_sq")));
}

TEST(NarrowState, ShardsOfStateHaveItsType) {
  const auto shard = std::make_shared<const Shard>(
      Shard{ShardSpec("w", {5, 4}, DataType::bf16, MeshShape({{"dp", 2}}), Placement::parse("dp:S(0){3, 2}")), 1});
  AdamW wide({{"w", at::zeros({2, 4}, at::kBFloat16), shard}}, narrow_options(false, at::kFloat));
  AdamW narrow({{"w", at::zeros({2, 4}, at::kBFloat16), shard}}, {.state_dtype = at::kBFloat16});
  const auto type = [](const Optimizer& optimizer, const std::string& name) {
    TrainState state;
    optimizer.collect_state(state);
    for (const auto& one : state.tensors) {
      if (one.name == "optimizer.w." + name) return one.shard->spec.dtype();
    }
    return DataType::u8;
  };
  EXPECT_EQ(type(wide, "exp_avg"), DataType::f32);
  EXPECT_EQ(type(narrow, "exp_avg"), DataType::bf16);
  EXPECT_EQ(type(narrow, "master"), DataType::f32);
}

TEST(NarrowState, WhatIsNotKnownIsRefused) {
  const auto half = at::zeros({2}, at::kHalf);
  EXPECT_THAT(error_text<ConfigError>([&] {
                AdamW({{"w", half}}, narrow_options(true));
              }),
              HasSubstr("stochastic_rounding is for bfloat16, but parameter 'w' is Half"));
  EXPECT_THAT(error_text<ConfigError>([&] {
                AdamW({{"w", half}}, {.state_dtype = at::kHalf});
              }),
              HasSubstr("state_dtype is Half: expected Float or BFloat16"));
}

}  // namespace
}  // namespace phalanx::narrow_state_test
