#include "phalanx/train/ranks/rank_agreement.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <atomic>
#include <nlohmann/json.hpp>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/comm/testing/texts_of_ranks.h"

namespace phalanx::train {
namespace {

using nlohmann::json;

/// The error of each rank; "" if there is none.
template <class E>
std::vector<std::string> told(int ranks, const std::function<void(Communicator&)>& body) {
  return texts_of_ranks(ranks, [&](const auto& world) { return error_text<E>([&] { body(*world); }); });
}

TEST(RankAgreement, AllRanksAreToldWhichOnesDiffer) {
  const auto messages = told<ConfigError>(4, [](Communicator& world) {
    json mine = {{"optimizer", {{"lr", world.rank() == 2 ? 0.5 : 0.25}, {"name", "AdamW"}}}};
    if (world.rank() == 3) mine["extra"] = true;
    require_same_on_ranks(world, "configuration", mine, "mend it");
  });
  for (const std::string& message : messages) {
    EXPECT_THAT(message, AllOf(HasSubstr("the ranks do not have the same configuration:"),
                               HasSubstr("\n  optimizer.lr: 0.25 on ranks 0, 1, 3; 0.5 on rank 2"),
                               HasSubstr("\n  extra: not set on ranks 0 to 2; true on rank 3"), HasSubstr("mend it"),
                               Not(HasSubstr("AdamW"))));
  }
}

TEST(RankAgreement, WhereAllAgreeNothingIsSaid) {
  for (const int ranks : {1, 3}) {
    const auto messages = told<Error>(ranks, [](Communicator& world) {
      require_same_on_ranks(world, "configuration", {{"a", 1}}, "");
      require_same_weights(world, {{"w", at::arange(10)}});
    });
    EXPECT_EQ(messages, std::vector<std::string>(static_cast<std::size_t>(ranks)));
  }
}

TEST(RankAgreement, OtherWeightsOnARankAreNamed) {
  const auto messages = told<Error>(3, [](Communicator& world) {
    at::Tensor same = at::arange(50), large = at::zeros({300, 200});
    if (world.rank() == 1) large.add_(1e-3);
    require_same_weights(world, {{"same", same}, {"large", large}});
  });
  for (const std::string& message : messages) {
    EXPECT_THAT(message, AllOf(HasSubstr("do not begin with the same weights"), HasSubstr("large: "),
                               HasSubstr("on ranks 0, 2"), HasSubstr("on rank 1"), Not(HasSubstr("same: "))));
  }
}

// In a pipeline: ranks with other tensors are not compared.
TEST(RankAgreement, RanksWithOtherPartsMayHoldOtherValues) {
  const auto stages = [](Communicator& world, int odd) {
    const int stage = world.rank() / 2;
    at::Tensor values = at::arange(10) * (stage + 1);
    if (world.rank() == odd) values.add_(1);
    require_same_weights(world, {{"stage" + std::to_string(stage), values}});
  };
  for (const std::string& message : told<Error>(4, [&](Communicator& world) { stages(world, -1); })) {
    EXPECT_EQ(message, "");
  }
  for (const std::string& message : told<Error>(4, [&](Communicator& world) { stages(world, 3); })) {
    EXPECT_THAT(message,
                AllOf(HasSubstr("stage1: "), HasSubstr("on rank 2"), HasSubstr("on rank 3"), Not(HasSubstr("stage0"))));
  }
}

}  // namespace
}  // namespace phalanx::train
