// Products of few rows and attention of one query per row, against ATen in fp64, and the guarantee of equal bits.
#include "phalanx/kernels/skinny_gemm.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include "phalanx/kernels/linear.h"
#include "phalanx/kernels/row_kernels.h"
#include "phalanx/kernels/swiglu_feed_forward.h"

namespace phalanx::kernels {
namespace {

double distance(const at::Tensor& found, const at::Tensor& expected) {
  return ((found.to(at::kDouble) - expected).norm() / expected.norm()).item<double>();
}

// Error of a product of numbers of both signs, relative to the sum of their absolute values: rounding is proportional
// to that sum, however small the result is (Higham, Accuracy and Stability of Numerical Algorithms, 3.1).
double rounding(const at::Tensor& found, const at::Tensor& expected, const at::Tensor& of_absolute_values) {
  return ((found.to(at::kDouble) - expected) / of_absolute_values).abs().max().item<double>();
}

TEST(SkinnyGemm, ProductsAreThoseOfALibraryAtAnySize) {
  const c10::InferenceMode inference;
  at::manual_seed(1);
  for (const std::int64_t rows : {1, 2, 3, 4, 5, 8, 15, 16}) {
    for (const std::int64_t in : {1, 7, 8, 37, 256}) {
      for (const std::int64_t outs : {1, 2, 3, 8, 11, 64, 300}) {
        const at::Tensor x = at::randn({rows, in}), w = at::randn({outs, in}), b = at::randn({outs});
        ASSERT_TRUE(can_use_skinny_gemm(x, w));
        const at::Tensor expected = at::linear(x.to(at::kDouble), w.to(at::kDouble), b.to(at::kDouble));
        const at::Tensor sums = at::linear(x.abs().to(at::kDouble), w.abs().to(at::kDouble), b.abs().to(at::kDouble));
        // Over a hundred seeds it is at most 2.6e-7, four units in the last place.
        EXPECT_LT(rounding(kernels::linear(x, w, b), expected, sums), 5e-7) << rows << " " << in << " " << outs;
      }
    }
  }
}

TEST(SkinnyGemm, OnlyWhatTheLoopsKnowIsTaken) {
  const at::Tensor x = at::randn({2, 3, 8}), w = at::randn({5, 8});
  EXPECT_FALSE(can_use_skinny_gemm(x, w));  // gradients could be asked for
  const c10::InferenceMode inference;
  EXPECT_TRUE(can_use_skinny_gemm(x, w));
  EXPECT_EQ(skinny_gemm(x, w).sizes(), at::IntArrayRef({2, 3, 5}));
  EXPECT_FALSE(can_use_skinny_gemm(at::randn({kSkinnyGemmRows + 1, 8}), w));
  EXPECT_FALSE(can_use_skinny_gemm(at::randn({0, 8}), w));
  EXPECT_FALSE(can_use_skinny_gemm(x.to(at::kDouble), w));
  EXPECT_FALSE(can_use_skinny_gemm(x.to(at::kBFloat16), w.to(at::kBFloat16)));
  EXPECT_FALSE(can_use_skinny_gemm(x, at::randn({8, 5}).t()));
  EXPECT_FALSE(can_use_skinny_gemm(at::randn({2, 7}), w));
  // Rows that are not contiguous.
  const at::Tensor gaps = at::randn({4, 16}).slice(1, 0, 8);
  EXPECT_LT(distance(kernels::linear(gaps, w), at::linear(gaps.to(at::kDouble), w.to(at::kDouble))), 1e-6);
}

TEST(SkinnyGemm, ARowsBitsDoNotDependOnItsNeighboursOrThreads) {
  const c10::InferenceMode inference;
  at::manual_seed(2);
  const at::Tensor x = at::randn({16, 133}), w1 = at::randn({1000, 133}), w3 = at::randn({1000, 133});
  const at::Tensor w2 = at::randn({133, 1000});
  const at::Tensor all = swiglu_feed_forward(x, w1, w2, w3);
  const int threads = at::get_num_threads();
  for (const std::int64_t rows : {1, 2, 3, 5, 7, 12}) {
    at::set_num_threads(rows % 2 == 0 ? 3 : 1);
    for (const std::int64_t first : {0, 1, 4}) {
      const at::Tensor some = swiglu_feed_forward(x.narrow(0, first, rows), w1, w2, w3);
      EXPECT_TRUE(some.equal(all.narrow(0, first, rows))) << rows << " from " << first;
    }
  }
  at::set_num_threads(threads);
}

TEST(SkinnyGemm, EveryInstructionSetGivesTheSameToRounding) {
  at::manual_seed(3);
  const at::Tensor x = at::randn({5, 50}), w = at::randn({21, 50}), p = at::randn({5, 21});
  const at::Tensor products = at::linear(x.to(at::kDouble), w.to(at::kDouble));
  const at::Tensor sums = p.to(at::kDouble).matmul(w.to(at::kDouble));
  int tables = 0;
  for (const RowKernels* table : available_row_kernels().tables) {
    if (table == nullptr) continue;
    ++tables;
    const at::Tensor y = at::full({5, 21}, 7.0), z = at::full({5, 50}, 7.0);
    table->row_products(5, 21, 50, x.const_data_ptr<float>(), 50, w.const_data_ptr<float>(), 50,
                        y.mutable_data_ptr<float>(), 21);
    table->weighted_sums(5, 21, 50, p.const_data_ptr<float>(), 21, w.const_data_ptr<float>(), 50,
                         z.mutable_data_ptr<float>(), 50);
    EXPECT_LT(distance(y, products), 1e-6) << table->isa;
    EXPECT_LT(distance(z, sums), 1e-6) << table->isa;
  }
  EXPECT_GE(tables, 1);
}

/// Each row by itself, in fp64.
at::Tensor reference_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                               const std::vector<std::int64_t>& seen, std::int64_t window) {
  std::vector<at::Tensor> rows;
  for (std::int64_t r = 0; r < q.size(0); ++r) {
    const std::int64_t all = seen[static_cast<std::size_t>(r)], count = window > 0 ? std::min(window, all) : all;
    const auto part = [&](const at::Tensor& t) {
      return t.narrow(0, r, 1)
          .narrow(2, all - count, count)
          .to(at::kDouble)
          .repeat_interleave(q.size(1) / keys.size(1), 1);
    };
    rows.push_back(at::scaled_dot_product_attention(q.narrow(0, r, 1).to(at::kDouble), part(keys), part(values)));
  }
  return at::cat(rows);
}

TEST(DecodeAttention, EachRowSeesItsOwnPositions) {
  const c10::InferenceMode inference;
  at::manual_seed(4);
  for (const auto& [heads, kv_heads] : std::vector<std::pair<std::int64_t, std::int64_t>>{{4, 4}, {6, 2}, {8, 1}}) {
    for (const std::int64_t dim : {5, 16, 64, 80}) {
      const at::Tensor q = at::randn({3, 1, heads, dim}).transpose(1, 2);
      const at::Tensor keys = at::randn({3, kv_heads, 40, dim}), values = at::randn({3, kv_heads, 40, dim});
      ASSERT_TRUE(can_use_decode_attention(q, keys, values));
      for (const std::int64_t window : {0, 9}) {
        const std::vector<std::int64_t> seen = {1, 33, 17};
        const at::Tensor y = decode_attention(q, keys.narrow(2, 0, 34), values.narrow(2, 0, 34), seen, window);
        EXPECT_LT(distance(y, reference_attention(q, keys, values, seen, window)), 1e-6) << heads << " " << dim;
        // Computed alone, it has the same bits.
        const at::Tensor alone = decode_attention(q.narrow(0, 1, 1), keys.narrow(0, 1, 1), values.narrow(0, 1, 1),
                                                  std::vector<std::int64_t>{33}, window);
        EXPECT_TRUE(alone.equal(y.narrow(0, 1, 1)));
      }
    }
  }
  EXPECT_FALSE(can_use_decode_attention(at::randn({1, 4, 2, 8}), at::randn({1, 4, 9, 8}), at::randn({1, 4, 9, 8})));
  EXPECT_FALSE(can_use_decode_attention(at::randn({1, 4, 1, 8}), at::randn({1, 3, 9, 8}), at::randn({1, 3, 9, 8})));
}

}  // namespace
}  // namespace phalanx::kernels
