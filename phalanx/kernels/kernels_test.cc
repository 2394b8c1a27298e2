#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/kernels/causal_attention.h"
#include "phalanx/kernels/linear_cross_entropy.h"
#include "phalanx/kernels/rms_norm.h"
#include "phalanx/kernels/rotary.h"
#include "phalanx/kernels/row_kernels.h"
#include "phalanx/kernels/swiglu_feed_forward.h"
#include "phalanx/kernels/testing/gradients.h"

namespace {

namespace kernels = phalanx::kernels;
namespace kernels_testing = phalanx::kernels_testing;
using kernels_testing::Function;
using kernels_testing::Tensors;
using kernels_testing::value_and_gradients;

/// The fused function in fp32 against the ATen reference in fp64.
void expect_equal_to_reference(const Function& fused, const Function& reference, const Tensors& inputs) {
  const Tensors got = value_and_gradients(fused, inputs, at::kFloat);
  const Tensors expected = value_and_gradients(reference, inputs, at::kDouble);
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double error = (got[i].to(at::kDouble) - expected[i]).norm().item<double>();
    EXPECT_LE(error, 2e-6 * expected[i].norm().item<double>()) << (i == 0 ? "value" : "gradient of input ") << i;
    EXPECT_EQ(got[i].sizes(), expected[i].sizes());
  }
}

TEST(RmsNormKernel, EqualsTheReferenceAtOddSizes) {
  for (const auto& shape : std::vector<std::vector<std::int64_t>>{{1, 2}, {3, 5}, {2, 131, 33}, {300, 256}}) {
    at::manual_seed(1);
    // The reference in fp64 must stay in fp64; the fused kernel always casts to fp32.
    const Function reference = [](const Tensors& in) {
      return in[0] * (in[0] * in[0]).mean(-1, true).add(1e-5).rsqrt() * in[1];
    };
    expect_equal_to_reference([](const Tensors& in) { return kernels::rms_norm(in[0], in[1], 1e-5); }, reference,
                              {at::randn(shape) * 3.0, at::randn({shape.back()})});
  }
}

TEST(RmsNormKernel, ReferenceComputesSixteenBitsInFp32) {
  const at::Tensor x = at::randn({4, 32}).to(at::kBFloat16), w = at::randn({32}).to(at::kBFloat16);
  const at::Tensor y = kernels::rms_norm(x, w, 1e-5);
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(at::allclose(y.to(at::kFloat), kernels::rms_norm(x.to(at::kFloat), w.to(at::kFloat), 1e-5), 0.02, 0.01));
}

TEST(RmsNormKernel, EpsIsAddedUnderTheRoot) {
  const at::Tensor y = kernels::rms_norm(at::full({1, 2}, 0.5), at::ones({2}), 0.75);  // sqrt(0.25 + 0.75) = 1
  EXPECT_TRUE(at::allclose(y, at::full({1, 2}, 0.5)));
}

TEST(RmsNormKernel, TakesAWeightWithGaps) {
  const at::Tensor x = at::randn({4, 6}), wide = at::randn({12});
  const at::Tensor weight = wide.slice(0, 0, 12, 2);
  EXPECT_TRUE(at::equal(kernels::rms_norm(x, weight, 1e-5), kernels::rms_norm_reference(x, weight, 1e-5)));
}

TEST(RotaryKernel, EqualsTheReferenceForAnyLayoutOfHeadsAndPositions) {
  at::manual_seed(1);
  const at::Tensor angles = at::rand({3, 7, 5}) * 6.0;
  for (const bool per_row : {false, true}) {
    const at::Tensor table = per_row ? angles : angles[0];
    const Function fused = [&](const Tensors& in) {
      return kernels::apply_rotary(in[0].transpose(1, 2), table.cos(), table.sin());
    };
    const Function reference = [&](const Tensors& in) {
      return kernels::apply_rotary_reference(in[0].transpose(1, 2), table.cos(), table.sin());
    };
    expect_equal_to_reference(fused, reference, {at::randn({3, 7, 2, 10})});
  }
}

TEST(AttentionKernel, EqualsTheReferenceForAnyGroupingLengthAndLayout) {
  struct Case {
    std::int64_t heads, kv_heads, seq, dim;
  };
  for (const Case& c : {Case{1, 1, 1, 2}, Case{4, 2, 64, 16}, Case{6, 2, 65, 10}, Case{3, 1, 200, 8}}) {
    for (const bool heads_first : {false, true}) {
      at::manual_seed(1);
      // [batch, seq, heads, dim], as the projections return it, or contiguous.
      const auto split = [&](const at::Tensor& t) { return heads_first ? t : t.transpose(1, 2); };
      const auto input = [&](std::int64_t heads) {
        return heads_first ? at::randn({2, heads, c.seq, c.dim}) : at::randn({2, c.seq, heads, c.dim});
      };
      expect_equal_to_reference(
          [&](const Tensors& in) { return kernels::causal_attention(split(in[0]), split(in[1]), split(in[2])); },
          [&](const Tensors& in) {
            return kernels::causal_attention_reference(split(in[0]), split(in[1]), split(in[2]));
          },
          {input(c.heads) * 2.0, input(c.kv_heads), input(c.kv_heads)});
    }
  }
}

TEST(AttentionKernel, AWindowHidesWhatLiesBeforeIt) {
  at::manual_seed(1);
  for (const std::int64_t window : {2, 3, 64, 70, 200}) {  // of 150 positions: blocks of 64 and of the window
    const at::Tensor distance = at::arange(150, at::kLong).unsqueeze(1) - at::arange(150, at::kLong).unsqueeze(0);
    const at::Tensor hidden = (distance < 0).logical_or(distance >= window);
    const Function reference = [&](const Tensors& in) {
      const at::Tensor k = in[1].repeat_interleave(2, 1), v = in[2].repeat_interleave(2, 1);
      const at::Tensor scores = in[0].matmul(k.transpose(2, 3)) / std::sqrt(6.0);
      return scores.masked_fill(hidden, -1e30).softmax(-1).matmul(v);
    };
    expect_equal_to_reference([&](const Tensors& in) { return kernels::causal_attention(in[0], in[1], in[2], window); },
                              reference,
                              {at::randn({2, 4, 150, 6}), at::randn({2, 2, 150, 6}), at::randn({2, 2, 150, 6})});
  }
}

TEST(AttentionKernel, TakesNoShapesThatItsLoopsDoNotKnow) {
  // More queries than keys use the ATen op. Key heads that do not divide the query heads are the ATen op's error.
  const at::Tensor q = at::randn({1, 4, 5, 8}), k = at::randn({1, 2, 3, 8}), v = at::randn({1, 2, 3, 8});
  EXPECT_TRUE(at::equal(kernels::causal_attention(q, k, v), kernels::causal_attention_reference(q, k, v)));
  EXPECT_ANY_THROW(kernels::causal_attention(q, at::randn({1, 3, 5, 8}), at::randn({1, 3, 5, 8})));
}

TEST(SwigluKernel, FeedForwardEqualsTheReferenceAcrossChunks) {
  for (const std::int64_t rows : {1, 37, 512, 1030}) {
    at::manual_seed(1);
    const Function reference = [](const Tensors& in) {
      return at::linear(kernels::swiglu_reference(at::linear(in[0], in[1]), at::linear(in[0], in[3])), in[2]);
    };
    expect_equal_to_reference(
        [](const Tensors& in) { return kernels::swiglu_feed_forward(in[0], in[1], in[2], in[3]); }, reference,
        {at::randn({rows, 12}), at::randn({19, 12}), at::randn({12, 19}), at::randn({19, 12})});
  }
}

TEST(SwigluKernel, GivesTheSameValueWithoutGradients) {
  const at::Tensor x = at::randn({2, 700, 8}), w1 = at::randn({11, 8}), w2 = at::randn({8, 11}),
                   w3 = at::randn({11, 8});
  const at::Tensor recorded = kernels::swiglu_feed_forward(x, w1.clone().requires_grad_(), w2, w3);
  EXPECT_TRUE(at::equal(recorded.detach(), kernels::swiglu_feed_forward(x, w1, w2, w3)));
}

TEST(CrossEntropyKernel, EqualsTheReferenceAcrossChunks) {
  for (const std::int64_t rows : {1, 6, 512, 1030}) {
    at::manual_seed(1);
    const at::Tensor labels = at::randint(77, {rows}, at::TensorOptions(at::kLong));
    expect_equal_to_reference(
        [&](const Tensors& in) { return kernels::linear_cross_entropy(in[0], in[1], labels); },
        [&](const Tensors& in) { return at::cross_entropy_loss(at::linear(in[0], in[1]), labels); },
        {at::randn({rows, 9}), at::randn({77, 9})});
  }
}

/// The z-loss, beside autograd's of the same formula.
TEST(CrossEntropyKernel, TheZLossIsThatOfTheFormula) {
  for (const std::int64_t rows : {6, 700}) {
    at::manual_seed(1);
    at::Tensor labels = at::randint(77, {rows}, at::TensorOptions(at::kLong));
    labels[2] = phalanx::kIgnoredLabel;
    for (const auto& divisor : {std::optional<double>(), std::optional<double>(12)}) {
      const auto expected = [&](const at::Tensor& logits) {
        const at::Tensor counts = labels.ne(phalanx::kIgnoredLabel);
        const at::Tensor chosen = logits.gather(1, labels.clamp_min(0).unsqueeze(1)).squeeze(1);
        const at::Tensor z = at::logsumexp(logits, 1);
        return ((z - chosen + 0.05 * z * z) * counts).sum() / (divisor ? *divisor : counts.sum().item<double>());
      };
      const Tensors inputs = {at::randn({rows, 9}), at::randn({77, 9})};
      expect_equal_to_reference(
          [&](const Tensors& in) { return kernels::linear_cross_entropy(in[0], in[1], labels, divisor, 0.05); },
          [&](const Tensors& in) { return expected(at::linear(in[0], in[1])); }, inputs);
      expect_equal_to_reference(
          [&](const Tensors& in) { return kernels::cross_entropy(at::linear(in[0], in[1]), labels, divisor, 0.05); },
          [&](const Tensors& in) { return expected(at::linear(in[0], in[1])); }, inputs);
    }
  }
}

/// Weights of tokens, negative and zero ones among them, beside autograd's gradient of the same formula.
TEST(CrossEntropyKernel, WeightsOfTokensAreThoseOfTheFormula) {
  for (const std::int64_t rows : {6, 700}) {
    at::manual_seed(1);
    at::Tensor labels = at::randint(77, {rows}, at::TensorOptions(at::kLong)), weights = at::randn({rows});
    labels[2] = phalanx::kIgnoredLabel;
    weights[3] = 0;
    const auto losses_of = [&](const at::Tensor& logits) {
      return at::cross_entropy_loss(logits, labels, {}, at::Reduction::None, phalanx::kIgnoredLabel);
    };
    const Tensors inputs = {at::randn({rows, 9}), at::randn({77, 9})};
    for (const double divisor : {1.0, 12.0}) {
      const Function expected = [&](const Tensors& in) {
        return (losses_of(at::linear(in[0], in[1])) * weights).sum() / divisor;
      };
      expect_equal_to_reference(
          [&](const Tensors& in) { return kernels::linear_cross_entropy(in[0], in[1], labels, divisor, 0, weights); },
          expected, inputs);
      expect_equal_to_reference(
          [&](const Tensors& in) {
            return kernels::cross_entropy(at::linear(in[0], in[1]), labels, divisor, 0, weights);
          },
          expected, inputs);
    }
    const at::Tensor each = losses_of(at::linear(inputs[0], inputs[1]));
    EXPECT_TRUE(at::allclose(kernels::linear_token_losses(inputs[0], inputs[1], labels), each, 1e-5, 1e-5));
    EXPECT_TRUE(at::allclose(kernels::token_losses(at::linear(inputs[0], inputs[1]), labels), each, 1e-5, 1e-5));
  }
}

TEST(CrossEntropyKernel, LargeLogitsDoNotOverflowAndTheLossNeedsNoGradients) {
  const at::Tensor x = at::full({2, 1}, 1000.0), labels = at::zeros({2}, at::TensorOptions(at::kLong));
  const at::Tensor weight = at::tensor({1.0f, -1.0f, 0.5f}).view({3, 1});
  EXPECT_NEAR(kernels::linear_cross_entropy(x, weight, labels).item<double>(), 0.0, 1e-6);
  EXPECT_NEAR(kernels::linear_cross_entropy(x, weight, labels + 1).item<double>(), 2000.0, 1e-3);
}

TEST(CrossEntropyKernel, TheGradientIsScaledByTheLosssAndASecondBackwardIsAnError) {
  const at::Tensor x = at::randn({5, 4}), weight = at::randn({6, 4}).requires_grad_();
  const at::Tensor labels = at::zeros({5}, at::TensorOptions(at::kLong));
  kernels::linear_cross_entropy(x, weight, labels).backward();
  const at::Tensor once = weight.grad().clone();
  weight.mutable_grad().reset();
  const at::Tensor loss = kernels::linear_cross_entropy(x, weight, labels);
  (loss * 0.25).backward({}, /*retain_graph=*/true);
  EXPECT_TRUE(at::allclose(weight.grad(), once * 0.25));
  EXPECT_THROW(loss.backward(), phalanx::Error);
}

TEST(CrossEntropyKernel, EachInputAloneMayWantItsGradient) {
  const at::Tensor x = at::randn({5, 4}), weight = at::randn({6, 4});
  const at::Tensor labels = at::arange(5, at::TensorOptions(at::kLong));
  const at::Tensor x_leaf = x.clone().requires_grad_(), weight_leaf = weight.clone().requires_grad_();
  kernels::linear_cross_entropy(x_leaf, weight_leaf, labels).backward();
  const at::Tensor x_alone = x.clone().requires_grad_(), weight_alone = weight.clone().requires_grad_();
  kernels::linear_cross_entropy(x_alone, weight, labels).backward();
  kernels::linear_cross_entropy(x, weight_alone, labels).backward();
  EXPECT_TRUE(at::equal(x_alone.grad(), x_leaf.grad()));
  EXPECT_TRUE(at::equal(weight_alone.grad(), weight_leaf.grad()));
}

TEST(CrossEntropyKernel, ALabelOutsideTheVocabularyIsNamed) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {  // the fused path and the ATen ops
    const at::Tensor x = at::randn({3, 4}).to(dtype), weight = at::randn({6, 4}).to(dtype);
    for (const std::int64_t bad : {-1, 6}) {
      const at::Tensor labels = at::full({3}, bad, at::TensorOptions(at::kLong));
      EXPECT_THAT(phalanx::error_text<phalanx::DataError>([&] { kernels::linear_cross_entropy(x, weight, labels); }),
                  testing::HasSubstr("expected 0 to 5"));
    }
  }
}

TEST(FusedKernels, StandBackForAutocast) {
  const at::Tensor x = at::randn({3, 4}), w1 = at::randn({6, 4}), w2 = at::randn({4, 6}), w3 = at::randn({6, 4});
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const at::Tensor y = kernels::swiglu_feed_forward(x, w1, w2, w3);
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  EXPECT_EQ(kernels::swiglu_feed_forward(x, w1, w2, w3).scalar_type(), at::kFloat);
}

TEST(RowKernels, TheFastestIsTaken) {
  const kernels::AvailableRowKernels available = kernels::available_row_kernels();
  const kernels::RowKernels* last = nullptr;
  for (const kernels::RowKernels* table : available.tables) last = table != nullptr ? table : last;
  EXPECT_EQ(&kernels::row_kernels(), last);
}

TEST(RowKernels, EveryInstructionSetGivesTheSameToRounding) {
  // 37 columns: whole vectors and a remainder for every width.
  constexpr std::int64_t kRows = 3, kDim = 37;
  const at::Tensor x = at::randn({kRows, kDim}) * 4.0, up = at::randn({kRows, kDim}), w = at::randn({kDim});
  const std::vector<std::int64_t> labels = {0, 36, 7};
  Tensors first;
  int tables = 0;
  for (const kernels::RowKernels* table : kernels::available_row_kernels().tables) {
    if (table == nullptr) continue;
    ++tables;
    Tensors out;
    const auto buffer = [&]() {
      out.push_back(at::zeros({kRows, kDim}));
      return out.back().mutable_data_ptr<float>();
    };
    const float *in = x.const_data_ptr<float>(), *u = up.const_data_ptr<float>(), *weight = w.const_data_ptr<float>();
    std::vector<float> inverse(kRows), dweight(kDim), loss(kRows);
    table->rms_norm(kRows, kDim, in, weight, 1e-5f, buffer(), inverse.data());
    table->rms_norm_backward(kRows, kDim, in, weight, inverse.data(), u, buffer(), buffer());
    table->swiglu(kRows * kDim, in, u, buffer());
    float *dgate = buffer(), *dup = buffer(), *h = buffer();
    table->swiglu_backward(kRows * kDim, in, u, in, dgate, dup, h);
    table->rotate(kRows, kDim / 2, weight, u, 1.0f, in, kDim, buffer(), kDim);
    float *p = buffer(), *dp = buffer();
    std::vector<float> log_sum(kRows);
    out[out.size() - 2].copy_(x);
    table->causal_softmax(kRows, kDim, 33, 0, p, log_sum.data());
    out.push_back(at::tensor(log_sum));
    out[out.size() - 3].copy_(x);
    out[out.size() - 2].copy_(up);
    table->causal_softmax_backward(kRows, kDim, 33, 0, kDim, 0.5f, log_sum.data(), in, kDim, u, kDim, p, dp);
    out.push_back(x.clone());
    table->cross_entropy(kRows, kDim, out.back().mutable_data_ptr<float>(), labels.data(), 0.5f, 0.01f, loss.data());
    out.push_back(at::tensor(loss));
    if (first.empty()) first = out;
    for (std::size_t i = 0; i < out.size(); ++i)
      EXPECT_TRUE(at::allclose(out[i], first[i], 1e-5, 1e-6)) << table->isa << i;
  }
  EXPECT_GE(tables, 1);
}

TEST(RowKernels, ExponentialIsAccurateOverItsWholeRange) {
  // Tested through the softmax of two logits, whose loss is log(1 + e^d) for label 0 and difference d.
  for (double d = -80.0; d <= 0.0; d += 0.37) {
    float logits[2] = {0.0f, static_cast<float>(d)}, loss = 0.0f;
    const std::int64_t label = 1;
    kernels::row_kernels().cross_entropy(1, 2, logits, &label, 1.0f, 0.0f, &loss);
    const double e = std::exp(static_cast<double>(static_cast<float>(d)));
    EXPECT_NEAR(logits[1] + 1.0, e / (1.0 + e), 3e-7) << d;
    EXPECT_NEAR(loss, std::log1p(e) - static_cast<float>(d), 1e-5) << d;
    float scores[2] = {0.0f, static_cast<float>(d)}, log_sum = 0.0f;
    kernels::row_kernels().causal_softmax(1, 2, 1, 0, scores, &log_sum);
    EXPECT_NEAR(scores[1] * (1.0 + e) / e, 1.0, 4e-7) << d;  // small ones too
  }
}

TEST(RowKernels, BitsDoNotDependOnTheNumberOfThreads) {
  at::manual_seed(1);
  const at::Tensor x = at::randn({1030, 64}), w = at::randn({64});
  const int threads = at::get_num_threads();
  const at::Tensor leaf = x.clone().requires_grad_(), weight = w.clone().requires_grad_();
  const auto gradients = [&](int n) {
    at::set_num_threads(n);
    const at::Tensor y = kernels::rms_norm(leaf, weight, 1e-5);
    leaf.mutable_grad().reset();
    weight.mutable_grad().reset();
    y.backward(x);
    return Tensors{y.detach(), leaf.grad(), weight.grad()};
  };
  const Tensors one = gradients(1), four = gradients(4);
  at::set_num_threads(threads);
  for (std::size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(at::equal(one[i], four[i])) << i;
}

}  // namespace
