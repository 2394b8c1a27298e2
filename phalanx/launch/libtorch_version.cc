#include "phalanx/launch/libtorch_version.h"

#include <ATen/Version.h>
#include <torch/version.h>

#include <string_view>

namespace phalanx {

std::string libtorch_version() {
  static constexpr std::string_view kKey = "TORCH_VERSION=";
  const std::string settings = at::show_config();  // of the library itself: "..., TORCH_VERSION=2.13.0, USE_CUDA=OFF"
  const std::size_t found = settings.find(kKey);
  if (found == std::string::npos) return TORCH_VERSION;
  const std::size_t begin = found + kKey.size();
  return settings.substr(begin, settings.find_first_of(", \n", begin) - begin);
}

}  // namespace phalanx
