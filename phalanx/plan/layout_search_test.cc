#include "phalanx/plan/layout_search.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <set>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/plan/scenario.h"

namespace phalanx::plan {
namespace {

constexpr std::int64_t kMebibyte = 1 << 20;

TrainingShape small_base(std::int64_t seq = 128) {
  TrainingShape base{.model = models::llama_flavor("5M"), .seq = seq};
  base.on_device = true;
  return base;
}

Devices devices_of(std::int64_t count, std::int64_t bytes, std::int64_t per_node = 0) {
  return {.groups = {{.count = count, .name = "", .bytes = bytes}}, .per_node = per_node > 0 ? per_node : count};
}

SearchOptions search_of(std::int64_t count, std::int64_t bytes, std::int64_t seq = 128) {
  return {
      .base = small_base(seq), .devices = devices_of(count, bytes), .global_batch = 16, .max_batch = 4, .headroom = 0};
}

std::int64_t need_of(const Layout& layout, std::int64_t seq = 128) {
  return predict_memory(apply_layout(small_base(seq), layout)).total();
}

TEST(Layout, HasAName) {
  EXPECT_EQ(name_of({.batch = 3}), "batch=3");
  EXPECT_EQ(name_of({.parallel = {.pp = 2, .dp_replicate = 4, .tp = 2, .sequence_parallel = false},
                     .recompute_every = 1,
                     .schedule = "GPipe"}),
            "pp=2,schedule=GPipe,dp_replicate=4,tp=2,sp=off,ac=full,batch=1");
  EXPECT_EQ(name_of({.parallel = {.dp_shard = 2, .zero_stage = 1}, .recompute_every = 1, .uses_op_sac = true}),
            "dp_shard=2,zero=1,ac=op,batch=1");
  // By default a pipeline's stages stay unsharded for a step, and what is not cut in stages is resharded.
  EXPECT_EQ(name_of({.parallel = {.dp_shard = 2}, .reshard_after_forward = false}),
            "dp_shard=2,zero=3,reshard=never,batch=1");
  EXPECT_EQ(name_of({.parallel = {.pp = 2, .dp_shard = 2}}), "pp=2,dp_shard=2,zero=3,reshard=always,batch=1");
  EXPECT_EQ(name_of({.parallel = {.pp = 2, .dp_shard = 2}, .reshard_after_forward = false}),
            "pp=2,dp_shard=2,zero=3,batch=1");
  EXPECT_EQ(kind_of({}), "one rank");
  EXPECT_EQ(kind_of({.dp_replicate = 4}), "data parallelism");
  EXPECT_EQ(kind_of({.dp_shard = 4, .zero_stage = 2}), "ZeRO-2");
  EXPECT_EQ(kind_of({.pp = 2, .tp = 2}), "pipeline and tensor parallelism");
  EXPECT_EQ(kind_of({.pp = 2, .dp_shard = 2}), "pipeline with sharded stages");
}

TEST(Layout, DecidesTheTypes) {
  TrainingShape base = small_base();
  base.gather_bytes = 2;
  const TrainingShape sharded = apply_layout(base, {.parallel = {.dp_shard = 2}});
  EXPECT_EQ(sharded.gather_bytes, 2);
  EXPECT_FALSE(sharded.autocast);
  const TrainingShape whole = apply_layout(base, {.parallel = {.dp_replicate = 2}});
  EXPECT_EQ(whole.gather_bytes, 4);
  EXPECT_TRUE(whole.autocast);
}

// Rings send (n - 1) / n of a buffer for an all-gather or a reduce-scatter, twice that for an all-reduce.
TEST(StepCommVolume, IsThatOfRings) {
  const TrainingShape base = small_base();
  const std::int64_t bytes = 4 * base.model.parameter_count();
  const auto sent = [&](const Layout& layout, std::int64_t per_node = 8) {
    return predict_comm_volume(apply_layout(base, layout), layout, per_node);
  };
  EXPECT_EQ(sent({}).total(), 0);
  EXPECT_EQ(sent({.parallel = {.dp_replicate = 4}}).intra_node, 2 * bytes * 3 / 4);
  EXPECT_EQ(sent({.parallel = {.dp_replicate = 4}}).inter_node, 0);
  EXPECT_EQ(sent({.parallel = {.dp_shard = 4, .zero_stage = 2}}).total(), 2 * (bytes * 3 / 4));
  // Gradients are reduce-scattered in every pass, or once; if they stay full, always once.
  EXPECT_EQ(sent({.parallel = {.dp_shard = 4}, .passes = 3}).total(), (3 + 2 * 3) * bytes * 3 / 4);
  EXPECT_EQ(sent({.parallel = {.dp_shard = 4}, .passes = 3, .reduces_each_microbatch = false}).total(),
            (1 + 2 * 3) * bytes * 3 / 4);
  EXPECT_EQ(sent({.parallel = {.dp_shard = 4, .zero_stage = 2}, .passes = 3}).total(), (3 + 1) * (bytes * 3 / 4));
  EXPECT_EQ(sent({.parallel = {.dp_shard = 4, .zero_stage = 1}, .passes = 3}).total(), 2 * (bytes * 3 / 4));
  // Four ranks on two nodes: half intra-node, then half of a half inter-node, for each of the two directions.
  EXPECT_EQ(sent({.parallel = {.dp_replicate = 4}}, 2).intra_node, 2 * bytes / 2);
  EXPECT_EQ(sent({.parallel = {.dp_replicate = 4}}, 2).inter_node, 2 * (bytes / 2) / 2);
  // Shards intra-node, replicas inter-node: a shard is half of the model.
  EXPECT_EQ(sent({.parallel = {.dp_replicate = 2, .dp_shard = 2}}, 2).intra_node, 3 * bytes / 2);
  EXPECT_EQ(sent({.parallel = {.dp_replicate = 2, .dp_shard = 2}}, 2).inter_node, 2 * (bytes / 2) / 2);
  // 4 blocks, 8 exchanges each, and 4 of embedding and output.
  const std::int64_t hidden = 4 * 2 * base.seq * base.model.dim;
  EXPECT_EQ(sent({.parallel = {.tp = 2}, .batch = 2}).total(), (4 * 8 + 4) * hidden / 2);
  EXPECT_EQ(sent({.parallel = {.pp = 2}, .batch = 2, .passes = 3}).total(), 2 * 3 * hidden);
  // Context parallelism over 2: keys and values of 4 blocks, once, and their gradients;
  // around a ring twice, and of four pieces three.
  const std::int64_t weights = sent({.parallel = {.dp_replicate = 2}}).total();
  const std::int64_t keys = 4 * 4 * 2 * base.seq * base.model.n_kv_heads * base.model.head_dim();
  EXPECT_EQ(sent({.parallel = {.cp = 2}}).total(), weights + 2 * keys / 2);
  EXPECT_EQ(sent({.parallel = {.cp = 2}, .context_exchange = "ring"}).total(), weights + 3 * keys / 2 * 3 / 4);
  // A sharded stage is averaged once per step, and unsharded once, or for each pass of each micro-batch.
  const auto of_stage = [&](int stage, bool reshard) {
    const Layout layout{.parallel = {.pp = 2, .dp_shard = 2, .zero_stage = stage},
                        .batch = 2,
                        .passes = 3,
                        .reshard_after_forward = reshard};
    return sent(layout).total() - 2 * 3 * hidden;
  };
  const std::int64_t once = of_stage(1, true) / 2;
  EXPECT_GT(once, bytes / 2 / 2);  // half of the fuller stage, which has more than half of the model
  EXPECT_EQ(of_stage(3, false), 2 * once);
  EXPECT_EQ(of_stage(3, true), (1 + 2 * 3) * once);
}

TEST(Scenario, AllFits) {
  const Scenario found = find_scenario(small_base(), devices_of(4, 2048 * kMebibyte), 0.05);
  EXPECT_EQ(found.number, 1);
  EXPECT_EQ(found.methods, "data parallelism, ZeRO");
  EXPECT_EQ(found.whole.total(), need_of({.parallel = {.dp_replicate = 4}}));
}

TEST(Scenario, FitsOnTheLargestOnlyOrOnNone) {
  const std::int64_t whole = need_of({.parallel = {.dp_replicate = 4}, .recompute_every = 1});
  Devices devices = devices_of(2, whole - 1);
  devices.groups.push_back({.count = 2, .name = "", .bytes = whole});
  const Scenario on_largest = find_scenario(small_base(), devices, 0);
  EXPECT_EQ(on_largest.number, 2);
  EXPECT_THAT(on_largest.reason, HasSubstr("only the largest devices have that much"));
  const Scenario on_none = find_scenario(small_base(), devices_of(4, whole - 1), 0);
  EXPECT_EQ(on_none.number, 2);
  EXPECT_THAT(on_none.reason, HasSubstr("no device has that much"));
  EXPECT_EQ(find_scenario(small_base(), devices_of(4, whole), 0).number, 1);
  EXPECT_EQ(find_scenario(small_base(), devices_of(4, whole), 0.01).number, 2);  // of which 1 % stays free
}

TEST(Scenario, OneLayerDoesNotFit) {
  const LayerNeed layer = find_scenario(small_base(), devices_of(4, kMebibyte), 0).layer;
  EXPECT_EQ(layer.name, "output and loss");
  EXPECT_EQ(layer.weights, 4 * (4096 * 256 + 256));
  EXPECT_EQ(find_scenario(small_base(), devices_of(4, layer.total()), 0).number, 2);
  EXPECT_EQ(find_scenario(small_base(), devices_of(4, layer.total() - 1), 0).number, 3);
}

TEST(LayoutSearch, TakesWhatExchangesLeast) {
  const auto found = search_layouts(search_of(4, 8192 * kMebibyte));
  EXPECT_EQ(name_of(recommended(found)->layout), "dp_replicate=4,batch=4");
  EXPECT_THAT(reasons(found, *recommended(found)), IsEmpty());
}

TEST(LayoutSearch, GoesOnAsMemoryShrinks) {
  // Each time one byte less than what the previous layout needs.
  std::vector<std::string> taken;
  std::int64_t bytes = 8192 * kMebibyte;
  SearchOptions options = search_of(4, bytes);
  options.global_batch = 4;
  options.max_batch = 1;
  while (true) {
    options.devices = devices_of(4, bytes);
    const auto found = search_layouts(options);
    const Candidate* const best = recommended(found);
    if (best == nullptr) break;
    for (const Candidate& candidate : found) {
      if (&candidate == best) break;
      EXPECT_GT(candidate.memory.total(), candidate.available) << name_of(candidate.layout);
    }
    taken.push_back(name_of(best->layout));
    bytes = best->memory.total() - 1;
  }
  EXPECT_THAT(std::vector(taken.begin(), taken.begin() + 4),
              ElementsAre("dp_replicate=4,batch=1", "dp_replicate=2,dp_shard=2,zero=1,batch=1",
                          "dp_shard=4,zero=1,batch=1", "dp_replicate=2,dp_shard=2,zero=2,batch=1"));
  EXPECT_THAT(taken, Contains(HasSubstr("ac=")));
  EXPECT_THAT(taken, Contains(HasSubstr("tp=")));
}

TEST(LayoutSearch, TellsWhatComesBeforeAndDoesNotFit) {
  const Layout zero1{.parallel = {.dp_shard = 4, .zero_stage = 1}, .batch = 4};
  SearchOptions options = search_of(4, need_of(zero1, 256), 256);
  options.global_batch = 16;
  const auto found = search_layouts(options);
  ASSERT_EQ(name_of(recommended(found)->layout), "dp_replicate=4,batch=2");  // in two passes
  options.base = small_base();
  options.global_batch = 4;
  options.max_batch = 1;
  options.devices = devices_of(4, need_of({.parallel = {.dp_shard = 4, .zero_stage = 1}}));
  const auto smaller = search_layouts(options);
  EXPECT_THAT(reasons(smaller, *recommended(smaller)),
              ElementsAre(StartsWith("data parallelism: dp_replicate=4,batch=1 needs "),
                          StartsWith("ZeRO-1: dp_replicate=2,dp_shard=2,zero=1,batch=1 needs ")));
}

TEST(LayoutSearch, StagesOfAPipelineMayBeSharded) {
  const auto found = search_layouts(search_of(4, 8192 * kMebibyte));
  std::vector<std::string> names;
  for (const Candidate& candidate : found) {
    const Layout& layout = candidate.layout;
    if (layout.parallel.pp == 1 || layout.parallel.dp_shard == 1 || layout.recompute_every > 0) continue;
    names.push_back(name_of(layout));
    EXPECT_EQ(candidate.memory.total(), need_of(layout)) << names.back();
  }
  EXPECT_THAT(names, ElementsAre("pp=2,dp_shard=2,zero=1,batch=4", "pp=2,dp_shard=2,zero=3,reshard=always,batch=4"));
  // They are reported under a separate name.
  SearchOptions options = search_of(4, found.front().memory.total());
  options.devices = devices_of(4, 1);
  const auto none = search_layouts(options);
  EXPECT_THAT(reasons(none, none.back()), Contains(StartsWith("pipeline with sharded stages: pp=2,")));
}

TrainingShape mixture_base(std::int64_t experts) {
  TrainingShape base = small_base();
  base.model.family = models::LlamaFamily::mixtral;
  base.model.experts = experts;
  base.model.experts_per_token = 2;
  return base;
}

// Weights of experts that are divided among as many ranks as shard stay where they are; rows travel.
TEST(StepCommVolume, OfDividedExpertsIsThatOfTheirRows) {
  const TrainingShape base = mixture_base(8);
  const auto sent = [&](std::int64_t ep, std::int64_t per_node = 8) {
    const Layout layout{.parallel = {.dp_shard = 4, .ep = ep}, .batch = 2, .passes = 3};
    return predict_comm_volume(apply_layout(base, layout), layout, per_node);
  };
  const std::int64_t layers = base.model.n_layers, dim = base.model.dim, ffn = base.model.ffn_hidden;
  const std::int64_t experts = 4 * layers * 8 * 3 * dim * ffn, rows = 4 * 2 * base.seq * 2 * dim;
  EXPECT_EQ(sent(1).total() - sent(4).total(), 3 * 3 * experts * 3 / 4 - 3 * layers * 4 * rows * 3 / 4);
  // Half of them between two ranks that have the same ones.
  EXPECT_EQ(sent(1).total() - sent(2).total(), 3 * 3 * (experts * 3 / 4 - experts / 2 / 2) - 3 * layers * 4 * rows / 2);
  // On nodes of two ranks: rows for a half of the experts stay on the node.
  EXPECT_GE(sent(4, 2).inter_node, 3 * layers * 4 * rows / 2);
}

TEST(LayoutSearch, ExpertsOfAMixtureMayBeDivided) {
  SearchOptions options = search_of(4, 8192 * kMebibyte);
  options.base = mixture_base(6);
  std::set<std::int64_t> degrees;
  const auto found = search_layouts(options);
  for (const Candidate& candidate : found) {
    const ParallelPlan& plan = candidate.layout.parallel;
    degrees.insert(plan.ep);
    if (plan.ep == 1) continue;
    EXPECT_EQ(plan.dp_shard % plan.ep, 0);
    Layout whole = candidate.layout;
    whole.parallel.ep = 1;
    EXPECT_LT(candidate.memory.total(), evaluate(options, whole).memory.total()) << name_of(candidate.layout);
  }
  EXPECT_THAT(degrees, ElementsAre(1, 2));  // 4 does not divide 6 experts
  // Where nothing is cut and nothing computed again, the last layout that fits divides them.
  std::optional<Candidate> least;
  for (const Candidate& one : found) {
    const Layout& layout = one.layout;
    if (layout.parallel.tp * layout.parallel.pp > 1 || layout.recompute_every > 0) continue;
    if (!least || one.memory.total() < least->memory.total()) least = one;
  }
  EXPECT_THAT(name_of(least->layout), HasSubstr("ep=2"));
  EXPECT_EQ(kind_of({.dp_shard = 4, .ep = 2}), "ZeRO-3, experts divided");
}

TEST(LayoutSearch, NoTensorGroupSplitsABlockOfNf4) {
  SearchOptions options = search_of(4, 8192 * kMebibyte);
  options.base.model.ffn_hidden = 704;  // 11 blocks
  for (const auto& [type, degrees] : {std::pair{"bfloat16", std::set<std::int64_t>{1, 2, 4}}, {"nf4", {1}}}) {
    options.base.lora = {.rank = 4, .base_dtype = type};
    std::set<std::int64_t> found;
    for (const Candidate& candidate : search_layouts(options)) found.insert(candidate.layout.parallel.tp);
    EXPECT_EQ(found, degrees) << type;
  }
}

TEST(LayoutSearch, TensorGroupsStayOnAMachine) {
  SearchOptions options = search_of(8, 8192 * kMebibyte);
  options.devices.per_node = 2;
  for (const Candidate& candidate : search_layouts(options)) EXPECT_LE(candidate.layout.parallel.tp, 2);
}

TEST(LayoutSearch, DevicesMayDiffer) {
  // Only the two large devices, if the small ones hold nothing.
  SearchOptions options = search_of(2, 8192 * kMebibyte);
  options.devices.groups.insert(options.devices.groups.begin(), {.count = 2, .name = "", .bytes = kMebibyte});
  options.devices.per_node = 4;
  const auto found = search_layouts(options);
  ASSERT_NE(recommended(found), nullptr);
  EXPECT_EQ(recommended(found)->devices, 2);
  EXPECT_EQ(name_of(recommended(found)->layout), "dp_replicate=2,batch=4");
  // A pipeline's stages are compared with their own devices.
  const Layout pipeline{.parallel = {.pp = 2}, .batch = 1, .passes = 16};
  const TrainingShape shape = apply_layout(small_base(), pipeline);
  const std::int64_t first = predict_memory_of_stage_rank(shape, 0).total();
  const std::int64_t second = predict_memory_of_stage_rank(shape, 1).total();
  ASSERT_NE(first, second);
  options.devices = {.groups = {{.count = 1, .name = "", .bytes = first}, {.count = 1, .name = "", .bytes = second}},
                     .per_node = 2};
  options.max_batch = 1;
  const auto is_pipeline = [](const Candidate& one) {
    return one.devices == 2 && name_of(one.layout) == "pp=2,batch=1";
  };
  const auto on_unlike = search_layouts(options);
  const auto pipelined = std::ranges::find_if(on_unlike, is_pipeline);
  ASSERT_NE(pipelined, on_unlike.end());
  EXPECT_TRUE(pipelined->fits());
  std::swap(options.devices.groups[0], options.devices.groups[1]);
  const auto swapped = search_layouts(options);
  EXPECT_FALSE(std::ranges::find_if(swapped, is_pipeline)->fits());
}

TEST(LayoutSearch, OneLayoutIsEvaluatedAsTheSearchDoes) {
  const SearchOptions options = search_of(4, 8192 * kMebibyte);
  for (const Candidate& found : search_layouts(options)) {
    const Candidate one = evaluate(options, found.layout);
    EXPECT_EQ(one.memory.total(), found.memory.total()) << name_of(found.layout);
    EXPECT_EQ(one.comm_volume.weighted(), found.comm_volume.weighted()) << name_of(found.layout);
    EXPECT_EQ(one.devices, 4);
  }
}

TEST(LayoutSearch, OneLayoutTakesTheFirstDevices) {
  SearchOptions options = search_of(2, 8192 * kMebibyte);
  options.devices.groups.push_back({.count = 2, .name = "", .bytes = 2048 * kMebibyte});
  options.headroom = 0.5;
  EXPECT_EQ(evaluate(options, {.parallel = {.dp_replicate = 2}}).available, 4096 * kMebibyte);
  EXPECT_EQ(evaluate(options, {.parallel = {.dp_replicate = 2}}).devices, 2);
  EXPECT_EQ(evaluate(options, {.parallel = {.dp_shard = 4}}).available, 1024 * kMebibyte);
  EXPECT_EQ(evaluate(options, {.parallel = {.pp = 2}, .passes = 2}).devices, 2);
  EXPECT_THROW(evaluate(options, {.parallel = {.pp = 2}, .passes = 1}), ConfigError);  // too few for its schedule
}

TEST(LayoutSearch, ABatchThatNobodyCanShareIsRefused) {
  SearchOptions options = search_of(7, 8192 * kMebibyte);
  options.devices.per_node = 1;
  options.base.model.n_layers = 4;
  try {
    search_layouts(options);
    ADD_FAILURE();
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("16 sequences a step cannot be shared out over 7 devices"));
    EXPECT_THAT(error.what(), HasSubstr("nearest that does: 21"));
  }
}

}  // namespace
}  // namespace phalanx::plan
