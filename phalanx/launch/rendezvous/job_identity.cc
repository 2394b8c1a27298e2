#include "phalanx/launch/rendezvous/job_identity.h"

#include <fmt/format.h>
#include <unistd.h>

#include "phalanx/base/env.h"
#include "phalanx/launch/rendezvous/launcher_variables.h"
#include "phalanx/launch/rendezvous/variable_reader.h"

namespace phalanx {

std::chrono::seconds predecessor_timeout(const JobIdentity& job) {
  constexpr std::chrono::seconds kWithKilled{2}, kWithEarlierAttempt{120};
  return job.attempt > 0 ? kWithEarlierAttempt : kWithKilled;
}

JobIdentity job_identity(const EnvironmentLookup& lookup_or_none) {
  const EnvironmentLookup lookup =
      lookup_or_none ? lookup_or_none : [](const std::string& name) { return env_string(name); };
  VariableReader reader(lookup);
  const auto count = [&](const char* name) { return reader.integer(name, 0, 1 << 30).value_or(0); };
  const int requeued = count("SLURM_RESTART_COUNT");
  if (const auto job = lookup("SLURM_JOB_ID")) {
    return {.name = fmt::format("slurm {} {}", lookup("SLURM_CLUSTER_NAME").value_or("cluster"), *job),
            .attempt = requeued + count("TORCHELASTIC_RESTART_COUNT")};
  }
  if (!lookup("TORCHELASTIC_RUN_ID")) return {};
  char host[256] = {};
  if (::gethostname(host, sizeof host - 1) != 0) host[0] = '\0';
  return {.name = fmt::format("launcher {} {} {}", lookup("TORCHELASTIC_RUN_ID").value_or(""), host,
                              ancestor_identity("phalanx")),
          .attempt = count("TORCHELASTIC_RESTART_COUNT")};
}

}  // namespace phalanx
