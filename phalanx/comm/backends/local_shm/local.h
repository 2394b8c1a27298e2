// The local backend: N ranks as threads of one process. Most tests of parallel logic use it.
//
//   run_local_ranks(4, [](const std::shared_ptr<Communicator>& comm) {
//     auto x = at::full({3}, comm->rank());
//     comm->all_reduce(x);
//     EXPECT_EQ(x[0].item<float>(), 6);
//   });
//
// The body runs once per rank, on a separate thread with one intra-op thread and grad mode on. The first exception of
// any rank aborts the others (they throw CommError) and is rethrown here. If it is a phalanx::Error its message gets
// the prefix "rank R: "; any other exception is rethrown unchanged. A rank that waits for one whose body has
// returned gets an error, too.
#pragma once

#include <functional>
#include <memory>

#include "phalanx/comm/communicator.h"

namespace phalanx {

void run_local_ranks(int world_size, const std::function<void(const std::shared_ptr<Communicator>&)>& body,
                     const CommunicatorOptions& options = {});

}  // namespace phalanx
