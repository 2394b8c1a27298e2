// Two ranks, one message: rank 0 sends ten ones, rank 1 receives them into zeros and prints what it has.
//
//   $ phalanx launch --nproc-per-node 2 -- send_recv
//   [1] rank 1 has received 1 1 1 1 1 1 1 1 1 1
//
// On two nodes, give each the address of rank 0's node, or start one rank on each with a launcher:
//
//   send_recv --init-method tcp://HOST:29400 --rank R --world-size 2
//   torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 --no-python send_recv
//
// send() and recv() return when the message has been sent or has arrived; with .async = true they return a Work at
// once.
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include "recipes/recipe.h"

namespace {

void send_ones(phalanx::Communicator& world, const at::TensorOptions& here) { world.send(at::ones({10}, here), 1); }

void receive_and_print(phalanx::Communicator& world, const at::TensorOptions& here) {
  at::Tensor received = at::zeros({10}, here);
  world.recv(received, 0);
  fmt::print("rank 1 has received");
  for (int i = 0; i < 10; ++i) fmt::print(" {}", received[i].item<float>());
  fmt::print("\n");
}

bool send_recv(const phalanx::ProcessContext& context) {
  if (context.world_size != 2) throw phalanx::UsageError("send_recv needs two ranks: phalanx launch -n 2 -- send_recv");
  const at::TensorOptions here(context.device);  // on a GPU the message goes from GPU to GPU
  context.rank == 0 ? send_ones(*context.world, here) : receive_and_print(*context.world, here);
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  recipe::Program program;
  program.add_rendezvous_options();
  return program.run(argc, argv, send_recv);
}
