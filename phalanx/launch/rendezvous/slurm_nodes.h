// Expands the compact lists of nodes and task counts that Slurm sets, without calling scontrol. Torch-free.
//
//   expand_slurm_nodes("gpu[01-02,7],login", "SLURM_JOB_NODELIST")    {"gpu01", "gpu02", "gpu7", "login"}
//   expand_slurm_nodes("r[1-2]n[3-4]-ib", ...)                        {"r1n3-ib", "r1n4-ib", "r2n3-ib", "r2n4-ib"}
//   expand_slurm_counts("2(x3),1", "SLURM_STEP_TASKS_PER_NODE")       {2, 2, 2, 1}
//
// A number is padded to the width of the lower bound of its range. Both functions throw ConfigError; the error names
// the variable and the position in its value. Neither makes more than 65,536 entries.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace phalanx {

std::vector<std::string> expand_slurm_nodes(std::string_view list, const std::string& variable);

/// The first node of the list. Slurm normally runs rank 0 there.
std::string first_slurm_node(std::string_view list, const std::string& variable);

std::vector<int> expand_slurm_counts(std::string_view list, const std::string& variable);

}  // namespace phalanx
