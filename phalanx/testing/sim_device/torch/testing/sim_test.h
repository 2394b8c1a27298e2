// For tests on simulated devices: counters and reports start at nothing, and in the end no race may be left.
//
//   class MyTest : public SimTest {};
//   TEST_F(MyTest, Adds) { at::ones({4}, on_sim()).add_(1); EXPECT_EQ(waits(), 0); }
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/testing/sim_device/torch/sim_backend.h"

namespace phalanx {

class SimTest : public ::testing::Test {
 protected:
  SimTest() {
    at::set_num_threads(1);  // as the devices' kernels
    reset();
  }
  ~SimTest() override {
    EXPECT_THAT(take_races(), ::testing::IsEmpty());
    reset();
  }

  static at::TensorOptions on_sim(int index = 0) {
    return at::TensorOptions(at::kFloat).device(sim_device::SimBackend::device(index));
  }
  std::uint64_t waits() const { return sim.runtime.host_waits().total(); }
  std::vector<std::string> take_races() {
    std::vector<std::string> races = sim.runtime.races();
    sim.runtime.clear_races();
    return races;
  }

  sim_device::SimBackend& sim = sim_device::sim_backend();
  const c10::Device device = sim_device::SimBackend::device(0);

 private:
  void reset() {
    sim.runtime.set_delays({});
    for (int i = 0; i < sim_device::kDevices; ++i) {
      try {
        sim.runtime.synchronize_device(i, "a test begins or ends");
      } catch (const Error& error) {
        ADD_FAILURE() << error.what();
        sim.runtime.clear_failure(i);
      }
    }
    sim.runtime.clear_races();
    sim.runtime.clear_launches();
    sim.runtime.host_waits().clear();
  }
};

}  // namespace phalanx
