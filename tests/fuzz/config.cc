// A configuration in TOML.
#include "phalanx/config/config.h"
#include "tests/fuzz/fuzz.h"

using namespace phalanx;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  // What is wrong between two keys is said of the keys.
  return fuzz::parse(
      [&] {
        const auto config = config::parse_config(fuzz::text_of(data, size), "[fuzz.input]", {});
        const std::string printed = config::print_config(config);
        fuzz::require(config::print_config(config::parse_config(printed, "[fuzz.input]", {})) == printed,
                      "what is printed is read");
      },
      "[");
}
