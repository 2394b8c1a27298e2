#include "phalanx/base/assert.h"

#include <cstdio>
#include <cstdlib>

namespace phalanx {

void fail_assertion(const char* condition, const char* file, int line, const char* text) noexcept {
  std::fprintf(stderr, "%s:%d: assertion '%s' failed: %s\n", file, line, condition, text);
  std::abort();
}

}  // namespace phalanx
