#include "phalanx/train/run_rollback.h"

#include "phalanx/base/error.h"
#include "phalanx/base/testing/faulty_file_system.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/checkpoint/files/checkpoint_list.h"
#include "phalanx/train/testing/trainer_test_support.h"

namespace phalanx::train {
namespace {

class RunRollbackTest : public TrainerTest {
 protected:
  RunRollbackTest() { train(config("source", {"--checkpoint.interval=4"}), 1); }

  RollbackFolders folders(const std::string& run) const {
    return {.checkpoints = path(run) + "/checkpoint", .run = path(run)};
  }
  /// A run with checkpoints of steps 4, 8 and 12.
  void copy_run(const std::string& run) const {
    std::filesystem::remove_all(path(run));
    std::filesystem::copy(path("source"), path(run), std::filesystem::copy_options::recursive);
  }
  /// The next command, without load_step, does one step.
  void start(const std::string& run) { train(config(run, {"--training.steps=14"}), 1, stop_after_first_step()); }
  nlohmann::json branches_of(const std::string& run) const {
    return nlohmann::json::parse(std::ifstream(path(run) + "/run.json")).value("branches", nlohmann::json::array());
  }
  std::vector<int> steps_in(const std::string& curve) const {
    std::ifstream file(path(curve));
    std::vector<int> steps;
    for (std::string line; std::getline(file, line);) {
      const auto entry = nlohmann::json::parse(line);
      if (entry.contains("loss")) steps.push_back(entry["step"]);
    }
    return steps;
  }
};

// A rollback interrupted at any file operation has not begun, or is completed by the next start, with one entry.
TEST_F(RunRollbackTest, TheNextStartCompletesItAndTheRecordSaysSoWhateverWasInterrupted) {
  std::int64_t operations = 0;
  {
    copy_run("run");
    FaultyFileSystem fs(posix_file_system());
    EXPECT_THAT(roll_back(folders("run"), {.step = 4}, fs).names, ElementsAre("step-8", "step-12"));
    operations = fs.operations();
  }
  int begun_runs = 0;
  for (std::int64_t n = 0; n < operations; ++n) {
    for (const Fault kind : {Fault::crash, Fault::error}) {
      SCOPED_TRACE(::testing::Message() << "operation " << n << " of " << operations << ", fault "
                                        << static_cast<int>(kind));
      copy_run("run");
      FaultyFileSystem fs(posix_file_system(), {.fail_at = n, .kind = kind});
      bool failed = false;
      try {
        roll_back(folders("run"), {.step = 4}, fs);
      } catch (const SimulatedCrash&) {
        failed = true;
      } catch (const FileError&) {
        failed = true;
      }
      // If the curve beside the steps cannot be stored, that is a warning, not a failure.
      EXPECT_TRUE(failed || kind == Fault::error);
      const auto record = read_branch(path("run/checkpoint"));
      const bool interrupted = record && !record->being_set_aside.empty();
      // Only the first thing that a start does; now and then a complete start.
      const bool starts = kind == Fault::crash && n % 7 == 0;
      if (starts) {
        start("run");
        EXPECT_EQ(result_.step, record ? 5 : 13);
      } else {
        EXPECT_EQ(finish_rollback(folders("run")).has_value(), interrupted);
      }
      const nlohmann::json branches = branches_of("run");
      if (!record) {
        EXPECT_TRUE(branches.empty());
        continue;
      }
      ++begun_runs;
      EXPECT_EQ(resolve_checkpoint(path("run")), path(starts ? "run/checkpoint/step-5" : "run/checkpoint/step-4"));
      EXPECT_THAT(steps_in("run/metrics.jsonl"), SizeIs(starts ? 5 : 12));
      if (failed) {
        EXPECT_THAT(steps_in("run/checkpoint/abandoned-1/metrics.jsonl"), SizeIs(12));
      }
      ASSERT_THAT(branches, SizeIs(1));
      EXPECT_EQ(branches[0]["step"], 4);
      EXPECT_EQ(branches[0]["set_aside"], (nlohmann::json{"step-8", "step-12"}));
      EXPECT_EQ(branches[0]["into"], path("run/checkpoint/abandoned-1"));
      EXPECT_EQ(branches[0].contains("interrupted"), interrupted);
      EXPECT_GT(branches[0]["time"], 0);
    }
  }
  EXPECT_GT(begun_runs, 10);
}

// Interrupted, and the next command asks for another rollback: both are listed.
TEST_F(RunRollbackTest, ARollbackAfterAnInterruptedOneLosesNeither) {
  copy_run("run");
  std::int64_t last = 0;
  {
    copy_run("all");
    FaultyFileSystem fs(posix_file_system());
    roll_back(folders("all"), {.step = 8}, fs);
    last = fs.operations() - 1;
  }
  FaultyFileSystem fs(posix_file_system(), {.fail_at = last - 3, .kind = Fault::crash});
  EXPECT_THROW(roll_back(folders("run"), {.step = 8}, fs), SimulatedCrash);
  train(config("run", {"--checkpoint.load_step=4"}), 1, stop_after_first_step());
  const auto branches = branches_of("run");
  ASSERT_THAT(branches, SizeIs(2));
  EXPECT_EQ(branches[0]["set_aside"], nlohmann::json{"step-12"});
  EXPECT_EQ(branches[0]["interrupted"], true);
  EXPECT_EQ(branches[1]["set_aside"], nlohmann::json{"step-8"});
  EXPECT_FALSE(branches[1].contains("interrupted"));
}

// A branch is identified by the settings that began it and by those that continued it last.
TEST_F(RunRollbackTest, TheBranchKnowsWhatWentOnWithItLast) {
  copy_run("run");
  const auto back = [&](std::vector<std::string> more = {}) {
    more.push_back("--checkpoint.load_step=4");
    train(config("run", more), 1, stop_after_first_step());
    return result_.step;
  };
  job_ = {.name = "job 7", .is_restart = false};
  EXPECT_EQ(back(), 5);
  job_.is_restart = true;
  EXPECT_EQ(back({"--optimizer.lr=1e-3"}), 6);
  job_ = {};
  EXPECT_EQ(back({"--optimizer.lr=1e-3"}), 7) << "by hand, as it was last";
  EXPECT_EQ(back(), 8) << "as it was begun";
  job_ = {.name = "job 9", .is_restart = false};
  EXPECT_EQ(back(), 9);
  job_.is_restart = true;
  EXPECT_EQ(back({"--optimizer.lr=2e-3"}), 10) << "a later attempt of the job that went on last";
  job_.name = "job 7";
  EXPECT_EQ(back({"--optimizer.lr=4e-3"}), 11) << "and of the one that began it";
  job_.name = "job 8";
  EXPECT_EQ(back({"--optimizer.lr=8e-3"}), 5);
  EXPECT_THAT(branches_of("run"), SizeIs(2));
}

}  // namespace
}  // namespace phalanx::train
