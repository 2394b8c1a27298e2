// NF4 on a device: the values of the host, and no wait for them.
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>

#include "phalanx/kernels/nf4.h"
#include "phalanx/testing/sim_device/torch/testing/sim_test.h"

namespace phalanx::kernels {
namespace nf4_on_device_test {

class Nf4OnDevice : public SimTest {};

TEST_F(Nf4OnDevice, HasTheValuesOfTheHostAndWaitsForNothing) {
  const at::Tensor weight = at::randn({96, 384});
  const Nf4Weight there = quantise_nf4(weight, Nf4Tables::make(device));
  const Nf4Weight here = quantise_nf4(weight, Nf4Tables::make(at::kCPU));
  const Nf4Weight some{there.codes.narrow(0, 40, 20), there.absmax.narrow(0, 40, 20), there.nested, there.tables};
  const std::uint64_t before = waits();
  const at::Tensor all = dequantise_nf4(there, {.columns = 384}, at::kFloat);
  const at::Tensor rows = dequantise_nf4(some, {.first_row = 40, .columns = 384}, at::kBFloat16);
  EXPECT_EQ(waits(), before);
  const at::Tensor expected = dequantise_nf4(here, {.columns = 384}, at::kFloat);
  EXPECT_TRUE(at::equal(all.cpu(), expected));
  EXPECT_TRUE(at::equal(rows.cpu(), expected.narrow(0, 40, 20).to(at::kBFloat16)));
}

}  // namespace nf4_on_device_test
}  // namespace phalanx::kernels
