// `phalanx checkpoint merge`: adds an adapter to the weights of its base.
#pragma once

#include "cli/command.h"

namespace phalanx::cli {

int merge_worker(const Arguments& arguments);

}  // namespace phalanx::cli
