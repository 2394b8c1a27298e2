#include <ATen/ops/embedding.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <array>

#include "phalanx/base/testing/matchers.h"
#include "phalanx/parallel/testing/ddp_test_support.h"

namespace phalanx {
namespace {

using ddp_testing::Bag;
using ddp_testing::message_of;
using ddp_testing::Mlp;
using ddp_testing::waves;

void expect_different_models(
    const std::string& difference, const std::function<void(Bag&, int rank)>& build,
    const std::function<DdpOptions(int rank)>& options = [](int) { return DdpOptions{}; }) {
  run_local_ranks(3, [&](const std::shared_ptr<Communicator>& comm) {
    Bag model;
    build(model, comm->rank());
    const auto message = message_of([&] { DistributedDataParallel ddp(model, comm, options(comm->rank())); });
    EXPECT_THAT(message, AllOf(HasSubstr("the ranks hold different models"), HasSubstr(difference)));
  });
}

TEST(DdpErrors, DifferentModelsAreNamedOnEveryRank) {
  expect_different_models("rank 2 has parameter 'w' Float [3] requires_grad, rank 0 has parameter 'w' Float [2]",
                          [](Bag& model, int rank) { model.add("w", at::ones({rank == 2 ? 3 : 2})); });
  expect_different_models("rank 1 has parameter 'v' Float [2]",
                          [](Bag& model, int rank) { model.add(rank == 1 ? "v" : "w", at::ones({2})); });
  expect_different_models(
      "rank 1 has parameter 'w' Double [2] requires_grad, rank 0 has parameter 'w' Float",
      [](Bag& model, int rank) { model.add("w", at::ones({2}, rank == 1 ? at::kDouble : at::kFloat)); });
  expect_different_models("rank 2 has nothing more, rank 0 has buffer 'b' Float [1]", [](Bag& model, int rank) {
    model.add("w", at::ones({2}));
    if (rank != 2) model.add_buffer("b", at::ones({1}));
  });
  expect_different_models("rank 1 has parameter 'w' Float [2], rank 0 has parameter 'w' Float [2] requires_grad",
                          [](Bag& model, int rank) { model.add("w", at::ones({2}), rank != 1); });
  expect_different_models(
      "bucket_bytes = 7", [](Bag& model, int) { model.add("w", at::ones({2})); },
      [](int rank) { return DdpOptions{.bucket_bytes = rank == 1 ? std::size_t{7} : std::size_t{8}}; });
}

TEST(DdpErrors, ModulesItCannotSynchronise) {
  run_local_ranks(1, [](const std::shared_ptr<Communicator>& comm) {
    Bag empty, frozen;
    frozen.add("w", at::ones({2}), /*requires_grad=*/false);
    EXPECT_THAT(message_of([&] { DistributedDataParallel ddp(empty, nullptr); }), HasSubstr("communicator is null"));
    EXPECT_THAT(message_of([&] { DistributedDataParallel ddp(empty, comm); }), HasSubstr("no parameter that requires"));
    EXPECT_THAT(message_of([&] { DistributedDataParallel ddp(frozen, comm); }),
                HasSubstr("no parameter that requires"));
  });
}

TEST(DdpErrors, AnUnusedParameterIsNamedOnEveryRank) {
  for (const int world : {1, 2, 4}) {
    for (const bool on_one_rank_only : {false, true}) {
      run_local_ranks(world, [&](const std::shared_ptr<Communicator>& comm) {
        Bag model;
        const auto used = model.add("used", at::ones({2}));
        const auto head_module = std::make_shared<Bag>();
        const auto head = head_module->add("weight", at::ones({2}));
        model.register_module("head", head_module);
        DistributedDataParallel ddp(model, comm);
        const bool skip = !on_one_rank_only || comm->rank() == 0;
        const auto loss = skip ? used.sum() : used.sum().add(head.sum());
        EXPECT_THAT(message_of([&] { loss.backward(); }),
                    AllOf(HasSubstr("gave no gradient to 1 of 2 parameters: 'head.weight'"),
                          HasSubstr("find_unused_parameters")));
      });
    }
  }
}

TEST(DdpErrors, UnusedParametersContributeZerosWhereThatIsAskedFor) {
  for (const int world : {1, 2, 3, 4, 8}) {
    run_local_ranks(world, [&](const std::shared_ptr<Communicator>& comm) {
      Bag model;
      const auto always = model.add("always", at::ones({2})), by_one = model.add("by_one", at::ones({3})),
                 never = model.add("never", at::ones({4}));
      DistributedDataParallel ddp(model, comm,
                                  {.first_bucket_bytes = 1, .bucket_bytes = 1, .find_unused_parameters = true});
      const float n = static_cast<float>(world);
      for (int step = 0; step < 4; ++step) {
        const int user = step % world;  // another rank in every step
        auto loss = always.sum();
        if (comm->rank() == user) loss = loss.add(by_one.sum().mul(n * 2));
        loss.backward();
        EXPECT_EQ(always.grad()[0].item<float>(), 1.0F);
        EXPECT_TRUE(at::equal(by_one.grad(), at::full({3}, 2.0)));
        EXPECT_FALSE(never.grad().defined());
        model.zero_grad();
      }
      EXPECT_EQ(ddp.statistics().rebuilds, 1);
    });
  }
}

TEST(DdpErrors, FindUnusedKeepsGradientsAccumulatedBefore) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& comm) {
    Bag model;
    const auto a = model.add("a", at::ones({1})), b = model.add("b", at::ones({1}));
    DistributedDataParallel ddp(model, comm, {.find_unused_parameters = true});
    {
      const auto guard = ddp.no_sync();
      a.sum().add(b.sum().mul(comm->rank() * 4)).backward();
    }
    a.sum().backward();  // b has a gradient from the previous micro-batch
    EXPECT_EQ(a.grad().item<float>(), 2.0F);
    EXPECT_EQ(b.grad().item<float>(), 2.0F);
  });
}

TEST(DdpErrors, AnExceptionInsideBackwardLeavesNobodyWaiting) {
  run_local_ranks(3, [](const std::shared_ptr<Communicator>& comm) {
    Mlp model(3);
    DistributedDataParallel ddp(model, comm, {.first_bucket_bytes = 1, .bucket_bytes = 1});
    if (comm->rank() == 1) {
      model.weights[0].register_hook([](const at::Tensor&) { throw DataError("the user's own error"); });
    }
    const auto message = message_of([&] { model.loss(waves({2, 8}, 0), waves({2, 1}, 1)).backward(); });
    if (comm->rank() == 1) {
      EXPECT_EQ(message, "the user's own error");
    } else {
      EXPECT_THAT(message, HasSubstr("the backward pass of rank 1 ended with an error before its gradients"));
    }
    // The communicator stays unusable, with the same reason, so that ranks cannot get out of step.
    EXPECT_THAT(message_of([&] { comm->barrier(); }), HasSubstr("the backward pass of rank 1"));
  });
}

TEST(DdpErrors, OneRankGoesOnAfterAnException) {
  run_local_ranks(1, [](const std::shared_ptr<Communicator>& comm) {
    Mlp model(3);
    DistributedDataParallel ddp(model, comm);
    bool fail = true;
    model.weights[0].register_hook([&](const at::Tensor&) {
      if (fail) throw DataError("once");
    });
    EXPECT_EQ(message_of([&] { model.loss(waves({2, 8}, 0), waves({2, 1}, 1)).backward(); }), "once");
    fail = false;
    model.zero_grad();
    model.loss(waves({2, 8}, 0), waves({2, 1}, 1)).backward();
    Mlp reference(3);
    reference.loss(waves({2, 8}, 0), waves({2, 1}, 1)).backward();
    EXPECT_TRUE(at::equal(model.weights[0].grad(), reference.weights[0].grad()));
    EXPECT_EQ(ddp.statistics().synchronisations, 1);
  });
}

TEST(DdpErrors, ABackwardPassInsideItselfIsRefused) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& comm) {
    Bag model;
    const auto a = model.add("a", at::ones({1})), b = model.add("b", at::ones({1}));
    DistributedDataParallel ddp(model, comm);
    a.register_hook([&](const at::Tensor&) {  // b's gradient comes twice
      const at::AutoGradMode grad_mode(true);
      b.sum().backward();
    });
    EXPECT_THAT(message_of([&] { b.add(a.mul(b)).sum().backward(); }),
                AnyOf(HasSubstr("received a second gradient"), HasSubstr("ended with an error")));
  });
}

TEST(DdpErrors, SparseGradientsAreRefused) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& comm) {
    Bag model;
    const auto table = model.add("table", at::ones({5, 2}));
    DistributedDataParallel ddp(model, comm);
    const auto rows = at::embedding(table, at::tensor({1, 3}), /*padding_idx=*/-1, /*scale_grad_by_freq=*/false,
                                    /*sparse=*/true);
    EXPECT_THAT(message_of([&] { rows.sum().backward(); }),
                AnyOf(HasSubstr("the gradient of 'table' is sparse"), HasSubstr("ended with an error")));
  });
}

TEST(DdpErrors, ALoadedBucketOrderIsChecked) {
  const auto load = [](DistributedDataParallel& ddp, const std::function<void(at::Tensor&)>& change) {
    TrainState state;
    ddp.collect_state(state);
    change(state.tensors[0].tensor);
  };
  run_local_ranks(2, [&](const std::shared_ptr<Communicator>& comm) {
    Bag model;
    const auto w = model.add("w", at::ones({1}));
    DistributedDataParallel ddp(model, comm);
    load(ddp, [](at::Tensor& order) { order[0] = 1234; });
    EXPECT_THAT(message_of([&] { w.sum().backward(); }),
                AnyOf(HasSubstr("ddp.bucket_order: it was saved from a model with other parameters"),
                      HasSubstr("ended with an error")));
  });
  run_local_ranks(2, [&](const std::shared_ptr<Communicator>& comm) {
    Bag model;
    const auto w = model.add("w", at::ones({1})), v = model.add("v", at::ones({1}));
    DistributedDataParallel ddp(model, comm);
    load(ddp, [&](at::Tensor& order) {
      order[1] = 1;
      if (comm->rank() == 1) order.narrow(0, 2, 2).copy_(order.narrow(0, 2, 2).flip(0).clone());
    });
    EXPECT_THAT(message_of([&] { w.sum().add(v.sum()).backward(); }),
                AnyOf(HasSubstr("the ranks loaded different orders"), HasSubstr("ended with an error")));
  });
}

}  // namespace
}  // namespace phalanx
