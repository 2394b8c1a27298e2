// spawn_local_ranks(): for a program that starts its own ranks on this node, without a launcher.
//
// - Call it first in main(). In the process that the user started, it runs the same program again `ranks` times with
//   the same arguments, as `phalanx launch` would (supervisor.h): output is prefixed, the first failure ends all ranks,
//   and no process is left behind. It prints the root cause of a failure on standard error. It returns the exit status
//   that main() must return.
// - In the ranks it starts nothing and returns nullopt; continue with init_from_environment(). The same holds if a
//   launcher has started the program already: phalanx launch, torchrun, variables set by hand, or more than one rank by
//   srun or mpirun.
// - It executes the program again instead of forking and calling a function. The threads of libtorch, libgomp and CUDA
//   do not survive a fork, and these libraries read some settings only when a program starts.
// - Throws ConfigError if `ranks` is not positive or the environment is contradictory.
//
//   int main(int argc, char** argv) {
//     if (auto status = phalanx::spawn_local_ranks(phalanx::ranks_for_devices(), argc, argv)) return *status;
//     auto context = phalanx::init_from_environment();
//   }
#pragma once

#include <filesystem>
#include <optional>

namespace phalanx {

std::optional<int> spawn_local_ranks(int ranks, int argc, char** argv);

/// A rank for each device of this node: as many as there are visible GPUs, or without GPUs as many as this
/// process may use cores. What `phalanx launch --nproc-per-node auto` starts. `root` is the folder above /dev
/// and /proc; tests replace it.
int ranks_for_devices(const std::filesystem::path& root = "/");

}  // namespace phalanx
