// How a run starts: all ranks decide the same, whatever each of them sees, and fail with the same error.
#include <unistd.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "phalanx/base/error.h"
#include "phalanx/base/folder_lock.h"
#include "phalanx/train/run_checkpoints.h"
#include "phalanx/train/trainer_test_support.h"

namespace phalanx::train {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class TrainerStartTest : public TrainerTest {};

/// Reads what is written to standard error, and does something once, as soon as a text is in it.
class WatchedErrors {
 public:
  WatchedErrors(std::string text, std::function<void()> act) : kept_(::dup(STDERR_FILENO)) {
    int ends[2];
    if (::pipe(ends) != 0) throw Error("cannot make a pipe");
    ::dup2(ends[1], STDERR_FILENO);
    ::close(ends[1]);
    reader_ = std::thread([this, from = ends[0], text = std::move(text), act = std::move(act)] {
      char block[4096];
      bool done = false;
      for (ssize_t size = 0; (size = ::read(from, block, sizeof block)) > 0;) {
        all_.append(block, static_cast<std::size_t>(size));
        if (done || all_.find(text) == std::string::npos) continue;
        done = true;
        act();
      }
      ::close(from);
    });
  }
  ~WatchedErrors() { finish(); }
  WatchedErrors(const WatchedErrors&) = delete;

  /// All that was written.
  std::string finish() {
    if (!reader_.joinable()) return all_;
    ::dup2(kept_, STDERR_FILENO);  // the pipe's last writer goes
    ::close(kept_);
    reader_.join();
    return all_;
  }

 private:
  int kept_;
  std::string all_;
  std::thread reader_;
};

// What the holder of the folder saves while another run waits for it decides what that one is.
TEST_F(TrainerStartTest, ARunThatWaitsForItsFolderGoesOnFromWhatTheHolderLeaves) {
  train(config("other", {"--training.steps=3"}), 1);
  auto holder = std::make_unique<FolderLock>(path("run"));
  WatchedErrors errors("waiting up to", [&] {
    std::filesystem::rename(path("other/checkpoint"), path("run/checkpoint"));
    holder.reset();
  });
  run_local_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
    Trainer trainer(config("run", {"--training.steps=4"}),
                    {.world = world, .job = {.name = "job", .patience = std::chrono::seconds(60)}});
    EXPECT_EQ(trainer.run().step, 4);
  });
  EXPECT_THAT(errors.finish(), AllOf(HasSubstr("continuing from"), ::testing::Not(HasSubstr("initial weights: "))));
  EXPECT_EQ(losses("run").size(), 1u);
}

// As on a network file system whose other nodes do not see yet, or see no more, what rank 0 does.
TEST_F(TrainerStartTest, OneRankLooksForAll) {
  train(config("run", {"--training.steps=1"}), 1);
  for (const bool first_sees : {true, false}) {
    run_local_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
      const bool sees = (world->rank() == 0) == first_sees;
      RunCheckpoints checkpoints(config(sees ? "run" : "none"), world, [](const std::string&) {});
      checkpoints.decide();
      EXPECT_EQ(checkpoints.continues(), first_sees) << "rank " << world->rank();
    });
  }
}

// Weights of neither a checkpoint nor a new run are no beginning.
TEST_F(TrainerStartTest, CheckpointsThatComeOrGoWhileARunStartsAreAnError) {
  train(config("run", {"--training.steps=1"}), 1);
  for (const bool there : {true, false}) {
    run_local_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
      RunCheckpoints checkpoints(config("run"), world, [](const std::string&) {});
      checkpoints.decide();
      EXPECT_EQ(checkpoints.continues(), there);
      world->barrier();
      if (world->rank() == 0) std::filesystem::rename(path("run/checkpoint"), path("moved"));
      if (world->rank() == 0 && !there) std::filesystem::rename(path("kept"), path("run/checkpoint"));
      world->barrier();
      TrainState state = state_in_folder(there ? path("moved") : path("run/checkpoint"), 1);
      try {
        checkpoints.load(state);
        ADD_FAILURE() << "loaded";
      } catch (const CheckpointError& error) {
        EXPECT_THAT(error.what(), HasSubstr("something else writes to the folder"));
      }
    });
    if (there) std::filesystem::rename(path("moved"), path("kept"));
  }
}

}  // namespace
}  // namespace phalanx::train
