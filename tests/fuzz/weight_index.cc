// model.safetensors.index.json: which file each tensor is in. No name may lead out of the directory.
#include "phalanx/checkpoint/files/weight_index.h"
#include "tests/fuzz/fuzz.h"

using namespace phalanx;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return fuzz::parse([&] {
    for (const auto& [tensor, file] : parse_weight_index(fuzz::kFile, fuzz::text_of(data, size))) {
      fuzz::require(file.find('/') == std::string::npos && file.ends_with(".safetensors"),
                    "files are in the directory");
    }
  });
}
