// On a real GPU; built only for CUDA. Everything runs in forked ranks. CUDA does not survive a fork, so this process
// itself never touches the device.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CPUAllocator.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <thread>

#include "phalanx/base/error.h"
#include "phalanx/comm/backends/local_shm/local_backend.h"
#include "phalanx/comm/backends/local_shm/shm_backend.h"
#include "phalanx/comm/backends/nccl/nccl.h"
#include "phalanx/comm/device/staged_backend.h"
#include "phalanx/comm/testing/backend_suite.h"
#include "phalanx/comm/testing/forked_ranks.h"
#include "phalanx/store/tcp_store.h"

namespace phalanx {
namespace {

using namespace std::chrono_literals;

#define PHALANX_NEEDS_GPU() \
  if (!std::filesystem::exists("/dev/nvidiactl")) GTEST_SKIP() << "this machine has no GPU"

// Tensors of the suite are in host memory. Here that memory is pinned, so the device, and NCCL, can use it in place.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    void* memory = nullptr;
    if (cudaHostAlloc(&memory, bytes > 0 ? bytes : 1, cudaHostAllocPortable) != cudaSuccess) throw std::bad_alloc();
    return {memory, memory, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  static void release(void* memory) { (void)cudaFreeHost(memory); }
};

// The suite reads results on the host, so here the host, as its own current stream, waits.
class HostWaits final : public DeviceStreams {
 public:
  explicit HostWaits(std::shared_ptr<DeviceStreams> cuda) : cuda_(std::move(cuda)) {}
  std::shared_ptr<void> enter() const override { return cuda_->enter(); }
  std::shared_ptr<void> enter_stream(DeviceStream stream) override { return cuda_->enter_stream(stream); }
  DeviceStream make_stream() override { return cuda_->make_stream(); }
  DeviceStream current_stream() const override { return cuda_->current_stream(); }
  std::shared_ptr<DeviceEvent> record(DeviceStream stream) override { return cuda_->record(stream); }
  std::shared_ptr<DeviceEvent> record_current() override { return cuda_->record_current(); }
  void wait(DeviceStream stream, const DeviceEvent& event) override { cuda_->wait(stream, event); }
  void current_waits(const DeviceEvent& event) override {
    while (!event.is_done()) std::this_thread::yield();
  }
  void copy(DeviceStream stream, void* to, const void* from, std::size_t bytes) override {
    cuda_->copy(stream, to, from, bytes);
  }
  std::shared_ptr<std::byte> make_pinned(std::size_t bytes) override { return cuda_->make_pinned(bytes); }

 private:
  std::shared_ptr<DeviceStreams> cuda_;
};

TEST(CudaDevice, NcclPassesTheSuiteAtWorldOne) {
  PHALANX_NEEDS_GPU();
  EXPECT_EQ(run_forked_ranks(1,
                             [](int) {
                               c10::SetCPUAllocator(new PinnedAllocator, /*priority=*/255);
                               auto comm =
                                   make_nccl_communicator(make_local_backends(1).front(), -1, load_nccl(),
                                                          std::make_shared<HostWaits>(make_cuda_streams(0)), {});
                               run_backend_suite(*comm);
                             }),
            "");
}

void require_filled(const at::Tensor& tensor, float value, const char* what) {
  const at::Tensor host = tensor.to(at::kCPU);
  for (std::int64_t i = 0; i < host.numel(); ++i)
    if (host.const_data_ptr<float>()[i] != value)
      throw std::runtime_error(
          fmt::format("{}: element {} is {}, expected {}", what, i, host.const_data_ptr<float>()[i], value));
}

// Verbs on tensors of the GPU, asynchronous ones between computations of the current stream.
void use_cuda_tensors(Communicator& comm) {
  const auto options = at::TensorOptions(at::kFloat).device(at::Device(at::kCUDA, 0));
  const auto world = static_cast<float>(comm.size());
  for (const std::int64_t count : {std::int64_t{1}, std::int64_t{3'000'000}}) {
    at::Tensor x = at::full({count}, 1.0F, options);
    x.add_(static_cast<float>(comm.rank()));
    comm.all_reduce(x);
    x.mul_(2);
    require_filled(x, world * (world + 1), "all_reduce");
    at::Tensor y = at::full({count}, 1.0F, options);
    const Work work = comm.all_reduce(y, {.async = true});
    work.wait();
    y.add_(1);
    require_filled(y, world + 1, "asynchronous all_reduce");
    at::Tensor all = at::zeros({count * comm.size()}, options);
    comm.all_gather(all, at::full({count}, static_cast<float>(comm.rank()), options));
    for (int rank = 0; rank < comm.size(); ++rank)
      require_filled(all.narrow(0, rank * count, count), static_cast<float>(rank), "all_gather");
    comm.broadcast(x, {.root = comm.size() - 1});
    require_filled(x, world * (world + 1), "broadcast");
  }
  at::Tensor host = at::full({5}, 1.0F);
  comm.all_reduce(host);  // CPU tensors do not go through NCCL
  require_filled(host, world, "all_reduce of a CPU tensor");
  comm.barrier();
}

TEST(CudaDevice, NcclMovesCudaTensors) {
  PHALANX_NEEDS_GPU();
  EXPECT_EQ(
      run_forked_ranks(1, [](int) { use_cuda_tensors(*make_nccl_communicator(make_local_backends(1).front(), 0)); }),
      "");
}

// Against the host's clock, before and after work that takes the GPU some milliseconds.
TEST(CudaDevice, EventsKeepTheirTime) {
  PHALANX_NEEDS_GPU();
  EXPECT_EQ(run_forked_ranks(
                1,
                [](int) {
                  const auto streams = make_cuda_streams(0);
                  const at::Tensor x = at::ones({4096, 4096}, at::TensorOptions(at::kFloat).device(at::kCUDA, 0));
                  at::mm(x, x).sum().item<float>();
                  const auto now_us = [] {
                    const auto now = std::chrono::system_clock::now().time_since_epoch();
                    return std::chrono::duration_cast<std::chrono::microseconds>(now).count();
                  };
                  const auto require = [](bool is_so, const char* what) {
                    if (!is_so) throw std::runtime_error(what);
                  };
                  const auto wait = [](const DeviceEvent& event) {
                    while (!event.is_done()) std::this_thread::yield();
                    return event.time_us().value();
                  };
                  constexpr std::int64_t kApart = 5000;  // between the clocks
                  const std::int64_t begin = now_us();
                  const auto before = streams->record_current_timed();
                  for (int i = 0; i < 20; ++i) at::mm(x, x);
                  const auto after = streams->record_current_timed();
                  const std::int64_t end_us = wait(*after), begin_us = wait(*before), end = now_us();
                  require(begin_us >= begin - kApart, "the first event is too early");
                  require(end_us <= end + kApart, "the last event is too late");
                  require(end_us - begin_us > 1000, "no time has passed on the GPU");
                  require(!streams->record_current()->time_us(), "an event without a time has one");
                }),
            "");
}

TEST(CudaDevice, TwoRanksShareAGpuThroughHostMemory) {
  PHALANX_NEEDS_GPU();
  TcpStoreServer server;
  EXPECT_EQ(run_forked_ranks(2,
                             [&](int rank) {
                               TcpStore store(server.address());
                               Communicator comm(
                                   make_staged_backend(make_shm_backend(store, rank, 2, "staged", 60s), 0), {});
                               use_cuda_tensors(comm);
                             }),
            "");
}

}  // namespace
}  // namespace phalanx
