#include "phalanx/base/error_serialization.h"

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
  const std::string serialized = serialize_error(error);
  try {
    throw_serialized_error(serialized, "rank 3: ");
  } catch (const Error& other) {
    EXPECT_EQ(typeid(other), typeid(Kind));
    EXPECT_STREQ(other.kind(), error.kind());
    EXPECT_EQ(other.what(), "rank 3: " + std::string(error.what()));
  }
}

TEST(ErrorSerialization, IsThrownAsTheSameClass) {
  expect_same(Error("of two\nlines"));
  expect_same(UsageError("-x"));
  expect_same(ConfigError("[training] steps"));
  expect_same(CommError(""));
  expect_same(CheckpointError("step-8"));
  expect_same(DataError("tokens.bin"));
  expect_same(MemoryError("1 GiB"));
  expect_same(FileError("config.json", ENOENT));
  try {
    throw_serialized_error(serialize_error(FileError("config.json", ENOENT)));
  } catch (const FileError& error) {
    EXPECT_EQ(error.code(), ENOENT);
  }
}

TEST(ErrorSerialization, WhatIsNotOursIsAnError) {
  try {
    throw_serialized_error(serialize_error(std::out_of_range("of the standard library")));
  } catch (const Error& error) {
    EXPECT_EQ(typeid(error), typeid(Error));
    EXPECT_STREQ(error.what(), "of the standard library");
  }
}

TEST(ErrorSerialization, OtherTextIsNoNote) {
  EXPECT_THROW(throw_serialized_error(""), std::invalid_argument);
  EXPECT_THROW(throw_serialized_error("ConfigError\n0"), std::invalid_argument);
}

}  // namespace
}  // namespace phalanx
