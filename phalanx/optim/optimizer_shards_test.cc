// Optimizers over parts of parameters: the same bits as over the whole.
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/optim/adadelta.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/optim/lion.h"
#include "phalanx/optim/sgd.h"
#include "phalanx/optim/step_kernels.h"

namespace phalanx {
namespace {

using Make = std::function<std::unique_ptr<Optimizer>(std::vector<NamedTensor>)>;

template <class T, class Options>
Make make_with(Options options) {
  return [options](std::vector<NamedTensor> parameters) { return std::make_unique<T>(std::move(parameters), options); };
}

const std::vector<std::pair<std::string, Make>>& optimizers() {
  static const std::vector<std::pair<std::string, Make>> all = {
      {"adamw", make_with<AdamW>(AdamWOptions{})},
      {"adamw without decay", make_with<AdamW>(AdamWOptions{.beta1 = 0.8, .eps = 1e-6, .weight_decay = 0})},
      {"sgd", make_with<Sgd>(SgdOptions{.weight_decay = 0.01})},
      {"sgd with momentum", make_with<Sgd>(SgdOptions{.momentum = 0.9, .weight_decay = 0.05})},
      {"sgd with nesterov", make_with<Sgd>(SgdOptions{.momentum = 0.9, .nesterov = true})},
      {"lion", make_with<Lion>(LionOptions{.weight_decay = 0.05})},
      {"adadelta", make_with<Adadelta>(AdadeltaOptions{.weight_decay = 0.05})},
  };
  return all;
}

/// Values of many magnitudes, zeros and denormals among them.
std::vector<float> random_values(std::mt19937_64& generator, std::size_t count) {
  std::vector<float> values(count);
  for (auto& value : values) {
    const int exponent = static_cast<int>(generator() % 60) - 40;
    value = std::ldexp(static_cast<float>(static_cast<double>(generator() % 2000001) - 1000000) * 1e-6F, exponent);
    if (generator() % 50 == 0) value = generator() % 2 == 0 ? 0.0F : 1e-41F;
  }
  return values;
}

/// A tensor of these values whose memory begins `shift` floats after an aligned address.
at::Tensor shifted_tensor(const float* values, std::int64_t count, std::int64_t shift) {
  const auto tensor = at::empty({count + shift}, at::TensorOptions(at::kFloat)).narrow(0, shift, count);
  if (count > 0) std::memcpy(tensor.mutable_data_ptr<float>(), values, static_cast<std::size_t>(count) * sizeof(float));
  return tensor;
}

bool same_bits(const at::Tensor& tensor, const float* expected) {
  return tensor.numel() == 0 || std::memcmp(tensor.const_data_ptr<float>(), expected,
                                            static_cast<std::size_t>(tensor.numel()) * sizeof(float)) == 0;
}

TEST(OptimizerShards, AnElementGetsTheSameBitsWhereverItsArrayIsCut) {
  constexpr std::int64_t kCount = 70'001;  // several parts per thread
  constexpr std::size_t kSteps = 4;
  std::mt19937_64 generator(7);
  const int threads = at::get_num_threads();
  for (const auto& [what, make] : optimizers()) {
    for (int round = 0; round < 3; ++round) {
      const auto start = random_values(generator, kCount);
      std::vector<std::vector<float>> grads;
      for (std::size_t step = 0; step < kSteps; ++step) grads.push_back(random_values(generator, kCount));
      // Ends of the pieces: some of them next to each other, some empty.
      std::vector<std::int64_t> ends = {0, 1, 8, 8, 23, 101, 102, 16384, kCount};
      for (int i = 0; i < 20; ++i) ends.push_back(static_cast<std::int64_t>(generator() % (kCount + 1)));
      std::sort(ends.begin(), ends.end());

      at::set_num_threads(1);
      const auto whole = shifted_tensor(start.data(), kCount, 0).requires_grad_();
      const auto reference = make({{"w", whole}});
      TrainState reference_state;
      reference->collect_state(reference_state);
      std::vector<NamedTensor> pieces;
      std::vector<std::int64_t> shifts;
      for (std::size_t i = 0; i + 1 < ends.size(); ++i) {
        shifts.push_back(static_cast<std::int64_t>(generator() % 17));
        pieces.push_back({fmt::format("w{}", i),
                          shifted_tensor(start.data() + ends[i], ends[i + 1] - ends[i], shifts[i]).requires_grad_()});
      }
      const auto optimizer = make(pieces);
      TrainState state;
      optimizer->collect_state(state);
      for (std::size_t step = 0; step < kSteps; ++step) {
        const double lr = 1e-2 / static_cast<double>(step + 1);
        at::set_num_threads(1);
        whole.mutable_grad() = shifted_tensor(grads[step].data(), kCount, 0);
        reference->step(lr);
        at::set_num_threads(2);
        for (std::size_t i = 0; i < pieces.size(); ++i) {
          pieces[i].tensor.mutable_grad() =
              shifted_tensor(grads[step].data() + ends[i], ends[i + 1] - ends[i], (shifts[i] * 5) % 16);
        }
        optimizer->step(lr);
      }
      for (std::size_t i = 0; i < pieces.size(); ++i) {
        EXPECT_TRUE(same_bits(pieces[i].tensor, whole.const_data_ptr<float>() + ends[i]))
            << what << ": parameter " << ends[i] << " to " << ends[i + 1];
        for (std::size_t s = 0; s < reference_state.tensors.size(); ++s) {
          if (reference_state.tensors[s].tensor.dim() == 0) continue;
          EXPECT_TRUE(same_bits(state.tensors[s * pieces.size() + i].tensor,
                                reference_state.tensors[s].tensor.const_data_ptr<float>() + ends[i]))
              << what << ": " << reference_state.tensors[s].name << " " << ends[i] << " to " << ends[i + 1];
        }
      }
    }
  }
  at::set_num_threads(threads);
}

/// The value, rounded to float32 here: no compiler contracts across it.
float rounded(float value) {
  volatile float result = value;
  return result;
}

TEST(OptimizerShards, EveryOperationIsRoundedByItself) {
  constexpr std::size_t kCount = 1003;
  std::mt19937_64 generator(5);
  const auto grad = random_values(generator, kCount), start = random_values(generator, kCount);
  auto p = start, m = random_values(generator, kCount), v = random_values(generator, kCount);
  for (auto& value : v) value = std::abs(value);
  auto expected_p = p, expected_m = m, expected_v = v;
  const AdamWStep s(1e-2, 0.9, 0.95, 1e-8, 0.1, 3);
  EXPECT_FLOAT_EQ(s.size, static_cast<float>(1e-2 / (1 - 0.9 * 0.9 * 0.9)));
  for (std::size_t i = 0; i < kCount; ++i) {
    const float decayed = rounded(p[i] - rounded(s.decay * p[i]));
    expected_m[i] = m[i] + rounded(s.grad_weight * rounded(grad[i] - m[i]));
    expected_v[i] = rounded(s.beta2 * v[i]) + rounded(rounded(s.square_weight * grad[i]) * grad[i]);
    const float root = rounded(std::sqrt(rounded(expected_v[i])));
    const float denominator = rounded(rounded(root * s.inverse_correction) + s.eps);
    expected_p[i] = decayed - rounded(rounded(s.size * rounded(expected_m[i])) / denominator);
  }
  adamw_step(s, kCount, grad.data(), p.data(), m.data(), v.data());
  EXPECT_EQ(std::memcmp(m.data(), expected_m.data(), kCount * sizeof(float)), 0);
  EXPECT_EQ(std::memcmp(v.data(), expected_v.data(), kCount * sizeof(float)), 0);
  EXPECT_EQ(std::memcmp(p.data(), expected_p.data(), kCount * sizeof(float)), 0);

  for (const bool nesterov : {false, true}) {
    auto q = start, b = random_values(generator, kCount), expected_q = start, expected_b = b;
    const SgdStep t{0.01F, 0.9F, 0.05F, nesterov};
    for (std::size_t i = 0; i < kCount; ++i) {
      const float g = rounded(grad[i] + rounded(t.weight_decay * q[i]));
      expected_b[i] = rounded(t.momentum * b[i]) + g;
      const float update = nesterov ? rounded(g + rounded(t.momentum * expected_b[i])) : expected_b[i];
      expected_q[i] = q[i] - rounded(t.lr * update);
    }
    sgd_step(t, kCount, grad.data(), q.data(), b.data());
    EXPECT_EQ(std::memcmp(b.data(), expected_b.data(), kCount * sizeof(float)), 0) << nesterov;
    EXPECT_EQ(std::memcmp(q.data(), expected_q.data(), kCount * sizeof(float)), 0) << nesterov;
  }

  auto lion = start, mean = m, expected_lion = start, expected_mean = m;
  const LionStep l{0.01F, 0.002F, 0.1F, 0.01F};
  for (std::size_t i = 0; i < kCount; ++i) {
    const float off = rounded(grad[i] - mean[i]), c = mean[i] + rounded(l.grad_weight * off);
    const float kept = lion[i] - rounded(l.decay * lion[i]);
    expected_lion[i] = kept - (c > 0 ? l.lr : c < 0 ? -l.lr : 0.0F);
    expected_mean[i] = mean[i] + rounded(l.momentum_weight * off);
  }
  lion_step(l, kCount, grad.data(), lion.data(), mean.data());
  EXPECT_EQ(std::memcmp(lion.data(), expected_lion.data(), kCount * sizeof(float)), 0);
  EXPECT_EQ(std::memcmp(mean.data(), expected_mean.data(), kCount * sizeof(float)), 0);

  auto q = start, squares = v, deltas = v, expected_q = q;
  const AdadeltaStep a{0.5F, 0.9F, 0.1F, 1e-6F, 0.05F};
  for (std::size_t i = 0; i < kCount; ++i) {
    const float g = rounded(grad[i] + rounded(a.weight_decay * q[i]));
    const float square = rounded(a.rho * squares[i]) + rounded(rounded(a.square_weight * g) * g);
    const float ratio = rounded(std::sqrt(rounded(deltas[i] + a.eps))) / rounded(std::sqrt(rounded(square + a.eps)));
    expected_q[i] = q[i] - rounded(a.lr * rounded(rounded(ratio) * g));
  }
  adadelta_step(a, kCount, grad.data(), q.data(), squares.data(), deltas.data());
  EXPECT_EQ(std::memcmp(q.data(), expected_q.data(), kCount * sizeof(float)), 0);
}

TEST(OptimizerShards, LayoutInMemoryDoesNotMatter) {
  std::mt19937_64 generator(11);
  const auto start = random_values(generator, 35), gradient = random_values(generator, 35);
  for (const auto& [what, make] : optimizers()) {
    const auto plain = shifted_tensor(start.data(), 35, 0).view({5, 7}).requires_grad_();
    plain.mutable_grad() = shifted_tensor(gradient.data(), 35, 0).view({5, 7});
    // Columns first, a gradient in another layout than its parameter, and columns out of a wider matrix.
    const auto turned = plain.detach().t().contiguous().t().requires_grad_();
    turned.mutable_grad() = plain.grad().clone();
    const auto back = plain.detach().clone().requires_grad_();
    back.mutable_grad() = plain.grad().t().contiguous().t();
    const auto wide = at::full({5, 9}, 3.0F);
    const auto part = wide.narrow(1, 1, 7);
    part.copy_(plain.detach());
    part.mutable_grad() = plain.grad().clone();
    const auto optimizer = make({{"plain", plain}, {"turned", turned}, {"back", back}, {"part", part}});
    for (int step = 0; step < 3; ++step) optimizer->step(0.01);
    EXPECT_FALSE(same_bits(plain, start.data())) << what;
    EXPECT_TRUE(at::equal(turned, plain)) << what;
    EXPECT_TRUE(at::equal(back, plain)) << what;
    EXPECT_TRUE(at::equal(part, plain)) << what;
    EXPECT_TRUE(at::equal(wide.select(1, 0), at::full({5}, 3.0F))) << what;  // nothing is written outside the part
    EXPECT_TRUE(at::equal(wide.select(1, 8), at::full({5}, 3.0F))) << what;
  }
}

TEST(OptimizerShards, EmptyPartsStep) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    for (const auto& [what, make] : optimizers()) {
      const auto empty = at::zeros({0, 4}, dtype).requires_grad_(), other = at::ones({2}, dtype).requires_grad_();
      const auto optimizer = make({{"empty", empty}, {"other", other}});
      empty.mutable_grad() = at::zeros({0, 4}, dtype);
      other.mutable_grad() = at::ones({2}, dtype);
      optimizer->step(10);  // far enough for 16 bits
      EXPECT_FALSE(at::equal(other, at::ones({2}, dtype))) << what;
      TrainState state;
      optimizer->collect_state(state);
      for (const auto& [name, tensor, shard] : state.tensors) {
        // A rank also counts the steps of parameters that only other ranks have.
        if (name == "optimizer.empty.step") {
          EXPECT_EQ(tensor.item<float>(), 1) << what;
        } else if (name == "optimizer.empty.exp_avg") {
          EXPECT_EQ(tensor.sizes(), empty.sizes()) << what;
        }
      }
      other.mutable_grad().reset();
      optimizer->step(0.1);  // nothing else to do
    }
  }
}

template <class Body>
void expect_refusal(const std::vector<std::string>& parts, Body&& body) {
  try {
    body();
    ADD_FAILURE() << "expected an error about " << parts.front();
  } catch (const Error& error) {
    for (const auto& part : parts) EXPECT_THAT(error.what(), HasSubstr(part));
  }
}

TEST(OptimizerShards, AutogradNoticesTheStep) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    const auto w = at::ones({3}, dtype).requires_grad_();
    AdamW optimizer({{"w", w}});
    const auto loss = w.mul(w).sum();  // its backward needs w as it is here
    w.mutable_grad() = at::ones({3}, dtype);
    optimizer.step(0.1);
    try {
      loss.backward();
      ADD_FAILURE() << "gradients of weights that are gone, " << dtype;
    } catch (const std::exception& error) {
      EXPECT_THAT(error.what(), HasSubstr("modified by an inplace operation"));
    }
  }
}

TEST(OptimizerShards, RefusesGradientsOfAnotherShape) {
  const auto p = at::ones({3, 2}).requires_grad_(), q = at::ones({2}).requires_grad_();
  AdamW optimizer({{"q", q}, {"p", p}});
  // Autograd itself refuses such a gradient only when it creates it. The owner of flat buffers may set any gradient.
  q.mutable_grad() = at::ones({2});
  p.mutable_grad() = at::ones({2, 3});
  expect_refusal({"the gradient of 'p' is [2, 3] on cpu; the parameter is [3, 2] on cpu"},
                 [&] { optimizer.step(0.1); });
  EXPECT_TRUE(at::equal(q, at::ones({2})));  // nothing was updated
}

std::shared_ptr<const Shard> rows_of_rank(int rank) {
  return std::make_shared<const Shard>(
      Shard{ShardSpec("w", {5, 4}, DataType::f32, MeshShape({{"dp", 3}}), Placement::parse("dp:S(0){3, 0, 2}")), rank});
}

TEST(OptimizerShards, StateIsLaidOutAsItsParameter) {
  for (int rank = 0; rank < 3; ++rank) {
    const auto shard = rows_of_rank(rank);
    const auto rows = at::ones(shard->box().shape).requires_grad_();
    const std::vector<NamedTensor> parameters = {{"w", rows, shard}, {"bias", at::ones({4}).requires_grad_()}};
    TrainState state;
    AdamW adamw(parameters);
    Sgd sgd(parameters, {.momentum = 0.9});
    adamw.collect_state(state);
    sgd.collect_state(state);
    std::map<std::string, const NamedTensor*> by_name;
    for (const auto& tensor : state.tensors) by_name[tensor.name] = &tensor;
    ASSERT_EQ(by_name.size(), 8U);
    for (const std::string what : {"exp_avg", "exp_avg_sq", "momentum_buffer"}) {
      const NamedTensor& moment = *by_name.at("optimizer.w." + what);
      EXPECT_EQ(moment.shard, shard) << what;
      EXPECT_EQ(moment.tensor.sizes(), rows.sizes()) << what;
      EXPECT_EQ(moment.global_shape(), (std::vector<std::int64_t>{5, 4})) << what;
      EXPECT_EQ(by_name.at("optimizer.bias." + what)->shard, nullptr) << what;
    }
    EXPECT_EQ(by_name.at("optimizer.w.step")->shard, nullptr);  // a number that every rank has
    EXPECT_EQ(by_name.at("optimizer.w.step")->tensor.dim(), 0);
  }
}

TEST(OptimizerShards, RefusesATensorThatIsNotItsShard) {
  const auto shard = rows_of_rank(2);
  expect_refusal({"'w' has the shape [5, 4] on rank 2 of its mesh, whose part is [3:5, 0:4]", "dp:S(0){3, 0, 2}"}, [&] {
    AdamW optimizer({{"w", at::ones({5, 4}), shard}});
  });
  const auto partial = std::make_shared<const Shard>(
      Shard{ShardSpec("w", {5, 4}, DataType::f32, MeshShape({{"dp", 3}}), Placement::parse("dp:P")), 0});
  expect_refusal({"'w' is an addend along 'dp'", "expected values"}, [&] {
    AdamW optimizer({{"w", at::ones({5, 4}), partial}});
  });
}

}  // namespace
}  // namespace phalanx
