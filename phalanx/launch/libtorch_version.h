// The version of the loaded libtorch. It may differ from the version that Phalanx was compiled against.
#pragma once

#include <string>

namespace phalanx {

std::string libtorch_version();  // "2.13.0"

}  // namespace phalanx
