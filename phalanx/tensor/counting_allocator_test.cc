#include "phalanx/tensor/counting_allocator.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

#include "phalanx/comm/backends/local_shm/shared_tensors.h"
#include "phalanx/comm/testing/forked_ranks.h"

namespace phalanx {
namespace {

using observe::MemoryCategory;
using observe::MemoryScope;

class CountingAllocatorTest : public ::testing::Test {
 protected:
  CountingAllocatorTest() {
    install_counting_allocator();
    install_counting_allocator();
    before_ = observe::memory_allocated();
  }
  std::int64_t taken(MemoryCategory category) const {
    return observe::memory_allocated()[category] - before_[category];
  }
  observe::MemoryCounts before_;
};

// The heap rounds sizes up, by less than this.
constexpr std::int64_t kSlack = 4096;

TEST_F(CountingAllocatorTest, TensorsCountWhileTheyLive) {
  constexpr std::int64_t kBytes = 1'000'000 * 4;
  {
    const at::Tensor x = at::empty({1'000'000}, at::kFloat);
    const at::Tensor view = x.narrow(0, 10, 10);
    EXPECT_GE(taken(MemoryCategory::activations), kBytes);
    EXPECT_LE(taken(MemoryCategory::activations), kBytes + kSlack);
    const MemoryScope scope(MemoryCategory::optimizer);
    const at::Tensor y = at::ones({10}, at::kFloat);
    EXPECT_GE(taken(MemoryCategory::optimizer), 40);
    EXPECT_LE(taken(MemoryCategory::optimizer), 40 + 64);
  }
  EXPECT_EQ(taken(MemoryCategory::activations), 0);
  EXPECT_EQ(taken(MemoryCategory::optimizer), 0);
}

TEST_F(CountingAllocatorTest, ABlockIsFreedWhereItWasCounted) {
  at::Tensor x;
  {
    const MemoryScope scope(MemoryCategory::parameters);
    x = at::empty({5000}, at::kFloat);
  }
  const std::int64_t bytes = taken(MemoryCategory::parameters);
  EXPECT_GE(bytes, 20000);
  std::thread([&x] {
    const MemoryScope scope(MemoryCategory::buffers);
    x.reset();
  }).join();
  EXPECT_EQ(taken(MemoryCategory::parameters), 0);
  EXPECT_EQ(taken(MemoryCategory::buffers), 0);
}

TEST_F(CountingAllocatorTest, WhatItIsForCanBeFoundOutLater) {
  at::Tensor x = at::empty({5000}, at::kFloat);
  const std::int64_t bytes = taken(MemoryCategory::activations);
  count_as(x.narrow(0, 5, 5), MemoryCategory::gradients);
  count_as(x, MemoryCategory::gradients);
  EXPECT_EQ(taken(MemoryCategory::gradients), bytes);
  EXPECT_EQ(taken(MemoryCategory::activations), 0);
  x.reset();
  EXPECT_EQ(taken(MemoryCategory::gradients), 0);
  count_as(at::Tensor(), MemoryCategory::gradients);
  count_as(at::empty({0}, at::kFloat), MemoryCategory::gradients);
  EXPECT_EQ(taken(MemoryCategory::gradients), 0);
}

// The caller may use all the requested bytes, at libtorch's alignment, even if only an address is known.
TEST_F(CountingAllocatorTest, BlocksAreAsLibtorchExpectsThem) {
  for (std::size_t bytes = 1; bytes < 5000; bytes += bytes < 200 ? 1 : 61) {
    c10::DataPtr block = c10::GetCPUAllocator()->allocate(bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block.get()) % 64, 0U);
    std::memset(block.get(), 0xff, bytes);
  }
  void* const raw = c10::GetCPUAllocator()->raw_allocate(1000);
  std::memset(raw, 0xff, 1000);
  c10::GetCPUAllocator()->raw_deallocate(raw);
  EXPECT_EQ(observe::memory_allocated().bytes, before_.bytes);
  EXPECT_EQ(c10::GetCPUAllocator()->allocate(0).get(), nullptr);

  at::Tensor grown = at::ones({100}, at::kFloat);
  grown.resize_({100'000});
  EXPECT_EQ(grown[99].item<float>(), 1.0f);
  EXPECT_EQ(at::mm(at::ones({64, 64}, at::kFloat), at::ones({64, 64}, at::kFloat))[3][3].item<float>(), 64.0f);
}

TEST_F(CountingAllocatorTest, MemoryThatIsNotThereIsLibtorchsError) {
  EXPECT_THROW(at::empty({std::int64_t{1} << 50}, at::kByte), c10::Error);
  EXPECT_EQ(observe::memory_allocated().bytes, before_.bytes);
}

// The shared heap is permanent, and so is its place below this allocator: hence a separate process.
TEST_F(CountingAllocatorTest, TensorsInTheSharedHeapCountAsShared) {
  const std::string error = run_forked_ranks(1, [](int) {
    const auto require = [](bool holds, const char* what) {
      if (!holds) throw std::runtime_error(what);
    };
    share_large_tensors();
    const observe::MemoryCounts before = observe::memory_allocated();
    const auto taken = [&](MemoryCategory category) {
      return observe::memory_allocated()[category] - before[category];
    };
    at::Tensor large, small;
    {
      const MemoryScope scope(MemoryCategory::parameters);
      large = at::empty({5000}, at::kFloat);
      small = at::empty({10}, at::kFloat);
    }
    require(SharedHeap::owner_of(large.const_data_ptr()) == SharedHeap::current(), "the large one is in the heap");
    require(SharedHeap::owner_of(small.const_data_ptr()) == nullptr, "the small one is not");
    const std::int64_t pages = static_cast<std::int64_t>(SharedHeap::current()->use().in_use);
    require(pages >= 20'000 && observe::memory_allocated().shared - before.shared == pages, "pages count as shared");
    require(taken(MemoryCategory::parameters) >= pages + 40, "as parameters");
    count_as(large, MemoryCategory::gradients);
    require(taken(MemoryCategory::gradients) == pages && taken(MemoryCategory::parameters) < pages, "as gradients");
    require(observe::memory_allocated().shared - before.shared == pages, "still shared");
    std::thread([&] { large.reset(); }).join();
    small.reset();
    require(taken(MemoryCategory::gradients) == 0 && taken(MemoryCategory::parameters) == 0, "freed");
    require(observe::memory_allocated().shared == before.shared && SharedHeap::current()->use().in_use == 0,
            "all of it");
  });
  EXPECT_EQ(error, "");
}

}  // namespace
}  // namespace phalanx
