// `phalanx report`: which file it writes, and what it refuses.
#include <gtest/gtest.h>

#include <filesystem>

#include "cli/front/report_command.h"
#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/folder_test.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx::cli {
namespace {

class ReportCommandTest : public FolderTest {
 protected:
  ReportCommandTest() {
    for (const char* run : {"a", "b"}) {
      write(std::string(run) + "/run.json", "{}");
      write(std::string(run) + "/metrics.jsonl", "{\"step\":1,\"loss\":2}\n");
    }
  }
  static std::string refusal(const Arguments& arguments) {
    return error_text<UsageError>([&] { report_command(arguments); });
  }
};

TEST_F(ReportCommandTest, OneRunIsWrittenIntoItsFolderUnlessAnotherFileIsNamed) {
  EXPECT_EQ(report_command({path("a")}), 0);
  const std::string whole = read_file(path("a/report.html"));
  EXPECT_EQ(report_command({"--output", path("other.html"), path("a")}), 0);
  EXPECT_EQ(read_file(path("other.html")), whole);
}

TEST_F(ReportCommandTest, SeveralRunsMakeOnePage) {
  EXPECT_EQ(report_command({path("a"), path("b"), "--output=" + path("both.html")}), 0);
  EXPECT_THAT(read_file(path("both.html")), HasSubstr("<h1>Comparison of 2 runs</h1>"));
  EXPECT_FALSE(std::filesystem::exists(path("a/report.html")));
}

TEST_F(ReportCommandTest, WrongCommandLinesAreRefused) {
  EXPECT_THAT(refusal({}), HasSubstr("expected the run's folder"));
  EXPECT_THAT(refusal({"--output", path("x.html")}), HasSubstr("expected the run's folder"));
  EXPECT_THAT(refusal({path("a"), "--outptu", "x"}), HasSubstr("'--outptu'"));
  EXPECT_THAT(refusal({path("a"), "--output="}), HasSubstr("--output is empty"));
  EXPECT_THAT(refusal({path("a"), path("a")}), HasSubstr("is named twice"));
}

}  // namespace
}  // namespace phalanx::cli
