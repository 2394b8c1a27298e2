// What a new user sees first: versions, colours, wrong variables, a run that is already finished.
#include <fmt/format.h>

#include "cli/testing/program_fixture.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/base/testing/under_sanitizer.h"

namespace phalanx::cli {
namespace {

using namespace program_testing;
using FirstContact = ProgramTest;

TEST_F(FirstContact, VersionAlsoAsJson) {
  EXPECT_THAT(run({"version"}).out, ::testing::MatchesRegex("phalanx [0-9.]+\n"));
  EXPECT_THAT(run({"version", "--json"}).out, ::testing::MatchesRegex("\\{\"version\": \"[0-9.]+\"\\}\n"));
  expect_one_error(run({"version", "--jsn"}), 2, "unknown option '--jsn' (did you mean '--json'?)");
}

TEST_F(FirstContact, NoColorAndItsKeySwitchTheColoursOfATerminalOff) {
  const std::string green = "\x1b[32m", what = config();
  const auto screen = [&](const std::map<std::string, std::string>& environment, const std::string& flag) {
    std::filesystem::remove_all(path("run"));
    return run({"train", what, "--training.steps=1", flag},
               {.environment = environment, .streams = RunOptions::Streams::terminal})
        .out;
  };
  EXPECT_THAT(screen({}, "--metrics.log_freq=1"), HasSubstr(green));
  EXPECT_THAT(screen({{"NO_COLOR", "1"}}, "--metrics.log_freq=1"),
              AllOf(HasSubstr("step:  1"), Not(HasSubstr("\x1b[3"))));
  EXPECT_THAT(screen({}, "--metrics.disable_color_printing"), AllOf(HasSubstr("step:  1"), Not(HasSubstr("\x1b[3"))));
}

TEST_F(FirstContact, VariablesThatAreWrongAreNamed) {
  for (const char* threads : {"abc", "99999", "0"}) {
    expect_one_error(run({"train", config()}, {.environment = {{"OMP_NUM_THREADS", threads}}}), 2,
                     std::string("OMP_NUM_THREADS is '") + threads + "': expected a number of threads");
  }
  expect_one_error(run({"train", config()}, {.environment = {{"MASTER_PORT", "0"}}}), 2, "MASTER_PORT is '0'");
}

TEST_F(FirstContact, ARunThatIsDoneSaysSoAndMeasuresNothing) {
  const std::string what = config();
  EXPECT_EQ(run({"train", what}).status, 0);
  const Outcome again = run({"train", what});
  EXPECT_EQ(again.status, 0) << again.err;
  EXPECT_THAT(again.err, AllOf(HasSubstr("nothing to train: step 8 of 8 is done"), Not(HasSubstr("peak memory"))));
  EXPECT_THAT(contents(path("run/run.json")), AllOf(HasSubstr("\"finished\""), HasSubstr("\"steps_done\": 8")));
}

TEST_F(FirstContact, AllProblemsOfAConfigurationAreOneError) {
  expect_one_error(run({"train", config("[modell]\nx = 1\n"), "--training.steps=none", "--optimizer.lr=fast"}), 2,
                   "3 problems");
}

// Each limit fails in another call: pipes, events and the sockets of the store in the launcher, and those of the ranks.
TEST_F(FirstContact, TooFewOpenFilesAreNamedWithTheLimit) {
  const std::string file = config();
  for (rlim_t most = 5; most <= 26; ++most) {
    const Outcome refused = run({"train", "-n", "2", file}, {.limits = {{RLIMIT_NOFILE, most}}});
    if (refused.status == 127 && most < 8) continue;  // the loader could not open the program's libraries and says so
    EXPECT_EQ(refused.status, 1) << most << "\n" << refused.err;
    EXPECT_THAT(refused.err,
                HasSubstr(fmt::format("RLIMIT_NOFILE is {} files and connections of a process (ulimit -n): "
                                      "raise it",
                                      most)));
  }
}

TEST_F(FirstContact, ATinyStackIsNamedWithTheLimit) {
  for (const char* ranks : {"1", "2"})
    expect_one_error(run({"train", "-n", ranks, config()}, {.limits = {{RLIMIT_STACK, 64 << 10}}}), 1,
                     "the stack is limited to 64.0 KiB (RLIMIT_STACK, ulimit -s)");
}

TEST_F(FirstContact, LibrariesThatDoNotFitIntoTheAddressSpaceAreNamedWithTheLimit) {
  if (kUnderSanitizer) GTEST_SKIP() << kWhyNoMemoryLimit;
  const Outcome refused = run({"train", "-n", "2", config()}, {.limits = {{RLIMIT_AS, 200 << 20}}});
  EXPECT_EQ(refused.status, 1) << refused.err;
  EXPECT_THAT(refused.err,
              HasSubstr("the program, or a library that it needs, could not be loaded: RLIMIT_AS: 200 MiB"));
}

TEST_F(FirstContact, WhereMpiCannotBeLoadedTheBackendSaysWhatIsMissing) {
  const Outcome outcome = run({"train", config(), "--comm.backend=mpi"},
                              {.environment = {{"PHALANX_MPI_MODULE", path("libphalanx_mpi.so")}}});
  EXPECT_EQ(outcome.status, 2) << outcome.err;
  EXPECT_THAT(outcome.err,
              AnyOf(AllOf(HasSubstr("libphalanx_mpi.so"), HasSubstr("Open MPI")), HasSubstr("this build has no MPI")));
}

}  // namespace
}  // namespace phalanx::cli
