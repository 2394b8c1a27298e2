// FolderTest: a test with files in a folder of its own, which goes with it.
//
//   class CorpusTest : public FolderTest {};
//   TEST_F(CorpusTest, ...) { EXPECT_EQ(read_file(write("deep/a.txt", "text")), "text"); }
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <string_view>

#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"

namespace phalanx {

class FolderTest : public ::testing::Test {
 protected:
  std::string folder() const { return folder_.path().string(); }
  std::string path(const std::string& name) const { return (folder_.path() / name).string(); }
  /// Creates the folders above the file, and returns its path.
  std::string write(const std::string& name, std::string_view contents) const {
    const std::filesystem::path file = folder_.path() / name;
    std::filesystem::create_directories(file.parent_path());
    write_file(file, contents);
    return file.string();
  }

 private:
  TempDirectory folder_;
};

}  // namespace phalanx
