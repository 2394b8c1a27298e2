// The version of Phalanx, as `phalanx version` prints it and checkpoints store it.
#pragma once

namespace phalanx {

const char* version();  // "0.1.0"

}  // namespace phalanx
