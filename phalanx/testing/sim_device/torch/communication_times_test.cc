// How long operations take, and how long a stream stands still for them, by the events of simulated devices.
#include <ATen/ops/ones.h>

#include <future>
#include <thread>

#include "phalanx/observe/communication_time.h"
#include "phalanx/testing/sim_device/torch/testing/sim_ranks.h"
#include "phalanx/testing/sim_device/torch/testing/sim_test.h"

namespace phalanx {
namespace {

using namespace std::chrono_literals;

class CommunicationTimesOnSim : public SimTest {
 protected:
  struct Gate {
    void wait_on(int device, sim_device::Runtime& runtime) {
      runtime.launch({device, 0}, {"busy", {}, [opened = opened_] { opened.wait(); }});
    }
    void open() { open_.set_value(); }

   private:
    std::promise<void> open_;
    std::shared_future<void> opened_ = open_.get_future().share();
  };

  /// An all_reduce of two ranks, for which both streams wait. The entries of the ranks.
  std::vector<observe::FlightEntry> reduce(const std::function<void(int rank)>& before,
                                           const std::function<void(int rank)>& after) {
    std::vector<observe::FlightEntry> entries(2);
    run_sim_ranks(2, /*over_nccl=*/true, [&](const std::shared_ptr<Communicator>& world) {
      const int rank = world->rank();
      const at::Tensor x = at::ones({64}, on_sim(rank));
      before(rank);
      const Work work = world->all_reduce(x, {.async = true});
      work.wait();
      after(rank);
      sim.runtime.synchronize_device(rank, "the end of a test");
      while (world->recent_operations().back().ended_us == 0) std::this_thread::yield();
      entries[static_cast<std::size_t>(rank)] = world->recent_operations().back();
    });
    for (const observe::FlightEntry& entry : entries) {
      EXPECT_EQ(entry.verb, "all_reduce");
      EXPECT_GT(entry.started_us, 0);
      EXPECT_LE(entry.started_us, entry.ended_us);
    }
    return entries;
  }
  static void sleep_at_least(std::chrono::milliseconds time) {
    const auto begin = std::chrono::steady_clock::now();
    while (std::chrono::steady_clock::now() - begin < time) std::this_thread::yield();
  }
};

// Rank 1's device is busy first. Meanwhile rank 0's stream stands still, though its host goes on.
TEST_F(CommunicationTimesOnSim, AStreamStandsStillForALateRank) {
  Gate gate;
  const auto entries = reduce(
      [&](int rank) {
        if (rank == 1) gate.wait_on(1, sim.runtime);
      },
      [&](int rank) {
        if (rank == 1) return;
        sleep_at_least(200ms);
        gate.open();
      });
  const observe::FlightEntry &early = entries[0], &late = entries[1];
  EXPECT_GT(early.wait_from_us, 0);
  EXPECT_EQ(early.wait_until_us, early.ended_us);
  EXPECT_GE(early.ended_us - early.started_us, 100'000);
  EXPECT_LT(late.ended_us - late.started_us, early.ended_us - early.started_us);
}

// Rank 0's device computes for longer than the operation takes.
TEST_F(CommunicationTimesOnSim, WhatComputingHidesIsNotExposed) {
  Gate gate;
  int over = 0;
  std::mutex mutex;
  std::vector<observe::FlightEntry> entries(2);
  run_sim_ranks(2, /*over_nccl=*/true, [&](const std::shared_ptr<Communicator>& world) {
    const int rank = world->rank();
    const at::Tensor x = at::ones({64}, on_sim(rank));
    const Work work = world->all_reduce(x, {.async = true});
    gate.wait_on(rank, sim.runtime);
    work.wait();
    while (world->recent_operations().back().ended_us == 0) std::this_thread::yield();
    {
      const std::lock_guard lock(mutex);
      if (++over == 2) gate.open();
    }
    sim.runtime.synchronize_device(rank, "the end of a test");
    entries[static_cast<std::size_t>(rank)] = world->recent_operations().back();
  });
  for (const observe::FlightEntry& entry : entries) {
    EXPECT_EQ(entry.wait_until_us, 0);
    EXPECT_GT(entry.started_us, 0);
  }
}

// The wait begins where the stream has come to it, though the host waits before the copy back is in the stream.
TEST_F(CommunicationTimesOnSim, AStreamStandsStillForAStagedOperation) {
  std::promise<void> open;
  std::shared_future<void> opened = open.get_future().share();
  std::vector<observe::FlightEntry> entries(2);
  std::thread opener([&] {
    sleep_at_least(200ms);
    open.set_value();
  });
  run_sim_ranks(2, /*over_nccl=*/false, [&](const std::shared_ptr<Communicator>& world) {
    const int rank = world->rank();
    const at::Tensor x = at::ones({64}, on_sim(rank));
    if (rank == 1) sim.runtime.launch({1, 0}, {"busy", {}, [opened] { opened.wait(); }});
    world->all_reduce(x);
    while (world->recent_operations().back().ended_us == 0) std::this_thread::yield();
    entries[static_cast<std::size_t>(rank)] = world->recent_operations().back();
  });
  opener.join();
  EXPECT_GT(entries[0].wait_from_us, 0);
  EXPECT_GE(entries[0].wait_until_us - entries[0].wait_from_us, 50'000);
}

}  // namespace
}  // namespace phalanx
