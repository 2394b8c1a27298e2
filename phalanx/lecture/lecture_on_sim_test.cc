// The lecture on simulated devices, which are asynchronous as GPUs are: every check holds there, too, and no stream
// uses memory that another one still needs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "phalanx/comm/device/staged_backend.h"
#include "phalanx/lecture/lecture.h"
#include "phalanx/testing/sim_device/torch/sim_streams.h"
#include "phalanx/testing/sim_device/torch/testing/sim_test.h"

namespace phalanx::lecture {
namespace {

std::shared_ptr<Communicator> world_on_sim(const std::shared_ptr<Communicator>& host, at::Device device) {
  sim_device::current_device() = device.index();
  return std::make_shared<Communicator>(
      make_staged_backend(host->backend(), device.index(), sim_device::make_sim_streams(device.index())),
      CommunicatorOptions{});
}

/// Autograd counts the devices in a program's first backward pass, which may be that of a test on the CPU.
class RegistersDevice : public ::testing::Environment {
  void SetUp() override { sim_device::sim_backend(); }
};
const auto* const kRegistersDevice = ::testing::AddGlobalTestEnvironment(new RegistersDevice);

class LectureOnSimTest : public SimTest, public ::testing::WithParamInterface<std::string_view> {};

TEST_P(LectureOnSimTest, EveryCheckHolds) {
  const Section& section = *chosen_sections({std::string(GetParam())}).front();
  const WrittenSection written =
      write_section(section, {.ranks = 4, .device = device.type(), .make_world = world_on_sim});
  EXPECT_TRUE(written.all_hold) << written.markdown;
  if (GetParam() == "why") {
    EXPECT_THAT(written.markdown, ::testing::HasSubstr("device " + sim_device::SimBackend::device(3).str()));
  }
}

std::vector<std::string_view> all_sections() {
  std::vector<std::string_view> ids;
  for (const Section& section : sections()) ids.push_back(section.id);
  return ids;
}

INSTANTIATE_TEST_SUITE_P(Sections, LectureOnSimTest, ::testing::ValuesIn(all_sections()), [](const auto& info) {
  std::string name;
  for (const char c : info.param) name += c == '-' ? '_' : c;
  return name;
});

}  // namespace
}  // namespace phalanx::lecture
