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
Tensors attend(at::Device device, at::ScalarType type, std::int64_t window, bool has_documents, bool by_mask,
               bool has_sinks = false) {
  at::manual_seed(3);
  Tensors leaves;
  for (const std::int64_t heads : {4, 2, 2}) {
    leaves.push_back(at::randn({2, kSeq, heads, 8}).to(type).to(device).requires_grad_());
  }
  const auto documents = has_documents ? std::make_shared<const DocumentBoundaries>(
                                             kSeq, std::vector<std::int32_t>{0, 1, 65, 150, 214, 215, 300}, device)
                                       : nullptr;
  const at::Tensor q = leaves[0].transpose(1, 2), k = leaves[1].transpose(1, 2), v = leaves[2].transpose(1, 2);
  at::Tensor sinks;
  if (has_sinks) leaves.push_back(sinks = at::randn({4}).to(type).to(device).requires_grad_());
  const at::Tensor y =
      by_mask     ? at_positions(kernels::causal_attention_reference(q, k, v, window, documents.get(), sinks))
      : has_sinks ? at_positions(kernels::causal_attention(q, k, v, window, documents, sinks))
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

TEST(PartialAttention, WithSinksOnADeviceEqualsAttentionWithAMask) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const std::int64_t window : {0, 70}) {
      for (const bool has_documents : {false, true}) {
        SCOPED_TRACE(::testing::Message()
                     << c10::toString(type) << ", window " << window << (has_documents ? ", documents" : ""));
        const Tensors found = attend(sim_device::SimBackend::device(0), type, window, has_documents, false, true),
                      expected = attend(at::kCPU, at::kDouble, window, has_documents, true, true);
        const double tolerance = type == at::kFloat ? 3e-6 : type == at::kHalf ? 4e-3 : 3e-2;
        for (std::size_t i = 0; i < expected.size(); ++i) {
          EXPECT_LE((found[i] - expected[i]).norm().item<double>(), tolerance * expected[i].norm().item<double>()) << i;
        }
        EXPECT_THAT(sim_device::sim_backend().runtime.races(), ::testing::IsEmpty());
      }
    }
  }
}

// As at a hop of a ring: queries behind all keys, of which a document begins late, and a window that ends among them.
TEST(PartialAttention, QueriesBehindAllKeysSeeThoseOfTheirWindow) {
  const at::Device device = sim_device::SimBackend::device(0);
  constexpr std::int64_t kKeys = 64, kFirst = 44, kWindow = 40;
  const auto boundaries = [&](at::Device where) {
    return std::make_shared<const DocumentBoundaries>(2 * kKeys, std::vector<std::int32_t>{0, kFirst, 2 * kKeys},
                                                      where);
  };
  for (const bool has_documents : {false, true}) {
    at::manual_seed(4);
    // The last query that sees a key is window - 1 behind the last one.
    const std::int64_t count = kWindow - 1;
    const at::Tensor q = at::randn({1, count, 4, 8}).to(at::kHalf), k = at::randn({1, kKeys, 2, 8}).to(at::kHalf),
                     v = at::randn({1, kKeys, 2, 8}).to(at::kHalf), dy = at::randn({1, count, 4, 8}).to(at::kHalf);
    const auto of = [&](AttentionKernel kernel, at::Device where, at::ScalarType type) -> Tensors {
      const auto there = [&](const at::Tensor& t) { return t.to(type).to(where).transpose(1, 2); };
      const kernels::AttentionQueries queries{.ranges = {{kKeys, count}},
                                              .seq = 2 * kKeys,
                                              .documents = has_documents ? boundaries(where) : nullptr,
                                              .window = kWindow,
                                              .keys = PositionRange{0, kKeys}};
      const kernels::AttentionPart part = kernels::attend(kernel, there(q), there(k), there(v), queries);
      const kernels::AttentionGradients grads = kernels::attention_gradients(
          kernel, there(dy), there(q), there(k), there(v), {part.y.to(type), part.log_sums}, queries);
      Tensors results;
      for (const at::Tensor& t : {part.y, part.log_sums, grads.dq, grads.dk, grads.dv}) {
        results.push_back(t.cpu().to(at::kDouble));
      }
      return results;
    };
    const Tensors found = of(AttentionKernel::flash, device, at::kHalf),
                  expected = of(AttentionKernel::operators, at::kCPU, at::kDouble);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_LE((found[i] - expected[i]).norm().item<double>(), 4e-3 * expected[i].norm().item<double>())
          << i << (has_documents ? ", documents" : "");
    }
  }
}

}  // namespace
}  // namespace phalanx::partial_attention_test
