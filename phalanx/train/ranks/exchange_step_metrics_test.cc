#include "phalanx/train/ranks/exchange_step_metrics.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <memory>

#include "phalanx/comm/backends/local_shm/local.h"

namespace phalanx::train {
namespace {

// Two parts of the batch, each on two ranks. The second part has no labels.
TEST(StepMetrics, OfUnequalPartsAreThoseOfTheGlobalBatch) {
  run_local_ranks(4, [](const std::shared_ptr<Communicator>& world) {
    const bool is_first = world->rank() < 2;
    const GlobalStepMetrics totals =
        exchange_step_metrics({.loss = is_first ? 1.75 : 0.0,
                               .mean_loss = is_first ? 1.75 : std::numeric_limits<double>::quiet_NaN(),
                               .label_count = is_first ? 6 : 0,
                               .pairs = is_first ? 100.0 : 28.0},
                              *world, /*data_ranks=*/2);
    EXPECT_DOUBLE_EQ(totals.pairs, 128);
    EXPECT_DOUBLE_EQ(totals.loss, 1.75);
    EXPECT_DOUBLE_EQ(totals.max_loss, 1.75);
    EXPECT_EQ(totals.label_count, 6);
  });
  run_local_ranks(3, [](const std::shared_ptr<Communicator>& world) {
    const double labels = 1 + world->rank();  // each token's loss is 2, 3 or 4 by rank
    const double mean = 2 + world->rank();
    const GlobalStepMetrics totals = exchange_step_metrics(
        {.loss = mean * labels / 6, .mean_loss = mean, .label_count = static_cast<std::int64_t>(labels)}, *world,
        /*data_ranks=*/3);
    EXPECT_DOUBLE_EQ(totals.loss, (2 * 1 + 3 * 2 + 4 * 3) / 6.0);
    EXPECT_DOUBLE_EQ(totals.max_loss, 4);
    EXPECT_EQ(totals.label_count, 6);
  });
}

}  // namespace
}  // namespace phalanx::train
