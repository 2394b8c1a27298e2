// Which Phalanx this is, as `phalanx version` tells it and checkpoints keep it.
#pragma once

namespace phalanx {

const char* version();  // "0.1.0"

}  // namespace phalanx
