// For tests: the message of an error.
//
//   EXPECT_THAT(error_text<DataError>([&] { TokenFile file(path); }), HasSubstr("t.bin"));
#pragma once

#include <string>

#include "phalanx/base/error.h"

namespace phalanx {

/// The message of the E that `body` throws; "" if it throws nothing.
template <class E = Error, class Body>
std::string error_text(Body&& body) {
  try {
    body();
  } catch (const E& error) {
    return error.what();
  }
  return "";
}

}  // namespace phalanx
