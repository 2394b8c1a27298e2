#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>

#include <cstdio>
#include <memory>

#include "phalanx/phalanx.h"

int main() {
  double sum = 0;
  phalanx::run_local_ranks(2, [&](const std::shared_ptr<phalanx::Communicator>& comm) {
    at::Tensor mine = at::full({4}, comm->rank() + 1.0);
    comm->all_reduce(mine);
    if (comm->rank() == 0) sum = mine[0].item<double>();
  });
  std::printf("1 + 2 = %g over 2 ranks\n", sum);
  return sum == 3.0 ? 0 : 1;
}
