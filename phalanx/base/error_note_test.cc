#include "phalanx/base/error_note.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <stdexcept>
#include <string>
#include <typeinfo>

#include "phalanx/base/error.h"
#include "phalanx/base/memory_limits.h"

namespace phalanx {
namespace {

template <typename Kind>
void expect_same(const Kind& error) {
  const std::string note = error_note(error);
  try {
    throw_noted(note, "rank 3: ");
  } catch (const Error& other) {
    EXPECT_EQ(typeid(other), typeid(Kind));
    EXPECT_STREQ(other.kind(), error.kind());
    EXPECT_EQ(other.what(), "rank 3: " + std::string(error.what()));
  }
}

TEST(ErrorNote, IsThrownAsTheSameClass) {
  expect_same(Error("of two\nlines"));
  expect_same(UsageError("-x"));
  expect_same(ConfigError("[training] steps"));
  expect_same(CommError(""));
  expect_same(CheckpointError("step-8"));
  expect_same(DataError("tokens.bin"));
  expect_same(MemoryError("1 GiB"));
  expect_same(FileError("config.json", ENOENT));
  try {
    throw_noted(error_note(FileError("config.json", ENOENT)));
  } catch (const FileError& error) {
    EXPECT_EQ(error.code(), ENOENT);
  }
}

TEST(ErrorNote, WhatIsNotOursIsAnError) {
  try {
    throw_noted(error_note(std::out_of_range("of the standard library")));
  } catch (const Error& error) {
    EXPECT_EQ(typeid(error), typeid(Error));
    EXPECT_STREQ(error.what(), "of the standard library");
  }
}

TEST(ErrorNote, OtherTextIsNoNote) {
  EXPECT_THROW(throw_noted(""), std::invalid_argument);
  EXPECT_THROW(throw_noted("ConfigError\n0"), std::invalid_argument);
}

}  // namespace
}  // namespace phalanx
