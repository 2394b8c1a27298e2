// The communicator over the local backend: ranks as threads. The same suite runs over processes in shm_backend_test.cc.
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include "phalanx/base/error.h"
#include "phalanx/comm/local.h"

namespace phalanx {
namespace {

TEST(LocalSmoke, SumsRanks) {
  for (int n : {1, 2, 3, 4, 8}) {
    run_local_ranks(n, [&](const std::shared_ptr<Communicator>& comm) {
      at::Tensor x = at::full({1000}, comm->rank() + 1.0);
      comm->all_reduce(x);
      EXPECT_EQ(x[999].item<double>(), n * (n + 1) / 2.0);
      Work work = comm->all_reduce(x, {.op = ReduceOp::avg, .async = true});
      work.wait();
      EXPECT_EQ(x[0].item<double>(), n * (n + 1) / 2.0);
      auto half = comm->split(comm->rank() % 2, comm->rank());
      EXPECT_EQ(half->size(), (n + 1 - comm->rank() % 2) / 2);
      half->barrier();
      if (n > 1 && comm->rank() < 2) {
        at::Tensor y = at::full({5}, comm->rank());
        at::Tensor z = at::full({5}, -1);
        comm->batch_peer_to_peer({{true, y, 1 - comm->rank(), 3}, {false, z, 1 - comm->rank(), 3}});
        EXPECT_EQ(z[4].item<std::int64_t>(), 1 - comm->rank());
      }
    });
  }
}

}  // namespace
}  // namespace phalanx
