#include "phalanx/launch/rendezvous/launcher_variables.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "phalanx/launch/rendezvous/slurm_nodes.h"

namespace phalanx {
namespace {

// This name distinguishes the files of different jobs. It contains everything that makes a job unique, and only
// characters that a path may contain.
std::string rendezvous_file_name(const std::string& launcher, const std::string& job) {
  std::string name = fmt::format(".phalanx-{}-{}", launcher, job);
  std::replace_if(
      name.begin(), name.end(), [](char c) { return c == '/' || static_cast<unsigned char>(c) <= ' '; }, '_');
  return name.substr(0, 200);
}

void choose_folder(VariableReader& reader, WorkerEnvironment& environment, const std::string& shared_folder) {
  if (const auto chosen = reader.text("PHALANX_RENDEZVOUS_DIR"))
    environment.file_folder = *chosen;
  else if (!environment.on_one_node())
    environment.file_folder = shared_folder;
}

std::optional<WorkerEnvironment> read_open_mpi(VariableReader& reader) {
  if (!reader.has("OMPI_COMM_WORLD_RANK") && !reader.has("OMPI_COMM_WORLD_SIZE")) return std::nullopt;
  WorkerEnvironment result;
  result.rank = reader.required_integer("OMPI_COMM_WORLD_RANK", 0, kMaxWorldSize - 1);
  result.world_size = reader.required_integer("OMPI_COMM_WORLD_SIZE", 1, kMaxWorldSize);
  result.local_rank = reader.required_integer("OMPI_COMM_WORLD_LOCAL_RANK", 0, kMaxWorldSize - 1);
  result.local_world_size = reader.required_integer("OMPI_COMM_WORLD_LOCAL_SIZE", 1, kMaxWorldSize);
  // Open MPI 4 and 5 put the name of the job here; it is the same for all ranks of one mpirun.
  const auto job = reader.text("PMIX_NAMESPACE");
  result.launcher = job ? fmt::format("Open MPI (job {})", *job) : "Open MPI";
  result.file_name = rendezvous_file_name("openmpi", job.value_or(ancestor_identity("orted")));
  choose_folder(reader, result, ".");
  return result;
}

// srun sets SLURM_STEP_*. The batch script, which is a single process, has SLURM_PROCID and SLURM_NTASKS only.
bool is_slurm_task(const VariableReader& reader) {
  return reader.has("SLURM_PROCID") && (reader.has("SLURM_STEP_ID") || reader.has("SLURM_STEPID")) &&
         reader.has("SLURM_STEP_NUM_TASKS");
}

std::optional<WorkerEnvironment> read_slurm(VariableReader& reader) {
  if (!is_slurm_task(reader)) return std::nullopt;
  WorkerEnvironment result;
  result.rank = reader.required_integer("SLURM_PROCID", 0, kMaxWorldSize - 1);
  result.world_size = reader.required_integer("SLURM_STEP_NUM_TASKS", 1, kMaxWorldSize);
  result.local_rank = reader.required_integer("SLURM_LOCALID", 0, kMaxWorldSize - 1);
  const int node = reader.integer("SLURM_NODEID", 0, kMaxWorldSize - 1).value_or(0);
  const char* const counts_name = "SLURM_STEP_TASKS_PER_NODE";
  try {
    const auto counts = expand_slurm_counts(reader.required_text(counts_name), counts_name);
    if (static_cast<std::size_t>(node) < counts.size())
      result.local_world_size = counts[static_cast<std::size_t>(node)];
    else
      reader.complain(fmt::format("SLURM_NODEID is {}, and {} tells of {} nodes", node, counts_name, counts.size()));
  } catch (const ConfigError& error) {
    if (reader.has(counts_name)) reader.complain(error.what());
  }
  const std::string job = reader.required_text("SLURM_JOB_ID");
  const std::string step = reader.text("SLURM_STEP_ID").value_or(reader.text("SLURM_STEPID").value_or(""));
  result.launcher = fmt::format("Slurm (job {}, step {})", job, step);
  // A requeued job keeps its number.
  result.file_name =
      rendezvous_file_name("slurm", fmt::format("{}-{}.{}.{}", reader.text("SLURM_CLUSTER_NAME").value_or("cluster"),
                                                job, step, reader.text("SLURM_RESTART_COUNT").value_or("0")));
  choose_folder(reader, result, reader.text("SLURM_SUBMIT_DIR").value_or("."));
  return result;
}

std::optional<WorkerEnvironment> read_pmi(VariableReader& reader) {
  if (!reader.has("PMI_RANK") && !reader.has("PMI_SIZE")) return std::nullopt;
  // srun with a PMI plugin sets both. Slurm's variables contain more.
  if (is_slurm_task(reader) && reader.text("PMI_RANK") == reader.text("SLURM_PROCID") &&
      reader.text("PMI_SIZE") == reader.text("SLURM_STEP_NUM_TASKS"))
    return std::nullopt;
  WorkerEnvironment result;
  result.rank = reader.required_integer("PMI_RANK", 0, kMaxWorldSize - 1);
  result.world_size = reader.required_integer("PMI_SIZE", 1, kMaxWorldSize);
  for (const auto& [rank_name, size_name] :
       {std::pair("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), std::pair("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")})
    if (reader.has(rank_name) && reader.has(size_name)) {
      result.local_rank = *reader.integer(rank_name, 0, kMaxWorldSize - 1);
      result.local_world_size = *reader.integer(size_name, 1, kMaxWorldSize);
    }
  std::optional<std::string> job;
  for (const char* name : {"PALS_APID", "PMI_JOBID"})
    if (!job) job = reader.text(name);
  result.launcher = job ? fmt::format("PMI (job {})", *job) : "PMI";
  if (job)
    result.file_name = rendezvous_file_name("pmi", *job);
  else if (result.on_one_node())
    result.file_name = rendezvous_file_name("pmi", ancestor_identity("hydra_pmi_proxy"));
  choose_folder(reader, result, ".");
  return result;
}

}  // namespace

std::string ancestor_identity(const std::string& name) {
  std::string nearest;
  for (int pid = getppid(); pid > 0;) {
    std::ifstream file(fmt::format("/proc/{}/stat", pid));
    std::string stat;
    if (!std::getline(file, stat)) break;
    // pid (name) state parent ... The name may contain any character, so the last bracket ends it. Field 22 is the
    // start time.
    const auto open = stat.find('('), close = stat.rfind(')');
    if (open == std::string::npos || close == std::string::npos) break;
    std::istringstream fields(stat.substr(close + 1));
    std::string field;
    int parent = 0;
    for (int number = 3; number <= 22 && fields >> field; ++number)
      if (number == 4) parent = std::atoi(field.c_str());
    std::string identity = fmt::format("{}-{}", pid, field);
    if (nearest.empty()) nearest = identity;
    if (stat.substr(open + 1, close - open - 1) == name) return identity;
    pid = parent;
  }
  return nearest;
}

std::optional<std::string> first_slurm_host(VariableReader& reader) {
  for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"}) {
    const auto list = reader.text(name);
    if (!list) continue;
    try {
      return first_slurm_node(*list, name);
    } catch (const ConfigError& error) {
      reader.complain(error.what());
      return std::nullopt;
    }
  }
  return std::nullopt;
}

std::optional<WorkerEnvironment> read_launcher_variables(VariableReader& reader) {
  if (auto found = read_open_mpi(reader)) return found;
  if (auto found = read_pmi(reader)) return found;
  return read_slurm(reader);
}

}  // namespace phalanx
