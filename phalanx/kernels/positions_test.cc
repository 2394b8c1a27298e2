// Attention of queries at some positions of a sequence, against ATen's reference of all positions in fp64.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/kernels/causal_attention.h"
#include "phalanx/kernels/saved_activations.h"
#include "phalanx/kernels/testing/gradients.h"

namespace phalanx::positions_test {
namespace {

using Documents = std::shared_ptr<const DocumentBoundaries>;
using kernels_testing::expect_close;
using kernels_testing::Function;
using kernels_testing::Tensors;
using kernels_testing::value_and_gradients;
using Positions = std::vector<PositionRange>;

constexpr std::int64_t kSeq = 160;

at::Tensor at_positions(const at::Tensor& x, const Positions& positions) {
  Tensors parts;
  for (const auto& [first, count] : positions) parts.push_back(x.narrow(2, first, count));
  return at::cat(parts, 2);
}

/// What two and four ranks of context parallelism have, one range, and ranges that meet within a block of queries.
const std::vector<Positions>& cuts() {
  static const std::vector<Positions> all = {{{0, 40}, {120, 40}}, {{40, 40}, {80, 40}}, {{20, 20}, {120, 20}},
                                             {{0, kSeq}},          {{159, 1}},           {{3, 7}, {10, 100}, {130, 1}}};
  return all;
}

const std::vector<Documents>& divisions() {
  static const std::vector<Documents> all = {
      nullptr, std::make_shared<const DocumentBoundaries>(kSeq, std::vector<std::int32_t>{0, 1, 65, 160, 214, 320}),
      std::make_shared<const DocumentBoundaries>(kSeq, std::vector<std::int32_t>{0, 64, 128, 160, 320})};
  return all;
}

Tensors queries_keys_values() {
  at::manual_seed(1);
  return {at::randn({2, 4, kSeq, 8}) * 2.0, at::randn({2, 2, kSeq, 8}), at::randn({2, 2, kSeq, 8})};
}

void expect_rows_of_whole(at::ScalarType type, double tolerance) {
  for (const Documents& documents : divisions()) {
    for (const std::int64_t window : {0, 3, 70}) {
      for (const Positions& positions : cuts()) {
        Tensors inputs = queries_keys_values();
        for (at::Tensor& input : inputs) input = input.to(type);
        const auto some = [&](const Tensors& in) {
          return kernels::causal_attention_of_positions(at_positions(in[0], positions), in[1], in[2], positions, window,
                                                        documents);
        };
        const auto whole = [&](const Tensors& in) {
          return at_positions(kernels::causal_attention_reference(in[0], in[1], in[2], window, documents.get()),
                              positions);
        };
        SCOPED_TRACE(testing::Message() << "window " << window << ", first positions " << positions[0].first << " + "
                                        << positions[0].count << ", " << (documents ? documents->count() : 0)
                                        << " documents");
        expect_close(value_and_gradients(some, inputs, type), value_and_gradients(whole, inputs, at::kDouble),
                     tolerance);
      }
    }
  }
}

TEST(AttentionOfPositions, IsTheRowsOfTheWhole) { expect_rows_of_whole(at::kFloat, 1e-5); }
TEST(AttentionOfPositions, IsTheRowsOfTheWholeInDouble) { expect_rows_of_whole(at::kDouble, 1e-12); }
TEST(AttentionOfPositions, IsTheRowsOfTheWholeInBFloat16) { expect_rows_of_whole(at::kBFloat16, 1.5e-2); }

// Each row has queries at positions of its own.
TEST(AttentionOfPositions, OfRowsIsTheRowsOfTheWhole) {
  const std::vector<Positions> rows = {{{0, 1}, {60, 20}, {150, 9}}, {{30, 10}, {50, 15}, {100, 5}}};
  const auto at_rows = [&](const at::Tensor& x) {
    return at::cat({at_positions(x.narrow(0, 0, 1), rows[0]), at_positions(x.narrow(0, 1, 1), rows[1])}, 0);
  };
  for (const auto& [type, tolerance] :
       {std::pair(at::kFloat, 1e-5), std::pair(at::kDouble, 1e-12), std::pair(at::kBFloat16, 1.5e-2)}) {
    for (const Documents& documents : divisions()) {
      if (!documents) continue;
      for (const std::int64_t window : {0, 3, 70}) {
        Tensors inputs = queries_keys_values();
        for (at::Tensor& input : inputs) input = input.to(type);
        SCOPED_TRACE(testing::Message() << "window " << window << ", " << documents->count() << " documents");
        expect_close(
            value_and_gradients(
                [&](const Tensors& in) {
                  return kernels::causal_attention_of_rows(at_rows(in[0]), in[1], in[2], rows, window, documents);
                },
                inputs, type),
            value_and_gradients(
                [&](const Tensors& in) {
                  return at_rows(kernels::causal_attention_reference(in[0], in[1], in[2], window, documents.get()));
                },
                inputs, at::kDouble),
            tolerance);
      }
    }
  }
}

TEST(AttentionOfPositions, OfAllPositionsHasTheBitsOfCausalAttention) {
  const Tensors inputs = queries_keys_values();
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (const Documents& documents : divisions()) {
      const Tensors some = value_and_gradients(
          [&](const Tensors& in) {
            return kernels::causal_attention_of_positions(in[0], in[1], in[2], {{0, kSeq}}, 0, documents);
          },
          inputs, type);
      const Tensors whole = value_and_gradients(
          [&](const Tensors& in) { return kernels::causal_attention(in[0], in[1], in[2], 0, documents); }, inputs,
          type);
      for (std::size_t i = 0; i < some.size(); ++i) EXPECT_TRUE(some[i].equal(whole[i])) << i;
    }
  }
}

// A recomputed layer takes the saved result, and has the same gradients.
TEST(AttentionOfPositions, IsComputedOnceIfItIsSaved) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    const Positions positions = cuts()[0];
    const auto attend = [&](const Tensors& in) {
      return kernels::causal_attention_of_positions(at_positions(in[0], positions), in[1], in[2], positions);
    };
    const Tensors inputs = queries_keys_values();
    const Tensors expected = value_and_gradients(attend, inputs, type);
    kernels::SavedActivations saved([](kernels::SavedOp, int) { return true; });
    Tensors in;
    for (const auto& input : inputs) in.push_back(input.to(type));
    {
      const kernels::SavedActivations::Scope scope(&saved, kernels::SavedActivations::Run::forward);
      attend(in);
    }
    const kernels::SavedActivations::Scope scope(&saved, kernels::SavedActivations::Run::recompute);
    const Tensors found = value_and_gradients(attend, inputs, type);
    for (std::size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(found[i].equal(expected[i])) << i;
  }
}

TEST(AttentionOfPositions, RefusesWhatDoesNotFit) {
  const Tensors in = queries_keys_values();
  const auto refusal = [&](const Positions& positions, std::int64_t queries, const Documents& documents = nullptr) {
    return error_text<Error>([&] {
      kernels::causal_attention_of_positions(in[0].narrow(2, 0, queries), in[1], in[2], positions, 0, documents);
    });
  };
  EXPECT_THAT(refusal({{0, 4}}, 5), HasSubstr("2 rows of 5 queries at 4 positions up to 4, 2 rows of 160 keys"));
  EXPECT_THAT(refusal({{4, 4}, {0, 4}}, 8), HasSubstr("expected increasing positions"));
  EXPECT_THAT(refusal({{158, 4}}, 4), HasSubstr("up to 162"));
  EXPECT_THAT(refusal({{0, 4}}, 4, std::make_shared<const DocumentBoundaries>(8, std::vector<std::int32_t>{0, 8, 16})),
              HasSubstr("documents of 2 rows of 8"));
  const auto refusal_of_rows = [&](const std::vector<Positions>& rows, const Documents& documents) {
    return error_text<Error>(
        [&] { kernels::causal_attention_of_rows(in[0].narrow(2, 0, 4), in[1], in[2], rows, 0, documents); });
  };
  EXPECT_THAT(refusal_of_rows({{{0, 4}}}, divisions()[1]), HasSubstr("positions of 1 rows; expected those of the"));
  EXPECT_THAT(refusal_of_rows({{{0, 4}}, {{0, 4}}}, nullptr), HasSubstr("2 rows without documents"));
  EXPECT_THAT(refusal_of_rows({{{0, 4}}, {{0, 3}}}, divisions()[1]), HasSubstr("4 queries at 3 positions up to 3"));
  EXPECT_THAT(refusal_of_rows({{{0, 4}}, {{157, 4}}}, divisions()[1]), HasSubstr("up to 161"));
}

}  // namespace
}  // namespace phalanx::positions_test
