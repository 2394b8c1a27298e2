// What FullyShardOptions change besides the stage: the dtypes of use, reduction and output, where shards are stored,
// which ranks keep units between the passes, and prefetching.
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <memory>

#include "phalanx/base/testing/matchers.h"
#include "phalanx/nn/init.h"
#include "phalanx/nn/module.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/optim/sgd.h"
#include "phalanx/parallel/fsdp/fully_shard.h"
#include "phalanx/parallel/testing/ddp_test_support.h"
#include "phalanx/parallel/testing/fully_shard_test_support.h"
#include "phalanx/tensor/grad_ready.h"

namespace phalanx {
namespace {

using ddp_testing::message_of;
using ddp_testing::Mlp;
using ddp_testing::waves;
using fully_shard_testing::kWidth;
using fully_shard_testing::linears;
using fully_shard_testing::sharding_mesh;

enum class Compare { bits, closely, bits_of_gradients };

// Every rank's rows must be those of the whole tensors.
void expect_rows_of(const std::vector<NamedTensor>& shards, const torch::nn::Module& whole,
                    Compare compare = Compare::bits) {
  const bool grads = compare == Compare::bits_of_gradients;
  const auto named = whole.named_parameters();
  ASSERT_EQ(shards.size(), named.size());
  for (const auto& [name, tensor, shard] : shards) {
    const Box box = shard->box();
    const at::Tensor& all = grads ? named[name].grad() : named[name];
    const at::Tensor expected = all.narrow(0, box.offsets[0], box.shape[0]);
    if (compare == Compare::closely) {
      EXPECT_TRUE(at::allclose(tensor, expected, 1e-5, 1e-6)) << name;
    } else {
      EXPECT_TRUE(at::equal(grads ? tensor.grad() : tensor, expected)) << name;
    }
  }
}

// Mixed precision written out: the net is rounded to bfloat16, and its gradients are widened, averaged, and given to
// the net.
struct ByHand {
  explicit ByHand(std::shared_ptr<Communicator> world) : world(std::move(world)) {}
  void add_gradients(const at::Tensor& x) {
    auto rounded = linears(3);
    const at::NoGradGuard no_grad;
    auto all = rounded->named_parameters();
    for (auto& p : master->named_parameters()) all[p.key()].copy_(p.value());
    rounded->to(at::kBFloat16);
    {
      const at::AutoGradMode record(true);
      rounded->forward(x.to(at::kBFloat16)).square().sum().backward();
    }
    for (auto& p : master->named_parameters()) {
      const at::Tensor grad = rounded->named_parameters()[p.key()].grad().to(at::kFloat);
      at::Tensor& sum = p.value().mutable_grad();
      sum.defined() ? (void)sum.add_(grad) : (void)(sum = grad.clone());
    }
  }
  void average() {
    for (auto& p : master->parameters()) world->all_reduce(p.grad(), {.op = ReduceOp::avg});
  }
  std::shared_ptr<Communicator> world;
  torch::nn::Sequential master = linears(3);
};

TEST(MixedPrecision, ComputesInBfloat16AndAveragesAndStepsInFloat32) {
  for (const int ranks : {1, 2, 3}) {
    for (const int stage : {1, 2, 3}) {
      SCOPED_TRACE(::testing::Message() << ranks << " ranks, stage " << stage);
      run_local_ranks(ranks, [&](const std::shared_ptr<Communicator>& world) {
        ByHand reference(world);
        auto net = linears(3);
        FullyShardedDataParallel sharded(
            *net, sharding_mesh(world),
            {.stage = stage, .param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat, .output_dtype = at::kFloat});
        Sgd expected(nn::named_parameters(*reference.master)), optimizer(sharded.parameters());
        for (int step = 0; step < 3; ++step) {
          for (int part = 0; part < 2; ++part) {  // two micro-batches, added up in float32
            const at::Tensor x = waves({5, kWidth}, world->rank() + 0.3 * step + part);
            reference.add_gradients(x);
            std::optional<FullyShardedDataParallel::NoSync> held;
            if (part == 0) held.emplace(sharded.no_sync());
            const at::Tensor y = net->forward(x);
            EXPECT_EQ(y.scalar_type(), at::kFloat);
            y.to(at::kBFloat16).square().sum().backward();
          }
          reference.average();
          expect_rows_of(sharded.parameters(), *reference.master, Compare::bits_of_gradients);
          expected.step(0.05);
          optimizer.step(0.05);
          expected.zero_grad();
          optimizer.zero_grad();
        }
        for (const auto& p : sharded.parameters()) EXPECT_EQ(p.tensor.scalar_type(), at::kFloat);
        expect_rows_of(sharded.parameters(), *reference.master);
      });
    }
  }
}

TEST(MixedPrecision, ReducesInTheParametersDtypeUnlessToldOtherwise) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    for (const int stage : {1, 2, 3}) {
      auto net = linears(2);
      FullyShardedDataParallel sharded(*net, sharding_mesh(world), {.stage = stage, .param_dtype = at::kBFloat16});
      EXPECT_EQ(net->forward(waves({3, kWidth}, 0)).scalar_type(), at::kBFloat16);
      net->forward(waves({3, kWidth}, world->rank())).sum().backward();
      for (const auto& p : sharded.parameters()) EXPECT_EQ(p.tensor.grad().scalar_type(), at::kBFloat16);
      // P elements: float32 shards, the gathered bfloat16 in addition if it stays, and bfloat16 gradients.
      const auto statistics = sharded.statistics();
      const std::int64_t elements = 2 * (kWidth * kWidth + kWidth) + statistics.padding_bytes / 2;
      EXPECT_EQ(statistics.shard_bytes, elements / 2 * 4 + (stage < 3 ? elements * 2 : 0));
      EXPECT_EQ(statistics.sharded_grad_bytes, stage == 1 ? 0 : elements / 2 * 2);
      AdamW(sharded.parameters()).step(1e-3);
    }
  });
}

// Records the dtypes of its inputs.
struct Watched : nn::Module {
  Watched() : nn::Module("Watched") { weight = make_parameter("weight", {kWidth}, {}, Init::constant(0.5)); }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& y) {
    seen = x.scalar_type();
    other = y.scalar_type();
    return x * weight;
  }
  at::Tensor weight;
  at::ScalarType seen = at::kFloat, other = at::kFloat;
};

TEST(MixedPrecision, TheFirstInputOfOurModulesIsConverted) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    Watched net;
    nn::initialise(net, 1);
    const FullyShardedDataParallel sharded(net, sharding_mesh(world),
                                           {.param_dtype = at::kBFloat16, .output_dtype = at::kDouble});
    const at::Tensor y = nn::call(net, waves({2, kWidth}, 0), waves({1}, 0));
    EXPECT_EQ(net.seen, at::kBFloat16);
    EXPECT_EQ(net.other, at::kFloat);
    EXPECT_EQ(y.scalar_type(), at::kDouble);
    EXPECT_EQ(nn::call(net, at::zeros({1}, at::kLong), waves({1}, 0)).scalar_type(), at::kDouble);
    EXPECT_EQ(net.seen, at::kLong);
  });
}

TEST(MixedPrecision, APlainModuleIsConvertedByRun) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    Mlp net;
    FullyShardedDataParallel sharded(net, sharding_mesh(world),
                                     {.param_dtype = at::kBFloat16, .output_dtype = at::kFloat});
    const at::Tensor y = sharded.run(net, waves({6, 8}, world->rank()));
    EXPECT_EQ(y.scalar_type(), at::kFloat);
    y.sum().backward();
    EXPECT_EQ(sharded.parameters()[0].tensor.grad().scalar_type(), at::kBFloat16);
  });
}

struct Variant {
  const char* name;
  int ranks;
  int replicas;
  FullyShardOptions options;
};

void PrintTo(const Variant& variant, std::ostream* out) { *out << variant.name; }

// None of these may change a bit: they move values, or change when they are moved.
class WithoutConsequence : public ::testing::TestWithParam<Variant> {};

TEST_P(WithoutConsequence, TrainsAsUnderDataParallelism) {
  const Variant& variant = GetParam();
  run_local_ranks(variant.ranks, [&](const std::shared_ptr<Communicator>& world) {
    auto a = linears(4), b = linears(4);
    DistributedDataParallel ddp(*a, world);
    FullyShardedDataParallel sharded(*b, sharding_mesh(world, variant.replicas), variant.options);
    AdamW first(ddp.parameters()), second(sharded.parameters());
    for (int step = 0; step < 4; ++step) {
      if (step == 2) {  // an extra forward pass, whose values must not be reused
        const at::NoGradGuard no_grad;
        EXPECT_TRUE(at::allclose(a->forward(waves({2, kWidth}, 1)), b->forward(waves({2, kWidth}, 1))));
      }
      for (int part = 0; part < 2; ++part) {
        std::optional<DistributedDataParallel::NoSync> held_a;
        std::optional<FullyShardedDataParallel::NoSync> held_b;
        if (part == 0) {
          held_a.emplace(ddp.no_sync());
          held_b.emplace(sharded.no_sync());
        }
        const at::Tensor x = waves({5, kWidth}, world->rank() + 0.3 * step + part);
        const at::Tensor loss_a = a->forward(x).square().mean(), loss_b = b->forward(x).square().mean();
        // Averages over replicas of averages are not in rank order.
        EXPECT_TRUE(variant.replicas > 1 ? at::allclose(loss_a, loss_b) : at::equal(loss_a, loss_b));
        loss_a.backward();
        loss_b.backward();
      }
      first.step(0.01);
      second.step(0.01);
      first.zero_grad();
      second.zero_grad();
    }
    expect_rows_of(sharded.parameters(), *a, variant.replicas > 1 ? Compare::closely : Compare::bits);
  });
}
INSTANTIATE_TEST_SUITE_P(
    Options, WithoutConsequence,
    ::testing::Values(Variant{"Offload1", 2, 1, {.stage = 1, .offload = true}},
                      Variant{"Offload2", 3, 1, {.stage = 2, .offload = true}},
                      Variant{"Offload3", 2, 1, {.stage = 3, .offload = true}},
                      Variant{"OffloadAlone", 1, 1, {.stage = 3, .offload = true}},
                      Variant{"OffloadReplicated", 4, 2, {.stage = 3, .offload = true}},
                      Variant{"Replicated", 4, 2, {.stage = 3}},
                      Variant{"PrefetchOff", 2, 1, {.stage = 3, .prefetch = false}},
                      Variant{"GroupOf2", 4, 1, {.stage = 3, .reshard_group = 2}},
                      Variant{"GroupOf1", 2, 1, {.stage = 3, .reshard_group = 1}},
                      Variant{"GroupOfAll", 3, 1, {.stage = 3, .reshard_group = 3}},
                      Variant{"GroupOf2Offload", 4, 1, {.stage = 3, .reshard_group = 2, .offload = true}}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(Offload, GradientsThatAreStillThereAreAddedTo) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    for (const auto reduce : {at::kFloat, at::kDouble}) {
      for (const int stage : {1, 3}) {
        auto net = linears(2);
        FullyShardedDataParallel sharded(*net, sharding_mesh(world),
                                         {.stage = stage, .offload = true, .reduce_dtype = reduce});
        const auto pass = [&] { net->forward(waves({3, kWidth}, world->rank())).sum().backward(); };
        pass();
        std::vector<at::Tensor> once;
        for (const auto& p : sharded.parameters()) once.push_back(p.tensor.grad().clone());
        pass();
        for (std::size_t i = 0; i < once.size(); ++i) {
          EXPECT_EQ(once[i].scalar_type(), reduce);
          EXPECT_TRUE(at::equal(sharded.parameters()[i].tensor.grad(), once[i].mul(2))) << stage;
        }
      }
    }
  });
}

TEST(ReshardGroup, KeepsAPartOfEveryUnitOnEachRank) {
  run_local_ranks(4, [](const std::shared_ptr<Communicator>& world) {
    auto net = linears(4);
    FullyShardedDataParallel sharded(*net, sharding_mesh(world), {.reshard_group = 2});
    const std::int64_t model = 4 * (kWidth * kWidth + kWidth) * 4 + sharded.statistics().padding_bytes;
    EXPECT_EQ(sharded.statistics().shard_bytes, model / 4 + model / 2);
    // The neighbours need no other rank for the backward pass. It uses the values of the forward pass, even if the
    // shards have changed since.
    const at::Tensor y = net->forward(waves({3, kWidth}, 0.0)).sum();
    const at::NoGradGuard no_grad;
    for (const auto& p : sharded.parameters()) p.tensor.zero_();
    {
      const at::AutoGradMode record(true);
      y.backward();
    }
    for (const auto& p : sharded.parameters()) {
      if (p.tensor.numel() == 0) continue;
      EXPECT_NE(p.tensor.grad().abs().sum().item<float>(), 0.0F) << p.name;
    }
    // The next forward pass uses their current values.
    EXPECT_EQ(net->forward(waves({3, kWidth}, 0.0)).abs().sum().item<float>(), 0.0F);
  });
}

TEST(Prefetch, CanBeTurnedOff) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    for (const bool prefetch : {true, false}) {
      auto net = linears(4);
      FullyShardedDataParallel sharded(*net, sharding_mesh(world), {.prefetch = prefetch});
      net->forward(waves({3, kWidth}, 0.0)).sum().backward();
      EXPECT_EQ(sharded.statistics().prefetches, prefetch ? 3 + 3 : 0);
      EXPECT_EQ(sharded.statistics().gathers, 4 + 3);
    }
  });
}

TEST(ReshardGroup, AnErrorInBackwardWakesTheNeighbours) {
  std::vector<std::string> messages(4);
  run_local_ranks(4, [&](const std::shared_ptr<Communicator>& world) {
    auto net = linears(4);
    FullyShardedDataParallel sharded(*net, sharding_mesh(world), {.reshard_group = 2});
    // In the last block but one: the neighbours still have to gather the first two.
    GradReadySubscription subscription;
    if (world->rank() == 1) {
      subscription = on_grad_ready(net->named_parameters()["4.weight"],
                                   [](const at::Tensor&) { throw Error("the hook of rank 1"); });
    }
    messages[static_cast<std::size_t>(world->rank())] = message_of([&] {
      net->forward(waves({2, kWidth}, 1.0)).sum().backward();
    });
  });
  EXPECT_THAT(messages[1], HasSubstr("the hook of rank 1"));
  for (const int rank : {0, 2, 3}) {
    EXPECT_THAT(messages[static_cast<std::size_t>(rank)], HasSubstr("ended with an error")) << rank;
  }
}

TEST(FullyShardOptionsErrors, SayWhatIsExpected) {
  run_local_ranks(4, [](const std::shared_ptr<Communicator>& world) {
    auto net = linears(1);
    const auto refusal = [&](const FullyShardOptions& options) {
      return message_of([&] { FullyShardedDataParallel(*net, sharding_mesh(world), options); });
    };
    EXPECT_THAT(refusal({.reshard_group = 3}), HasSubstr("reshard_group is 3: expected a divisor of the 4 ranks"));
    EXPECT_THAT(refusal({.reshard_group = -1}), HasSubstr("expected a divisor of the 4 ranks"));
    EXPECT_THAT(refusal({.stage = 2, .reshard_group = 2}),
                AllOf(HasSubstr("stage = 2"), HasSubstr("expected stage 3")));
    EXPECT_THAT(refusal({.reshard_after_forward = false, .reshard_group = 2}), HasSubstr("units stay whole"));
    EXPECT_THAT(refusal({.param_dtype = at::kLong}), HasSubstr("param_dtype is Long: expected Float, BFloat16"));
    EXPECT_THAT(refusal({.reduce_dtype = world->rank() == 0 ? at::kFloat : at::kBFloat16}),
                HasSubstr("the ranks hold different"));
    const OwnShardGroup group{.patterns = {"*bias*"}, .ranks = world};
    EXPECT_THAT(refusal({.own_group = group}), HasSubstr("own_group: gradient_reduction: expected ReduceOp::sum"));
    EXPECT_THAT(refusal({.gradient_reduction = ReduceOp::sum, .own_group = group}),
                HasSubstr("own_group has 1 of the 2 parameters of unit"));
  });
}

}  // namespace
}  // namespace phalanx
