// Which job a run is part of (launch/rendezvous/job_identity.h tells a worker).
#pragma once

#include <chrono>
#include <string>

namespace phalanx::train {

struct RunJob {
  std::string name;                           // the same for all attempts of it; empty: none
  bool is_restart = false;                    // by a launcher or a scheduler, after an earlier attempt
  std::chrono::milliseconds lock_timeout{0};  // with a process that holds the run's folder
};

}  // namespace phalanx::train
