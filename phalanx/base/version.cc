#include "phalanx/base/version.h"

namespace phalanx {

const char* version() { return PHALANX_VERSION; }

}  // namespace phalanx
