// Ranks as threads of a test, each with a simulated device of its own, over NCCL's double or through pinned memory.
//
//   run_sim_ranks(2, /*over_nccl=*/true, [](const std::shared_ptr<Communicator>& world) {
//     at::Tensor x = at::ones({4}, on_sim(world->rank()));
//     world->all_reduce(x);
//   });
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/comm/backends/local_shm/local_backend.h"
#include "phalanx/comm/backends/nccl/nccl.h"
#include "phalanx/comm/communicator.h"
#include "phalanx/comm/device/staged_backend.h"
#include "phalanx/comm/testing/fake_nccl.h"
#include "phalanx/testing/sim_device/torch/sim_backend.h"
#include "phalanx/testing/sim_device/torch/sim_streams.h"

namespace phalanx {

/// NCCL's double on the streams and the memory of a simulated device. Its kernels are called "nccl all_reduce", ...
class SimNcclDevice final : public FakeNcclDevice {
 public:
  explicit SimNcclDevice(int device) : device_(device) {}

  void launch(DeviceStream stream, const char* name, const std::vector<Range>& ranges,
              std::function<void()> kernel) override {
    std::vector<sim_device::Access> accesses;
    for (const Range& range : ranges) accesses.push_back({range.begin, range.bytes, range.is_write});
    runtime().launch({device_, reinterpret_cast<std::intptr_t>(stream)},
                     {kept(std::string("nccl ") + name), std::move(accesses), std::move(kernel)});
  }
  void* kernel_view(const void* address) const override { return runtime().kernel_view(address); }

 private:
  static sim_device::Runtime& runtime() { return sim_device::sim_backend().runtime; }
  // The runtime wants names that stay.
  static const char* kept(const std::string& name) {
    static std::mutex mutex;
    static auto& names = *new std::set<std::string>;
    const std::lock_guard lock(mutex);
    return names.insert(name).first->c_str();
  }

  int device_;
};

using MakeStreams = std::function<std::shared_ptr<DeviceStreams>(int device)>;

/// Rank r's current device is sim:r. Throws what a rank throws, as run_local_ranks() does.
/// REQUIRES: at most kDevices ranks.
inline void run_sim_ranks(int ranks, bool over_nccl,
                          const std::function<void(const std::shared_ptr<Communicator>&)>& body,
                          const MakeStreams& make_streams = &sim_device::make_sim_streams) {
  const auto transport = make_local_backends(ranks);
  run_local_ranks(ranks, [&](const std::shared_ptr<Communicator>& host) {
    const int rank = host->rank();
    sim_device::current_device() = rank;
    if (!over_nccl)
      return body(std::make_shared<Communicator>(make_staged_backend(host->backend(), rank, make_streams(rank)),
                                                 CommunicatorOptions{}));
    FakeNccl nccl(transport[static_cast<std::size_t>(rank)], std::make_shared<SimNcclDevice>(rank));
    body(make_nccl_communicator(host->backend(), rank, nccl.table(), make_streams(rank), {}));
  });
}

}  // namespace phalanx
