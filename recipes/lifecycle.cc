// The life of a process group: how a rank learns its number and finds the other ranks, what it then has, how all leave.
//
//   lifecycle                                                          one process alone
//   lifecycle --spawn 4                                                starts four ranks on this node
//   phalanx launch -n 4 -- lifecycle                                   by the environment, which a launcher sets ...
//   RANK=R WORLD_SIZE=2 MASTER_ADDR=HOST MASTER_PORT=29400 lifecycle   ... or you, for each rank
//   lifecycle --method tcp://HOST:29400 --rank R --world-size 2        by an address of rank 0's node
//   lifecycle --method file:///shared/run7 --rank R --world-size 2     by a file that all ranks can see
//
// --backend chooses the backend (auto: what suits device and nodes), --device where tensors are (auto: the GPU of the
// local rank, if there is one). Each rank contributes its number; the sum shows that all ranks are there.
#include <ATen/ops/full.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>

#include "phalanx/base/error.h"
#include "phalanx/launch/process_context.h"
#include "phalanx/launch/spawn.h"
#include "phalanx/launch/supervisor/worker_report.h"

namespace {

/// From the first collective to the last: the group lives as long as the context.
int live(const phalanx::InitOptions& options) {
  const phalanx::ProcessContext context = phalanx::init_from_environment(options);
  phalanx::Communicator& world = *context.world;

  at::Tensor sum = at::full({1}, context.rank, at::TensorOptions(at::kFloat).device(context.device));
  world.all_reduce(sum);
  // Rank 0 prints the line of every rank, in the order of the ranks.
  const auto lines = world.gather_bytes(fmt::format(
      "rank {} of {}: local rank {} of {}, device {}, backend {}, sum {}", context.rank, context.world_size,
      context.local_rank, context.local_world_size, context.device.str(), world.backend_name(), sum.item<float>()));
  for (const std::string& line : lines) fmt::print("{}\n", line);
  world.barrier();  // after it no rank needs a rank that leaves
  return context.rank;
}  // the communicator goes first, then rank 0's store

}  // namespace

int main(int argc, char** argv) try {
  phalanx::InitOptions options;
  int spawned = 0;
  CLI::App app("The life of a process group");
  app.add_option("--method", options.method, "env://, tcp://HOST:PORT or file:///PATH")->capture_default_str();
  app.add_option("--rank", options.rank, "of this process, for tcp:// and file://")->check(CLI::NonNegativeNumber);
  app.add_option("--world-size", options.world_size, "how many ranks, likewise")->check(CLI::PositiveNumber);
  app.add_option("--backend", options.backend, "auto, shm, gloo, mpi, nccl, ...")->capture_default_str();
  app.add_option("--device", options.device, "auto, cpu or cuda")->capture_default_str();
  app.add_option("--spawn", spawned, "start so many ranks on this machine")->check(CLI::Range(1, 1024));
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  if (spawned > 0) {
    // Here the result is the ranks' exit status. In the ranks, which run this same main(), there is no result.
    if (const auto status = phalanx::spawn_local_ranks(spawned, argc, argv)) return *status;
  }
  if (live(options) == 0) fmt::print("all ranks have left\n");
  return 0;
} catch (const phalanx::Error& error) {
  if (!phalanx::report_error_to_launcher(error)) fmt::print(stderr, "lifecycle: {}\n", error.what());
  return error.exit_status();
}
