#include "cli/launch_command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "phalanx/base/cpu.h"
#include "phalanx/base/error.h"

namespace phalanx::cli {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

std::string launch_error(const Arguments& arguments) {
  try {
    parse_launch_arguments(arguments);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "no error";
}

TEST(LaunchCommandTest, TakesTorchrunsSpellings) {
  for (const Arguments& head : std::vector<Arguments>{{"--nproc-per-node", "4"},
                                                      {"--nproc_per_node=4"},
                                                      {"-n", "4"},
                                                      {"--standalone", "--nnodes=1", "--nproc_per_node", "4"},
                                                      {"--no_python", "--nnodes", "1:1", "-n", "4", "--"}}) {
    Arguments arguments = head;
    for (const char* rest : {"prog", "--nproc-per-node", "9", "--", "x"}) arguments.emplace_back(rest);
    const auto parsed = parse_launch_arguments(arguments);
    EXPECT_EQ(parsed.ranks, 4);
    EXPECT_THAT(parsed.program, ElementsAre("prog", "--nproc-per-node", "9", "--", "x"));
  }
  EXPECT_EQ(parse_launch_arguments({"prog"}).ranks, 1);
  EXPECT_EQ(parse_launch_arguments({"-n", "cpu", "prog"}).ranks, usable_cores());
  EXPECT_TRUE(parse_launch_arguments({"--help"}).help);
}

TEST(LaunchCommandTest, RefusesByName) {
  EXPECT_THAT(launch_error({"--rdzv_backend=c10d", "prog"}), AllOf(HasSubstr("--rdzv_backend"), HasSubstr("torchrun")));
  EXPECT_THAT(launch_error({"--max-restarts", "3", "prog"}), HasSubstr("not restarted"));
  EXPECT_THAT(launch_error({"--nnodes", "2", "prog"}), AllOf(HasSubstr("'2'"), HasSubstr("one machine")));
  EXPECT_THAT(launch_error({"--nproc-per-nod", "2", "prog"}), HasSubstr("did you mean '--nproc-per-node'"));
  for (const char* bad : {"0", "-1", "two", "2x", "", "5000"})
    EXPECT_THAT(launch_error({"-n", bad, "prog"}), HasSubstr("expected a number from 1 to 4096")) << bad;
  EXPECT_THAT(launch_error({"-n"}), HasSubstr("-n needs a value"));
  EXPECT_THAT(launch_error({"-n", "2"}), HasSubstr("no program"));
  EXPECT_THAT(launch_error({"-n", "2", "--"}), HasSubstr("no program"));
  EXPECT_THAT(launch_error({"--standalone=yes", "prog"}), HasSubstr("takes no value"));
}

}  // namespace
}  // namespace phalanx::cli
