// Work: one operation of a communicator, under way or done.
//
// Every verb returns one. A synchronous verb (the default) returns a finished Work, so ignoring it is right; with
// `.async = true` the operation goes on by itself and the Work keeps the tensors and buffers it uses alive.
//   wait()     returns when the result may be used: on the CPU the host waits; on CUDA the current stream waits and the
//              host goes on; a synchronous verb on CUDA returns in the same way. Throws CommError if the operation
//              failed: mismatch, timeout, dead peer (on CUDA: if that is known by then; else a later operation of the
//              communicator throws it). May be called from any thread, any number of times.
//   is_done()  true once wait() would not block; never throws.
// Dropping an unfinished Work neither cancels nor waits; the operation runs to its end.
//
//   Work w = comm.all_reduce(grad, {.op = ReduceOp::avg, .async = true});
//   ...compute...
//   w.wait();
#pragma once

#include <memory>

namespace phalanx {

class WorkState;  // shared between the issuing thread and whoever drives the operation; see comm/progress.h

class Work {
 public:
  Work() = default;  // done
  explicit Work(std::shared_ptr<WorkState> state) : state_(std::move(state)) {}
  void wait() const;
  bool is_done() const noexcept;

 private:
  std::shared_ptr<WorkState> state_;
};

}  // namespace phalanx
