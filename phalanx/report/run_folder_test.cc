#include "phalanx/report/run_folder.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/folder_test.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx::report {
namespace {

class RunFolderTest : public FolderTest {
 protected:
  void make_run(const std::string& name, const std::string& metrics) const {
    write(name + "/run.json", "{}");
    write(name + "/metrics.jsonl", metrics);
  }
  std::string refusal(const std::string& name) const {
    return error_text<DataError>([&] { read_run(path(name)); });
  }
};

TEST_F(RunFolderTest, AnythingElseIsNamedAndSoAreTheRunsNearby) {
  EXPECT_THAT(refusal("nothing"),
              AllOf(HasSubstr("nothing' does not exist: expected the folder of a run, with run.json")));
  make_run("all/b", "");
  make_run("all/a", "");
  std::filesystem::create_directory(path("all/empty"));
  EXPECT_THAT(refusal("all"),
              AllOf(HasSubstr("all' holds no run.json"), HasSubstr(path("all/a") + "', '" + path("all/b") + "'"),
                    Not(HasSubstr("all/empty"))));
  EXPECT_THAT(refusal("all/empty"), AllOf(HasSubstr("holds no run.json"), Not(HasSubstr("runs lie in"))));
  EXPECT_THAT(refusal("all/a/metrics.jsonl"),
              AllOf(HasSubstr("is a file"), HasSubstr("such as '" + path("all/a") + "'")));
  for (int i = 0; i < 9; ++i) make_run("many/" + std::to_string(i), "");
  EXPECT_THAT(refusal("many"), AllOf(HasSubstr("many/7'"), HasSubstr(", ..."), Not(HasSubstr("many/8'"))));
}

TEST_F(RunFolderTest, ARunWithoutStepsOrWithOneSaysSo) {
  make_run("empty", "");
  EXPECT_THAT(read_run(path("empty")).notes(), ElementsAre("metrics.jsonl has no training step yet"));
  make_run("one", "{\"step\":1,\"loss\":2}\n");
  EXPECT_THAT(read_run(path("one")).notes(), ElementsAre(HasSubstr("one training step")));
  make_run("two", "{\"step\":1,\"loss\":2}\n{\"step\":2,\"loss\":2}\n");
  EXPECT_THAT(read_run(path("two")).notes(), IsEmpty());
}

TEST_F(RunFolderTest, NamesAreAsShortAsTheyDiffer) {
  const auto names = [](const std::vector<std::string>& folders) {
    std::vector<RunFolder> runs;
    for (const std::string& folder : folders) runs.push_back({.folder = folder});
    name_by_folder(runs);
    std::vector<std::string> found;
    for (const RunFolder& run : runs) found.push_back(run.name);
    return found;
  };
  EXPECT_THAT(names({"outputs/a/", "./outputs/b"}), ElementsAre("a", "b"));
  EXPECT_THAT(names({"x/run", "y/run", "/y/z/other"}), ElementsAre("x/run", "y/run", "z/other"));
  EXPECT_THAT(names({"run", "x/run"}), ElementsAre("run", "x/run"));
  EXPECT_THAT(names({"."}), ElementsAre("."));
}

}  // namespace
}  // namespace phalanx::report
