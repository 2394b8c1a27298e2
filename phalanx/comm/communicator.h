// Communicator: a process group whose ranks exchange tensors. The tensor-level interface of comm/.
//
// Contract
// - Every rank of the communicator calls the same verbs in the same order, with matching shapes, dtypes, ops and roots.
//   The ranks compare signatures before data moves. A mismatch is a CommError on every rank; it names each rank's call.
// - nccl compares asynchronously unless it is strict (nccl.h). A mismatch may then be the error of a later call, and
//   results computed in between are invalid.
// - Verbs are synchronous unless `.async = true`; see work.h. Operations of one communicator complete in issue order.
//   Several communicators progress independently, so two ranks may use two of them in opposite order.
// - Tensors must be contiguous and on the communicator's device. A non-contiguous tensor is an Error (copy it first),
//   so there is never a hidden copy. Neither read nor write the data until an asynchronous Work is done.
// - Reductions give every rank the same bits. The local, shm, gloo and shm+gloo backends reduce in rank order, so
//   their results are also equal from run to run and between these backends. 16-bit floats are accumulated in float32.
//   `avg` divides once, after the sum; it is refused for integers.
// - Every wait has a timeout. Its error names group, op, sequence number, shape and the ranks that have not arrived.
//   After a CommError the destination is undefined: it may hold a mix of old and new values.
// - One thread at a time uses a Communicator (the thread of its rank). Destroy it only when its Works are done.
// - A forked child may destroy the communicators of its parent, which then continue undisturbed. Its verbs on them are
//   Errors.
//
//   std::shared_ptr<Communicator> comm = context.world;  // of init_from_environment(); or run_local_ranks(), split()
//   comm->all_reduce(loss, {.op = ReduceOp::avg});
//   auto tp = comm->split(rank / 4, rank); // sub-communicator of the ranks with the same colour, ordered by key
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/comm/types.h"
#include "phalanx/comm/work.h"

namespace phalanx {

class Backend;
namespace observe {
struct FlightEntry;
}

struct ReduceOptions {
  ReduceOp op = ReduceOp::sum;
  bool async = false;
};
struct RootedReduceOptions {
  int root = 0;
  ReduceOp op = ReduceOp::sum;
  bool async = false;
};
struct RootedOptions {
  int root = 0;
  bool async = false;
};
struct CommOptions {
  bool async = false;
};
struct P2POptions {
  int tag = 0;  // operations between two ranks match by tag, then by order
  bool async = false;
};

struct CommunicatorOptions {
  std::string name = "world";                        // shown in errors and traces
  std::chrono::milliseconds first_timeout{300'000};  // until mark_started() is called
  std::chrono::milliseconds timeout{100'000};        // afterwards
  // How long to wait for a rank whose process is stopped (SIGSTOP) or sends no heartbeat. 0: as long as for any other
  // rank. nullopt: $PHALANX_COMM_HEARTBEAT_SECONDS, else 5 s.
  std::optional<std::chrono::milliseconds> heartbeat;
  // nccl compares signatures asynchronously, so a mismatch is the error of a later call. Strict: it compares before
  // data moves, the host waits for that, and the call itself throws. Other backends always do so.
  bool strict = false;
  // The flight recorder: the last trace_capacity operations are written to <trace_folder>/<trace_prefix><rank>.json on
  // an error and on SIGQUIT. Without a folder: to $PHALANX_COMM_TRACE_DIR, else nowhere. Without trace_files: nowhere;
  // a log line then replaces each file.
  bool trace_files = true;
  std::string trace_folder;
  std::string trace_prefix = "rank_";
  std::size_t trace_capacity = 2048;
};

class Communicator {
 public:
  Communicator(std::shared_ptr<Backend> backend, CommunicatorOptions options);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const noexcept;
  int size() const noexcept;
  const std::string& name() const noexcept;
  std::string backend_name() const;  // "local", "shm", "gloo", "mpi", "nccl"; hierarchical: "shm+gloo", "nccl+mpi", ...
  /// For code built on top of it (device_communicator.h).
  std::shared_ptr<Backend> backend() const;

  /// Copies root's tensor into every rank's tensor.
  Work broadcast(at::Tensor tensor, RootedOptions options = {});
  /// Reduces in place. Every rank gets the same bits.
  Work all_reduce(at::Tensor tensor, ReduceOptions options = {});
  /// Reduces into root's tensor. The other ranks' tensors are unchanged.
  Work reduce(at::Tensor tensor, RootedReduceOptions options = {});
  /// REQUIRES: output.numel() == size() * input.numel(). Input may be this rank's slice of output (in place, no copy).
  /// ENSURES: rank r's input is at element r * input.numel() of output.
  Work all_gather(at::Tensor output, at::Tensor input, CommOptions options = {});
  /// Uneven form: rank r contributes counts[r] elements (flat). They are concatenated in rank order.
  Work all_gather_uneven(at::Tensor output, at::Tensor input, std::vector<std::int64_t> counts,
                         CommOptions options = {});
  /// Rank r receives the reduction of slice r. Output may be this rank's slice of input.
  /// REQUIRES: input.numel() == size() * output.numel().
  Work reduce_scatter(at::Tensor output, at::Tensor input, ReduceOptions options = {});
  Work reduce_scatter_uneven(at::Tensor output, at::Tensor input, std::vector<std::int64_t> counts,
                             ReduceOptions options = {});
  /// Output is used on root only (undefined elsewhere).
  /// REQUIRES: on root, output.numel() == size() * input.numel().
  Work gather(at::Tensor output, at::Tensor input, RootedOptions options = {});
  /// Input is used on root only (undefined elsewhere).
  /// REQUIRES: on root, input.numel() == size() * output.numel().
  Work scatter(at::Tensor output, at::Tensor input, RootedOptions options = {});
  /// Slice j of rank i's input becomes slice i of rank j's output.
  /// REQUIRES: input and output do not overlap.
  Work all_to_all(at::Tensor output, at::Tensor input, CommOptions options = {});
  Work all_to_all_uneven(at::Tensor output, at::Tensor input, std::vector<std::int64_t> output_counts,
                         std::vector<std::int64_t> input_counts, CommOptions options = {});
  Work send(at::Tensor tensor, int destination, P2POptions options = {});
  Work recv(at::Tensor tensor, int source, P2POptions options = {});
  Work barrier(CommOptions options = {});

  struct P2POp {
    bool is_send = true;
    at::Tensor tensor;
    int peer = 0;
    int tag = 0;
  };
  /// Starts all operations at once. They cannot deadlock among themselves, in whatever order each side lists them.
  Work batch_isend_irecv(std::vector<P2POp> operations, CommOptions options = {});

  /// Byte objects of any length (host memory, synchronous). gather_bytes returns all ranks' values on root, else an
  /// empty list.
  std::string broadcast_bytes(std::string value, int root = 0);
  std::vector<std::string> all_gather_bytes(const std::string& value);
  std::vector<std::string> gather_bytes(const std::string& value, int root = 0);
  std::string scatter_bytes(const std::vector<std::string>& values, int root = 0);

  /// Collective. Ranks with the same colour form a new communicator, ordered by key, then rank. A rank with a negative
  /// colour takes part in the call and gets nullptr. The new communicator's lifetime is independent of this one's.
  std::shared_ptr<Communicator> split(int color, int key, std::string name = "");
  /// Collective. A communicator of the same ranks for CPU tensors, byte objects and barriers. Its operations pass those
  /// of this one that are queued on a device. Here, CPU tensors would wait for them.
  std::shared_ptr<Communicator> split_host(std::string name);

  /// An uninitialised contiguous tensor for data that are communicated repeatedly.
  /// REQUIRES: collective; sizes and dtype are the same on every rank.
  /// Throws CommError if the ranks' requests differ or there is no memory.
  ///
  /// On shm the memory is shared. A collective then copies nothing into or out of slots, if on every rank its data are
  /// in such a tensor of this communicator, or in a part of one, and are at least 16 KiB. Data means the tensor of
  /// all_reduce, reduce and broadcast, and the input of the other verbs. Scatter and uneven all_to_all always copy. On
  /// other backends, and for devices, the tensor is like any other. After a CommError the contents are undefined, and a
  /// peer that was stopped in the middle may still change them when it is continued.
  ///
  ///   at::Tensor bucket = comm->symmetric_empty({elements}, at::kFloat);
  at::Tensor symmetric_empty(at::IntArrayRef sizes, at::TensorOptions options, SymmetricOptions symmetric = {});

  /// Call it after the first training step: timeouts switch from first_timeout to timeout.
  void mark_started();
  /// True if no asynchronous operation is in flight, here or in a communicator split from this one.
  bool is_idle() const;
  /// Writes, as JSON, the last operations of this communicator and of its family: the communicator it was split from,
  /// and all split from that one. See flight_log.h for the format and for when this happens automatically.
  void dump_flight_recorder(const std::string& path) const;
  /// The last operations of this communicator, oldest first (observe/flight_recorder.h). Any thread may call it.
  std::vector<observe::FlightEntry> recent_operations() const;
  /// Fails every pending and later operation on this rank with this reason, and soon on its peers.
  void abort(const std::string& reason);

 private:
  class Impl;
  explicit Communicator(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace phalanx
