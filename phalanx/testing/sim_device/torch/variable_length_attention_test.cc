// Attention within documents on a simulated device, by the operators that CUDA has for it, against ATen's with a mask.
#include <ATen/ops/arange.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "phalanx/kernels/causal_attention.h"
#include "phalanx/kernels/variable_length_attention.h"
#include "phalanx/testing/sim_device/torch/sim_backend.h"

namespace phalanx::variable_length_attention_test {
namespace {

using Tensors = std::vector<at::Tensor>;

// Lengths below, at and above 64, and documents of one token.
const std::vector<std::int32_t> kEnds = {0, 1, 65, 150, 214, 215, 300};

/// The output and the gradients of queries, keys and values [batch, seq, heads, head_dim], as projections return them.
Tensors attend(at::Device device, at::ScalarType type, std::int64_t window, bool by_mask) {
  at::manual_seed(3);
  Tensors leaves;
  for (const std::int64_t heads : {4, 2, 2}) {
    leaves.push_back(at::randn({2, 150, heads, 8}).to(type).to(device).requires_grad_());
  }
  const auto documents = std::make_shared<const DocumentBoundaries>(150, kEnds, device);
  const at::Tensor q = leaves[0].transpose(1, 2), k = leaves[1].transpose(1, 2), v = leaves[2].transpose(1, 2);
  const at::Tensor y = by_mask ? kernels::causal_attention_reference(q, k, v, window, documents.get())
                               : kernels::causal_attention(q, k, v, window, documents);
  y.backward(at::arange(y.numel(), at::kDouble).mul(0.7).sin().view(y.sizes()).to(type).to(device));
  Tensors results = {y.detach().cpu().to(at::kDouble)};
  for (const at::Tensor& leaf : leaves) results.push_back(leaf.grad().cpu().to(at::kDouble));
  return results;
}

TEST(VariableLengthAttention, EqualsAttentionWithAMask) {
  sim_device::SimBackend& sim = sim_device::sim_backend();
  const at::Device device = sim_device::SimBackend::device(0);
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const std::int64_t window : {0, 3, 70}) {
      SCOPED_TRACE(::testing::Message() << c10::toString(type) << ", window " << window);
      const at::Tensor probe = at::randn({2, 4, 150, 8}).to(type).to(device);
      // Memory-efficient attention is not used with windows.
      EXPECT_EQ(kernels::can_use_variable_lengths(probe, window > 0), type != at::kFloat || window == 0);
      const Tensors found = attend(device, type, window, false), expected = attend(at::kCPU, at::kDouble, window, true);
      // 16 bits: inputs and results are rounded to 2^-8 or 2^-11, which a softmax and sums carry on.
      const double tolerance = type == at::kFloat ? 2e-6 : type == at::kHalf ? 4e-3 : 3e-2;
      for (std::size_t i = 0; i < expected.size(); ++i) {
        EXPECT_LE((found[i] - expected[i]).norm().item<double>(), tolerance * expected[i].norm().item<double>()) << i;
      }
      EXPECT_THAT(sim.runtime.races(), ::testing::IsEmpty());
    }
  }
}

}  // namespace
}  // namespace phalanx::variable_length_attention_test
