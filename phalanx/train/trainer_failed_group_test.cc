// A collective that failed in one group of ranks is told before the weights that it spoilt are saved.
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "phalanx/comm/testing/forwarding_backend.h"
#include "phalanx/train/testing/trainer_test_support.h"

namespace phalanx::train {
namespace {

/// Of a rank, by the name of the group: whether a barrier followed the last collective that moved tensors.
struct GroupLog {
  std::mutex mutex;
  std::map<std::string, bool> ends_with_barrier;
};

/// Keeps a GroupLog, of this group and of those split from it.
class LoggingBackend final : public ForwardingBackend {
 public:
  LoggingBackend(std::shared_ptr<Backend> below, std::string name, std::shared_ptr<GroupLog> log)
      : ForwardingBackend(std::move(below)), name_(std::move(name)), log_(std::move(log)) {}

  std::unique_ptr<Operation> start(const OperationDescription& asked) override {
    if (!asked.compare_only) {
      const std::lock_guard lock(log_->mutex);
      if (asked.verb == Verb::barrier) {
        if (const auto group = log_->ends_with_barrier.find(name_); group != log_->ends_with_barrier.end())
          group->second = true;
      } else if (asked.verb != Verb::broadcast) {
        log_->ends_with_barrier[name_] = false;
      }
    }
    return ForwardingBackend::start(asked);
  }
  std::shared_ptr<Backend> split(const SplitRequest& request) override {
    auto part = ForwardingBackend::split(request);
    return part ? std::make_shared<LoggingBackend>(std::move(part), request.name, log_) : nullptr;
  }

 private:
  std::string name_;
  std::shared_ptr<GroupLog> log_;
};

class TrainerFailedGroupTest : public TrainerTest {};

// A failure in one group of ranks is reported by that group's next call.
TEST_F(TrainerFailedGroupTest, EveryGroupIsAskedWhetherItsCollectivesFailedBeforeASave) {
  const auto config = config_of({.name = "run", .ranks = 8, .tp = 2, .pp = 2, .keys = sharded(3, 2)}, "run",
                                {"--training.steps=2", "--checkpoint.interval=2", "--validation.no-enable"});
  run_local_ranks(8, [&](const std::shared_ptr<Communicator>& world) {
    const auto log = std::make_shared<GroupLog>();
    const auto logged = std::make_shared<Communicator>(std::make_shared<LoggingBackend>(world->backend(), "world", log),
                                                       CommunicatorOptions{.name = "world"});
    Trainer trainer(config, {.world = logged, .quiet = true});
    trainer.run();
    EXPECT_GE(log->ends_with_barrier.size(), 4U);
    for (const auto& [group, ends_with_barrier] : log->ends_with_barrier) {
      if (group == "world") continue;  // it exchanges other numbers later
      EXPECT_TRUE(ends_with_barrier) << group << ", rank " << world->rank();
    }
  });
}

}  // namespace
}  // namespace phalanx::train
