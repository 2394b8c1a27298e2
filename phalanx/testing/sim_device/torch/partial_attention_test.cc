// Attention of some positions on a simulated device, by the fused operators that CUDA has for it, against ATen's of all
// positions with a mask.
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "phalanx/kernels/causal_attention.h"
#include "phalanx/kernels/partial_attention.h"
#include "phalanx/testing/sim_device/torch/sim_backend.h"

namespace phalanx::partial_attention_test {
namespace {

using Tensors = std::vector<at::Tensor>;
using kernels::AttentionKernel;

constexpr std::int64_t kSeq = 150;
// Ranges that begin in the middle of documents.
const std::vector<PositionRange> kPositions = {{20, 30}, {90, 45}};

at::Tensor at_positions(const at::Tensor& x) {
  Tensors parts;
  for (const auto& [first, count] : kPositions) parts.push_back(x.narrow(2, first, count));
  return at::cat(parts, 2);
}

/// The output and the gradients of queries, keys and values [batch, seq, heads, head_dim].
Tensors attend(at::Device device, at::ScalarType type, std::int64_t window, bool has_documents, bool by_mask) {
  at::manual_seed(3);
  Tensors leaves;
  for (const std::int64_t heads : {4, 2, 2}) {
    leaves.push_back(at::randn({2, kSeq, heads, 8}).to(type).to(device).requires_grad_());
  }
  const auto documents = has_documents ? std::make_shared<const DocumentBoundaries>(
                                             kSeq, std::vector<std::int32_t>{0, 1, 65, 150, 214, 215, 300}, device)
                                       : nullptr;
  const at::Tensor q = leaves[0].transpose(1, 2), k = leaves[1].transpose(1, 2), v = leaves[2].transpose(1, 2);
  const at::Tensor y =
      by_mask ? at_positions(kernels::causal_attention_reference(q, k, v, window, documents.get()))
              : kernels::causal_attention_of_positions(at_positions(q), k, v, kPositions, window, documents);
  y.backward(at::arange(y.numel(), at::kDouble).mul(0.7).sin().view(y.sizes()).to(type).to(device));
  Tensors results = {y.detach().cpu().to(at::kDouble)};
  for (const at::Tensor& leaf : leaves) results.push_back(leaf.grad().cpu().to(at::kDouble));
  return results;
}

TEST(PartialAttention, OnADeviceEqualsAttentionWithAMask) {
  sim_device::SimBackend& sim = sim_device::sim_backend();
  const at::Device device = sim_device::SimBackend::device(0);
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const std::int64_t window : {0, 3, 70}) {
      for (const bool has_documents : {false, true}) {
        SCOPED_TRACE(::testing::Message()
                     << c10::toString(type) << ", window " << window << (has_documents ? ", documents" : ""));
        const at::Tensor probe = at::randn({2, 4, kSeq, 8}).to(type).to(device);
        EXPECT_EQ(kernels::attention_kernel_for(probe, probe, probe),
                  type == at::kFloat ? AttentionKernel::efficient : AttentionKernel::flash);
        const Tensors found = attend(device, type, window, has_documents, false),
                      expected = attend(at::kCPU, at::kDouble, window, has_documents, true);
        // 16 bits: inputs and results are rounded to 2^-8 or 2^-11, which a softmax and sums carry on.
        const double tolerance = type == at::kFloat ? 2e-6 : type == at::kHalf ? 4e-3 : 3e-2;
        for (std::size_t i = 0; i < expected.size(); ++i) {
          EXPECT_LE((found[i] - expected[i]).norm().item<double>(), tolerance * expected[i].norm().item<double>()) << i;
        }
        EXPECT_THAT(sim.runtime.races(), ::testing::IsEmpty());
      }
    }
  }
}

}  // namespace
}  // namespace phalanx::partial_attention_test
