// Backend: what lies below a Communicator. It only moves bytes; it knows no tensor, no timeout and no thread.
//
// The Communicator checks arguments, numbers operations, watches the clock and writes error texts. It (or the
// process's progress thread, see progress.h) then drives each operation to its end:
//
//   std::unique_ptr<Operation> op = backend.start(description);
//   while (op->advance() != Progress::done) { /* spin, then yield, then sleep on op->doorbell() */ }
//
// Rules for a backend
// - start() and advance() never block. advance() does a bounded piece of work (about a chunk) and returns, so that one
//   thread can keep many operations of many communicators going.
// - A backend is driven by one thread at a time, but not always by the same one. start() is called in the same order on
//   every rank for collectives; the next collective is started only after the one before is done. Point-to-point
//   operations (send, recv, batch_p2p) may be under way several at a time, but never beside a collective.
// - Before data moves the ranks' signatures are compared (signature.h); a mismatch is a CommError on every rank.
// - After a throw, or abort(), every later start() and advance() throws; on the other ranks soon, too.
// - The description and the buffers it points to outlive the operation.
//
// A stream-ordered backend (traits) moves memory of an accelerator. For a description with `on_device` its start() is
// called on the issuing thread, at once and in the order of issue, also while the progress thread advances earlier
// operations; it takes its place behind what that thread's current stream has in hand. advance() then only watches.
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

namespace phalanx {

/// One message of send, recv or batch_p2p.
struct Transfer {
  bool is_send = true;
  void* data = nullptr;  // read if is_send, else written
  std::int64_t count = 0;
  DataType dtype = DataType::f32;
  int peer = 0;
  int tag = 0;
};

/// Messages between hosts have tags from here on. On a stream-ordered backend without a CUDA device (tests), which
/// takes all memory for a device's, these alone are of the host's.
inline constexpr int kHostMemoryTag = 1'000'000;

struct Signature;

/// What one rank asks for. Counts are in elements; all ranges are contiguous.
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
///   send, recv, batch_p2p: transfers only.   barrier: nothing.
/// The input of all_gather may be its own slice of the output, the output of reduce_scatter its own slice of the
/// input, the input of gather (root) and the output of scatter (root) likewise; other overlaps do not occur.
struct OperationDescription {
  Verb verb = Verb::barrier;
  DataType dtype = DataType::u8;
  bool on_device = false;       // the ranges are memory of an accelerator, not of the host
  ReduceOp op = ReduceOp::sum;  // reductions only
  int root = 0;                 // rooted verbs only
  std::uint64_t sequence = 0;   // collectives: the same on every rank; point-to-point: this rank's own count
  const void* input = nullptr;
  std::int64_t input_count = 0;
  void* output = nullptr;
  std::int64_t output_count = 0;
  std::vector<std::int64_t> counts;         // all_gather, reduce_scatter
  std::vector<std::int64_t> input_counts;   // all_to_all
  std::vector<std::int64_t> output_counts;  // all_to_all
  std::vector<Transfer> transfers;          // send, recv, batch_p2p
  bool compare_only = false;                // collectives of gloo and mpi: done once all ranks are known to ask alike
  // What the ranks compare, and errors tell, instead of this itself; lives as long as the operation.
  const Signature* stands_for = nullptr;
};

enum class Progress : std::uint8_t {
  blocked,  // nothing could be done: a peer has not got there
  moved,    // something was done; call again
  done
};

/// Where a blocked operation's driver may sleep: on a futex word that held `seen` when advance() found it wanting.
/// The driver adds itself to `sleepers` (if any) before the futex call and leaves after it; whoever changes the word
/// wakes only if sleepers is not zero. Sleeps are bounded (100 ms), so a missed wake costs time, never a hang.
struct Doorbell {
  std::atomic<std::uint32_t>* word = nullptr;
  std::uint32_t seen = 0;
  std::atomic<std::uint32_t>* sleepers = nullptr;
  bool process_shared = false;
};

/// How a waiter makes the stream it computes on, instead of the host, wait for a stream-ordered operation.
class StreamCompletion {
 public:
  virtual ~StreamCompletion() = default;
  /// The calling thread's current stream waits for the operation's end. False: it is not launched yet; ask again.
  virtual bool join_current_stream() = 0;
  /// The device is through with it. Never throws; what has failed is done, too.
  virtual bool is_done() const noexcept = 0;
};

class Operation {
 public:
  virtual ~Operation() = default;
  /// Does what can be done now. Throws CommError: mismatch, aborted by a peer, transport failure.
  virtual Progress advance() = 0;
  /// After advance() returned blocked. Nothing: the driver polls, at growing intervals.
  virtual std::optional<Doorbell> doorbell() { return std::nullopt; }
  /// The same of an operation that may wait in several places at once: adds them all. False: the driver polls.
  virtual bool add_doorbells(std::vector<Doorbell>& bells) {
    const std::optional<Doorbell> bell = doorbell();
    if (bell) bells.push_back(*bell);
    return bell.has_value();
  }
  /// Called about every 100 ms while blocked. Throws CommError if a rank waited for is dead, naming it.
  virtual void check_peers() {}
  /// Called after a failure, once the backend has been aborted, until it returns true: then no peer reads or writes
  /// this operation's buffers any more. Never blocks; what it waits for is only that peers finish the piece in hand.
  virtual bool retire() noexcept { return true; }
  /// Stream-ordered operations only. Asked for once, right after start(); may outlive the operation.
  virtual std::shared_ptr<StreamCompletion> completion() { return nullptr; }
  /// The ranks this operation is waiting for, for error messages; empty if the backend cannot know.
  virtual std::vector<int> missing_ranks() { return {}; }
  /// Stream-ordered operations only: puts into the stream what can be; advance() does the rest. Called at most once,
  /// right after start() and completion(), by the issuing thread; it may wait for a moment, but for no peer. After a
  /// throw retire() tells when the device is through with what it began.
  virtual void launch() {}
};

struct BackendTraits {
  std::string_view name;              // "local", "shm", "gloo"
  bool rank_order_reduction = false;  // reductions sum in rank order: the same bits on every run and such backend
  bool host_only = true;              // only host memory can be moved
  bool oversubscribed = false;        // more ranks than cores on this machine: a waiter gives its core away at once
  bool has_tags = true;         // of the memory it is for. False: messages between two ranks match in the order of
                                // issue, and a rank's run one after the other, each until it meets its other end
  bool stream_ordered = false;  // see above; host memory is moved, too, but not in any stream's order
  int cuda_device = -1;         // the only one whose memory a stream-ordered backend moves. -1 (tests): there is
                                // none, and the tensors' host memory plays its part
};

/// The members of one new group, asked for by all ranks of the old one at the same time.
struct SplitRequest {
  std::vector<int> members;  // old ranks in the order of the new; empty: this rank joins no group but takes part
  int rank = -1;             // this rank's place in members
  std::string name;          // of the new communicator; the same on all members
  std::uint64_t serial = 0;  // how many splits this group has made before: the same on every old rank
  std::vector<int> names;    // what error texts call the members, where these are a part of a group; empty: 0, 1, ...
  /// All-gathers byte strings over the old group; every old rank must call it the same number of times.
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
  /// Host memory of so many bytes (the same on all ranks, all of which call this), from which this backend moves data
  /// with fewer copies. Held by what is returned. nullptr on all ranks: it has none, ordinary memory is as good.
  virtual std::shared_ptr<std::byte> make_symmetric(std::size_t, SymmetricOptions, const SymmetricExchange&) {
    return nullptr;
  }
  /// Any thread, any number of times; the first reason counts.
  virtual void abort(const std::string& reason) noexcept = 0;
  /// Throws CommError if the group was aborted, or if a rank of it is known to have ended. A rank that has ended may
  /// have done all that was asked of it. Cheap; by whoever drives the backend.
  virtual void check_ranks() {}
};

}  // namespace phalanx
