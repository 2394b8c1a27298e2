// Attention within documents, and losses of some tokens only, against ATen references in fp64.
#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/ignored_label.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/kernels/causal_attention.h"
#include "phalanx/kernels/linear_cross_entropy.h"
#include "phalanx/kernels/saved_activations.h"
#include "phalanx/kernels/testing/gradients.h"
#include "phalanx/tensor/document_boundaries.h"

namespace phalanx::documents_test {
namespace {

using Documents = std::shared_ptr<const DocumentBoundaries>;
using kernels_testing::expect_close;
using kernels_testing::Function;
using kernels_testing::Tensors;
using kernels_testing::value_and_gradients;

Documents documents_of(std::int64_t seq, std::vector<std::int32_t> ends) {
  return std::make_shared<const DocumentBoundaries>(seq, std::move(ends));
}

Tensors queries_keys_values(std::int64_t rows, std::int64_t seq) {
  at::manual_seed(1);
  return {at::randn({rows, 4, seq, 8}) * 2.0, at::randn({rows, 2, seq, 8}), at::randn({rows, 2, seq, 8})};
}

// Lengths below, at and above the blocks of 64 queries, and documents of one token.
const std::vector<Documents>& divisions() {
  static const std::vector<Documents> all = {documents_of(150, {0, 1, 65, 150, 214, 300}),
                                             documents_of(150, {0, 150, 300}),
                                             documents_of(150, {0, 64, 128, 150, 151, 152, 300})};
  return all;
}

TEST(DocumentAttention, SeesItsOwnDocumentAlone) {
  for (const Documents& documents : divisions()) {
    for (const std::int64_t window : {0, 3, 70}) {
      const Tensors inputs = queries_keys_values(2, 150);
      const auto fused = [&](const Tensors& in) {
        return kernels::causal_attention(in[0], in[1], in[2], window, documents);
      };
      const auto reference = [&](const Tensors& in) {
        return kernels::causal_attention_reference(in[0], in[1], in[2], window, documents.get());
      };
      const Tensors expected = value_and_gradients(reference, inputs, at::kDouble);
      expect_close(value_and_gradients(fused, inputs, at::kFloat), expected, 2e-6);
      expect_close(value_and_gradients(fused, inputs, at::kDouble), expected, 1e-12);
      // 16 bits: rounded to 2^-8 at a few places, which add up.
      expect_close(value_and_gradients(fused, inputs, at::kBFloat16), expected, 3e-2);
    }
  }
}

TEST(DocumentAttention, GivesTheBitsOfEachDocumentAlone) {
  const Tensors inputs = queries_keys_values(2, 150);
  const Documents& documents = divisions().back();
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    const at::Tensor q = inputs[0].to(type), k = inputs[1].to(type), v = inputs[2].to(type);
    const at::Tensor packed = kernels::causal_attention(q, k, v, 0, documents);
    for (std::int64_t row = 0; row < 2; ++row) {
      const auto ends = documents->of_row(row);
      for (std::size_t i = 0; i + 1 < ends.size(); ++i) {
        const std::int64_t first = ends[i] - row * 150, count = ends[i + 1] - ends[i];
        const auto part = [&](const at::Tensor& t) { return t.narrow(0, row, 1).narrow(2, first, count); };
        EXPECT_TRUE(at::equal(part(packed), kernels::causal_attention(part(q), part(k), part(v))))
            << "document " << i << " of row " << row << " in " << c10::toString(type);
      }
    }
  }
}

// Recomputed layers take the outputs that the first run has saved.
TEST(DocumentAttention, IsSavedForRecomputation) {
  const Documents& documents = divisions().front();
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    kernels::SavedActivations saved([](kernels::SavedOp, int) { return true; });
    const auto run = [&](kernels::SavedActivations::Run how) {
      Tensors leaves;
      for (const auto& input : queries_keys_values(2, 150)) leaves.push_back(input.to(type).requires_grad_());
      at::Tensor y;
      {
        const kernels::SavedActivations::Scope scope(&saved, how);
        y = kernels::causal_attention(leaves[0], leaves[1], leaves[2], 0, documents);
      }
      y.sum().backward();
      return leaves[1].grad();
    };
    const at::Tensor first = run(kernels::SavedActivations::Run::forward);
    EXPECT_TRUE(at::equal(first, run(kernels::SavedActivations::Run::recompute)));
  }
}

TEST(DocumentAttention, RefusesBoundariesOfAnotherBatch) {
  const Tensors in = queries_keys_values(2, 150);
  const Documents other = documents_of(100, {0, 100, 200, 300});
  EXPECT_NE(error_text<Error>([&] {
              kernels::causal_attention(in[0], in[1], in[2], 0, other);
            }).find("3 rows of 100 tokens; expected those of queries and keys, 2 rows of 150"),
            std::string::npos);
}

struct Head {
  at::Tensor x, weight, labels;
};

Head head(std::int64_t rows, double ignored) {
  at::manual_seed(2);
  Head made{at::randn({rows, 12}), at::randn({30, 12}), at::randint(30, {rows}, at::kLong)};
  made.labels.masked_fill_(at::randn({rows}).abs() < ignored, kIgnoredLabel);
  return made;
}

TEST(IgnoredLabels, HaveNoLossAndNoGradient) {
  for (const std::int64_t rows : {5, 512, 1100}) {
    for (const std::optional<double> divisor : {std::optional<double>(), std::optional<double>(37.0)}) {
      const Head given = head(rows, 0.5);
      const auto count = static_cast<double>((given.labels != kIgnoredLabel).sum().item<std::int64_t>());
      ASSERT_GT(count, 0);
      ASSERT_LT(count, rows);
      const auto reference = [&](const Tensors& in) {
        return at::cross_entropy_loss(at::linear(in[0], in[1]), given.labels, {}, at::Reduction::Sum) /
               divisor.value_or(count);
      };
      const Tensors expected = value_and_gradients(reference, {given.x, given.weight}, at::kDouble);
      const auto fused = [&](const Tensors& in) {
        return kernels::linear_cross_entropy(in[0], in[1], given.labels, divisor);
      };
      const Tensors got = value_and_gradients(fused, {given.x, given.weight}, at::kFloat);
      expect_close(got, expected, 2e-6);
      expect_close(value_and_gradients(fused, {given.x, given.weight}, at::kDouble), expected, 1e-6);
      const at::Tensor ignored = (given.labels == kIgnoredLabel).nonzero().squeeze(1);
      EXPECT_TRUE(at::equal(got[1].index_select(0, ignored), at::zeros({ignored.size(0), 12})));
    }
  }
}

TEST(IgnoredLabels, NoLabelAtAllGivesZeroWithADivisorAndNoMeanWithout) {
  const Head given = head(6, 100.0);
  const auto fused = [&](std::optional<double> divisor) {
    return value_and_gradients(
        [&](const Tensors& in) { return kernels::linear_cross_entropy(in[0], in[1], given.labels, divisor); },
        {given.x, given.weight}, at::kFloat);
  };
  for (const at::Tensor& one : fused(8.0)) EXPECT_TRUE(at::equal(one, at::zeros_like(one)));
  EXPECT_TRUE(std::isnan(fused(std::nullopt)[0].item<double>()));
  EXPECT_THROW(fused(0.0), Error);
}

// Parts of a batch with unequal numbers of labels add up to the whole, if each divides by the whole's number.
TEST(IgnoredLabels, PartsAddUpToTheWhole) {
  const Head given = head(40, 0.7);
  const double count = static_cast<double>((given.labels != kIgnoredLabel).sum().item<std::int64_t>());
  const auto of = [&](std::int64_t first, std::int64_t rows) {
    return value_and_gradients(
        [&](const Tensors& in) {
          return kernels::linear_cross_entropy(in[0].narrow(0, first, rows), in[1], given.labels.narrow(0, first, rows),
                                               count);
        },
        {given.x, given.weight}, at::kFloat);
  };
  const Tensors whole = of(0, 40), few = of(0, 3), rest = of(3, 37);
  for (std::size_t i = 0; i < whole.size(); ++i) EXPECT_TRUE(at::allclose(whole[i], few[i] + rest[i], 1e-5, 1e-6));
}

}  // namespace
}  // namespace phalanx::documents_test
