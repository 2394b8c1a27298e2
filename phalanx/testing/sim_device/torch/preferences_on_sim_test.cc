// Preference tuning on simulated devices: the losses of the CPU, no races, and a host that waits once a step.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "phalanx/base/testing/case_sample.h"
#include "phalanx/testing/sim_device/torch/testing/sim_ranks.h"
#include "phalanx/train/testing/preference_test.h"

namespace phalanx::train::preferences_on_sim_test {
namespace {

class PreferencesOnSim : public PreferenceTest {
 protected:
  void expect_losses_of_the_cpu(const Layout& layout) {
    SCOPED_TRACE(layout.name);
    const std::vector<std::string> keys = {"--validation.enable", "--validation.fraction=0.2", "--validation.freq=100"};
    train(tune_in(layout, layout.name + "_cpu", keys), layout.ranks);
    std::map<int, std::uint64_t> waits;
    for (const int steps : {4, 7}) {
      const std::string run = fmt::format("{}_sim_{}", layout.name, steps);
      std::vector<std::string> more = {"--training.steps=" + std::to_string(steps), "--lr_scheduler.decay_ratio=0"};
      if (steps == 4) more = keys;
      sim_.runtime.clear_races();
      sim_.runtime.host_waits().clear();
      run_sim_ranks(layout.ranks, /*over_nccl=*/true, [&](const std::shared_ptr<Communicator>& world) {
        Trainer trainer(tune_in(layout, run, more),
                        {.world = world, .device = sim_device::SimBackend::device(world->rank()), .quiet = true});
        trainer.run();
      });
      EXPECT_THAT(sim_.runtime.races(), ::testing::IsEmpty());
      for (const auto& [site, count] : sim_.runtime.host_waits().by_site()) {
        if (site.find("DeviceReadback::read") != std::string::npos) waits[steps] += count;
      }
    }
    EXPECT_EQ(waits[7] - waits[4], 3U * static_cast<std::uint64_t>(layout.ranks));
    const std::string found = fmt::format("{}_sim_4", layout.name), expected = layout.name + "_cpu";
    for (const char* key : {"loss", "grad_norm", "rewards/chosen", "rewards/rejected", "validation_loss"}) {
      const std::vector<double> left = values_of(found, key), right = values_of(expected, key);
      ASSERT_EQ(left.size(), right.size()) << key;
      for (std::size_t i = 0; i < left.size(); ++i) {
        EXPECT_NEAR(left[i], right[i], 2e-5 * std::max(1.0, std::abs(right[i]))) << key << " " << i;
      }
    }
  }

  sim_device::SimBackend& sim_ = sim_device::sim_backend();
};

TEST_F(PreferencesOnSim, LossesAreThoseOfTheCpuAndAStepWaitsOnce) {
  const std::vector<Layout> layouts = {{.name = "one"},
                                       {.name = "zero3", .ranks = 2, .keys = sharded(3)},
                                       {.name = "tp", .ranks = 2, .tp = 2},
                                       {.name = "cp", .ranks = 2, .cp = 2},
                                       {.name = "pp", .ranks = 2, .pp = 2}};
  for (const Layout& layout : sampled(layouts, 2)) expect_losses_of_the_cpu(layout);
}

}  // namespace
}  // namespace phalanx::train::preferences_on_sim_test
