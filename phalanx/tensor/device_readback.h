// DeviceReadback brings values from a device to the host, which goes on and reads them later.
//
//   const DeviceReadback readback(at::stack({loss, norm}));   // queues the copy
//   queue_the_next_step();
//   const std::vector<double> numbers = readback.read();      // waits for the copy, not for the next step
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <vector>

namespace phalanx {

class DeviceReadback {
 public:
  /// Copies to pinned memory on the device's current stream. Does not wait.
  /// REQUIRES: `values` is contiguous and on a device other than the CPU.
  explicit DeviceReadback(const at::Tensor& values);

  /// Waits until the copy is done, and returns it: in pinned memory, which it shares with this object.
  const at::Tensor& wait() const;
  /// The same as numbers. REQUIRES: the values are float64.
  std::vector<double> read() const;

 private:
  at::Tensor on_host_;
  c10::Event copied_;
};

}  // namespace phalanx
