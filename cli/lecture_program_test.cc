// `phalanx lecture` as a user runs it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "cli/testing/program_fixture.h"
#include "phalanx/base/file.h"

namespace phalanx::cli {
namespace {

using namespace program_testing;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

using LectureProgramTest = ProgramTest;

TEST_F(LectureProgramTest, ListsItsSections) {
  const Outcome list = run({"lecture", "--list"});
  EXPECT_EQ(list.status, 0) << list.err;
  EXPECT_THAT(list.out, AllOf(HasSubstr("part 1  collectives"), HasSubstr("part 2  pipeline")));
}

TEST_F(LectureProgramTest, RunsASectionInTheTerminalAndIntoAPage) {
  const Outcome shown = run({"lecture", "--section", "collectives", "--ranks", "2", "--device", "cpu"});
  EXPECT_EQ(shown.status, 0) << shown.err;
  EXPECT_THAT(shown.out, AllOf(HasSubstr("    all_reduce      [0,1]>[1,3]"),
                               HasSubstr("holds: reduce_scatter, then all_gather, is all_reduce")));
  const std::string page = path("lecture.html");
  const Outcome written = run({"lecture", "--section", "collectives", "--device", "cpu", "--html", page});
  EXPECT_EQ(written.status, 0) << written.err;
  EXPECT_EQ(written.out, "");
  EXPECT_THAT(read_file(page), AllOf(HasSubstr("<section id=\"collectives\">"), HasSubstr("[6,10,14,18]")));
}

TEST_F(LectureProgramTest, WaitsAfterEachSection) {
  const std::string out = path("out");
  const std::string line =
      "printf '\\nq\\n' | " + program() +
      " lecture --step --device cpu --ranks 1 --section collectives --section jobs --section summary >" + out;
  EXPECT_EQ(std::system(line.c_str()), 0);
  EXPECT_THAT(contents(out), AllOf(HasSubstr("Collectives\n==="), HasSubstr("A job on a cluster\n==="),
                                   HasSubstr("[Enter: the next section; q: the end]"), Not(HasSubstr("Summary"))));
}

TEST_F(LectureProgramTest, WrongValuesAreOneErrorEach) {
  expect_one_error(run({"lecture", "--section", "colectives"}), 2, "did you mean 'collectives'?");
  expect_one_error(run({"lecture", "--ranks", "3", "--device", "cpu"}), 2, "--ranks has 3: expected 1, 2 or 4");
  expect_one_error(run({"lecture", "--device", "tpu"}), 2, "--device has 'tpu': expected cpu or cuda");
  const Outcome none = run({"lecture", "--device", "cuda", "--section", "summary"});
  if (none.status != 0) expect_one_error(none, 2, "--device cuda: this libtorch has no CUDA, or this node no GPU");
}

}  // namespace
}  // namespace phalanx::cli
