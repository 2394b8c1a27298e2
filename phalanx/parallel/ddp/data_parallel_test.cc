#include "phalanx/parallel/ddp/data_parallel.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/relu.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <condition_variable>
#include <mutex>
#include <set>
#include <thread>

#include "phalanx/base/testing/matchers.h"
#include "phalanx/nn/dropout.h"
#include "phalanx/nn/init.h"
#include "phalanx/nn/linear.h"
#include "phalanx/optim/sgd.h"
#include "phalanx/parallel/testing/ddp_test_support.h"

namespace phalanx {
namespace {

using ddp_testing::message_of;
using ddp_testing::waves;

std::vector<at::Device> cpus(std::size_t count) { return std::vector<at::Device>(count, at::kCPU); }

// A plain module that cannot be cloned: a convolution, a hidden layer and an output.
struct SmallNet : torch::nn::Module {
  SmallNet() : torch::nn::Module("SmallNet") {
    kernel = register_parameter("kernel", waves({4, 1, 3, 3}, 0.1).mul(0.4));
    hidden = register_parameter("hidden", waves({12, 64}, 0.7).mul(0.2));
    bias = register_parameter("bias", waves({12}, 0.3));
    out = register_parameter("out", waves({3, 12}, 1.9).mul(0.5));
  }
  at::Tensor forward(const at::Tensor& x) {  // [batch, 1, 6, 6] -> [batch, 3]
    const at::Tensor features = at::relu(at::conv2d(x, kernel)).flatten(1);
    return at::linear(at::tanh(at::linear(features, hidden, bias)), out);
  }
  at::Tensor kernel, hidden, bias, out;
};
std::shared_ptr<SmallNet> make_small_net() { return std::make_shared<SmallNet>(); }

// Every row times w: gradients and outputs are known.
struct Scale : torch::nn::Module {
  Scale() : torch::nn::Module("Scale") { w = register_parameter("w", at::ones({2})); }
  at::Tensor forward(const at::Tensor& x) { return x * w; }
  at::Tensor w;
};
std::shared_ptr<Scale> make_scale() { return std::make_shared<Scale>(); }

// What a body of the test does instead of a forward pass.
struct Probe : torch::nn::Module {
  using Body = std::function<at::Tensor(Probe&, const at::Tensor&)>;
  explicit Probe(Body body) : torch::nn::Module("Probe"), body(std::move(body)) {
    w = register_parameter("w", at::ones({1}));
  }
  at::Tensor forward(const at::Tensor& x) { return body(*this, x); }
  Body body;
  at::Tensor w;
};

double distance(const at::Tensor& a, const at::Tensor& b) { return a.sub(b).abs().max().item<double>(); }

TEST(DataParallelTest, ClosedForm) {
  Scale scale;
  DataParallel parallel(scale, cpus(3), make_scale);
  const at::Tensor x = at::arange(14, at::kFloat).view({7, 2});  // pieces of 3, 2 and 2 rows
  const at::Tensor y = parallel.forward(x);
  EXPECT_TRUE(at::equal(y, x));
  y.sum().backward();
  EXPECT_TRUE(at::equal(scale.w.grad(), x.sum(0)));
}

TEST(DataParallelTest, EqualsOneDevice) {
  // Products over other numbers of rows may be rounded in another order, and sums over the batch are cut: 1e-6 of
  // outputs and gradients of size 1.
  for (const std::size_t replicas : {1, 2, 3, 4}) {
    for (const std::int64_t rows : {8, 7, 2, 1, 0}) {
      SmallNet net, alone;
      DataParallel parallel(net, cpus(replicas), make_small_net);
      at::Tensor x = waves({rows, 1, 6, 6}, 0.2), same = x.clone();
      x.requires_grad_(), same.requires_grad_();
      const at::Tensor y = parallel.forward(x), expected = alone.forward(same);
      ASSERT_EQ(y.sizes(), expected.sizes());
      if (rows == 0) continue;
      EXPECT_LE(distance(y, expected), 1e-6) << replicas << " replicas, " << rows << " rows";
      y.square().mean().backward();
      expected.square().mean().backward();
      EXPECT_LE(distance(x.grad(), same.grad()), 1e-6);
      for (std::size_t i = 0; i < net.parameters().size(); ++i) {
        EXPECT_LE(distance(net.parameters()[i].grad(), alone.parameters()[i].grad()), 1e-6) << i;
      }
    }
  }
}

TEST(DataParallelTest, AForwardPassWithoutGradientsLeavesEarlierGraphsAlone) {
  SmallNet net, alone;
  DataParallel parallel(net, cpus(3), make_small_net);
  const at::Tensor x = waves({7, 1, 6, 6}, 0.2), other = waves({7, 1, 6, 6}, 0.9);
  const at::Tensor y = parallel.forward(x);
  {
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(parallel.forward(other).requires_grad());
  }
  y.square().mean().backward();
  alone.forward(x).square().mean().backward();
  for (std::size_t i = 0; i < net.parameters().size(); ++i) {
    EXPECT_LE(distance(net.parameters()[i].grad(), alone.parameters()[i].grad()), 1e-6) << i;
  }
}

TEST(DataParallelTest, TrainsAsOneDevice) {
  // 20 steps let differences of the last bit grow: 1e-5 of weights of size 1.
  SmallNet net, alone;
  DataParallel parallel(net, cpus(3), make_small_net);
  Sgd optimizer(nn::named_parameters(net), {.momentum = 0.9}), other(nn::named_parameters(alone), {.momentum = 0.9});
  for (int step = 0; step < 20; ++step) {
    const at::Tensor x = waves({10, 1, 6, 6}, step), target = waves({10, 3}, 2.0 * step);
    const at::Tensor loss = parallel.forward(x).sub(target).square().mean();
    const at::Tensor expected = alone.forward(x).sub(target).square().mean();
    EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-5 * expected.item<double>()) << step;
    loss.backward();
    expected.backward();
    optimizer.step(0.05), other.step(0.05);
    optimizer.zero_grad(), other.zero_grad();
  }
  for (std::size_t i = 0; i < net.parameters().size(); ++i) {
    EXPECT_LE(distance(net.parameters()[i], alone.parameters()[i]), 1e-5) << i;
    EXPECT_GE(distance(net.parameters()[i], SmallNet().parameters()[i]), 1e-2) << "never moved";
  }
}

TEST(DataParallelTest, ForwardPassesAddUpAndGradientsOfGradientsFlow) {
  Scale scale;
  DataParallel parallel(scale, cpus(2), make_scale);
  const at::Tensor x = at::arange(8, at::kFloat).view({4, 2});
  const at::Tensor first = parallel.forward(x), second = parallel.forward(x * 10);
  (first.sum() + second.sum()).backward();
  EXPECT_TRUE(at::equal(scale.w.grad(), x.sum(0) * 11));

  // y = x w; g = d sum(y^2) / dw = 2 w sum(x^2); d sum(g) / dw = 2 sum(x^2).
  scale.zero_grad();
  const auto grads = torch::autograd::grad({parallel.forward(x).square().sum()}, {scale.w}, {}, /*retain_graph=*/true,
                                           /*create_graph=*/true);
  grads[0].sum().backward();
  EXPECT_TRUE(at::equal(scale.w.grad(), x.square().sum(0) * 2));
}

TEST(DataParallelTest, AParameterChangedBeforeTheBackwardPassIsTorchsError) {
  // A sum does not need w again. A product does, here only in the copy.
  const Probe::Body body = [](Probe& probe, const at::Tensor& x) {
    return x.lt(0).any().item<bool>() ? x * probe.w : x + probe.w;
  };
  Probe probe(body);
  DataParallel parallel(probe, cpus(2), [&] { return std::make_shared<Probe>(body); });
  const at::Tensor x = at::tensor({1.0F, -1.0F}).requires_grad_();
  const at::Tensor y = parallel.forward(x);
  {
    const at::NoGradGuard no_grad;
    probe.w.mul_(2);
  }
  EXPECT_THROW(y.sum().backward(), c10::Error);
  EXPECT_TRUE(at::equal(parallel.forward(x), at::tensor({3.0F, -2.0F})));  // and the next pass uses the new value
}

TEST(DataParallelTest, FrozenAndUnusedParameters) {
  struct Choosy : torch::nn::Module {  // uses `rare` where a row is negative
    Choosy() : torch::nn::Module("Choosy") {
      frozen = register_parameter("frozen", at::ones({1}), /*requires_grad=*/false);
      rare = register_parameter("rare", at::ones({1}));
      never = register_parameter("never", at::ones({1}));
    }
    at::Tensor forward(const at::Tensor& x) { return x.lt(0).any().item<bool>() ? x * frozen * rare : x * frozen; }
    at::Tensor frozen, rare, never;
  } choosy;
  DataParallel parallel(choosy, cpus(2), [] { return std::make_shared<Choosy>(); });
  parallel.forward(at::arange(4, at::kFloat).view({4, 1}) - 2).sum().backward();  // -2 -1 | 0 1
  EXPECT_EQ(choosy.rare.grad().item<float>(), -3);
  EXPECT_FALSE(choosy.frozen.grad().defined());
  EXPECT_FALSE(choosy.never.grad().defined());
  choosy.zero_grad();
  parallel.forward(1 - at::arange(4, at::kFloat).view({4, 1})).sum().backward();  // 1 0 | -1 -2: only the copy
  EXPECT_EQ(choosy.rare.grad().item<float>(), -3);
}

TEST(DataParallelTest, TorchsLayersAreClonedAndBuffersAreTheFirstPiecesOnes) {
  torch::nn::Sequential net(torch::nn::Linear(4, 6), torch::nn::BatchNorm1d(6), torch::nn::Linear(6, 2));
  nn::initialise(*net, 3);
  auto alone = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(net->clone());
  DataParallel parallel(*net, cpus(3));
  const at::Tensor x = waves({12, 4}, 0.4);
  parallel.forward(x);
  alone->forward(x.narrow(0, 0, 4));
  for (const auto& buffer : alone->named_buffers()) {
    EXPECT_TRUE(at::equal(net->named_buffers()[buffer.key()], buffer.value())) << buffer.key();
  }
  net->eval();  // the statistics that training left, in every replica
  alone->eval();
  EXPECT_LE(distance(parallel.forward(x), alone->forward(x)), 1e-6);
  const auto modules = net->modules(/*include_self=*/false);
  net->train();
  modules[1]->eval();  // only one layer
  alone->train();
  alone->modules(false)[1]->eval();
  EXPECT_LE(distance(parallel.forward(x), alone->forward(x)), 1e-6);
}

TEST(DataParallelTest, DropoutDropsWhatOneDeviceDrops) {
  struct Dropping : nn::Module {
    Dropping() : nn::Module("Dropping") { drop = register_module("drop", std::make_shared<nn::Dropout>(0.5)); }
    at::Tensor forward(const at::Tensor& x) { return nn::call(drop, x); }
    std::shared_ptr<nn::Dropout> drop;
  };
  Dropping net, alone;
  DataParallel parallel(net, cpus(4), [] { return std::make_shared<Dropping>(); });
  const at::Tensor x = at::ones({11, 5});
  at::Tensor before;
  for (int step = 0; step < 3; ++step) {
    const nn::PlaceInRun place{.seed = 7, .step = step, .first_row = 22};
    nn::set_dropout_rng_state(net, place);
    nn::set_dropout_rng_state(alone, place);
    const at::Tensor y = parallel.forward(x);
    EXPECT_TRUE(at::equal(y, nn::call(alone, x)));
    EXPECT_FALSE(step > 0 && at::equal(y, before));
    before = y;
  }
  net.eval();
  EXPECT_TRUE(at::equal(parallel.forward(x), x));
}

TEST(DataParallelTest, ReplicasRunAtOnceAndSeeTheCallersModes) {
  std::mutex mutex;
  std::condition_variable changed;
  std::set<std::thread::id> threads;
  std::vector<std::string> modes;
  const Probe::Body body = [&](Probe& probe, const at::Tensor& x) {
    std::unique_lock lock(mutex);
    threads.insert(std::this_thread::get_id());
    modes.push_back(std::string(at::GradMode::is_enabled() ? "grad " : "") +
                    (c10::InferenceMode::is_enabled() ? "inference " : "") +
                    (at::autocast::is_autocast_enabled(at::kCPU)
                         ? c10::toString(at::autocast::get_autocast_dtype(at::kCPU))
                         : "plain"));
    changed.notify_all();
    changed.wait(lock, [&] { return modes.size() >= 3; });  // hangs unless all three are here at once
    return x * probe.w;
  };
  Probe probe(body);
  DataParallel parallel(probe, cpus(3), [&] { return std::make_shared<Probe>(body); });
  const auto modes_of = [&](const std::function<at::Tensor()>& run) {
    modes.clear();
    return run().requires_grad() ? "recorded: " + modes[0] + "," + modes[1] + "," + modes[2]
                                 : modes[0] + "," + modes[1] + "," + modes[2];
  };
  const at::Tensor x = at::ones({3, 1});
  const auto forward = [&] { return parallel.forward(x); };
  EXPECT_EQ(modes_of(forward), "recorded: grad plain,grad plain,grad plain");
  EXPECT_EQ(threads.size(), 3U);
  EXPECT_FALSE(threads.contains(std::this_thread::get_id()));
  {
    const at::NoGradGuard no_grad;
    EXPECT_EQ(modes_of(forward), "plain,plain,plain");
  }
  {
    const c10::InferenceMode inference;
    EXPECT_EQ(modes_of(forward), "inference plain,inference plain,inference plain");
  }
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(at::kCPU);
  at::autocast::set_autocast_dtype(at::kCPU, at::kHalf);
  EXPECT_EQ(modes_of(forward), "recorded: grad Half,grad Half,grad Half");
  at::autocast::set_autocast_dtype(at::kCPU, dtype);
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  EXPECT_EQ(modes_of(forward), "recorded: grad plain,grad plain,grad plain");
  EXPECT_EQ(threads.size(), 3U) << "the threads are kept";
}

TEST(DataParallelTest, AnExceptionOfAReplicaReachesTheCaller) {
  const Probe::Body body = [](Probe& probe, const at::Tensor& x) {
    const auto value = x.sum().item<float>();
    if (value == 1) throw DataError("a row is 1");
    if (value == 2) return at::ones({2}) + at::ones({3});  // torch's own error
    return value == 3 ? at::Tensor() : x * probe.w;
  };
  Probe probe(body);
  DataParallel parallel(probe, cpus(3), [&] { return std::make_shared<Probe>(body); });
  const auto error_for = [&](float a, float b, float c) {
    return message_of([&] { parallel.forward(at::tensor({a, b, c}).view({3, 1})); });
  };
  EXPECT_EQ(error_for(0, 1, 0), "DataParallel: replica 1 of 3 (on cpu): a row is 1");
  EXPECT_THAT(error_for(0, 1, 2), HasSubstr("replica 1 of 3 (on cpu), and 1 more: a row is 1"));
  EXPECT_THAT(error_for(2, 0, 0), AllOf(HasSubstr("replica 0 of 3"), HasSubstr("must match the size")));
  EXPECT_THAT(error_for(0, 0, 3), HasSubstr("replica 2 of 3 (on cpu): its forward returned an undefined tensor"));
  try {
    parallel.forward(at::tensor({0.0F, 1.0F}).view({2, 1}));
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_THROW(std::rethrow_if_nested(error), DataError);
  }
  EXPECT_EQ(parallel.forward(at::zeros({3, 1})).sum().item<float>(), 0);
}

TEST(DataParallelTest, LossesOfThePiecesAreGatheredInAVector) {
  const Probe::Body body = [](Probe& probe, const at::Tensor& x) { return (x * probe.w).sum(); };
  Probe probe(body);
  DataParallel parallel(probe, cpus(2), [&] { return std::make_shared<Probe>(body); });
  const at::Tensor losses = parallel.forward(at::arange(4, at::kFloat));
  EXPECT_TRUE(at::equal(losses, at::tensor({1.0F, 5.0F})));
  losses.sum().backward();
  EXPECT_EQ(probe.w.grad().item<float>(), 6);
}

TEST(DataParallelTest, SharedParametersAndThoseOfTheStack) {
  struct Tied : torch::nn::Module {
    Tied() : torch::nn::Module("Tied") {
      a = register_parameter("a", at::full({1}, 3.0F));
      register_parameter("b", a);
    }
    at::Tensor forward(const at::Tensor& x) { return x * a * named_parameters()["b"]; }
    at::Tensor a;
  } tied;
  DataParallel parallel(tied, cpus(2), [] { return std::make_shared<Tied>(); });
  parallel.forward(at::ones({4})).sum().backward();
  EXPECT_EQ(tied.a.grad().item<float>(), 4 * 2 * 3);
}

TEST(DataParallelTest, MakingReplicasDrawsNoRandomNumbersAndKeepsTheThreads) {
  const int threads = at::get_num_threads();
  torch::nn::Linear layer(3, 3);
  at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  generator.set_current_seed(5);
  const at::Tensor expected = at::rand({4});
  generator.set_current_seed(5);
  DataParallel parallel(*layer, cpus(3));
  EXPECT_TRUE(at::equal(at::rand({4}), expected));
  EXPECT_EQ(at::get_num_threads(), threads);
  EXPECT_EQ(parallel.devices().size(), 3U);
  EXPECT_FALSE(DataParallel::all_devices().empty());
}

TEST(DataParallelTest, RefusesWhatCannotWork) {
  SmallNet net;
  EXPECT_THAT(message_of([&] { DataParallel(net, {}); }), HasSubstr("no devices"));
  EXPECT_THAT(message_of([&] { DataParallel(net, cpus(2)); }),
              AllOf(HasSubstr("'SmallNet'"), HasSubstr("has no clone()"), HasSubstr("std::make_shared<SmallNet>()")));
  EXPECT_THAT(message_of([&] { DataParallel(net, {at::Device(at::kXLA, 0)}); }), HasSubstr("no device xla:0"));
  EXPECT_THAT(message_of([&] { DataParallel(net, cpus(2), [] { return nullptr; }); }), HasSubstr("null pointer"));
  // The same names in another shape, and other names.
  torch::nn::Linear narrow(2, 2), wide(3, 2);
  EXPECT_THAT(message_of([&] { DataParallel(*narrow, cpus(2), [&] { return wide.ptr(); }); }),
              HasSubstr("'weight' in a copy of module 'torch::nn::LinearImpl' has the shape [2, 3]: expected [2, 2]"));
  torch::nn::Linear without(torch::nn::LinearOptions(2, 2).bias(false));
  EXPECT_THAT(message_of([&] { DataParallel(*narrow, cpus(2), [&] { return without.ptr(); }); }),
              AllOf(HasSubstr("expected 1 submodules and [weight, bias]"), HasSubstr("found 1 and [weight]")));
  Probe meta([](Probe&, const at::Tensor& x) { return x; });
  meta.register_parameter("far", at::ones({1}, at::TensorOptions(at::kMeta)));
  EXPECT_THAT(message_of([&] { DataParallel(meta, cpus(1)); }),
              HasSubstr("parameter 'far' is on meta: expected it on the first device, cpu"));
  DataParallel parallel(*narrow, cpus(2));
  EXPECT_THAT(message_of([&] { parallel.forward(at::Tensor()); }), HasSubstr("the batch is undefined"));
  EXPECT_THAT(message_of([&] { parallel.forward(at::ones({})); }), HasSubstr("a single number"));
}

}  // namespace
}  // namespace phalanx
