#include "phalanx/tensor/copy_stream.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>

#include "phalanx/testing/sim_device/torch/testing/sim_test.h"

namespace phalanx {
namespace {

class CopyStreamTest : public SimTest {
 protected:
  CopyStreamTest() { sim.runtime.set_delays({.longest = std::chrono::microseconds(300), .seed = 5}); }
  static at::TensorOptions pinned() { return at::TensorOptions(at::kFloat).pinned_memory(true); }
};

TEST_F(CopyStreamTest, CopiesWhatWasQueuedBeforeAndLetsTheStreamThatComputesGoOn) {
  const CopyStream to_host(device);
  const at::Tensor values = at::ones({256}, on_sim()), on_host = at::empty({256}, pinned());
  values.mul_(3);
  const CopyStream::Mark copied = to_host.run([&] { on_host.copy_(values, /*non_blocking=*/true); });
  EXPECT_EQ(waits(), 0);
  EXPECT_EQ(sim.runtime.launches_by_kernel({0, 0}).count("copy_ (device to host)"), 0);
  EXPECT_EQ(sim.runtime.launches_by_kernel()["copy_ (device to host)"], 1);
  CopyStream::synchronize(copied);
  EXPECT_EQ(on_host[255].item<float>(), 3);
}

TEST_F(CopyStreamTest, TheCurrentStreamWaitsForAMark) {
  const CopyStream from_host(device);
  const at::Tensor on_host = at::full({256}, 2.0, pinned()), values = at::empty({256}, on_sim());
  const CopyStream::Mark arrived = from_host.run([&] { values.copy_(on_host, /*non_blocking=*/true); });
  CopyStream::current_waits(arrived);
  values.add_(1);  // a race, if it did not wait
  EXPECT_EQ(values.cpu()[7].item<float>(), 3);
}

TEST_F(CopyStreamTest, MemoryIsKeptUntilItsCopyIsDone) {
  const CopyStream to_host(device);
  const at::Tensor on_host = at::empty({256}, pinned());
  {
    const at::Tensor values = at::full({256}, 4.0, on_sim());
    to_host.run([&] { on_host.copy_(values, /*non_blocking=*/true); });
    to_host.keep_until_done(values);
  }
  const at::Tensor next = at::full({256}, 5.0, on_sim());
  to_host.synchronize();
  EXPECT_EQ(on_host[0].item<float>(), 4);
}

TEST_F(CopyStreamTest, OnTheCpuEverythingHappensAtOnce) {
  const CopyStream none{at::Device(at::kCPU)};
  int calls = 0;
  const CopyStream::Mark mark = none.run([&] { ++calls; });
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(mark, nullptr);
  CopyStream::current_waits(mark);
  CopyStream::synchronize(mark);
  none.synchronize();
}

}  // namespace
}  // namespace phalanx
