#include "phalanx/comm/backends/nccl/device_communicator.h"

#include <fmt/format.h>

#include "phalanx/base/error.h"
#include "phalanx/base/log.h"
#include "phalanx/comm/backends/nccl/nccl.h"
#include "phalanx/comm/device/device_streams.h"
#include "phalanx/comm/device/staged_backend.h"

namespace phalanx {

std::shared_ptr<Communicator> make_device_communicator(std::shared_ptr<Communicator> host, c10::Device device,
                                                       DeviceCommunicatorOptions options) {
  if (device.is_cpu()) return host;
  if (!device.is_cuda())
    throw ConfigError(
        fmt::format("device {}: expected cpu or cuda, which are those that can communicate", device.str()));
  const int index = device.has_index() ? device.index() : 0;
  use_cuda_device(index);
  const std::string through = host->backend_name();
  std::shared_ptr<Backend> backend = host->backend();
  host.reset();
  if (options.path != DevicePath::staged) {
    try {
      return make_nccl_communicator(backend, index, {.communicator = options.communicator});
    } catch (const NcclUnavailable& error) {
      if (options.path == DevicePath::nccl) throw;
      log::warn_once(fmt::format("{}; CUDA tensors go through host memory ({}), which is slow", error.what(), through));
    }
  }
  return std::make_shared<Communicator>(make_staged_backend(std::move(backend), index),
                                        std::move(options.communicator));
}

}  // namespace phalanx
