#include "phalanx/tensor/shard_spec.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <numeric>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/tensor/testing/random_specs.h"

namespace phalanx {
namespace {

const MeshShape kTwoByTwo({{"dp", 2}, {"tp", 2}});

ShardSpec spec_of(std::vector<std::int64_t> shape, Placement placement, const MeshShape& mesh = kTwoByTwo) {
  return {"w", std::move(shape), DataType::f32, mesh, std::move(placement)};
}

std::vector<std::string> boxes_of(const ShardSpec& spec) {
  std::vector<std::string> boxes;
  for (int rank = 0; rank < spec.mesh().size(); ++rank) boxes.push_back(spec.local_box(rank).text());
  return boxes;
}

TEST(ShardSpecBoxes, TensorParallelFirstThenShardedOnWhatIsLeft) {
  // tp cuts 10 rows into 5 + 5, dp each 5 into 3 + 2: ranks are (dp, tp) row-major.
  EXPECT_THAT(boxes_of(spec_of({10, 6}, {.splits = {{"tp", 0}, {"dp", 0}}})),
              ElementsAre("[0:3, 0:6]", "[5:8, 0:6]", "[3:5, 0:6]", "[8:10, 0:6]"));
  // The other nesting gives other boxes.
  EXPECT_THAT(boxes_of(spec_of({10, 6}, {.splits = {{"dp", 0}, {"tp", 0}}})),
              ElementsAre("[0:3, 0:6]", "[3:5, 0:6]", "[5:8, 0:6]", "[8:10, 0:6]"));
  // Along different dimensions the order does not matter.
  EXPECT_THAT(boxes_of(spec_of({10, 6}, {.splits = {{"tp", 1}, {"dp", 0}}})),
              ElementsAre("[0:5, 0:3]", "[0:5, 3:6]", "[5:10, 0:3]", "[5:10, 3:6]"));
  EXPECT_THAT(boxes_of(spec_of({10, 6}, {.splits = {{"tp", 1}}, .partial = {"dp"}})),
              ElementsAre("[0:10, 0:3]", "[0:10, 3:6]", "[0:10, 0:3]", "[0:10, 3:6]"));
}

TEST(ShardSpecBoxes, TheEvenRuleGivesTheFirstRanksOneMore) {
  const auto rows = [](std::int64_t n, int ranks) {
    std::vector<std::int64_t> sizes;
    const auto spec = spec_of({n}, {.splits = {{"dp", 0}}}, MeshShape({{"dp", ranks}}));
    for (int rank = 0; rank < ranks; ++rank) sizes.push_back(spec.local_box(rank).shape[0]);
    return sizes;
  };
  EXPECT_THAT(rows(9, 8), ElementsAre(2, 1, 1, 1, 1, 1, 1, 1));
  EXPECT_THAT(rows(10, 4), ElementsAre(3, 3, 2, 2));
  EXPECT_THAT(rows(2, 3), ElementsAre(1, 1, 0));
  EXPECT_THAT(rows(0, 2), ElementsAre(0, 0));
}

TEST(ShardSpecBoxes, BoundariesAsOneListOrOnePerBlock) {
  const MeshShape four({{"dp_shard", 4}});
  EXPECT_THAT(boxes_of(spec_of({256}, {.splits = {{"dp_shard", 0, {0, 0, 100, 156}}}}, four)),
              ElementsAre("[0:0]", "[0:0]", "[0:100]", "[100:256]"));
  // One list for both blocks of tp, which have equal length.
  EXPECT_THAT(boxes_of(spec_of({8}, {.splits = {{"tp", 0}, {"dp", 0, {1, 3}}}})),
              ElementsAre("[0:1]", "[4:5]", "[1:4]", "[5:8]"));
  // One list per block: blocks of 4 and 3.
  EXPECT_THAT(boxes_of(spec_of({7}, {.splits = {{"tp", 0}, {"dp", 0, {1, 3, 3, 0}}}})),
              ElementsAre("[0:1]", "[4:7]", "[1:4]", "[7:7]"));
}

TEST(ShardSpecBoxes, WhoHoldsWhat) {
  const auto spec = spec_of({10, 6}, {.splits = {{"tp", 0}}});  // dp replicates
  EXPECT_THAT(spec.ranks_holding({{2, 1}, {2, 5}}), ElementsAre(0, 2));
  EXPECT_THAT(spec.ranks_holding({{4, 0}, {2, 6}}), IsEmpty());  // across the boundary
  EXPECT_THAT(spec.ranks_touching({{4, 0}, {2, 6}}), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(spec.ranks_holding({{5, 5}, {1, 1}}), ElementsAre(1, 3));
  EXPECT_THAT(spec.ranks_touching({{5, 5}, {0, 1}}), IsEmpty());
  EXPECT_TRUE(spec.is_first_holder(0));
  EXPECT_TRUE(spec.is_first_holder(1));
  EXPECT_FALSE(spec.is_first_holder(2));
  EXPECT_FALSE(spec.is_first_holder(3));
  EXPECT_THAT(error_text<ConfigError>([&] {
                (void)spec.ranks_holding({{9, 0}, {2, 6}});
              }),
              AllOf(HasSubstr("box [9:11, 0:6]"), HasSubstr("does not lie in the tensor")));
  EXPECT_THAT(error_text<ConfigError>([&] { (void)spec.local_box(4); }),
              HasSubstr("(dp=2, tp=2) has no rank 4: it has 4 ranks"));
}

TEST(ShardSpecBoxes, AScalarIsOneElementThatEverybodyHolds) {
  const auto spec = spec_of({}, {});
  EXPECT_EQ(spec.local_box(3), (Box{{}, {}}));
  EXPECT_EQ(spec.numel(), 1);
  EXPECT_THAT(spec.ranks_holding({{}, {}}), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(flat_ranges({{}, {}}, {}), ElementsAre(FlatRange{0, 1}));
}

TEST(ShardSpecBoxes, Intersections) {
  const Box a{{0, 2}, {4, 4}};
  EXPECT_EQ(intersect(a, {{3, 0}, {4, 3}}), (Box{{3, 2}, {1, 1}}));
  EXPECT_EQ(intersect(a, {{4, 0}, {4, 9}}), std::nullopt);
  EXPECT_EQ(intersect(a, {{1, 2}, {0, 4}}), std::nullopt);  // an empty box inside of it
  EXPECT_EQ(relative_to({{3, 2}, {1, 1}}, a), (Box{{3, 0}, {1, 1}}));
  EXPECT_THROW((void)intersect(a, {{0}, {1}}), Error);
}

TEST(ShardSpecBoxes, FlatRangesAreAsFewAsPossible) {
  EXPECT_THAT(flat_ranges({{2, 0}, {3, 8}}, {10, 8}), ElementsAre(FlatRange{16, 24}));
  EXPECT_THAT(flat_ranges({{2, 1}, {2, 3}}, {10, 8}), ElementsAre(FlatRange{17, 3}, FlatRange{25, 3}));
  EXPECT_THAT(flat_ranges({{1, 2, 0}, {2, 1, 5}}, {3, 4, 5}), ElementsAre(FlatRange{30, 5}, FlatRange{50, 5}));
  EXPECT_THAT(flat_ranges({{0, 0}, {10, 8}}, {10, 8}), ElementsAre(FlatRange{0, 80}));
  EXPECT_THAT(flat_ranges({{3, 0}, {0, 8}}, {10, 8}), IsEmpty());
}

TEST(ShardSpecText, IsReadableAndReadBack) {
  const ShardSpec spec("layers.0.attention.wq.weight", {10, 6}, DataType::bf16,
                       MeshShape({{"cp", 2}, {"dp", 2}, {"tp", 2}}),
                       {.splits = {{"tp", 0}, {"dp", 0, {4, 1}}}, .partial = {"cp"}});
  EXPECT_EQ(spec.text(),
            "'layers.0.attention.wq.weight' bfloat16[10, 6] on (cp=2, dp=2, tp=2): tp:S(0), dp:S(0){4, 1}, cp:P");
  EXPECT_EQ(spec_of({}, {}).text(), "'w' float32[] on (dp=2, tp=2): replicated");
  const std::vector<ShardSpec> others = {spec, spec_of({}, {}), spec_of({0, 3}, {.partial = {"tp", "dp"}}),
                                         ShardSpec("it's [odd]: 'x'", {1}, DataType::boolean, MeshShape()),
                                         spec_of({4}, {.splits = {{"replicated", 0}}}, MeshShape({{"replicated", 2}}))};
  for (const auto& other : others) EXPECT_EQ(ShardSpec::parse(other.text()), other) << other.text();
}

TEST(ShardSpecText, WhatCannotBeReadShowsThePlace) {
  const auto error = [](const char* text) { return error_text<ConfigError>([&] { (void)Placement::parse(text); }); };
  EXPECT_EQ(error("tp:S0"), "cannot read \"tp:S0\" at character 4: expected \"S(\" or \"P\", found \"S0\"");
  EXPECT_EQ(error("tp:S(0"), "cannot read \"tp:S(0\" at character 7: expected \")\", found the end");
  EXPECT_THAT(error(""), HasSubstr("expected an axis, found the end"));
  EXPECT_THAT(error("tp:S(x)"), HasSubstr("at character 6: expected a number"));
  EXPECT_THAT(error("tp:S(0){}"), HasSubstr("expected a number between { and }"));
  EXPECT_THAT(error("tp:S(0){1,2}"), HasSubstr("expected \"}\", found \",2}\""));
  EXPECT_THAT(error("tp:P, dp:S(0)"), HasSubstr("splits stand before partial axes"));
  EXPECT_THAT(error("tp:P dp:P"), HasSubstr("expected \", \" or the end"));
  const auto spec = [](const char* text) { return error_text<ConfigError>([&] { (void)ShardSpec::parse(text); }); };
  EXPECT_THAT(spec("w float32[1] on (): replicated"), HasSubstr("expected a name between quotes"));
  EXPECT_THAT(spec("'w' float8[1] on (): replicated"), HasSubstr("expected a dtype such as float32"));
  EXPECT_THAT(spec("'w' float32[1] on (dp=2): tp:P"), HasSubstr("has no axis 'tp'"));
  EXPECT_THAT(spec("'"), HasSubstr("expected a name between quotes"));
}

TEST(ShardSpecErrors, SayWhatWasExpected) {
  const auto error = [](std::vector<std::int64_t> shape, const Placement& placement) {
    return error_text<ConfigError>([&] { (void)spec_of(std::move(shape), placement); });
  };
  EXPECT_EQ(error({8, 6}, {.splits = {{"tq", 0}}}),
            "shard spec 'w' float32[8, 6] on (dp=2, tp=2): tq:S(0): mesh (dp=2, tp=2) has no axis 'tq' (did you mean "
            "'tp'?)");
  EXPECT_THAT(error({8, 6}, {.splits = {{"tp", 2}}}),
              HasSubstr("tp:S(2) splits dimension 2: the tensor has the dimensions 0 to 1"));
  EXPECT_THAT(error({8, 6}, {.splits = {{"tp", -1}}}), HasSubstr("splits dimension -1"));
  EXPECT_THAT(error({8}, {.splits = {{"tp", 0}, {"tp", 0}}}), HasSubstr("axis 'tp' is used twice"));
  EXPECT_THAT(error({8}, {.splits = {{"tp", 0}}, .partial = {"tp"}}), HasSubstr("axis 'tp' is used twice"));
  EXPECT_THAT(error({}, {.splits = {{"tp", 0}}}), HasSubstr("without dimensions cannot be split"));
  EXPECT_THAT(error({8, -1}, {}), HasSubstr("a dimension has size -1"));
  EXPECT_THAT(error({1LL << 40, 1LL << 40}, {}), HasSubstr("do not fit into 63 bits"));
  EXPECT_THAT(error({8}, {.splits = {{"tp", 0, {4, 3, 1}}}}),
              HasSubstr("tp:S(0){4, 3, 1} has 3 sizes: expected 2, one for each rank along 'tp'"));
  EXPECT_THAT(error({8}, {.splits = {{"tp", 0}, {"dp", 0, {1, 1, 6}}}}),
              HasSubstr("expected 2, one for each rank along 'dp', or 4 for the 2 blocks"));
  EXPECT_THAT(error({8}, {.splits = {{"tp", 0, {4, 3}}}}),
              HasSubstr("add up to less than the 8 elements 0 to 8 of dimension 0"));
  EXPECT_THAT(error({8}, {.splits = {{"tp", 0, {9, 9}}}}), HasSubstr("add up to more than the 8"));
  EXPECT_THAT(error({8}, {.splits = {{"tp", 0, {9, -1}}}}), HasSubstr("add up to more than the 8"));
  EXPECT_THAT(error({8}, {.splits = {{"tp", 0, {-1, 9}}}}), HasSubstr("has the size -1"));
  EXPECT_THAT(error({7}, {.splits = {{"tp", 0}, {"dp", 0, {2, 2}}}}),
              HasSubstr("add up to more than the 3 elements 4 to 7 of dimension 0"));
  EXPECT_THAT(error_text<ConfigError>([] { ShardSpec("m", {2}, DataType::boolean, kTwoByTwo, {.partial = {"tp"}}); }),
              HasSubstr("which bool has no sum for"));
}

TEST(ShardSpecErrors, MeshesAreCheckedToo) {
  EXPECT_THAT(error_text<ConfigError>([] {
                (void)MeshShape({{"d p", 2}});
              }),
              HasSubstr("'d p' of an axis may hold letters"));
  EXPECT_THAT(error_text<ConfigError>([] {
                (void)MeshShape({{"a", 1 << 20}, {"b", 1 << 20}});
              }),
              HasSubstr("too large"));
  EXPECT_THAT(error_text<ConfigError>([] { (void)kTwoByTwo.rank_of({0, 2}); }), HasSubstr("no coordinates (0, 2)"));
  EXPECT_THAT(error_text<ConfigError>([] { (void)kTwoByTwo.rank_of({0}); }), HasSubstr("no coordinates (0)"));
}

TEST(ShardSpecProperties, BoxesAreWhatThePlainModelDeals) {
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    RandomSpecs random(seed);
    const MeshShape mesh = random.mesh(12);
    const auto shape = random.shape();
    const ShardSpec spec = spec_of(shape, random.placement(shape, mesh), mesh);
    SCOPED_TRACE(fmt::format("seed {}: {}", seed, spec.text()));
    EXPECT_EQ(ShardSpec::parse(spec.text()), spec);
    EXPECT_TRUE(spec.same_layout(spec));

    std::int64_t first_held = 0;
    for (int rank = 0; rank < mesh.size(); ++rank) {
      EXPECT_EQ(mesh.rank_of(mesh.coordinates_of(rank)), rank);
      const Box box = spec.local_box(rank);
      const auto held = held_indices(shape, mesh, spec.placement(), rank);
      for (std::size_t d = 0; d < shape.size(); ++d) {
        std::vector<std::int64_t> indices(static_cast<std::size_t>(box.shape[d]));
        std::iota(indices.begin(), indices.end(), box.offsets[d]);
        EXPECT_EQ(indices, held[d]) << "rank " << rank << " dimension " << d;
      }
      if (spec.is_first_holder(rank)) first_held += box.numel();
      EXPECT_EQ(spec.ranks_holding(box).empty(), box.empty());
      if (!box.empty()) {
        EXPECT_THAT(spec.ranks_holding(box), Contains(rank));
      }
      std::int64_t elements = 0;
      for (const auto& range : flat_ranges(box, shape)) elements += range.length;
      EXPECT_EQ(elements, box.numel());
    }
    // The first holders' boxes cover the tensor, and no two of them overlap.
    EXPECT_EQ(first_held, spec.numel());
    for (int a = 0; a < mesh.size(); ++a) {
      for (int b = 0; b < a; ++b) {
        const bool both = spec.is_first_holder(a) && spec.is_first_holder(b);
        EXPECT_FALSE(both && intersect(spec.local_box(a), spec.local_box(b)).has_value()) << a << " " << b;
      }
    }
    if (testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace phalanx
