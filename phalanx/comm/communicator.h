// Communicator: ranks that can talk. The tensor-level face of comm/.
//
// Contract
// - Every rank of the communicator calls the same verbs in the same order with matching shapes, dtypes, ops and roots.
//   Before data moves the signatures are compared; a mismatch is a CommError on every rank that says who called what.
//   nccl compares behind the stream unless it is strict (nccl.h): so it may be the error of a later call, and what was
//   computed in between is worthless.
// - Verbs are synchronous unless `.async = true`; see work.h. Operations of one communicator complete in issue order;
//   several communicators progress independently, so two may be used in opposite order on two ranks.
// - Tensors must be contiguous and on the communicator's device; a non-contiguous one is an Error (copy it first), so
//   no hidden copy is ever made. The data may be neither read nor written until an asynchronous Work is done.
// - Reductions give every rank the same bits. On the local and shm backends the order is rank order, so results are
//   also equal from run to run and between the two. 16-bit floats are accumulated in float32. `avg` divides once, after
//   the sum; on integers it is refused.
// - Every wait has a timeout; its error names group, op, sequence number, shape and the ranks that have not arrived.
//   After a CommError what the operation was to write is undefined: it may hold old and new values side by side.
// - A Communicator is used by one thread at a time (its rank's). It may be destroyed only when its Works are done.
//
//   auto comm = ...;                       // from init_from_environment(), run_local_ranks(), or split()
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
  // How long a rank whose process is stopped (SIGSTOP), or that gives no sign of life, is waited for; 0: as long as for
  // any. Nothing: $PHALANX_COMM_HEARTBEAT_SECONDS, else 5 s.
  std::optional<std::chrono::milliseconds> heartbeat;
  // On nccl the ranks' calls are compared behind the stream, and a mismatch is the error of a later call. Strict:
  // before, for which the host waits, and the call itself throws. Other backends always do.
  bool strict = false;
  // The flight recorder: the last trace_capacity operations go to <trace_folder>/<trace_prefix><rank>.json on an error
  // and on SIGQUIT. Without a folder: to $PHALANX_COMM_TRACE_DIR, else nowhere. Without trace_files nowhere, which is
  // said where they would be written.
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
  std::string backend_name() const;  // "local", "shm", "gloo", "mpi", "nccl"; of two levels "shm+gloo", "nccl+mpi", ...
  /// For what is built upon it (device_communicator.h).
  std::shared_ptr<Backend> backend() const;

  /// Copies root's tensor into every rank's.
  Work broadcast(at::Tensor tensor, RootedOptions options = {});
  /// Reduces in place; every rank gets the same bits.
  Work all_reduce(at::Tensor tensor, ReduceOptions options = {});
  /// Reduces into root's tensor; the others' tensors are unchanged.
  Work reduce(at::Tensor tensor, RootedReduceOptions options = {});
  /// output: numel = size() * input.numel(), rank r's input at element r * input.numel(). Input may be that slice
  /// itself (in place: nothing is copied).
  Work all_gather(at::Tensor output, at::Tensor input, CommOptions options = {});
  /// Uneven form: counts[r] elements (axis-free, flat) come from rank r, one after the other.
  Work all_gather_uneven(at::Tensor output, at::Tensor input, std::vector<std::int64_t> counts,
                         CommOptions options = {});
  /// input: numel = size() * output.numel(); rank r receives the reduction of slice r. Output may be that slice.
  Work reduce_scatter(at::Tensor output, at::Tensor input, ReduceOptions options = {});
  Work reduce_scatter_uneven(at::Tensor output, at::Tensor input, std::vector<std::int64_t> counts,
                             ReduceOptions options = {});
  /// output is used on root only (undefined elsewhere): numel = size() * input.numel().
  Work gather(at::Tensor output, at::Tensor input, RootedOptions options = {});
  /// input is used on root only (undefined elsewhere): numel = size() * output.numel().
  Work scatter(at::Tensor output, at::Tensor input, RootedOptions options = {});
  /// Slice j of rank i's input becomes slice i of rank j's output. Input and output must not overlap.
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
  /// All operations at once, in any order on either side: cannot deadlock among themselves.
  Work batch_isend_irecv(std::vector<P2POp> operations, CommOptions options = {});

  /// Byte objects of any length (host memory, synchronous). gather_bytes returns all ranks' on root, else an empty
  /// list.
  std::string broadcast_bytes(std::string value, int root = 0);
  std::vector<std::string> all_gather_bytes(const std::string& value);
  std::vector<std::string> gather_bytes(const std::string& value, int root = 0);
  std::string scatter_bytes(const std::vector<std::string>& values, int root = 0);

  /// Ranks that pass the same colour form a new communicator, ordered by key, then rank. A negative colour takes part
  /// in the call and gets nullptr. Collective. The new one's lifetime is independent of this one's.
  std::shared_ptr<Communicator> split(int color, int key, std::string name = "");

  /// An uninitialised contiguous tensor for data that are communicated again and again. Collective; sizes and dtype
  /// must be the same on every rank. On shm its memory is shared: collectives whose data (all_reduce, reduce,
  /// broadcast: the tensor; else: the input) are at least 16 KiB and lie, on every rank, in such a tensor of this
  /// communicator, or in a part of one, copy nothing into slots and out again; not scatter and uneven all_to_all. On
  /// other backends, and for devices, it is like any other tensor. After a CommError the contents are undefined, and a
  /// peer that was stopped in the middle may still change them when it is continued. Throws CommError if the ranks'
  /// requests differ or there is no memory.
  ///
  ///   at::Tensor bucket = comm->symmetric_empty({elements}, at::kFloat);
  at::Tensor symmetric_empty(at::IntArrayRef sizes, at::TensorOptions options, SymmetricOptions symmetric = {});

  /// The first training step is done: timeouts switch from first_timeout to timeout.
  void mark_started();
  /// True if no asynchronous operation is under way, here or in a communicator that was split from this one.
  bool is_idle() const;
  /// Writes the last operations of this communicator and of all of its family (what it was split from, and what was
  /// split from that) as JSON; see flight_log.h for the form and for when that happens by itself.
  void dump_flight_recorder(const std::string& path) const;
  /// The last operations of this communicator, the oldest first (observe/flight_recorder.h). From any thread.
  std::vector<observe::FlightEntry> recent_operations() const;
  /// Fails every pending and later operation on this rank, and soon on its peers, with this reason.
  void abort(const std::string& reason);

 private:
  class Impl;
  explicit Communicator(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace phalanx
