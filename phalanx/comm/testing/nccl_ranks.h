// Ranks as threads over the nccl backend with a double of NCCL (fake_nccl.h): messages have no tags, a send waits for
// its receive, and what a communicator is asked for runs in the order of issue. For tests of whatever must live with
// that.
//
//   EXPECT_EQ(run_nccl_threads(4, [](NcclRank& rank) { use(rank.comm); }), "");
//
// With FakeStreams::Kernels::one_at_a_time a device runs the kernels of all its communicators one after the other, in
// the order of issue, as NCCL may: ranks that issue those of two communicators in different orders wait for ever then.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "phalanx/comm/backends/nccl/nccl.h"
#include "phalanx/comm/communicator.h"
#include "phalanx/comm/testing/fake_nccl.h"
#include "phalanx/comm/testing/fake_streams.h"

namespace phalanx {

/// One rank: its device, its library, its communicator. They end in the opposite order.
struct NcclRank {
  std::shared_ptr<FakeStreams> streams = std::make_shared<FakeStreams>();
  std::shared_ptr<FakeNccl> nccl;
  std::shared_ptr<Communicator> comm;
};

using NcclBody = std::function<void(NcclRank&)>;

/// body(rank) on a thread for each rank. Returns one line for each rank that threw.
std::string run_nccl_threads(int world, const NcclBody& body, const NcclOptions& options = {},
                             FakeStreams::Kernels kernels = FakeStreams::Kernels::at_once);

}  // namespace phalanx
