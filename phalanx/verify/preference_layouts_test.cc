// The loss of preferences ([dpo]) has one rank's value, gradients and updates in every layout.
#include <string>
#include <vector>

#include "phalanx/base/testing/case_sample.h"
#include "phalanx/train/conversation_files.h"
#include "phalanx/train/testing/preference_test.h"
#include "phalanx/verify/layout_check.h"
#include "phalanx/verify/layout_side.h"

namespace phalanx::verify::preference_layouts_test {
namespace {

class PreferenceLayouts : public train::PreferenceTest {
 protected:
  LayoutCheck check(const Layout& layout, const std::function<void(LayoutSide&)>& prepare = {}) {
    LayoutCheck found;
    run_local_ranks(layout.ranks, [&](const std::shared_ptr<Communicator>& world) {
      const config::TrainConfig config = train::config_of_data(tune_in(layout, "run"), world);
      const LayoutCheck check = check_layout(config, {.world = world, .prepare = prepare}, {.steps = 2});
      if (world->rank() == 0) found = check;
    });
    return found;
  }
};

TEST_F(PreferenceLayouts, AreVerified) {
  const std::vector<Layout> layouts = {
      {.name = "accumulated", .keys = {"--training.local_batch_size=2"}},
      {.name = "ddp2_bfloat16", .ranks = 2, .keys = {"--training.mixed_precision_param=bfloat16"}},
      {.name = "zero3", .ranks = 2, .keys = sharded(3)},
      {.name = "tp2_bfloat16", .ranks = 2, .tp = 2, .keys = {"--training.mixed_precision_param=bfloat16"}},
      {.name = "pp2", .ranks = 2, .pp = 2, .keys = {"--parallelism.pipeline_parallel_schedule=1F1B"}},
      {.name = "cp2", .ranks = 2, .cp = 2}};
  for (const Layout& layout : sampled(layouts, 3)) {
    SCOPED_TRACE(layout.name);
    const LayoutCheck found = check(layout);
    EXPECT_EQ(found.finding ? found.finding->text() : "", "");
    EXPECT_EQ(found.steps.size(), 2U);
    EXPECT_GT(found.documents_compared.value_or(0), 0);
  }
}

TEST_F(PreferenceLayouts, AnotherReferenceOnOneSideIsFound) {
  const LayoutCheck found = check({.name = "ddp2", .ranks = 2}, [](LayoutSide& side) {
    side.options.reference = side.options.reference.clone();
    side.options.reference.select(1, 0).sub_(1);
  });
  EXPECT_TRUE(found.finding.has_value());
}

}  // namespace
}  // namespace phalanx::verify::preference_layouts_test
