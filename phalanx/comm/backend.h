// Backend: the layer below a Communicator. It only moves bytes. It knows no tensors, no timeouts and no threads.
//
// The Communicator checks arguments, numbers the operations, applies timeouts and writes error texts. Then a driver
// (the Communicator itself, or the process's progress thread, see progress.h) completes each operation:
//
//   std::unique_ptr<Operation> op = backend.start(description);
//   while (op->advance() != Progress::done) { /* spin, then yield, then sleep on op->doorbell() */ }
//
// Rules for a backend
// - start() and advance() never block. advance() does a bounded amount of work (about one chunk) and returns. So one
//   thread can drive many operations of many communicators.
// - One thread at a time drives a backend, but not always the same one.
// - For collectives, every rank calls start() in the same order. A collective starts only after the previous one is
//   done.
// - Several point-to-point operations (send, recv, batch_isend_irecv) may be in flight at once,
//   but never together with a collective.
// - The ranks compare signatures (signature.h) before data moves. A mismatch is a CommError on every rank.
// - After a throw, or after abort(), every later start() and advance() throws. The other ranks follow soon.
// - The description and the buffers that it points to outlive the operation.
//
// A stream-ordered backend (BackendTraits::stream_ordered) moves accelerator memory. For a description with
// `on_device`, the issuing thread calls start() at once, in issue order, even while the progress thread advances
// earlier operations. The operation is ordered after the work already queued on that thread's current stream. advance()
// then only watches.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "phalanx/comm/types.h"
#include "phalanx/observe/device_times.h"

namespace phalanx {

/// One message of send, recv or batch_isend_irecv.
struct Transfer {
  bool is_send = true;
  void* data = nullptr;  // read if is_send, else written
  std::int64_t count = 0;
  DataType dtype = DataType::f32;
  int peer = 0;
  int tag = 0;
};

/// Messages in host memory use tags from this value on. A stream-ordered backend without a CUDA device (tests) treats
/// all memory as device memory; there only these tags mark a message in host memory.
inline constexpr int kHostMemoryTag = 1'000'000;

struct Signature;

/// What one rank requests. Counts are in elements. All ranges are contiguous.
///   verb            input, input_count             output, output_count          counts
///   broadcast       - (output on root is read)     n                             -
///   all_reduce      - (in place)                   n                             -
///   reduce          - (in place on root; others'   n                             -
///                     output is only read)
///   all_gather      own part                       all parts                     empty: even; else per rank
///   reduce_scatter  all parts                      own part                      empty: even; else per rank
///   gather          own part                       all parts (root), else null   -
///   scatter         all parts (root), else null    own part                      -
///   all_to_all      parts by destination           parts by source               empty: even; else input_counts and
///                                                                                output_counts per rank
///   send, recv, batch_isend_irecv: transfers only.   barrier: nothing.
/// In-place forms: the input of all_gather may be this rank's slice of the output, and the output of
/// reduce_scatter may be this rank's slice of the input. The same holds on root for the input of gather and the output
/// of scatter. No other overlaps occur.
struct OperationDescription {
  Verb verb = Verb::barrier;
  DataType dtype = DataType::u8;
  bool on_device = false;       // the ranges are accelerator memory, not host memory
  ReduceOp op = ReduceOp::sum;  // reductions only
  int root = 0;                 // rooted verbs only
  std::uint64_t sequence = 0;   // collectives: the same on every rank; point-to-point: counted by this rank alone
  const void* input = nullptr;
  std::int64_t input_count = 0;
  void* output = nullptr;
  std::int64_t output_count = 0;
  std::vector<std::int64_t> counts;         // all_gather, reduce_scatter
  std::vector<std::int64_t> input_counts;   // all_to_all
  std::vector<std::int64_t> output_counts;  // all_to_all
  std::vector<Transfer> transfers;          // send, recv, batch_isend_irecv
  bool compare_only = false;                // collectives of gloo and mpi: done once all signatures are known to match
  // If set: the ranks compare this signature, and errors show it, instead of the description's own. Lives as long as
  // the operation.
  const Signature* stands_for = nullptr;
};

enum class Progress : std::uint8_t {
  blocked,  // nothing could be done: a peer has not arrived
  moved,    // some work was done; call again
  done
};

/// A futex word on which the driver of a blocked operation may sleep. `seen` is the value at which advance() had to
/// wait. The driver adds itself to `sleepers` (if not null) before the futex call and removes itself after it. The
/// thread that changes the word wakes sleepers only if the count is not zero. A sleep lasts at most 100 ms, so a missed
/// wake-up costs time but never hangs.
struct Doorbell {
  std::atomic<std::uint32_t>* word = nullptr;
  std::uint32_t seen = 0;
  std::atomic<std::uint32_t>* sleepers = nullptr;
  bool process_shared = false;
};

/// Lets a waiter make its compute stream, instead of the host, wait for a stream-ordered operation.
class StreamCompletion {
 public:
  virtual ~StreamCompletion() = default;
  enum class Joined : std::uint8_t {
    not_yet,        // it is not launched: ask again
    stream,         // the current stream waits
    issuing_stream  // the same, and the operation was issued on this stream, so that its memory may be used again there
  };
  /// Makes the calling thread's current stream wait for the end of the operation.
  virtual Joined join_current_stream() = 0;
  /// True once the device has finished it. Never throws. A failed operation is done, too.
  virtual bool is_done() const noexcept = 0;
  /// When the device worked on it, and whether a stream stood still meanwhile. Nothing: the backend does not know.
  /// REQUIRES: is_done() has returned true. Throws CommError if the device has failed.
  virtual std::optional<observe::DeviceTimes> times() const { return std::nullopt; }
};

class Operation {
 public:
  virtual ~Operation() = default;
  /// Does the work that is possible now. Throws CommError: mismatch, abort by a peer, transport failure.
  virtual Progress advance() = 0;
  /// Where to sleep after advance() returned blocked. nullopt: the driver polls, at growing intervals.
  virtual std::optional<Doorbell> doorbell() { return std::nullopt; }
  /// Like doorbell(), for an operation that may wait in several places at once: appends all of them. False: the driver
  /// polls.
  virtual bool add_doorbells(std::vector<Doorbell>& bells) {
    const std::optional<Doorbell> bell = doorbell();
    if (bell) bells.push_back(*bell);
    return bell.has_value();
  }
  /// The driver calls it about every 100 ms while blocked. Throws CommError, naming the rank, if an awaited rank is
  /// dead.
  virtual void check_peers() {}
  /// The driver calls it until it returns true. Never blocks: it only waits for peers to finish the piece they work on.
  /// REQUIRES: the operation failed and the backend has been aborted.
  /// ENSURES: once true, no peer reads or writes this operation's buffers any more.
  virtual bool retire() noexcept { return true; }
  /// Stream-ordered operations only. The driver calls it once, right after start(). The result may outlive the
  /// operation.
  virtual std::shared_ptr<StreamCompletion> completion() { return nullptr; }
  /// The ranks that this operation waits for, for error messages. Empty if the backend cannot know.
  virtual std::vector<int> missing_ranks() { return {}; }
  /// Stream-ordered operations only: enqueues what it can on the stream; advance() does the rest. The issuing thread
  /// calls it at most once, right after start() and completion(). It may wait for a moment, but never for a peer. After
  /// a throw, retire() returns true once the device has finished what launch() began.
  virtual void launch() {}
};

struct BackendTraits {
  std::string_view name;              // "local", "shm", "gloo", "mpi", "nccl"
  bool rank_order_reduction = false;  // reductions sum in rank order: same bits on every run and on every such backend
  bool host_only = true;              // only host memory can be moved
  bool oversubscribed = false;        // more ranks than cores on this node: a waiter yields its core at once
  bool sleeps = false;                // threads of the backend move the data: a waiter sleeps at once, on its doorbell
  // Messages match by tag; applies to the memory that the backend is made for. False: messages between two ranks match
  // in issue order, and a rank runs its messages one after the other, each until its peer has joined it.
  bool has_tags = true;
  bool stream_ordered = false;  // see above; host memory is moved, too, but not in any stream's order
  // The one CUDA device whose memory a stream-ordered backend moves. -1 (tests): no device; the tensors' host memory
  // acts as device memory.
  int cuda_device = -1;
};

/// The members of one new group. All ranks of the old group request it at the same time.
struct SplitRequest {
  std::vector<int> members;  // old ranks, in the order of the new ones; empty: joins no group but takes part
  int rank = -1;             // this rank's index in members
  std::string name;          // of the new communicator; the same on all members
  std::uint64_t serial = 0;  // number of earlier splits of this group: the same on every old rank
  std::vector<int> names;  // rank numbers for error texts, if the members are part of a larger group; empty: 0, 1, ...
  /// All-gathers byte strings over the old group.
  /// REQUIRES: every old rank calls it the same number of times.
  std::function<std::vector<std::string>(const std::string&)> exchange;
};

class Backend {
 public:
  /// All-gathers byte strings over the group.
  using SymmetricExchange = std::function<std::vector<std::string>(const std::string&)>;

  virtual ~Backend() = default;
  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;
  virtual BackendTraits traits() const noexcept = 0;
  virtual std::unique_ptr<Operation> start(const OperationDescription& description) = 0;
  /// nullptr if request.members is empty.
  virtual std::shared_ptr<Backend> split(const SplitRequest& request) = 0;
  /// As split(), for a group that moves host memory alone. A stream-ordered backend splits what moves it there.
  virtual std::shared_ptr<Backend> split_host(const SplitRequest& request) { return split(request); }
  /// Allocates this many bytes of host memory from which this backend moves data with fewer copies. The returned
  /// pointer owns the memory. nullptr on all ranks: the backend has no such memory; ordinary memory is as good.
  /// REQUIRES: all ranks call it, with the same number of bytes.
  virtual std::shared_ptr<std::byte> make_symmetric(std::size_t, SymmetricOptions, const SymmetricExchange&) {
    return nullptr;
  }
  /// Any thread may call it, any number of times. The first reason counts.
  virtual void abort(const std::string& reason) noexcept = 0;
  /// Throws CommError if the group was aborted, or if one of its ranks is known to have ended. (A rank that ended may
  /// have completed all its work.) Cheap. Only the thread that drives the backend may call it.
  virtual void check_ranks() {}
};

}  // namespace phalanx
