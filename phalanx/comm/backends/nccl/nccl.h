// The nccl communicator: ranks with one CUDA device each, on one or many nodes.
//
// - CUDA tensors of the rank's device go through NCCL, on a stream that the communicator owns. Before an operation,
//   synchronous or not, the device waits for the work queued on the caller's current stream. Work::wait() makes the
//   current stream wait, not the host.
// - The host waits only at a group's first calls. NCCL connects the ranks then, so wait(), and a synchronous verb,
//   returns when the others have made the call, too.
// - CPU tensors, byte objects and barriers go through the control communicator; there the host waits.
// - The ranks' signatures are compared asynchronously. A mismatch aborts the group, ends what hangs on the device, and
//   is the error of a later call on every rank. With CommunicatorOptions::strict the host waits for the comparison
//   first, and the call itself throws.
// - Messages between two ranks match in issue order; tags must agree. Put messages in both directions that are in
//   flight at the same time into one batch_isend_irecv().
// - Sums are in NCCL's order, 16-bit floats in NCCL's accumulator. Every rank gets the same bits. For bool: or, and.
// - CUDA graphs cannot capture an operation. Two ranks cannot share a device (NCCL refuses it).
//
//   auto control = make_shm_backend(store, rank, world_size, "control", timeout);
//   auto world = make_nccl_communicator(control, local_rank);
#pragma once

#include <memory>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/comm/backend.h"
#include "phalanx/comm/backends/nccl/nccl_table.h"
#include "phalanx/comm/communicator.h"

namespace phalanx {

/// A rank has no such device or cannot load NCCL, or two ranks share a device. All ranks get this error, and nothing
/// has been done yet.
class NcclUnavailable : public CommError {
 public:
  using CommError::CommError;
};

struct NcclOptions {
  CommunicatorOptions communicator;
  std::vector<int> names;  // rank numbers for error texts, if the ranks are part of a larger group; empty: 0, 1, ...
};

/// Collective over the ranks of `control`. Throws NcclUnavailable, or CommError if NCCL cannot connect the ranks within
/// communicator.first_timeout.
/// REQUIRES: nobody else uses `control` from then on.
std::shared_ptr<Communicator> make_nccl_communicator(std::shared_ptr<Backend> control, int cuda_device,
                                                     NcclOptions options = {});

/// The same over any table and streams; cuda_device -1: tensors are in host memory (tests).
std::shared_ptr<Communicator> make_nccl_communicator(std::shared_ptr<Backend> control, int cuda_device,
                                                     std::shared_ptr<const NcclTable> table,
                                                     std::shared_ptr<DeviceStreams> streams, NcclOptions options);

}  // namespace phalanx
