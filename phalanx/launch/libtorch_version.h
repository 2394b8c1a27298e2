// Which libtorch is loaded, which may be another than the one that was compiled against.
#pragma once

#include <string>

namespace phalanx {

std::string libtorch_version();  // "2.13.0"

}  // namespace phalanx
