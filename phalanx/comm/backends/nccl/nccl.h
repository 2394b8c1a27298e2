// The nccl communicator: ranks with a CUDA device each, on one or many machines.
//
// - CUDA tensors of the rank's device go through NCCL, on a stream of the communicator's own: a verb, synchronous or
//   not, waits on the device for what the caller's current stream has in hand, and Work::wait() makes the current
//   stream wait. The host waits at a group's first calls alone: NCCL connects the ranks then, so wait() returns, and a
//   synchronous verb with it, when the others have made the call, too. CPU tensors, byte objects and barriers go
//   through the control communicator and make the host wait as there.
// - The ranks' calls are compared behind the stream: a mismatch aborts the group, ends what hangs on the device, and is
//   the error of a later call on every rank. With CommunicatorOptions::strict the comparison comes first, and so does
//   the host's wait for it: the call itself throws.
// - Messages between two ranks match in the order of issue; tags must agree. Messages in both directions that are under
//   way at the same time belong into one batch_isend_irecv().
// - Sums are in NCCL's order, 16-bit floats in NCCL's accumulator; every rank gets the same bits. bool is or, and.
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

/// A rank has no such device or cannot load NCCL, or two share a device: nothing has been done yet, and all ranks get
/// this error.
class NcclUnavailable : public CommError {
 public:
  using CommError::CommError;
};

struct NcclOptions {
  CommunicatorOptions communicator;
  std::vector<int> names;  // what error texts call the ranks, where these are a part of a group; empty: 0, 1, ...
};

/// Collective over the ranks of `control`, which nobody else may use from then on. Throws NcclUnavailable, or CommError
/// if NCCL cannot connect the ranks within communicator.first_timeout.
std::shared_ptr<Communicator> make_nccl_communicator(std::shared_ptr<Backend> control, int cuda_device,
                                                     NcclOptions options = {});

/// The same over any table and streams; cuda_device -1: tensors are in host memory (tests).
std::shared_ptr<Communicator> make_nccl_communicator(std::shared_ptr<Backend> control, int cuda_device,
                                                     std::shared_ptr<const NcclTable> table,
                                                     std::shared_ptr<DeviceStreams> streams, NcclOptions options);

}  // namespace phalanx
