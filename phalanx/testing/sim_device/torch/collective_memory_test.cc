// Memory of tensors that ranks have exchanged is used again in the order of the stream, however late the progress
// thread sees the end of an operation.
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>

#include <future>

#include "phalanx/tensor/copy_stream.h"
#include "phalanx/testing/sim_device/torch/testing/sim_ranks.h"
#include "phalanx/testing/sim_device/torch/testing/sim_test.h"

namespace phalanx {
namespace {

class CollectiveMemoryOnSim : public SimTest {
 protected:
  static constexpr std::int64_t kElements = 1 << 18;  // 1 MiB
  static constexpr int kOperations = 16;

  /// The most memory in use on a device while `operation` runs many times, all behind a kernel that has not ended.
  std::size_t peak_of(const std::function<void(Communicator& world, int i)>& operation) {
    std::promise<void> open;
    std::shared_future<void> opened = open.get_future().share();
    std::vector<std::size_t> peaks(2);
    std::atomic<int> queued = 0;
    run_sim_ranks(2, /*over_nccl=*/true, [&](const std::shared_ptr<Communicator>& world) {
      const int rank = world->rank();
      operation(*world, 0);  // connects the ranks
      sim.runtime.synchronize_device(rank, "the beginning of a test");
      while (!world->is_idle()) std::this_thread::yield();
      sim.runtime.launch({rank, 0}, {"busy", {}, [opened] { opened.wait(); }});
      const std::size_t before = sim.memory.stats(rank).allocated;
      sim.memory.reset_peaks(rank);
      for (int i = 0; i < kOperations; ++i) operation(*world, i);
      peaks[static_cast<std::size_t>(rank)] = sim.memory.stats(rank).peak_allocated - before;
      if (++queued == 2) open.set_value();
      sim.runtime.synchronize_device(rank, "the end of a test");
    });
    return std::max(peaks[0], peaks[1]);
  }
};

TEST_F(CollectiveMemoryOnSim, IsUsedAgainOnceTheStreamWaits) {
  std::vector<at::Tensor> sums(2);
  const std::size_t peak = peak_of([&](Communicator& world, int i) {
    const at::Tensor x = at::full({kElements}, i + 1.0, on_sim(world.rank()));
    world.all_reduce(x);
    if (i == kOperations - 1) sums[static_cast<std::size_t>(world.rank())] = x;
  });
  EXPECT_LE(peak, 2 * kElements * sizeof(float));
  for (const at::Tensor& sum : sums) EXPECT_EQ(sum.cpu()[kElements - 1].item<float>(), 2 * kOperations);
}

// Nobody says when the memory may be used again.
TEST_F(CollectiveMemoryOnSim, IsKeptUntilTheEndWithoutAWait) {
  const std::size_t peak = peak_of([&](Communicator& world, int) {
    world.all_reduce(at::ones({kElements}, on_sim(world.rank())), {.async = true});
  });
  EXPECT_EQ(peak, kOperations * kElements * sizeof(float));
}

// It is used again in the order of its own stream, which knows nothing of the operation.
TEST_F(CollectiveMemoryOnSim, OfAnotherStreamIsKeptUntilTheEnd) {
  sim.runtime.set_delays({.longest = std::chrono::microseconds(500), .seed = 11});
  run_sim_ranks(2, /*over_nccl=*/true, [&](const std::shared_ptr<Communicator>& world) {
    const CopyStream side(sim_device::SimBackend::device(world->rank()));
    for (int i = 0; i < 20; ++i) {
      at::Tensor x;
      CopyStream::current_waits(side.run([&] { x = at::ones({kElements}, on_sim(world->rank())); }));
      world->all_reduce(x);
      x.reset();
      side.run([&] { at::full({kElements}, 7.0, on_sim(world->rank())); });  // may get the memory: a race
    }
  });
}

// Its owner may free it at once.
TEST_F(CollectiveMemoryOnSim, OfAnotherAllocatorIsKeptUntilTheEnd) {
  std::promise<void> open;
  std::shared_future<void> opened = open.get_future().share();
  std::atomic<int> queued = 0, freed = 0;
  run_sim_ranks(2, /*over_nccl=*/true, [&](const std::shared_ptr<Communicator>& world) {
    const int rank = world->rank();
    const at::Tensor memory = at::ones({64}, on_sim(rank));
    world->barrier();
    sim.runtime.launch({rank, 0}, {"busy", {}, [opened] { opened.wait(); }});
    world->all_reduce(at::from_blob(
        memory.mutable_data_ptr(), {64}, [&](void*) { ++freed; }, memory.options(), memory.device()));
    EXPECT_EQ(freed, 0);
    if (++queued == 2) open.set_value();
    sim.runtime.synchronize_device(rank, "the end of a test");
    while (!world->is_idle()) std::this_thread::yield();
  });
  EXPECT_EQ(freed, 2);
}

}  // namespace
}  // namespace phalanx
