// The compact lists in which Slurm names nodes and counts tasks, read without calling scontrol. Torch-free.
//
//   expand_slurm_nodes("gpu[01-02,7],login", "SLURM_JOB_NODELIST")    {"gpu01", "gpu02", "gpu7", "login"}
//   expand_slurm_nodes("r[1-2]n[3-4]-ib", ...)                        {"r1n3-ib", "r1n4-ib", "r2n3-ib", "r2n4-ib"}
//   expand_slurm_counts("2(x3),1", "SLURM_STEP_TASKS_PER_NODE")       {2, 2, 2, 1}
//
// A number keeps the width that the lower bound of its range has. Both throw ConfigError naming the variable and where
// in its value the trouble is; neither makes more than 65,536 entries.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace phalanx {

std::vector<std::string> expand_slurm_nodes(std::string_view list, const std::string& variable);

/// The first of them: by Slurm's habit the node of rank 0.
std::string first_slurm_node(std::string_view list, const std::string& variable);

std::vector<int> expand_slurm_counts(std::string_view list, const std::string& variable);

}  // namespace phalanx
