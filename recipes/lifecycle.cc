// The life of a process group: how a rank learns its number and finds the other ranks, what it then has, how all leave.
//
//   lifecycle                                                              one process alone
//   phalanx launch -n 4 -- lifecycle                                       by the environment, set by a launcher ...
//   RANK=R WORLD_SIZE=2 MASTER_ADDR=HOST MASTER_PORT=29400 lifecycle       ... or by you, for each rank
//   lifecycle --init-method tcp://HOST:29400 --rank R --world-size 2       by an address of rank 0's node
//   lifecycle --init-method file:///shared/run7 --rank R --world-size 2    by a file that all ranks can see
//
// It can also start its ranks itself, here a world of one and then a world of two:
//
//   $ lifecycle --spawn 1,2 --device cpu
//   rank 0 of 1: local rank 0 of 1, device cpu, backend shm, sum 0
//   all ranks have left
//   rank 0 of 2: local rank 0 of 2, device cpu, backend shm, sum 1
//   rank 1 of 2: local rank 1 of 2, device cpu, backend shm, sum 1
//   all ranks have left
//
// --backend chooses the backend (auto: what suits device and nodes), --device where tensors are (auto: the GPU of the
// local rank, if there is one). Each rank contributes its number; the sum shows that all ranks are there.
#include <ATen/ops/full.h>
#include <fmt/format.h>

#include "recipes/recipe.h"

namespace {

/// The group lives as long as the context: first its communicator goes, then rank 0's store.
bool live(const phalanx::ProcessContext& context) {
  phalanx::Communicator& world = *context.world;
  at::Tensor sum = at::full({1}, context.rank, at::TensorOptions(at::kFloat).device(context.device));
  world.all_reduce(sum);
  for (const std::string& line :
       world.gather_bytes(fmt::format("rank {} of {}: local rank {} of {}, device {}, backend {}, sum {}", context.rank,
                                      context.world_size, context.local_rank, context.local_world_size,
                                      context.device.str(), world.backend_name(), sum.item<float>()))) {
    fmt::print("{}\n", line);
  }
  world.barrier();  // after it no rank needs a rank that leaves
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  recipe::Program program;
  program.add_rendezvous_options();
  bool is_first = false;
  const int status = program.run(argc, argv, [&](const phalanx::ProcessContext& context) {
    is_first = context.rank == 0;
    return live(context);
  });
  if (is_first && status == 0) fmt::print("all ranks have left\n");
  return status;
}
