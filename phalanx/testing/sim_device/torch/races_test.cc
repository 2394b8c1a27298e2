// Faults in the use of streams, planted in programs like those of the library. Each is reported by the names of both
// operators, with and without delays; without the fault nothing is.
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>

#include "phalanx/testing/sim_device/torch/testing/sim_test.h"

namespace phalanx {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class SimRaces : public SimTest, public ::testing::WithParamInterface<int> {
 protected:
  SimRaces() { sim.runtime.set_delays({.longest = std::chrono::microseconds(GetParam()), .seed = 3}); }

  void one_waits_for_other(const c10::Stream& one, const c10::Stream& other) {
    c10::Event event(at::kPrivateUse1);
    event.record(other);
    event.block(one);
  }
  // A report that names both.
  static auto race_between(const char* one, const char* other) {
    return Contains(AllOf(HasSubstr(one), HasSubstr(other)));
  }
  template <class Plant>
  void expect_found_only_if_planted(const char* one, const char* other, Plant&& program) {
    program(/*is_planted=*/false);
    EXPECT_THAT(take_races(), IsEmpty());
    sim.runtime.synchronize_device(0, "between two programs");
    program(/*is_planted=*/true);
    sim.runtime.synchronize_device(0, "between two programs");
    EXPECT_THAT(take_races(), race_between(one, other));
  }

  const c10::impl::VirtualGuardImpl guard{at::kPrivateUse1};
  const c10::Stream compute = guard.getDefaultStream(device);
  const c10::Stream side = guard.getStreamFromGlobalPool(device, false);
};

INSTANTIATE_TEST_SUITE_P(Delays, SimRaces, ::testing::Values(0, 400), [](const auto& info) {
  return info.param == 0 ? std::string("None") : std::to_string(info.param) + "us";
});

// The shape of an asynchronous collective: the side stream reads and writes what compute made, compute goes on with it.
TEST_P(SimRaces, ADroppedWaitBeforeACollective) {
  expect_found_only_if_planted("aten::mul.out", "aten::mm", [&](bool is_planted) {
    const at::Tensor grad = at::mm(at::ones({64, 64}, on_sim()), at::ones({64, 64}, on_sim()));
    if (!is_planted) one_waits_for_other(side, compute);
    {
      const c10::StreamGuard on_side(side);
      grad.mul_(0.5);
    }
    one_waits_for_other(compute, side);
  });
}

TEST_P(SimRaces, ADroppedWaitAfterACollective) {
  expect_found_only_if_planted("aten::add.Tensor", "aten::mul.out", [&](bool is_planted) {
    const at::Tensor grad = at::mm(at::ones({64, 64}, on_sim()), at::ones({64, 64}, on_sim()));
    one_waits_for_other(side, compute);
    {
      const c10::StreamGuard on_side(side);
      grad.mul_(0.5);
    }
    if (!is_planted) one_waits_for_other(compute, side);
    const at::Tensor used = at::add(grad, 1.0);
    one_waits_for_other(compute, side);
  });
}

TEST_P(SimRaces, AMissingRecordStream) {
  expect_found_only_if_planted("'free'", "aten::mul.Tensor", [&](bool is_planted) {
    at::Tensor kept;
    {
      const at::Tensor input = at::ones({256, 256}, on_sim());
      one_waits_for_other(side, compute);
      const c10::StreamGuard on_side(side);
      kept = at::mul(input, 2.0);
      if (!is_planted) input.record_stream(side);
    }
    const at::Tensor next = at::full({256, 256}, 5.0, on_sim());  // may get the input's memory
    one_waits_for_other(compute, side);
    kept.record_stream(compute);
    kept.add_(1);
    one_waits_for_other(side, compute);
  });
}

// A staging buffer that the next piece overwrites while the copy of the last one still reads it.
TEST_P(SimRaces, ABufferReusedEarly) {
  const at::Tensor buffer = at::empty({1024}, on_sim());
  const at::Tensor target = at::empty({2, 1024}, on_sim());
  one_waits_for_other(side, compute);
  expect_found_only_if_planted("aten::fill_.Scalar", "copy_ (device to device)", [&](bool is_planted) {
    for (int piece = 0; piece < 2; ++piece) {
      if (!is_planted) one_waits_for_other(compute, side);
      buffer.fill_(piece);
      one_waits_for_other(side, compute);
      const c10::StreamGuard on_side(side);
      target.select(0, piece).copy_(buffer);
    }
    one_waits_for_other(compute, side);
  });
}

TEST_P(SimRaces, AReadBeforeTheCopyIsDone) {
  const at::Tensor host = at::ones({1024}).pin_memory();
  const at::Tensor batch = at::empty({1024}, on_sim());
  expect_found_only_if_planted("aten::add.Tensor", "copy_ (host to device)", [&](bool is_planted) {
    one_waits_for_other(side, compute);
    {
      const c10::StreamGuard on_side(side);
      batch.copy_(host, /*non_blocking=*/true);
    }
    if (!is_planted) one_waits_for_other(compute, side);
    const at::Tensor used = at::add(batch, 1.0);
    one_waits_for_other(compute, side);
  });
}

TEST_P(SimRaces, TheHostReadsPinnedMemoryBeforeTheCopyIsDone) {
  const at::Tensor host = at::empty({1024}, at::TensorOptions(at::kFloat).pinned_memory(true));
  expect_found_only_if_planted("the host reads pinned memory", "copy_ (device to host)", [&](bool is_planted) {
    host.copy_(at::ones({1024}, on_sim()), /*non_blocking=*/true);
    c10::Event done(at::kPrivateUse1);
    done.record(compute);
    if (!is_planted) done.synchronize();
    (void)*static_cast<const volatile float*>(host.const_data_ptr());
  });
}

TEST_P(SimRaces, TheHostWritesPinnedMemoryBeforeTheCopyIsDone) {
  const at::Tensor host = at::ones({1024}).pin_memory();
  const at::Tensor batch = at::empty({1024}, on_sim());
  expect_found_only_if_planted("the host writes pinned memory", "copy_ (host to device)", [&](bool is_planted) {
    batch.copy_(host, /*non_blocking=*/true);
    if (!is_planted) compute.synchronize();
    *static_cast<volatile float*>(host.mutable_data_ptr()) = 2;
  });
}

// A write to what another stream still reads: weights that the optimizer updates while a gather copies them.
TEST_P(SimRaces, AWriteWhileAnotherStreamReads) {
  const at::Tensor weights = at::ones({1024}, on_sim());
  const at::Tensor gathered = at::empty({1024}, on_sim());
  expect_found_only_if_planted("aten::add_.Tensor", "copy_ (device to device)", [&](bool is_planted) {
    one_waits_for_other(side, compute);
    {
      const c10::StreamGuard on_side(side);
      gathered.copy_(weights);
    }
    if (!is_planted) one_waits_for_other(compute, side);
    weights.add_(1);
    one_waits_for_other(compute, side);
  });
}

TEST_P(SimRaces, AnEventRecordedTooEarly) {
  const at::Tensor x = at::ones({1024}, on_sim());
  expect_found_only_if_planted("aten::mul.Tensor", "aten::add_.Tensor", [&](bool is_planted) {
    c10::Event event(at::kPrivateUse1);
    if (is_planted) event.record(compute);
    x.add_(1);
    if (!is_planted) event.record(compute);
    event.block(side);
    {
      const c10::StreamGuard on_side(side);
      const at::Tensor used = at::mul(x, 2.0);
    }
    one_waits_for_other(compute, side);
  });
}

TEST_P(SimRaces, ColumnsAreApartToo) {
  const at::Tensor x = at::ones({8, 64}, on_sim());
  const auto add_on_two_streams = [&](std::int64_t first_of_side) {
    one_waits_for_other(side, compute);
    x.narrow(1, 0, 32).add_(1);
    {
      const c10::StreamGuard on_side(side);
      x.narrow(1, first_of_side, 32).mul_(x.narrow(1, 32, 1));
    }
    one_waits_for_other(compute, side);
  };
  add_on_two_streams(32);
  EXPECT_THAT(take_races(), IsEmpty());
  add_on_two_streams(31);
  EXPECT_THAT(take_races(), race_between("aten::mul_.Tensor", "aten::add_.Tensor"));
}

// Disjoint halves of one storage are no race.
TEST_P(SimRaces, HalvesOfATensorAreApart) {
  const at::Tensor x = at::ones({1024}, on_sim());
  one_waits_for_other(side, compute);
  x.narrow(0, 0, 512).add_(1);
  {
    const c10::StreamGuard on_side(side);
    x.narrow(0, 512, 512).add_(1);
  }
  EXPECT_THAT(take_races(), IsEmpty());
  one_waits_for_other(compute, side);
}

}  // namespace
}  // namespace phalanx
