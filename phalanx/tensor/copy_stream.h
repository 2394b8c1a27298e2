// CopyStream: a stream of a device for copies between it and the host, so that its computing stream goes on meanwhile.
//
//   CopyStream to_host(device);
//   to_host.run([&] { pinned.copy_(values, /*non_blocking=*/true); });   // behind what computes `values`
//   queue_the_next_step();                                              // does not wait for the copy
//   to_host.synchronize();                                              // the host may read `pinned`
//
// On the CPU everything happens at once, and nothing waits.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <optional>

namespace phalanx {

class CopyStream {
 public:
  /// A position in a stream.
  using Mark = std::shared_ptr<c10::Event>;

  /// REQUIRES: the device has an index, unless it is the CPU.
  explicit CopyStream(at::Device device);

  /// Calls `body` with this stream as the current one. What it queues comes after all that the calling thread's current
  /// stream has queued so far. Returns its end; on the CPU null. If `body` throws, the current stream waits for what it
  /// has queued.
  ///
  /// The memory of a tensor that was allocated on another stream may be used again before the copy is done: keep the
  /// tensor, or call keep_until_done().
  Mark run(const std::function<void()>& body) const;
  /// The allocator does not use the tensor's memory again before what is queued here is done. Does nothing for memory
  /// that is not of the device's caching allocator.
  void keep_until_done(const at::Tensor& tensor) const;
  /// The host waits for all that is queued here.
  void synchronize() const;

  /// The end of what the calling thread's current stream of the device has queued so far; on the CPU null.
  static Mark mark_current(at::Device device);
  /// The calling thread's current stream of the device waits for `mark`, unless it is null. The host does not wait.
  static void current_waits(const Mark& mark);
  /// The host waits for `mark`, unless it is null.
  static void synchronize(const Mark& mark);

 private:
  std::optional<c10::Stream> stream_;  // none: the CPU
};

}  // namespace phalanx
