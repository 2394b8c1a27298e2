// CommandTest: runs one command within the test program, in a folder of its own.
//
//   class PlanCommandTest : public CommandTest {
//    protected:
//     PlanCommandTest() : CommandTest({"plan", "", kPlanHelp, plan_command}) {}
//   };
//   TEST_F(PlanCommandTest, ...) { ASSERT_EQ(run({"--model", "5M"}), 0) << error_; ... out_ ... }
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "cli/command.h"
#include "phalanx/base/testing/folder_test.h"

namespace phalanx::cli {

class CommandTest : public FolderTest {
 protected:
  explicit CommandTest(Command command) : command_(std::move(command)) {}

  /// Returns the exit status. The output is in out_ and error_.
  int run(const Arguments& arguments) {
    ::testing::internal::CaptureStdout();
    ::testing::internal::CaptureStderr();
    const int status = run_command(command_, arguments);
    out_ = ::testing::internal::GetCapturedStdout();
    error_ = ::testing::internal::GetCapturedStderr();
    return status;
  }

  std::string out_, error_;

 private:
  Command command_;
};

}  // namespace phalanx::cli
