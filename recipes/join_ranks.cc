#include "recipes/join_ranks.h"

namespace recipe {

phalanx::ProcessContext join_ranks(const phalanx::InitOptions& options) {
  return phalanx::init_from_environment(options);
}

}  // namespace recipe
