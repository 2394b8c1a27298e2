#include "phalanx/layout/flat_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

namespace phalanx::fsdp {
namespace {

// Checks the definition element by element: parameters do not overlap, and each is in whole rows on the ranks.
void expect_sound(const FlatLayout& layout) {
  std::vector<std::pair<std::int64_t, std::int64_t>> pieces;
  for (std::size_t i = 0; i < layout.parameters.size(); ++i) {
    const auto& p = layout.parameters[i];
    if (p.numel() == 0) continue;
    const std::int64_t begin = layout.offsets[i], end = begin + p.numel();
    EXPECT_GE(begin, 0);
    EXPECT_LE(end, layout.flat_elements());
    pieces.emplace_back(begin, end);
    std::int64_t expected = 0;
    for (int rank = 0; rank < layout.ranks; ++rank) {
      const RowRange rows = layout.rows_of(i, rank);
      EXPECT_EQ(rows.begin, expected);
      EXPECT_GE(rows.end, rows.begin);
      expected = rows.end;
      if (rows.begin == rows.end) continue;
      EXPECT_GE(begin + rows.begin * p.row_elements, rank * layout.shard_elements);
      EXPECT_LE(begin + rows.end * p.row_elements, (rank + 1) * layout.shard_elements);
    }
    EXPECT_EQ(expected, p.rows);
  }
  std::ranges::sort(pieces);
  for (std::size_t i = 1; i < pieces.size(); ++i) EXPECT_LE(pieces[i - 1].second, pieces[i].first);
}

std::vector<FlatParameter> llama_block(std::int64_t dim, std::int64_t kv, std::int64_t ffn) {
  return {{dim, dim}, {kv, dim}, {kv, dim}, {dim, dim}, {ffn, dim}, {dim, ffn}, {ffn, dim}, {dim, 1}, {dim, 1}};
}

// Weights of one input are adjacent, as one product needs them, though w2 is listed between w1 and w3.
TEST(FlatLayout, RowsOfOneLengthAreTogether) {
  for (const int ranks : {1, 2, 8, 64}) {
    const FlatLayout layout = lay_out_flat(llama_block(4096, 1024, 14336), ranks);
    const auto end_of = [&](std::size_t i) { return layout.offsets[i] + layout.parameters[i].numel(); };
    EXPECT_EQ(layout.offsets[1], end_of(0)) << ranks;
    EXPECT_EQ(layout.offsets[2], end_of(1)) << ranks;
    EXPECT_EQ(layout.offsets[6], end_of(4)) << ranks;
  }
}

double padding_of(const FlatLayout& layout) {
  return static_cast<double>(layout.padding()) / static_cast<double>(layout.flat_elements() - layout.padding());
}

TEST(FlatLayout, LlamaBlocksArePaddedByLessThanAPercent) {
  struct Shape {
    std::int64_t dim, kv, ffn;
  };
  for (const auto& [dim, kv, ffn] : {Shape{2048, 512, 8192}, Shape{4096, 1024, 14336}, Shape{4096, 4096, 11008},
                                     Shape{5120, 5120, 13824}, Shape{8192, 1024, 28672}}) {
    for (const int ranks : {1, 2, 3, 4, 6, 8, 12, 16, 32, 64}) {
      const FlatLayout layout = lay_out_flat(llama_block(dim, kv, ffn), ranks);
      expect_sound(layout);
      EXPECT_LE(padding_of(layout), 0.01) << "dim " << dim << " ffn " << ffn << " ranks " << ranks;
    }
  }
}

TEST(FlatLayout, TheSmallLlamaIsPaddedByLessThanFivePercent) {
  for (const int ranks : {1, 2, 3, 4, 8}) {
    const FlatLayout layout = lay_out_flat(llama_block(256, 128, 688), ranks);
    expect_sound(layout);
    EXPECT_LE(padding_of(layout), 0.05) << ranks;
  }
}

TEST(FlatLayout, OneRankHasItAllAndMoreRanksThanRowsLeaveSomeWithout) {
  const FlatLayout one = lay_out_flat({{3, 5}, {7, 1}}, 1);
  expect_sound(one);
  EXPECT_EQ(one.rows_of(0, 0), (RowRange{0, 3}));
  const FlatLayout many = lay_out_flat({{2, 100}}, 8);
  expect_sound(many);
  int holders = 0;
  for (int rank = 0; rank < 8; ++rank) {
    const RowRange rows = many.rows_of(0, rank);
    holders += rows.end > rows.begin ? 1 : 0;
  }
  EXPECT_EQ(holders, 2);
}

TEST(FlatLayout, EmptyParametersAndUnits) {
  const FlatLayout none = lay_out_flat({}, 4);
  EXPECT_EQ(none.flat_elements(), 0);
  const FlatLayout layout = lay_out_flat({{0, 7}, {5, 3}, {0, 1}}, 2);
  expect_sound(layout);
  EXPECT_EQ(layout.rows_of(0, 1), (RowRange{0, 0}));
}

TEST(FlatLayout, AnyShapesAndRanks) {
  std::mt19937 random(7);
  const auto up_to = [&](int n) { return static_cast<std::int64_t>(random() % static_cast<unsigned>(n) + 1); };
  for (int round = 0; round < 400; ++round) {
    SCOPED_TRACE(round);
    std::vector<FlatParameter> parameters(static_cast<std::size_t>(up_to(12)));
    std::int64_t total = 0;
    for (auto& p : parameters) {
      p = {up_to(90) - 1, random() % 3 == 0 ? 1 : up_to(70)};
      total += p.numel();
    }
    const int ranks = static_cast<int>(up_to(9));
    const FlatLayout layout = lay_out_flat(parameters, ranks);
    expect_sound(layout);
    EXPECT_LE(layout.shard_elements, total + 16 * 13);  // never worse than all on one rank
  }
}

}  // namespace
}  // namespace phalanx::fsdp
