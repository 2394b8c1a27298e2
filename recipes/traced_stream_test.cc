// Tests TracedStream with a simulated GPU, whose clock the test sets.
#include "recipes/traced_stream.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <optional>

namespace {

struct SimulatedGpu {
  double clock_ms = 0;   // at which the next event is reached
  double waited_ms = 0;  // the event last waited for: later events count as not complete
  c10::StreamId streams = 0, current = 0;
  bool idle = false;                    // the device was waited for
  std::optional<bool> idle_at_origin;   // when the first event was recorded
  std::vector<c10::StreamId> recorded;  // on which streams
};
SimulatedGpu gpu;

struct SimulatedEvent {
  double ms = 0;
};

constexpr auto kType = c10::DeviceType::PrivateUse1;

struct SimulatedGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override { return device; }
  c10::Device getDevice() const override { return {kType, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, gpu.current);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, ++gpu.streams);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return c10::Stream(c10::Stream::UNSAFE, stream.device(), std::exchange(gpu.current, stream.id()));
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag flag) const override {
    EXPECT_EQ(flag, c10::EventFlag::BACKEND_DEFAULT);  // events with other flags have no time
    if (!gpu.idle_at_origin) gpu.idle_at_origin = gpu.idle;
    if (*event == nullptr) *event = new SimulatedEvent;
    static_cast<SimulatedEvent*>(*event)->ms = gpu.clock_ms;
    gpu.recorded.push_back(stream.id());
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<SimulatedEvent*>(event);
  }
  void synchronizeEvent(void* event) const override { gpu.waited_ms = static_cast<SimulatedEvent*>(event)->ms; }
  bool queryEvent(void* event) const override { return static_cast<SimulatedEvent*>(event)->ms <= gpu.waited_ms; }
  void synchronizeDevice(c10::DeviceIndex) const override { gpu.idle = true; }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    return static_cast<SimulatedEvent*>(to)->ms - static_cast<SimulatedEvent*>(from)->ms;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, SimulatedGuard);

double end_of(const nlohmann::json& span) { return span["ts"].get<double>() + span["dur"].get<double>(); }

TEST(TracedStream, SpansHaveTheTimesOfTheGpuOnARowForEachStream) {
  gpu = {};
  gpu.clock_ms = 5000;  // its clock and the host's have nothing in common
  phalanx::observe::TraceRecorder trace;
  TracedStream compute({kType, 0}, "compute", trace), copies({kType, 0}, "copies", trace);
  EXPECT_EQ(gpu.idle_at_origin, true) << "what other streams have begun may not be done";

  c10::StreamId ran_on = 0;
  gpu.clock_ms = 5400;
  compute.run("matmul", "compute", [&] { ran_on = gpu.current, gpu.clock_ms += 30; });
  EXPECT_EQ(ran_on, 1);
  EXPECT_EQ(gpu.current, 0) << "the stream of before is current again";
  gpu.clock_ms = 5410;
  copies.run("copy", "comm", [&] { ran_on = gpu.current, gpu.clock_ms += 12.5; });
  EXPECT_EQ(ran_on, 2);
  EXPECT_EQ(gpu.recorded, (std::vector<c10::StreamId>{1, 2, 1, 1, 2, 2}));
  EXPECT_EQ(trace.size(), 0U) << "before they are done";
  compute.finish();
  copies.finish();
  copies.finish();  // nothing is reported twice

  std::map<std::string, std::vector<nlohmann::json>> spans;
  const auto json = nlohmann::json::parse(trace.to_json());
  for (const auto& event : json["traceEvents"]) {
    if (event["ph"] == "X") spans[event["name"]].push_back(event);
  }
  ASSERT_EQ(spans["matmul"].size(), 1U);
  ASSERT_EQ(spans["copy"].size(), 1U);
  ASSERT_EQ(spans["queued"].size(), 2U);  // the host was 400 ms ahead
  EXPECT_NEAR(end_of(spans["matmul"][0]) - end_of(spans["queued"][0]), 30'000, 2);
  EXPECT_NEAR(end_of(spans["copy"][0]) - end_of(spans["queued"][1]), 12'500, 2);
  EXPECT_NE(spans["matmul"][0]["tid"], spans["copy"][0]["tid"]);
  EXPECT_EQ(spans["matmul"][0]["cat"], "compute");
}

}  // namespace
