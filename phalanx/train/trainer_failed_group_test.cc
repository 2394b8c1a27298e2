// A collective that failed in one group of ranks is told before the weights that it spoilt are saved.
#include <filesystem>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/comm/testing/forwarding_backend.h"
#include "phalanx/train/testing/trainer_test_support.h"

namespace phalanx::train {
namespace {

constexpr int kRanks = 8;

/// The groups of a rank that moved tensors in training.
struct UsedGroups {
  std::mutex mutex;
  std::set<std::string> names;
};

/// Notes which groups are used: this one and those split from it. A barrier of the group `failed` throws, as the next
/// call does after a collective that failed behind the host.
class FailingBackend final : public ForwardingBackend {
 public:
  FailingBackend(std::shared_ptr<Backend> below, std::string name, std::string failed, std::shared_ptr<UsedGroups> used)
      : ForwardingBackend(std::move(below)),
        name_(std::move(name)),
        failed_(std::move(failed)),
        used_(std::move(used)) {}

  std::unique_ptr<Operation> start(const OperationDescription& asked) override {
    if (!asked.compare_only && asked.verb == Verb::barrier && name_ == failed_) throw CommError("a late failure");
    if (!asked.compare_only && asked.verb != Verb::barrier && asked.verb != Verb::broadcast) {
      const std::lock_guard lock(used_->mutex);
      used_->names.insert(name_);
    }
    return ForwardingBackend::start(asked);
  }
  std::shared_ptr<Backend> split(const SplitRequest& request) override {
    auto part = ForwardingBackend::split(request);
    return part ? std::make_shared<FailingBackend>(std::move(part), request.name, failed_, used_) : nullptr;
  }

 private:
  std::string name_, failed_;
  std::shared_ptr<UsedGroups> used_;
};

class TrainerFailedGroupTest : public TrainerTest {
 protected:
  /// The groups that rank 0 used. `failed`: empty for none.
  std::set<std::string> run(const config::TrainConfig& config, const std::string& failed) const {
    const auto of_first = std::make_shared<UsedGroups>();
    run_local_ranks(kRanks, [&](const std::shared_ptr<Communicator>& world) {
      const auto used = world->rank() == 0 ? of_first : std::make_shared<UsedGroups>();
      const auto failing =
          std::make_shared<Communicator>(std::make_shared<FailingBackend>(world->backend(), "world", failed, used),
                                         CommunicatorOptions{.name = "world"});
      Trainer(config, {.world = failing, .quiet = true}).run();
    });
    return of_first->names;
  }
};

// A failure in one group of ranks is reported by that group's next call.
TEST_F(TrainerFailedGroupTest, WeightsAreNotSavedAfterACollectiveOfAnyGroupFailed) {
  // Four ranks share the debug model's two heads of keys and values: groups of two sum their gradients.
  const std::vector<std::pair<Layout, std::string>> layouts = {
      {{.name = "stages", .ranks = kRanks, .tp = 2, .pp = 2, .keys = sharded(3, 2)}, "pp"},
      {{.name = "copies", .ranks = kRanks, .tp = 4, .keys = sharded(2, 2)}, "tp_copy"}};
  for (const auto& [layout, expected] : layouts) {
    const auto config_named = [&](const std::string& run) {
      return config_of(layout, run, {"--training.steps=2", "--checkpoint.interval=2", "--validation.no-enable"});
    };
    const auto used = run(config_named(layout.name), "");
    EXPECT_TRUE(std::filesystem::exists(path(layout.name + "/checkpoint/step-2")));
    EXPECT_THAT(used, ::testing::IsSupersetOf({std::string("tp"), expected}));
    for (const std::string& group : used) {
      SCOPED_TRACE(group);
      const std::string name = layout.name + "_" + group;
      EXPECT_THROW(run(config_named(name), group), CommError);
      EXPECT_FALSE(std::filesystem::exists(path(name + "/checkpoint/step-2")));
    }
  }
}

}  // namespace
}  // namespace phalanx::train
