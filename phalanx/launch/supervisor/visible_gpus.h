// How many GPUs a program started by this process will see. It does not use CUDA: the launcher must start in
// milliseconds and must not hold a context on a GPU. Torch-free.
//
// The GPUs are the files /dev/nvidia<N>. CUDA_VISIBLE_DEVICES selects among them by CUDA's rules:
// - An empty value selects none.
// - An entry that names no GPU ends the list: `0,-1` is one GPU, and `-1` is none.
// - A GPU that is named twice makes the list empty.
// - An entry is a number or the beginning of a UUID (`GPU-8f6d`). /proc/driver/nvidia/gpus lists the UUIDs; if it does
//   not, the entry is accepted.
// - Of MIG instances (`MIG-...`) CUDA shows a process one, however many are listed.
//
//   count_visible_gpus({{"CUDA_VISIBLE_DEVICES", "2,0,7"}})    // 2 on a machine with 4 GPUs
//   listed_gpus("2,0,7")                                       // {"2", "0"} there
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "phalanx/launch/supervisor/environment_preparation.h"

namespace phalanx {

/// The entries of a CUDA_VISIBLE_DEVICES list that are visible to CUDA, unchanged. If no file of a GPU exists, numbers
/// are accepted too. If the list begins with a MIG instance, all its MIG instances are entries, since each may be given
/// to a separate process. `root` is the folder above /dev and /proc; tests replace it.
std::vector<std::string> listed_gpus(std::string_view list, const std::filesystem::path& root = "/");

int count_visible_gpus(const EnvironmentMap& environment, const std::filesystem::path& root = "/");

}  // namespace phalanx
