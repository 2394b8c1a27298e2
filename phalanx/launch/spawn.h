// spawn_local_ranks(): a program that starts its own ranks on this machine, without any launcher.
//
// - Called first thing in main(). Started plainly, the program runs itself again `ranks` times, with the same
//   arguments, as `phalanx launch` would (supervisor.h: prefixed output, first failure ends all, nothing left behind),
//   prints the root cause of a failure on standard error, and the result is the exit status that main() is to return.
// - In those ranks, and where a launcher has started the program already (phalanx launch, torchrun, variables by hand,
//   more than one rank by srun or mpirun), nothing is started and there is no result: go on with
//   init_from_environment().
// - The program runs itself again instead of forking with a function to call: libtorch's threads, libgomp and CUDA do
//   not survive a fork, and some settings of theirs are read only when a program starts.
// - Throws ConfigError if ranks is not positive or the environment is contradictory.
//
//   int main(int argc, char** argv) {
//     if (auto status = phalanx::spawn_local_ranks(4, argc, argv)) return *status;
//     auto context = phalanx::init_from_environment();
#pragma once

#include <optional>

namespace phalanx {

std::optional<int> spawn_local_ranks(int ranks, int argc, char** argv);

}  // namespace phalanx
