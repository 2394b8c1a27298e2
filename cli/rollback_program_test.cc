// `phalanx train` with [checkpoint] load_step, restarted by a launcher and by hand.
#include <gtest/gtest.h>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "cli/testing/program_fixture.h"
#include "phalanx/base/folder_lock.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx::cli {
namespace {

using namespace program_testing;

class RollbackProgramTest : public ProgramTest {
 protected:
  RollbackProgramTest() {
    std::string tokens;
    for (int i = 0; i < 4000; ++i) tokens += {static_cast<char>(i * 7 % 251), static_cast<char>(i / 50 % 2)};
    write("tokens.bin", tokens);
    write("run.toml", "[job]\ndump_folder = \"" + path("run") +
                          "\"\n[model]\nflavor = \"debug\"\n[training]\ndataset_path = \"" + path("tokens.bin") +
                          "\"\nseq_len = 16\nlocal_batch_size = 1\nsteps = 6\n[lr_scheduler]\nwarmup_steps = 1\n"
                          "[checkpoint]\ninterval = 2\n");
  }
  Outcome train(std::vector<std::string> more = {}) const {
    more.insert(more.begin(), {"train", path("run.toml")});
    return run(more);
  }
  std::vector<int> steps_in_curve() const {
    std::vector<int> steps;
    std::istringstream lines(contents(path("run/metrics.jsonl")));
    for (std::string line; std::getline(lines, line);) {
      const auto json = nlohmann::json::parse(line);
      if (json.contains("loss")) steps.push_back(json["step"]);
    }
    return steps;
  }
};

// The first attempt starts the branch and fails two steps later. The second must not go back to the start of the
// branch, even though the file that both read has changed in between.
TEST_F(RollbackProgramTest, ARestartedAttemptGoesOnFromItsBranchsNewestStep) {
  ASSERT_EQ(train().status, 0);
  write("attempt.sh",
        "if [ \"$TORCHELASTIC_RESTART_COUNT\" = 0 ]; then\n  \"$0\" train \"$1\" --checkpoint.load_step 2 "
        "--training.steps 4; exit 1\nfi\nexec \"$0\" train \"$1\" --checkpoint.load_step 2\n");
  const Outcome launched = run(
      {"launch", "-n", "1", "--max-restarts", "1", "sh", "-c", ". " + path("attempt.sh"), program(), path("run.toml")});
  ASSERT_EQ(launched.status, 0) << launched.err;
  const std::string said = launched.out + launched.err;
  EXPECT_EQ(count(said, "load_step = 2: newer than that, and set aside in " + path("run/checkpoint/abandoned-1")), 1);
  EXPECT_THAT(said, AllOf(HasSubstr("step-4, step-6"),
                          HasSubstr("load_step = 2: an earlier attempt of this job has begun its branch"),
                          HasSubstr("continuing from " + path("run/checkpoint/step-4"))));
  EXPECT_THAT(steps_in_curve(), ElementsAre(1, 2, 3, 4, 5, 6));
  // When started by hand, the settings that began the branch mean the same branch, at its end.
  const Outcome again = train({"--checkpoint.load_step", "2", "--training.steps", "4"});
  EXPECT_EQ(again.status, 0);
  EXPECT_THAT(again.out + again.err, AllOf(HasSubstr("this command has begun its branch"),
                                           HasSubstr("nothing to train"), Not(HasSubstr("set aside"))));
}

TEST_F(RollbackProgramTest, ASecondRunInTheFolderIsRefused) {
  const FolderLock other(path("run"));
  const Outcome refused = train({"-n", "2", "--training.global_batch_size", "2"});
  EXPECT_EQ(refused.status, 1);
  EXPECT_THAT(refused.err,
              HasSubstr(path("run") + " is in use by process " + std::to_string(::getpid()) + " on host "));
}

}  // namespace
}  // namespace phalanx::cli
