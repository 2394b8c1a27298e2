// Which job a run is part of (launch/job_identity.h tells a worker).
#pragma once

#include <string>

namespace phalanx::train {

struct RunJob {
  std::string name;         // the same for all attempts of it; empty: none
  bool is_restart = false;  // by a launcher or a scheduler, after an earlier attempt
};

}  // namespace phalanx::train
