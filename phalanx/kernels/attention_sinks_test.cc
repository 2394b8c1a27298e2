// Attention with sinks against the softmax written out, and along every path that has them.
#include "phalanx/kernels/attention_sinks.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/softmax.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/kernels/causal_attention.h"
#include "phalanx/kernels/clamped_swiglu.h"
#include "phalanx/kernels/saved_activations.h"
#include "phalanx/kernels/skinny_gemm.h"
#include "phalanx/kernels/testing/gradients.h"
#include "phalanx/tensor/document_boundaries.h"

namespace phalanx::attention_sinks_test {
namespace {

using Documents = std::shared_ptr<const DocumentBoundaries>;
using kernels_testing::expect_close;
using kernels_testing::Tensors;
using kernels_testing::value_and_gradients;

constexpr std::int64_t kSeq = 150;

/// Queries, keys, values and sinks.
Tensors inputs() {
  at::manual_seed(1);
  return {at::randn({2, 4, kSeq, 8}) * 2.0, at::randn({2, 2, kSeq, 8}), at::randn({2, 2, kSeq, 8}),
          at::randn({4}) * 2.0};
}

/// With a matrix of all scores, and the sinks as its last column.
at::Tensor written_out(const Tensors& in, std::int64_t window, const DocumentBoundaries* documents) {
  const std::int64_t seq = in[0].size(2), group = in[0].size(1) / in[1].size(1);
  const at::Tensor place = at::arange(seq), distance = place.unsqueeze(1) - place;
  at::Tensor seen = (distance >= 0).view({1, 1, seq, seq});
  if (window > 0) seen = seen & (distance < window);
  if (documents != nullptr) {
    const at::Tensor start = (place - documents->positions()).unsqueeze(1);
    seen = seen & (start.unsqueeze(2) == start.unsqueeze(3));
  }
  const at::Tensor k = in[1].repeat_interleave(group, 1), v = in[2].repeat_interleave(group, 1);
  const at::Tensor scores = (at::matmul(in[0], k.transpose(2, 3)) / std::sqrt(static_cast<double>(in[0].size(3))))
                                .masked_fill(seen.logical_not(), -std::numeric_limits<double>::infinity());
  const at::Tensor sinks = in[3].view({1, -1, 1, 1}).expand({scores.size(0), -1, seq, 1});
  return at::matmul(at::softmax(at::cat({scores, sinks}, -1), -1).narrow(-1, 0, seq), v);
}

TEST(AttentionSinks, TakeTheirShareOfTheSoftmax) {
  const Documents some =
      std::make_shared<const DocumentBoundaries>(kSeq, std::vector<std::int32_t>{0, 1, 65, 150, 214, 300});
  for (const Documents& documents : {Documents(), some}) {
    for (const std::int64_t window : {0, 3, 70}) {
      const auto expected = value_and_gradients(
          [&](const Tensors& in) { return written_out(in, window, documents.get()); }, inputs(), at::kDouble);
      const auto found = [&](const Tensors& in) {
        return kernels::causal_attention(in[0], in[1], in[2], window, documents, in[3]);
      };
      const auto by_mask = [&](const Tensors& in) {
        return kernels::causal_attention_reference(in[0], in[1], in[2], window, documents.get(), in[3]);
      };
      const auto by_positions = [&](const Tensors& in) {
        return kernels::causal_attention_of_positions(in[0], in[1], in[2], {{0, kSeq}}, window, documents, in[3]);
      };
      expect_close(value_and_gradients(by_mask, inputs(), at::kDouble), expected, 1e-12);
      expect_close(value_and_gradients(found, inputs(), at::kDouble), expected, 1e-12);
      expect_close(value_and_gradients(found, inputs(), at::kFloat), expected, 3e-6);
      expect_close(value_and_gradients(by_positions, inputs(), at::kFloat), expected, 3e-6);
      // 16 bits: rounded to 2^-8 at a few places, which add up.
      expect_close(value_and_gradients(found, inputs(), at::kBFloat16), expected, 3e-2);
    }
  }
}

TEST(AttentionSinks, OfOneTokenARowAreThoseOfTheWholeSequence) {
  const c10::InferenceMode inference;
  const Tensors in = inputs();
  const at::Tensor last = in[0].narrow(2, kSeq - 1, 1);
  for (const std::int64_t window : {0, 9}) {
    const at::Tensor expected = written_out(in, window, nullptr).narrow(2, kSeq - 1, 1);
    ASSERT_TRUE(kernels::can_use_decode_attention(last, in[1], in[2]));
    const std::vector<std::int64_t> seen = {kSeq, kSeq};
    expect_close({kernels::decode_attention(last, in[1], in[2], seen, window, in[3])}, {expected}, 1e-6);
    const at::Tensor mask = at::arange(kSeq).view({1, kSeq}) >= (window > 0 ? kSeq - window : 0);
    expect_close({kernels::masked_attention_with_sinks(last, in[1], in[2], mask, in[3])}, {expected}, 1e-6);
  }
}

TEST(AttentionSinks, AreSavedForRecomputation) {
  kernels::SavedActivations saved([](kernels::SavedOp, int) { return true; });
  const auto run = [&](kernels::SavedActivations::Run how) {
    Tensors leaves;
    for (const auto& input : inputs()) leaves.push_back(input.clone().requires_grad_());
    at::Tensor y;
    {
      const kernels::SavedActivations::Scope scope(&saved, how);
      y = kernels::causal_attention(leaves[0], leaves[1], leaves[2], 0, nullptr, leaves[3]);
    }
    y.sum().backward();
    return leaves[3].grad();
  };
  const at::Tensor first = run(kernels::SavedActivations::Run::forward);
  EXPECT_TRUE(at::equal(first, run(kernels::SavedActivations::Run::recompute)));
}

TEST(AttentionSinks, OfOtherHeadsAreRefused) {
  const Tensors in = inputs();
  EXPECT_THAT(
      error_text<Error>([&] { kernels::causal_attention(in[0], in[1], in[2], 0, nullptr, in[3].narrow(0, 0, 2)); }),
      HasSubstr("causal_attention: 2 sinks for 4 query heads; expected one for each"));
}

TEST(ClampedSwiglu, IsTheFormulaWithLimits) {
  at::manual_seed(2);
  const Tensors in = {at::randn({40, 6}) * 2.0, at::randn({40, 6}) * 2.0};
  const auto written = [](const Tensors& x) {
    const at::Tensor g = x[0].clamp_max(1.5), u = x[1].clamp(-1.5, 1.5);
    return (u + 1.0) * g * at::sigmoid(g * 1.702);
  };
  const auto found = [](const Tensors& x) { return kernels::clamped_swiglu(x[0], x[1], 1.5); };
  const Tensors expected = value_and_gradients(written, in, at::kDouble);
  expect_close(value_and_gradients(found, in, at::kDouble), expected, 1e-12);
  expect_close(value_and_gradients(found, in, at::kFloat), expected, 1e-6);
}

}  // namespace
}  // namespace phalanx::attention_sinks_test
