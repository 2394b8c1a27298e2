#include "phalanx/base/mapped_file.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx {
namespace {

TEST(MappedFile, ShowsTheBytesAndSurvivesMoving) {
  const TempDirectory scratch;
  const std::filesystem::path path = scratch.path() / "f";
  write_file(path, "hello");
  MappedFile file(path, MappedFile::Access::random);
  EXPECT_EQ(file.text(), "hello");
  EXPECT_EQ(file.path(), path);
  MappedFile other;
  other = std::move(file);
  const MappedFile third(std::move(other));
  EXPECT_EQ(third.text(), "hello");
  EXPECT_EQ(third.bytes().size(), 5u);
  posix_file_system().remove(path);
  EXPECT_EQ(third.text(), "hello");  // the mapping keeps the file alive
}

TEST(MappedFile, EmptyFileIsAnEmptySpan) {
  const TempDirectory scratch;
  write_file(scratch.path() / "f", "");
  EXPECT_EQ(MappedFile(scratch.path() / "f").size(), 0u);
}

TEST(MappedFile, WhatCannotBeMappedIsNamed) {
  const TempDirectory scratch;
  EXPECT_THAT([&] { MappedFile(scratch.path() / "none"); },
              ::testing::ThrowsMessage<FileError>(HasSubstr((scratch.path() / "none").string())));
  EXPECT_THAT([&] { MappedFile{scratch.path()}; },
              ::testing::Throws<FileError>(::testing::Property(&FileError::code, EISDIR)));
  EXPECT_THROW(MappedFile("/dev/zero"), FileError);
}

}  // namespace
}  // namespace phalanx
