#include "cli/front/completion_command.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

#include "cli/testing/program_fixture.h"
#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx::cli {
namespace {

using namespace program_testing;

TEST(CompletionCommand, ReadsOptionsAndWordsOutOfAHelpText) {
  const CompletedCommand command = completed_command("cook",
                                                     "usage: phalanx cook soup [--salt N|--no-salt] FILE\n"
                                                     "       phalanx cook cake FILE\n\n"
                                                     "  -n, --count N   how many; see --section.key\n",
                                                     /*takes_keys=*/false);
  EXPECT_THAT(command.words, ElementsAre("cake", "soup"));
  EXPECT_THAT(command.options, ElementsAre("--count", "--help", "--no-salt", "--salt"));
  EXPECT_THAT(completed_command("train", "", true).options, Contains("--training.seq_len"));
}

TEST(CompletionCommand, AnotherShellIsRefused) {
  EXPECT_EQ(error_text<UsageError>([] { completion_script("bsh", {}); }),
            "'bsh' is no shell that can complete (did you mean 'bash'?): expected bash, zsh, fish");
  EXPECT_EQ(error_text<UsageError>([] { completion_command({}, {}); }), "expected a shell: bash, zsh, fish");
}

class CompletionTest : public ProgramTest {
 protected:
  /// What bash offers for the last of these words, one per line.
  std::string offered(const std::string& words) const {
    const std::string script = path("complete.sh");
    std::ofstream(script) << run({"completion", "bash"}).out << "COMP_WORDS=(" << words << ")\n"
                          << "COMP_CWORD=$((${#COMP_WORDS[@]} - 1))\n_phalanx\nprintf '%s\\n' \"${COMPREPLY[@]}\"\n";
    const std::string output = path("offered");
    EXPECT_EQ(std::system(("bash " + script + " >" + output).c_str()), 0);
    return contents(output);
  }
};

TEST_F(CompletionTest, BashCompletesCommandsWordsOptionsAndKeys) {
  EXPECT_EQ(offered("phalanx tr"), "train\ntrace\n");
  EXPECT_EQ(offered("phalanx train x.toml --training.seq"), "--training.seq_len\n");
  EXPECT_THAT(offered("phalanx launch --rdzv"), HasSubstr("--rdzv-endpoint\n"));
  EXPECT_THAT(offered("phalanx generate --"), HasSubstr("--top-k\n"));
  EXPECT_THAT(offered("phalanx generate --"), Not(HasSubstr("--training")));
  EXPECT_EQ(offered("phalanx bench tra"), "train\n");
}

TEST_F(CompletionTest, EveryShellHasAScript) {
  EXPECT_THAT(run({"completion", "zsh"}).out, HasSubstr("bashcompinit\n"));
  EXPECT_THAT(run({"completion", "fish"}).out,
              HasSubstr("complete -c phalanx -n '__fish_seen_subcommand_from generate' -l top-k\n"));
  expect_one_error(run({"completion", "ksh"}), 2, "expected bash, zsh, fish");
}

}  // namespace
}  // namespace phalanx::cli
