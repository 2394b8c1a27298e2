// What the fuzz targets share. A target is one function that gives libFuzzer's bytes to one parser:
//
//   extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
//     return fuzz::parse([&] { parse_it(fuzz::kFile, fuzz::text_of(data, size)); });
//   }
//
// A parser may refuse its input by an Error that names the file. Any other exception, a message without the file, a
// finding of a sanitizer, more memory or time than scripts/fuzz.sh allows end the run.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>

#include "phalanx/base/error.h"

namespace phalanx::fuzz {

inline constexpr const char* kFile = "fuzz.input";

inline std::string_view text_of(const std::uint8_t* data, std::size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

/// Ends the run: what must hold of an input that was accepted does not.
inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "fuzz: does not hold: %s\n", what);
  std::abort();
}

/// `file` must stand in what the parser says where it refuses the input.
template <class F>
int parse(const F& parser, std::string_view file = kFile) {
  try {
    parser();
  } catch (const Error& error) {
    if (std::string_view(error.what()).find(file) == std::string_view::npos) {
      std::fprintf(stderr, "fuzz: the message does not name the file: %s\n", error.what());
      std::abort();
    }
  }
  return 0;
}

}  // namespace phalanx::fuzz
