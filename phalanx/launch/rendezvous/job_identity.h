// JobIdentity: the job that a process belongs to. It is the same for all attempts that a launcher or scheduler makes.
//
//   const JobIdentity job = job_identity();
//   if (job.attempt > 0) resume();  // an earlier attempt has run
//
// Under `phalanx launch` and torchrun the launcher's process identifies the job, as long as it lives. Under Slurm it is
// the job number, which stays the same when the job is requeued. Without any of them the name is empty and the attempt
// is 0. Torch-free.
#pragma once

#include <chrono>
#include <string>

#include "phalanx/launch/rendezvous/worker_environment.h"

namespace phalanx {

struct JobIdentity {
  std::string name;
  int attempt = 0;  // how often the launcher has restarted it, or the scheduler has requeued it
};

/// How long to wait for a process that holds what this one needs, such as the lock of a run's folder. It may have been
/// killed a moment ago, or be the job's earlier attempt on a node that died (NFS 4 keeps its locks for a lease of 90
/// s).
std::chrono::seconds predecessor_timeout(const JobIdentity& job);

/// Reads the variables through `lookup`; without one, from the process's environment.
JobIdentity job_identity(const EnvironmentLookup& lookup = {});

}  // namespace phalanx
