#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>

#include <cstdio>
#include <memory>

#include "phalanx/base/human.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/comm/communicator.h"

int main() {
  double sum = 0;
  phalanx::run_local_ranks(2, [&](const std::shared_ptr<phalanx::Communicator>& comm) {
    at::Tensor mine = at::full({4}, comm->rank() + 1.0);
    comm->all_reduce(mine);
    if (comm->rank() == 0) sum = mine[0].item<double>();
  });
  std::printf("1 + 2 = %g over 2 ranks, %s each\n", sum, phalanx::human_bytes(4 * sizeof(float)).c_str());
  return sum == 3.0 ? 0 : 1;
}
