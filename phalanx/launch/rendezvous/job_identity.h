// JobIdentity: which job a process belongs to, the same for all attempts of it that a launcher or a scheduler makes.
//
//   const JobIdentity job = job_identity();
//   if (job.attempt > 0) ...                 // another attempt of it was there before
//
// Of `phalanx launch` and torchrun: the launcher's process, for as long as it lives. Of Slurm: the job's number, which
// it keeps when it is requeued. Of a process that none of these started: no name, attempt 0. Torch-free.
#pragma once

#include <chrono>
#include <string>

#include "phalanx/launch/rendezvous/worker_environment.h"

namespace phalanx {

struct JobIdentity {
  std::string name;
  int attempt = 0;  // restarts of the launcher, or times that the scheduler has requeued it
};

/// How long to wait for another process that holds what this one needs, such as a run's folder: one that was killed a
/// moment ago, or this job's earlier attempt, whose node may have died (NFS 4 keeps its locks for a lease of 90 s).
std::chrono::seconds predecessor_timeout(const JobIdentity& job);

/// Reads the process's environment, or what `lookup` says.
JobIdentity job_identity(const EnvironmentLookup& lookup = {});

}  // namespace phalanx
