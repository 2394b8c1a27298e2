// Ranks as threads over the nccl backend with a double of NCCL (fake_nccl.h), for tests (tests only). Messages have no
// tags, a send waits for its receive, and the operations of a communicator run in the order of issue.
//
//   EXPECT_EQ(run_nccl_threads(4, [](NcclRank& rank) { use(*rank.comm); }), "");
//
// With FakeStreams::Kernels::one_at_a_time a device runs the kernels of all its communicators one after the other, in
// the order of issue, as NCCL may. Then ranks deadlock if they issue operations of two communicators in different
// orders.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "phalanx/comm/backends/nccl/nccl.h"
#include "phalanx/comm/communicator.h"
#include "phalanx/comm/testing/fake_nccl.h"
#include "phalanx/comm/testing/fake_streams.h"

namespace phalanx {

/// One rank's device, library and communicator. They are destroyed in the opposite order.
struct NcclRank {
  std::shared_ptr<FakeStreams> streams = std::make_shared<FakeStreams>();
  std::shared_ptr<FakeNccl> nccl;
  std::shared_ptr<Communicator> comm;
};

using NcclBody = std::function<void(NcclRank&)>;

/// Runs body(rank) in one thread per rank. Returns one line for each rank that threw.
std::string run_nccl_threads(int world, const NcclBody& body, const NcclOptions& options = {},
                             FakeStreams::Kernels kernels = FakeStreams::Kernels::at_once);

}  // namespace phalanx
