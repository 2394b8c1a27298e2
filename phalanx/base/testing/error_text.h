// For tests: the message of an error.
//
//   EXPECT_THAT(error_text<DataError>([&] { TokenFile file(path); }), HasSubstr("t.bin"));
#pragma once

#include <concepts>
#include <stdexcept>
#include <string>

#include "phalanx/base/error.h"

namespace phalanx {

/// The message of the E that `body` throws; "" if it throws nothing.
template <class E = Error, std::invocable Body>
std::string error_text(Body&& body) {
  try {
    body();
  } catch (const E& error) {
    return error.what();
  }
  return "";
}

/// With the class: "ConfigError: message". "" if `body` throws nothing.
template <std::invocable Body>
std::string error_with_kind(Body&& body) {
  try {
    body();
  } catch (const Error& error) {
    return std::string(error.kind()) + ": " + error.what();
  }
  return "";
}

/// For a rank of a test, which reports by exceptions: the message of the E that `body` throws. Throws
/// std::runtime_error("WHAT: no error") if it throws nothing.
template <class E = Error, std::invocable Body>
std::string require_error(Body&& body, const std::string& what = "expected an error") {
  try {
    body();
  } catch (const E& error) {
    return error.what();
  }
  throw std::runtime_error(what + ": no error");
}

}  // namespace phalanx
