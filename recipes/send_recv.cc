// Two ranks, one message: rank 0 sends ten ones, rank 1 receives them into zeros and prints what it has.
//
//   phalanx launch --nproc-per-node 2 -- send_recv
//
// On two nodes, run the same program under torchrun on each of them:
//
//   torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 --no-python send_recv
//
// send() and recv() return when the message has been sent or has arrived; with .async = true they return a Work at
// once.
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <cstdio>

#include "phalanx/base/error.h"
#include "phalanx/launch/process_context.h"
#include "phalanx/launch/supervisor/worker_report.h"

int main() try {
  const phalanx::ProcessContext context = phalanx::init_from_environment();
  if (context.world_size != 2) throw phalanx::UsageError("send_recv needs two ranks: phalanx launch -n 2 -- send_recv");

  const at::TensorOptions here(context.device);  // on a GPU the message goes from GPU to GPU
  if (context.rank == 0) {
    context.world->send(at::ones({10}, here), 1);
  } else {
    at::Tensor received = at::zeros({10}, here);
    context.world->recv(received, 0);
    received = received.cpu();
    std::printf("rank 1 has received");
    for (int i = 0; i < 10; ++i) std::printf(" %g", received.const_data_ptr<float>()[i]);
    std::printf("\n");
  }
  return 0;
} catch (const phalanx::Error& error) {
  if (!phalanx::report_error_to_launcher(error)) std::fprintf(stderr, "send_recv: %s\n", error.what());
  return error.exit_status();
}
