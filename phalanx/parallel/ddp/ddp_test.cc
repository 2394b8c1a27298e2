#include "phalanx/parallel/ddp/ddp.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <chrono>
#include <optional>
#include <set>

#include "phalanx/base/testing/matchers.h"
#include "phalanx/kernels/linear_cross_entropy.h"
#include "phalanx/parallel/testing/ddp_test_support.h"
#include "phalanx/tensor/grad_ready.h"

namespace phalanx {
namespace {

using ddp_testing::Bag;
using ddp_testing::Mlp;
using ddp_testing::waves;

constexpr int kWorlds[] = {1, 2, 3, 4, 8};

float first_grad(const at::Tensor& parameter) { return parameter.grad().flatten()[0].item<float>(); }

TEST(Ddp, GradientsAreAveragesOverTheRanks) {
  for (const int world : kWorlds) {
    run_local_ranks(world, [&](const std::shared_ptr<Communicator>& comm) {
      Bag model;
      const auto w = model.add("w", at::ones({5})), v = model.add("v", at::ones({2, 3}));
      DistributedDataParallel ddp(model, comm);
      w.sum().mul(comm->rank() + 1).add(v.sum().mul(comm->rank() * 2)).backward();
      EXPECT_TRUE(at::equal(w.grad(), at::full({5}, (world + 1) / 2.0)));
      EXPECT_TRUE(at::equal(v.grad(), at::full({2, 3}, world - 1.0)));
    });
  }
}

TEST(Ddp, StartsFromTheValuesOfRankZero) {
  for (const std::size_t chunk : {std::size_t{64}, std::size_t{1} << 20}) {
    run_local_ranks(3, [&](const std::shared_ptr<Communicator>& comm) {
      Bag model;
      const float r = static_cast<float>(comm->rank());
      const auto f32 = model.add("f32", at::full({33}, r + 1));
      const auto f64 = model.add("f64", at::full({2, 2}, r + 2, at::kDouble));
      const auto bf16 = model.add("bf16", at::full({7}, r + 3, at::kBFloat16));
      const auto frozen = model.add("frozen", at::full({3}, r + 4), /*requires_grad=*/false);
      const auto transposed = model.add("transposed", waves({3, 2}, r).t());
      const auto scalar = model.add_buffer("scalar", at::full({}, comm->rank() + 5, at::kLong));
      const auto flags = model.add_buffer("flags", at::full({3}, comm->rank() == 0, at::kBool));
      const auto empty = model.add_buffer("empty", at::zeros({0}));
      const DistributedDataParallel ddp(model, comm, {.bucket_bytes = chunk});
      EXPECT_TRUE(at::equal(f32, at::full({33}, 1.0)));
      EXPECT_TRUE(at::equal(f64, at::full({2, 2}, 2.0, at::kDouble)));
      EXPECT_TRUE(at::equal(bf16, at::full({7}, 3.0, at::kBFloat16)));
      EXPECT_TRUE(at::equal(frozen, at::full({3}, 4.0)));
      EXPECT_TRUE(at::equal(transposed, waves({3, 2}, 0).t()));
      EXPECT_EQ(scalar.item<std::int64_t>(), 5);
      EXPECT_TRUE(at::equal(flags, at::full({3}, true, at::kBool)));
    });
  }
}

TEST(Ddp, BroadcastsBuffersWhenAsked) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& comm) {
    Bag model;
    model.add("w", at::ones({1}));
    const auto mean = model.add_buffer("mean", at::zeros({2}));
    DistributedDataParallel ddp(model, comm);
    mean.fill_(comm->rank() + 7);
    ddp.broadcast_buffers();
    EXPECT_EQ(mean[1].item<float>(), 7);
  });
}

std::set<const void*> gradient_storages(const DistributedDataParallel& ddp) {
  std::set<const void*> storages;
  for (const auto& [name, tensor, shard] : ddp.parameters()) storages.insert(tensor.grad().storage().data());
  return storages;
}

TEST(Ddp, GradientsRemainViewsOfTheBuckets) {
  enum class Zeroing { undefined, in_place, own_tensor };
  for (const auto zeroing : {Zeroing::undefined, Zeroing::in_place, Zeroing::own_tensor}) {
    run_local_ranks(2, [&](const std::shared_ptr<Communicator>& comm) {
      Mlp model(4), reference(4);
      DistributedDataParallel ddp(model, comm, {.first_bucket_bytes = 64, .bucket_bytes = 300});
      std::set<const void*> storages;
      for (int step = 0; step < 20; ++step) {
        const auto x = waves({3, 8}, step), y = waves({3, 1}, step + 0.3);
        model.loss(x, y).backward();
        reference.zero_grad();
        reference.loss(x, y).backward();  // the same data on both ranks: the average is either's gradient
        if (step == 1) storages = gradient_storages(ddp);
        if (step >= 1) {
          EXPECT_EQ(gradient_storages(ddp), storages);
        }
        EXPECT_EQ(gradient_storages(ddp).size(), ddp.buckets().size());
        EXPECT_GT(ddp.buckets().size(), 2U);
        const auto expected = reference.named_parameters();
        for (const auto& [name, tensor, shard] : ddp.parameters()) {
          EXPECT_TRUE(at::equal(tensor.grad(), expected[name].grad())) << name << " in step " << step;
          tensor.mutable_grad().detach_();  // as torch::optim's zero_grad() does
          if (zeroing == Zeroing::undefined) tensor.mutable_grad().reset();
          if (zeroing == Zeroing::in_place) tensor.mutable_grad().zero_();
          if (zeroing == Zeroing::own_tensor) tensor.mutable_grad() = at::zeros_like(tensor);
        }
      }
    });
  }
}

TEST(Ddp, OffersItsBucketsToTheLayers) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& comm) {
    Mlp model;
    const at::Tensor x = waves({4, 8}, comm->rank()), y = waves({4, 1}, 1.0 + comm->rank());
    {
      DistributedDataParallel ddp(model, comm);
      for (int step = 0; step < 2; ++step) {  // the buckets are rebuilt after the first
        model.loss(x, y).backward();
        for (const auto& p : model.parameters()) EXPECT_TRUE(grad_buffer(p).is_same(p.grad()));
      }
    }
    for (const auto& p : model.parameters()) EXPECT_FALSE(grad_buffer(p).defined());
  });
}

// A fused loss computes its weight's gradient in the bucket, ahead of its backward pass. What DDP puts there in between
// must not corrupt it.
TEST(Ddp, AGradientMayWaitInTheBucketForItsBackwardPass) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& comm) {
    Bag model;
    const auto w = model.add("w", waves({5, 4}, 0)), v = model.add("v", at::ones({3}));
    const at::Tensor x = waves({6, 4}, 1), labels = at::arange(6, at::kLong).remainder(5);
    const auto loss = [&] { return kernels::linear_cross_entropy(x, w, labels); };  // the same on both ranks
    loss().backward();
    const at::Tensor expected = w.grad();
    w.mutable_grad().reset();
    DistributedDataParallel ddp(model, comm, {.find_unused_parameters = true});

    at::Tensor waiting = loss();
    EXPECT_TRUE(at::equal(grad_buffer(w), expected));
    v.sum().backward();  // zeros for w
    EXPECT_FALSE(w.grad().defined());
    waiting.backward();
    EXPECT_TRUE(at::equal(w.grad(), expected));

    w.mutable_grad().reset();
    waiting = loss();
    {
      const auto guard = ddp.no_sync();
      w.sum().backward();  // copied from autograd's tensor
    }
    waiting.backward();
    EXPECT_TRUE(at::equal(w.grad(), expected + 1));
    EXPECT_TRUE(grad_buffer(w).is_same(w.grad()));
  });
}

TEST(Ddp, AddsToWhatIsThereAsASingleProcessDoes) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& comm) {
    Bag model;
    const auto w = model.add("w", at::ones({4}));
    w.mutable_grad() = at::full({4}, 10.0);  // set by the caller
    DistributedDataParallel ddp(model, comm);
    w.sum().mul(comm->rank()).backward();
    EXPECT_EQ(first_grad(w), 10.5F);
    w.sum().mul(comm->rank() * 3).backward();  // a second loss in the same step
    EXPECT_EQ(first_grad(w), 12.0F);
    w.mutable_grad() = at::full({4}, static_cast<float>(comm->rank()));
    w.sum().backward();
    EXPECT_EQ(first_grad(w), 1.5F);
  });
}

// The loss uses the parameters so that their gradients become ready in the order given.
void backward_in_order(const std::vector<at::Tensor>& order) {
  at::Tensor x = at::ones({1, 1}).requires_grad_();
  for (auto it = order.rbegin(); it != order.rend(); ++it) x = at::mm(x, *it);
  x.sum().backward();
}

TEST(Ddp, RebuildsBucketsOnceInTheReadyOrderOfRankZero) {
  for (const int world : kWorlds) {
    run_local_ranks(world, [&](const std::shared_ptr<Communicator>& comm) {
      Bag model;
      std::vector<at::Tensor> p;
      for (int i = 0; i < 4; ++i) p.push_back(model.add("p" + std::to_string(i), at::full({1, 1}, 1.0)));
      DistributedDataParallel ddp(model, comm, {.first_bucket_bytes = 1, .bucket_bytes = 8});
      EXPECT_THAT(ddp.buckets(), ElementsAre(ElementsAre(3), ElementsAre(2, 1), ElementsAre(0)));
      // Only rank 0's order counts; the other ranks see another one.
      for (int step = 0; step < 5; ++step) {
        if (comm->rank() == 0) {
          backward_in_order({p[1], p[3], p[0], p[2]});
        } else {
          backward_in_order({p[2], p[1], p[3], p[0]});
        }
        EXPECT_THAT(ddp.buckets(), ElementsAre(ElementsAre(1), ElementsAre(3, 0), ElementsAre(2)));
        EXPECT_EQ(ddp.statistics().rebuilds, 1);
        for (const auto& parameter : p) EXPECT_EQ(first_grad(parameter), static_cast<float>(step + 1));
      }
    });
  }
}

TEST(Ddp, ABucketTravelsWhileTheBackwardPassGoesOn) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& comm) {
    Mlp model(3);
    DistributedDataParallel ddp(model, comm, {.first_bucket_bytes = 1, .bucket_bytes = 1});
    bool arrived = false;
    // The first layer's gradient is the last; before it is announced the last layer's average has already arrived.
    model.weights[0].register_hook([&](const at::Tensor&) {
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
      while (!arrived && std::chrono::steady_clock::now() < deadline) {
        arrived = ddp.statistics().communication_seconds > 0;
      }
    });
    model.loss(waves({2, 8}, 0), waves({2, 1}, 1)).backward();
    EXPECT_TRUE(arrived);
  });
}

TEST(Ddp, NoSyncAccumulatesLikeOneBigBatch) {
  for (const bool zero_in_place : {false, true}) {
    run_local_ranks(2, [&](const std::shared_ptr<Communicator>& comm) {
      Mlp model, reference;
      DistributedDataParallel ddp(model, comm, {.first_bucket_bytes = 64, .bucket_bytes = 300});
      for (int step = 0; step < 3; ++step) {
        const auto x = waves({12, 8}, step), y = waves({12, 1}, step + 0.3);
        const auto mine = [&](const at::Tensor& t, int micro) { return t.narrow(0, comm->rank() * 6 + micro * 2, 2); };
        for (int micro = 0; micro < 3; ++micro) {
          std::optional<DistributedDataParallel::NoSync> guard;
          if (micro < 2) guard.emplace(ddp.no_sync());
          model.loss(mine(x, micro), mine(y, micro)).div(3).backward();
          EXPECT_EQ(ddp.statistics().synchronisations, step + (micro == 2 ? 1 : 0));
        }
        reference.zero_grad();
        reference.loss(x, y).backward();
        const auto expected = reference.named_parameters();
        for (const auto& [name, tensor, shard] : ddp.parameters()) {
          const auto error = tensor.grad().sub(expected[name].grad()).norm().div(expected[name].grad().norm());
          EXPECT_LT(error.item<float>(), 1e-6) << name;
          if (zero_in_place) {
            tensor.mutable_grad().zero_();
          } else {
            tensor.mutable_grad().reset();
          }
        }
      }
    });
  }
}

TEST(Ddp, HandlesFrozenAndSharedParameters) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& comm) {
    Bag model;
    const auto shared = model.add("a", at::ones({3}));
    const auto frozen = model.add("frozen", at::ones({3}), /*requires_grad=*/false);
    auto child = std::make_shared<Bag>();
    child->add("b", shared);
    model.register_module("child", child);
    DistributedDataParallel ddp(model, comm);
    ASSERT_EQ(ddp.parameters().size(), 1U);
    EXPECT_EQ(ddp.parameters()[0].name, "a");
    for (int step = 0; step < 2; ++step) {
      shared.mul(shared).mul(frozen).sum().mul(comm->rank() + 1).backward();
      EXPECT_EQ(first_grad(shared), 3.0F * static_cast<float>(step + 1));
      EXPECT_FALSE(frozen.grad().defined());
    }
  });
}

TEST(Ddp, MixesDtypesAndMemoryLayouts) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& comm) {
    Bag model;
    const auto f32 = model.add("f32", at::ones({3}));
    const auto f64 = model.add("f64", at::ones({3}, at::kDouble));
    const auto bf16 = model.add("bf16", at::ones({3}, at::kBFloat16));
    const auto transposed = model.add("transposed", waves({3, 2}, 0).t());
    DistributedDataParallel ddp(model, comm);
    EXPECT_EQ(ddp.buckets().size(), 3U);
    const auto coefficients = waves({2, 3}, 1);
    for (int step = 0; step < 3; ++step) {
      const auto loss = f32.sum().add(f64.sum().to(at::kFloat)).add(bf16.to(at::kFloat).sum());
      loss.add(transposed.mul(coefficients).sum()).mul(comm->rank() * 2).backward();
      for (const auto& p : {f32, f64, bf16}) EXPECT_EQ(first_grad(p), 1.0F);
      EXPECT_TRUE(at::equal(transposed.grad(), coefficients));
      EXPECT_EQ(transposed.grad().strides(), transposed.strides());  // autograd adds in place without a copy
      for (const auto& p : {f32, f64, bf16, transposed}) p.mutable_grad().zero_();
    }
  });
}

// tanh(x w), recomputed in a backward pass inside the backward pass.
struct DdpCheckpointed : torch::autograd::Function<DdpCheckpointed> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& w) {
    context->save_for_backward({x});
    context->saved_data["w"] = w;
    const at::NoGradGuard no_grad;
    return at::tanh(at::mm(x, w));
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto x = context->get_saved_variables()[0].detach().requires_grad_();
    const at::AutoGradMode grad_mode(true);
    at::tanh(at::mm(x, context->saved_data["w"].toTensor())).backward(grads[0]);
    return {x.grad(), at::Tensor()};
  }
};

TEST(Ddp, WorksUnderActivationCheckpointing) {
  // Which of the layers are checkpointed; the loss layer w2 is the first whose gradient is ready.
  for (const std::vector<bool>& checkpointed :
       {std::vector<bool>{true, true, true}, {false, true, true}, {true, true, false}, {false, true, false}}) {
    run_local_ranks(2, [&](const std::shared_ptr<Communicator>& comm) {
      Bag model, reference;
      std::vector<at::Tensor> w, plain;
      for (int i = 0; i < 3; ++i) w.push_back(model.add("w" + std::to_string(i), waves({4, 4}, i)));
      for (int i = 0; i < 3; ++i) plain.push_back(reference.add("w" + std::to_string(i), waves({4, 4}, i)));
      DistributedDataParallel ddp(model, comm, {.first_bucket_bytes = 1, .bucket_bytes = 1});
      for (int step = 0; step < 3; ++step) {
        model.zero_grad();
        reference.zero_grad();
        at::Tensor x = waves({2, 4}, step + comm->rank()).requires_grad_();
        for (std::size_t i = 0; i < 3; ++i) {
          x = checkpointed[i] ? DdpCheckpointed::apply(x, w[i]) : at::tanh(at::mm(x, w[i]));
        }
        x.sum().backward();
        at::Tensor sum;
        for (int rank = 0; rank < 2; ++rank) {
          at::Tensor y = waves({2, 4}, step + rank);
          for (const auto& weight : plain) y = at::tanh(at::mm(y, weight));
          sum = sum.defined() ? sum.add(y.sum()) : y.sum();
        }
        sum.div(2).backward();
        for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(w[i].grad().allclose(plain[i].grad(), 1e-5, 1e-7)) << i;
        EXPECT_EQ(ddp.statistics().synchronisations, step + 1);
      }
    });
  }
}

TEST(Ddp, AveragesGradientsThatAreFiredByHand) {
  run_local_ranks(3, [](const std::shared_ptr<Communicator>& comm) {
    Bag model;
    const auto a = model.add("a", at::ones({3})), b = model.add("b", at::ones({2}));
    DistributedDataParallel ddp(model, comm);
    for (int step = 0; step < 3; ++step) {
      for (const auto& p : {a, b}) {
        p.mutable_grad() = at::full(p.sizes(), static_cast<float>(comm->rank() + step));
        fire_grad_ready(p);
      }
      EXPECT_EQ(first_grad(a), static_cast<float>(1 + step));
      EXPECT_EQ(first_grad(b), static_cast<float>(1 + step));
    }
  });
}

TEST(Ddp, CountsWhatItSends) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& comm) {
    Bag model;
    const auto a = model.add("a", at::ones({16})), b = model.add("b", at::ones({5}));  // 64 and 20, padded to 64, bytes
    DistributedDataParallel ddp(model, comm);
    for (int step = 0; step < 3; ++step) a.sum().add(b.sum()).backward();
    const auto statistics = ddp.statistics();
    EXPECT_EQ(statistics.synchronisations, 3);
    EXPECT_EQ(statistics.bytes, 3 * 128);
    EXPECT_GT(statistics.communication_seconds, 0);
    EXPECT_GT(statistics.exposed_seconds, 0);
  });
  run_local_ranks(1, [](const std::shared_ptr<Communicator>& comm) {
    Bag model;
    const auto a = model.add("a", at::ones({16}));
    DistributedDataParallel ddp(model, comm);
    a.sum().backward();
    EXPECT_EQ(ddp.statistics().synchronisations, 1);
    EXPECT_EQ(ddp.statistics().bytes, 0);
  });
}

TEST(Ddp, ALoadedBucketOrderIsTakenOver) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& comm) {
    const DdpOptions options{.first_bucket_bytes = 1, .bucket_bytes = 8};
    Bag first, second;
    std::vector<at::Tensor> p, q;
    for (int i = 0; i < 4; ++i) p.push_back(first.add("p" + std::to_string(i), at::full({1, 1}, 1.0)));
    for (int i = 0; i < 4; ++i) q.push_back(second.add("p" + std::to_string(i), at::full({1, 1}, 1.0)));
    DistributedDataParallel trained(first, comm, options);
    backward_in_order({p[1], p[3], p[0], p[2]});
    TrainState saved, loaded;
    trained.collect_state(saved);
    ASSERT_EQ(saved.tensors.size(), 1U);
    EXPECT_EQ(saved.tensors[0].name, "layout.ddp.bucket_order");

    DistributedDataParallel resumed(second, comm, options);
    {
      const auto guard = resumed.no_sync();  // an existing gradient moves with its bucket
      q[2].sum().mul(5).backward();
    }
    resumed.collect_state(loaded);
    loaded.tensors[0].tensor.copy_(saved.tensors[0].tensor);
    backward_in_order({q[3], q[2], q[1], q[0]});  // would lead to another order
    EXPECT_EQ(resumed.buckets(), trained.buckets());
    EXPECT_EQ(resumed.statistics().rebuilds, 1);
    EXPECT_EQ(first_grad(q[2]), 6.0F);
    EXPECT_EQ(first_grad(q[1]), 1.0F);
    backward_in_order({q[3], q[2], q[1], q[0]});
    EXPECT_EQ(resumed.statistics().rebuilds, 1);
  });
}

TEST(Ddp, EndsWithTheObject) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& comm) {
    Bag model;
    const auto w = model.add("w", at::ones({2}));
    {
      DistributedDataParallel ddp(model, comm);
      w.sum().mul(comm->rank()).backward();
    }
    w.mutable_grad().reset();
    w.sum().mul(comm->rank()).backward();
    EXPECT_EQ(first_grad(w), static_cast<float>(comm->rank()));
    DistributedDataParallel again(model, comm);
    w.sum().backward();
    EXPECT_EQ(first_grad(w), 1.5F);
  });
}

}  // namespace
}  // namespace phalanx
