// How many GPUs the programs that this process starts will see, asked without CUDA: the launcher starts in
// milliseconds, and must not hold a context on a GPU. Torch-free.
//
// The GPUs are the files /dev/nvidia<N>. CUDA_VISIBLE_DEVICES chooses among them as CUDA reads it: empty is none; an
// entry that names no GPU ends the list, so that `0,-1` is one and `-1` none; a GPU that is named twice makes it none.
// An entry is a number or the beginning of a UUID (`GPU-8f6d`, /proc/driver/nvidia/gpus says which there are; where it
// does not, an entry is believed). Of MIG instances (`MIG-...`) CUDA shows a process one, whichever are listed.
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

/// The entries of such a list that CUDA gives a program, as they are written. Where no GPU's file is to be seen,
/// numbers are believed, too; all MIG instances of a list that begins with one are entries, since each may be given to
/// a process of its own. root: below which /dev and /proc are; tests replace it.
std::vector<std::string> listed_gpus(std::string_view list, const std::filesystem::path& root = "/");

int count_visible_gpus(const EnvironmentMap& environment, const std::filesystem::path& root = "/");

}  // namespace phalanx
