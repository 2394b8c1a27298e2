// Parameters that are frozen, unfrozen or added after DistributedDataParallel or FullyShardedDataParallel was attached:
// every rank throws an error that names them, in the backward pass in which they matter.
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "phalanx/base/testing/matchers.h"
#include "phalanx/parallel/fsdp/fully_shard.h"
#include "phalanx/parallel/testing/ddp_test_support.h"
#include "phalanx/parallel/testing/fully_shard_test_support.h"

namespace phalanx {
namespace {

using ddp_testing::Bag;
using ddp_testing::message_of;
using ddp_testing::waves;
using fully_shard_testing::kWidth;
using fully_shard_testing::linears;
using fully_shard_testing::sharding_mesh;

enum class Attached { ddp, ddp_that_finds_unused, fully_shard };

/// Three linear layers, the last of them frozen, and the object that averages their gradients.
class ChangingNet {
 public:
  ChangingNet(const std::shared_ptr<Communicator>& world, Attached attached) : net_(linears(3)) {
    set_requires_grad("4", false);
    if (attached == Attached::fully_shard) {
      sharded_.emplace(*net_, sharding_mesh(world));
    } else {
      ddp_.emplace(*net_, world, DdpOptions{.find_unused_parameters = attached == Attached::ddp_that_finds_unused});
    }
  }
  void set_requires_grad(const std::string& layer, bool wanted) {
    for (auto& p : net_->named_parameters()) {
      if (p.key().starts_with(layer + ".")) p.value().set_requires_grad(wanted);
    }
  }
  void pass() { net_->forward(waves({3, kWidth}, 0.0)).sum().backward(); }
  void held_pass() {
    if (sharded_) {
      const auto held = sharded_->no_sync();
      pass();
    } else {
      const auto held = ddp_->no_sync();
      pass();
    }
  }
  /// Whether ranks communicate in every pass.
  bool gathers() const { return sharded_.has_value(); }
  torch::nn::Sequential& net() { return net_; }

 private:
  torch::nn::Sequential net_;
  std::optional<DistributedDataParallel> ddp_;
  std::optional<FullyShardedDataParallel> sharded_;
};

/// Runs body(net, whether this rank changes it, world) with each kind, on all ranks and on one of them, before the
/// first step and after one.
void for_each_kind(const std::function<void(ChangingNet& net, bool changes)>& body) {
  for (const int ranks : {1, 2, 3}) {
    for (const auto attached : {Attached::ddp, Attached::ddp_that_finds_unused, Attached::fully_shard}) {
      for (const bool on_one_only : {false, true}) {
        for (const bool after_a_step : {false, true}) {
          run_local_ranks(ranks, [&](const std::shared_ptr<Communicator>& world) {
            SCOPED_TRACE(::testing::Message()
                         << ranks << " ranks, kind " << static_cast<int>(attached)
                         << (on_one_only ? ", on one only" : "") << (after_a_step ? ", after a step" : ""));
            ChangingNet net(world, attached);
            if (after_a_step) net.pass();
            body(net, !on_one_only || world->rank() == ranks - 1);
          });
        }
      }
    }
  }
}

TEST(ChangedParameters, OneThatIsUnfrozenLaterIsNamedOnEveryRank) {
  for_each_kind([](ChangingNet& net, bool changes) {
    if (changes) net.set_requires_grad("4", true);
    EXPECT_THAT(message_of([&] { net.pass(); }),
                AllOf(HasSubstr("'4.weight', '4.bias' have been unfrozen (requires_grad = true)"),
                      HasSubstr("alike on all ranks")));
  });
}

TEST(ChangedParameters, OneThatIsFrozenLaterIsNamedOnEveryRank) {
  for_each_kind([](ChangingNet& net, bool changes) {
    if (changes) net.set_requires_grad("0", false);
    EXPECT_THAT(message_of([&] { net.pass(); }),
                HasSubstr("'0.weight', '0.bias' have been frozen (requires_grad = false)"));
  });
}

// As in training parts in turn: none of the attached parameters gets a gradient.
TEST(ChangedParameters, TakingTurnsIsNotPassedOver) {
  for_each_kind([](ChangingNet& net, bool changes) {
    if (changes) {
      for (const char* layer : {"0", "2"}) net.set_requires_grad(layer, false);
      net.set_requires_grad("4", true);
    }
    EXPECT_THAT(message_of([&] { net.pass(); }), AllOf(HasSubstr("'4.weight', '4.bias' have been unfrozen"),
                                                       HasSubstr("'0.weight', '0.bias', '2.weight'")));
  });
}

TEST(ChangedParameters, WhereItReceivesAGradientAHeldPassFailsToo) {
  for_each_kind([](ChangingNet& net, bool changes) {
    if (changes) net.set_requires_grad("4", true);
    if (!changes && !net.gathers()) return;
    EXPECT_THAT(message_of([&] { net.held_pass(); }), HasSubstr("'4.weight', '4.bias' have been unfrozen"));
  });
}

TEST(ChangedParameters, OneThatIsAddedLaterIsNamedOnEveryRank) {
  for_each_kind([](ChangingNet& net, bool changes) {
    if (changes) net.net()->push_back("late", torch::nn::Linear(kWidth, kWidth));
    EXPECT_THAT(message_of([&] { net.pass(); }), HasSubstr("'late.weight', 'late.bias' have been added"));
  });
}

TEST(ChangedParameters, WhoeverAttachesAnewMayTrainOthers) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    auto net = linears(2);
    for (const char* frozen : {"0.", "2."}) {
      for (auto& p : net->named_parameters()) p.value().set_requires_grad(!p.key().starts_with(frozen));
      const DistributedDataParallel ddp(*net, world);
      for (int step = 0; step < 2; ++step) {
        net->zero_grad();
        net->forward(waves({3, kWidth}, world->rank())).sum().backward();
      }
      for (const auto& p : net->named_parameters()) {
        EXPECT_EQ(p.value().grad().defined(), !p.key().starts_with(frozen)) << p.key();
        if (!p.value().grad().defined()) continue;
        const at::Tensor sum = p.value().grad().clone();
        world->all_reduce(sum);
        EXPECT_TRUE(at::equal(sum, p.value().grad() * 2)) << p.key();
      }
      EXPECT_EQ(ddp.statistics().synchronisations, 2);
    }
  });
}

TEST(ChangedParameters, WhatStaysFrozenCostsNothing) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    for (const auto attached : {Attached::ddp, Attached::fully_shard}) {
      ChangingNet net(world, attached);
      for (int step = 0; step < 3; ++step) net.pass();
      net.held_pass();
      net.pass();
    }
  });
}

}  // namespace
}  // namespace phalanx
