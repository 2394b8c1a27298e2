#include "phalanx/checkpoint/files/branch.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/faulty_file_system.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/checkpoint/checkpoint_manager.h"
#include "phalanx/checkpoint/files/checkpoint_list.h"
#include "phalanx/checkpoint/testing/test_state.h"

namespace phalanx {
namespace {

using checkpoint_testing::make_state;

/// Checkpoints of steps 1 to 4, saved once and copied: the last one damaged, and one as a replacement left it.
void fill_with_steps(const std::filesystem::path& folder) {
  static const TempDirectory original("branch-original");
  if (std::filesystem::is_empty(original.path())) {
    CheckpointManager checkpoints(original.path());
    for (const std::int64_t step : {1, 2, 3, 4, 5}) checkpoints.save(make_state(step), step);
    std::filesystem::rename(original.path() / "step-3", original.path() / "step-3.replaced");
    std::filesystem::remove(original.path() / "step-5" / "manifest.json");
  }
  std::filesystem::copy(original.path(), folder, std::filesystem::copy_options::recursive);
}

std::vector<std::int64_t> complete_steps(const std::filesystem::path& folder) {
  std::vector<std::int64_t> steps;
  for (const auto& found : list_checkpoints(folder).complete) steps.push_back(found.step);
  return steps;
}

std::set<std::string> entries_of(const std::filesystem::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) names.insert(entry.path().filename().string());
  return names;
}

TEST(Branch, SetsAsideWhatIsNewerThanItsStep) {
  const TempDirectory scratch("branch");
  const auto folder = scratch.path() / "run";
  fill_with_steps(folder);
  EXPECT_THAT(complete_steps(folder), ElementsAre(4, 3, 2, 1));
  const SetAside moved = begin_branch(folder, {.step = 2, .command = "c", .job = "j"});
  EXPECT_THAT(moved.names, ElementsAre("step-3.replaced", "step-4", "step-5"));
  EXPECT_EQ(moved.into, folder / "abandoned-1");
  EXPECT_THAT(complete_steps(folder), ElementsAre(2, 1));
  EXPECT_THAT(complete_steps(folder / "abandoned-1"), ElementsAre(4, 3)) << "a checkpoint folder like any other";
  EXPECT_EQ(resolve_checkpoint(folder), folder / "step-2");
  const auto branch = read_branch(folder);
  ASSERT_TRUE(branch);
  EXPECT_EQ(branch->step, 2);
  EXPECT_EQ(branch->command, "c");
  EXPECT_EQ(branch->job, "j");
  EXPECT_THAT(branch->being_set_aside, IsEmpty());
  EXPECT_TRUE(has_same_base(folder, *branch));

  // Another one, further back; then one without anything newer.
  CheckpointManager(folder).save(make_state(9), 4);
  EXPECT_EQ(begin_branch(folder, {.step = 1}).into, folder / "abandoned-2");
  EXPECT_THAT(entries_of(folder / "abandoned-2"), UnorderedElementsAre("step-2", "step-4"));
  EXPECT_THAT(begin_branch(folder, {.step = 1}).names, IsEmpty());
  EXPECT_EQ(read_branch(folder)->set_aside_in, "");
  EXPECT_FALSE(has_same_base(folder / "abandoned-2", {.step = 2, .base = "other"}));
  forget_branch(folder);
  forget_branch(folder);
  EXPECT_FALSE(read_branch(folder));
}

void keep_metrics(const std::filesystem::path& into, const Branch& /*branch*/) {
  write_file(into / "metrics.jsonl", "{}");
}

class InterruptedBranch : public ::testing::TestWithParam<Fault> {};

TEST_P(InterruptedBranch, IsBegunOrNotAtEveryOperation) {
  std::int64_t operations = 0;
  {
    const TempDirectory scratch("branch");
    fill_with_steps(scratch.path() / "run");
    FaultyFileSystem fs(posix_file_system());
    begin_branch(scratch.path() / "run", {.step = 2}, fs, keep_metrics);
    operations = fs.operations();
  }
  ASSERT_GT(operations, 12);
  bool seen_none = false, seen_begun = false;
  for (std::int64_t n = 0; n < operations; ++n) {
    SCOPED_TRACE(::testing::Message() << "operation " << n << " of " << operations);
    const TempDirectory scratch("branch");
    const auto folder = scratch.path() / "run";
    fill_with_steps(folder);
    FaultyFileSystem fs(posix_file_system(), {.fail_at = n, .kind = GetParam()});
    try {
      begin_branch(folder, {.step = 2}, fs, keep_metrics);
    } catch (const SimulatedCrash&) {
    } catch (const FileError&) {
    }
    // A reader follows the branch from its record on, and sees nothing of it before.
    const bool begun = read_branch(folder).has_value();
    (begun ? seen_begun : seen_none) = true;
    const std::vector<std::int64_t> before = {4, 3, 2, 1}, after = {2, 1};
    EXPECT_EQ(complete_steps(folder), begun ? after : before);
    if (!begun) {
      EXPECT_THAT(finish_branch(folder, posix_file_system(), keep_metrics).names, IsEmpty());
      begin_branch(folder, {.step = 2}, posix_file_system(), keep_metrics);
    } else {
      finish_branch(folder, posix_file_system(), keep_metrics);
    }
    EXPECT_THAT(complete_steps(folder), ElementsAre(2, 1));
    EXPECT_EQ(entries_of(folder / "abandoned-1"),
              (std::set<std::string>{"metrics.jsonl", "step-3.replaced", "step-4", "step-5"}));
    EXPECT_THAT(read_branch(folder)->being_set_aside, IsEmpty());
    CheckpointManager(folder).save(make_state(8), 4);  // the branch's own
    EXPECT_THAT(complete_steps(folder), ElementsAre(4, 2, 1));
  }
  EXPECT_TRUE(seen_none);
  EXPECT_TRUE(seen_begun || GetParam() == Fault::full);
}

INSTANTIATE_TEST_SUITE_P(Faults, InterruptedBranch, ::testing::Values(Fault::error, Fault::full, Fault::crash));

TEST(Branch, AMalformedRecordIsNamed) {
  const TempDirectory scratch("branch");
  for (const char* text : {"{}", R"({"format": 2})", R"({"format": 1, "step": -1})",
                           R"({"format": 1, "step": 1, "command": "", "job": "", "base": "", "set_aside_in": "a/b",
                               "being_set_aside": []})",
                           R"({"format": 1, "step": 1, "command": "", "job": "", "base": "", "set_aside_in": "..",
                               "being_set_aside": ["step-3"]})",
                           R"({"format": 1, "step": 1, "command": "", "job": "", "base": "",
                               "set_aside_in": "abandoned-1", "being_set_aside": ["../x"]})"}) {
    write_file(scratch.path() / kBranchName, text);
    EXPECT_THAT(error_text<CheckpointError>([&] { list_checkpoints(scratch.path()); }),
                AllOf(HasSubstr("branch.json: expected what a rollback to [checkpoint] load_step writes"),
                      HasSubstr("remove the file")))
        << text;
  }
  for (const char* text : {"", "junk", "[]", "{\"format\""}) {
    write_file(scratch.path() / kBranchName, text);
    EXPECT_THAT(error_text<CheckpointError>([&] { list_checkpoints(scratch.path()); }),
                AllOf(HasSubstr("branch.json"), HasSubstr("remove the file")))
        << text;
  }
}

}  // namespace
}  // namespace phalanx
