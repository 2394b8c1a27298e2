// Work: a handle to one operation of a communicator, in flight or done.
//
// Every verb returns one. A synchronous verb (the default) returns a finished Work, so the caller may ignore it. With
// `.async = true` the operation runs in the background, and the Work keeps its tensors and buffers alive: until it is
// done, or on CUDA until wait() is called on the stream that was current when it was issued, if the memory is that of
// libtorch's caching allocator, which uses it again in the order of that stream.
//
// Dropping an unfinished Work neither cancels nor waits. The operation runs to its end.
//
//   Work w = comm->all_reduce(grad, {.op = ReduceOp::avg, .async = true});
//   // ... compute ...
//   w.wait();
#pragma once

#include <memory>

namespace phalanx {

class WorkState;  // shared by the issuing thread and the operation's driver; see comm/progress.h

class Work {
 public:
  Work() = default;  // done
  explicit Work(std::shared_ptr<WorkState> state) : state_(std::move(state)) {}
  /// Returns when the result may be used. On the CPU the host waits. On CUDA the current stream waits and the host
  /// continues; a synchronous verb on CUDA returns in the same way. Any thread may call it, any number of times.
  /// Throws CommError if the operation failed: mismatch, timeout, dead peer. On CUDA it throws only if the failure is
  /// known by then; else a later operation of the communicator throws it.
  void wait() const;
  /// True once wait() would not block. Never throws.
  bool is_done() const noexcept;

 private:
  std::shared_ptr<WorkState> state_;
};

}  // namespace phalanx
