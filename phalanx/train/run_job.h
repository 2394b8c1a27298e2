// The job that a run is part of (launch/rendezvous/job_identity.h provides it to a worker).
#pragma once

#include <chrono>
#include <string>

namespace phalanx::train {

struct RunJob {
  std::string name;                           // the same for all attempts of the job; empty: no job
  bool is_restart = false;                    // by a launcher or a scheduler, after an earlier attempt
  std::chrono::milliseconds lock_timeout{0};  // how long to wait for a process that holds the run's folder
};

}  // namespace phalanx::train
