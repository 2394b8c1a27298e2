// Linked into every test binary that links torch: each test begins with torch's CPU generator at the same place, alone
// or behind others. Without it that generator begins anywhere, and a test that draws from it is another one each time.
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

namespace phalanx {
namespace {

class SameRandomNumbers final : public ::testing::EmptyTestEventListener {
  void OnTestStart(const ::testing::TestInfo&) override {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    generator.set_current_seed(1);
  }
};

// GoogleTest owns it.
const bool is_listening = [] {
  ::testing::UnitTest::GetInstance()->listeners().Append(new SameRandomNumbers);
  return true;
}();

}  // namespace
}  // namespace phalanx
