// Closed forms: the formulas for given model dimensions. For the memory of real runs see measured_memory_test.cc.
#include "phalanx/plan/memory_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "phalanx/plan/activation_memory.h"
#include "phalanx/schedule/generators.h"

namespace phalanx::plan {
namespace {

using observe::MemoryCategory;

TEST(MemoryModel, PaddingOfTheSmallLlamaIsAtMostFivePercent) {
  for (const std::int64_t shards : {2, 3, 4, 8}) {
    EXPECT_LE(predict_memory({.model = models::llama_flavor("5M"), .shards = shards}).padding, 0.05) << shards;
  }
}

TEST(MemoryModel, PaddingOfLargeLlamasIsAtMostOnePercent) {
  for (const char* flavor : {"llama3_1b", "llama3_8b", "llama3_70b"}) {
    for (const std::int64_t shards : {2, 3, 4, 8, 16, 64}) {
      const TrainingMemory memory = predict_memory({.model = models::llama_flavor(flavor), .shards = shards});
      EXPECT_LE(memory.padding, 0.01) << flavor << " over " << shards;
    }
  }
}

TEST(MemoryModel, StateOfALargeLlamaFollowsTheFormulas) {
  const auto model = models::llama_flavor("llama3_8b");
  const auto p = static_cast<double>(model.parameter_count());
  const auto state = [&](TrainingShape shape) {
    shape.model = model;
    if (shape.shards == 1) {
      shape.batch = 8;  // so many that the rebuilt buckets, at a moment without activations, are not the peak
      shape.seq = 8192;
    }
    return static_cast<double>(predict_memory(shape).peak.state());
  };
  EXPECT_EQ(state({.replicas = 8}), 16 * p);
  EXPECT_NEAR(state({.shards = 8, .zero_stage = 1}), 8 * p + 8 * p / 8, 0.01 * 9 * p);
  EXPECT_NEAR(state({.shards = 8, .zero_stage = 2}), 4 * p + 12 * p / 8, 0.01 * 5.5 * p);
  EXPECT_NEAR(state({.shards = 8, .zero_stage = 3}), 16 * p / 8, 0.01 * 2 * p);
  EXPECT_EQ(state({.replicas = 3, .shards = 8}), state({.shards = 8}));
  const TrainingShape narrow{.weight_bytes = 2, .gather_bytes = 2, .reduce_bytes = 2};
  const auto with = [&](std::int64_t shards, int stage) {
    TrainingShape shape = narrow;
    shape.shards = shards;
    shape.replicas = shards == 1 ? 8 : 1;
    shape.zero_stage = stage;
    return shape;
  };
  EXPECT_EQ(state(with(1, 3)), 16 * p);
  EXPECT_NEAR(state(with(8, 1)), 4 * p + 12 * p / 8, 0.01 * 5.5 * p);
  EXPECT_NEAR(state(with(8, 2)), 2 * p + 14 * p / 8, 0.01 * 3.75 * p);
  EXPECT_NEAR(state(with(8, 3)), 16 * p / 8, 0.01 * 2 * p);
  // SGD has no moments, with momentum one.
  EXPECT_EQ(state({.replicas = 8, .optimizer_copies = 0}), 8 * p);
  EXPECT_EQ(state({.replicas = 8, .optimizer_copies = 1}), 12 * p);
  // Muon: a moment of matrices in blocks, two of what else there is.
  const auto others = static_cast<double>(2 * model.vocab_size * model.dim + (2 * model.n_layers + 1) * model.dim);
  EXPECT_EQ(state({.replicas = 8, .matrix_copies = 1}), 12 * p + 4 * others);
  EXPECT_NEAR(state({.shards = 8, .matrix_copies = 1}), (12 * p + 4 * others) / 8, 0.01 * 1.6 * p);
  EXPECT_EQ(state({.replicas = 8, .matrix_copies = 1, .adamw_params = {"layers.*"}}), 16 * p);
}

TEST(MemoryModel, BuffersAreTwoUnitsOfEachKind) {
  const auto model = models::llama_flavor("llama3_8b");
  const std::int64_t largest = 4 * model.vocab_size * model.dim;  // the embedding; the output with the norm beside it
  const auto buffers = [&](TrainingShape shape) {
    shape.model = model;
    return static_cast<double>(predict_memory(shape).peak[MemoryCategory::buffers]);
  };
  const auto unit = static_cast<double>(largest);
  EXPECT_NEAR(buffers({.shards = 8}), 4 * unit, 0.01 * unit);
  EXPECT_NEAR(buffers({.shards = 8, .reshard_after_forward = false}), 2 * unit, 0.01 * unit);
  EXPECT_NEAR(buffers({.shards = 8, .zero_stage = 2}), 2 * unit, 0.01 * unit);
  EXPECT_EQ(buffers({.shards = 8, .zero_stage = 1}), 0);
  EXPECT_EQ(buffers({.replicas = 8}), 0);
  const auto p = static_cast<double>(model.parameter_count());
  // With accumulation the rows of gradients are accumulated, if there are any; or full gradients are held.
  EXPECT_NEAR(buffers({.accumulates = true, .shards = 8}), 4 * unit, 0.01 * unit);
  EXPECT_NEAR(buffers({.accumulates = true, .reduces_each_microbatch = false, .shards = 8}), 2 * unit + 4 * p,
              0.01 * 4 * p);
  // An asynchronous save copies what a rank writes: weights and moments.
  EXPECT_NEAR(buffers({.replicas = 8, .async_checkpoint = true}), 12 * p / 8, 8);
}

// Full gradients would be 32 GB for the 8B model.
TEST(MemoryModel, AccumulatedGradientsAreAShareOfTheModel) {
  TrainingShape shape{.model = models::llama_flavor("llama3_8b"), .accumulates = true, .shards = 8, .on_device = true};
  const auto p = static_cast<double>(shape.model.parameter_count());
  const auto total = [&] { return static_cast<double>(predict_memory(shape).peak.total()); };
  const double each = total();
  shape.reduces_each_microbatch = false;
  const double largest = 4.0 * static_cast<double>(shape.model.vocab_size * shape.model.dim);
  // Buffers for two units instead of all; the embedding's rows are in flight when a pass ends.
  EXPECT_NEAR(total() - each, 4 * p - 2 * largest - largest / 8, 0.01 * 4 * p);
  // With a reduction in 16 bits the sums are in 32.
  shape.reduces_each_microbatch = true;
  shape.gather_bytes = shape.reduce_bytes = 2;
  EXPECT_NEAR(static_cast<double>(predict_memory(shape).peak[MemoryCategory::gradients]), 4 * p / 8, 0.03 * p);
  shape.zero_stage = 1;
  EXPECT_NEAR(static_cast<double>(predict_memory(shape).peak[MemoryCategory::gradients]), 2 * p, 0.01 * p);
}

TEST(MemoryModel, BucketsLaidOutAnewAreThereTwice) {
  const auto model = models::llama_flavor("5M");
  const std::int64_t bytes = 4 * model.parameter_count();
  const TrainingMemory few = predict_memory({.model = model, .batch = 1, .seq = 8, .replicas = 2});
  EXPECT_EQ(few.peak[MemoryCategory::gradients], 2 * bytes);  // more than the activations of eight tokens
  EXPECT_EQ(few.peak[MemoryCategory::activations], 0);
  const TrainingMemory many = predict_memory({.model = model, .batch = 8, .seq = 256, .replicas = 2});
  EXPECT_EQ(many.peak[MemoryCategory::gradients], bytes);
  // The order from a checkpoint is adopted while the activations are there.
  const TrainingMemory resumed =
      predict_memory({.model = model, .batch = 8, .seq = 256, .replicas = 2, .resumes = true});
  EXPECT_EQ(resumed.peak.total(), many.peak.total() + bytes);
}

TEST(MemoryModel, SharedMemoryIsThatOfWindows) {
  const auto model = models::llama_flavor("5M");
  TrainingShape shape{.model = model, .batch = 8, .seq = 256, .shards = 4, .shares_memory = true};
  const TrainingMemory memory = predict_memory(shape);
  // Shards and units that come and go.
  EXPECT_EQ(memory.peak.shared, memory.peak[MemoryCategory::parameters] + memory.peak[MemoryCategory::buffers]);
  EXPECT_EQ(memory.mapped, 3 * memory.peak.shared);
  shape.shares_memory = false;
  EXPECT_EQ(predict_memory(shape).peak.shared, 0);
  EXPECT_EQ(predict_memory(shape).peak.total(), memory.peak.total());
}

TEST(MemoryModel, ActivationsGrowWithTheTokensAndFallByRecomputing) {
  TrainingShape shape{.model = models::llama_flavor("50M"), .batch = 4, .seq = 512, .replicas = 2};
  const auto activations = [&](std::int64_t batch, std::int64_t recompute_every) {
    TrainingShape other = shape;
    other.batch = batch;
    other.recompute_every = recompute_every;
    return static_cast<double>(predict_memory(other).peak[MemoryCategory::activations]);
  };
  EXPECT_NEAR(activations(8, 0) / activations(4, 0), 2.0, 0.1);
  EXPECT_LT(activations(4, 2), 0.8 * activations(4, 0));
  EXPECT_LT(activations(4, 1), 0.45 * activations(4, 0));
  // The moments: the loss first, then the blocks from the last to the first.
  EXPECT_EQ(activation_memory_timeline(shape).size(), 1U + 8U);
  // Full logits if no fused kernel splits them.
  shape.autocast = true;
  EXPECT_GT(activations(4, 0), static_cast<double>(3 * 4 * 4 * 512 * shape.model.vocab_size));
}

TEST(MemoryModel, LogitsOnAGpuTakeTwoGibibytesAtMost) {
  TrainingShape shape{.model = models::llama_flavor("llama3_8b"), .batch = 16, .seq = 8192, .autocast = true};
  shape.replicas = 8;
  const std::int64_t logits = 2 * shape.batch * shape.seq * shape.model.vocab_size;
  EXPECT_GT(activation_sizes(shape).loss, logits);
  shape.on_device = true;
  const std::int64_t hidden = shape.batch * shape.seq * shape.model.dim;
  const std::int64_t others = 8 * hidden + 2 * shape.model.vocab_size * shape.model.dim;
  EXPECT_LT(activation_sizes(shape).loss, others + (std::int64_t{1} << 31) + 12 * shape.batch * shape.seq);
}

TEST(MemoryModel, OneRankMakesItsGradientsInTheBackwardPass) {
  const auto model = models::llama_flavor("5M");
  const TrainingMemory few = predict_memory({.model = model, .batch = 1, .seq = 8});
  EXPECT_EQ(few.peak[MemoryCategory::gradients], 4 * model.parameter_count());
  const TrainingMemory many = predict_memory({.model = model, .batch = 32, .seq = 256});
  EXPECT_LT(many.peak[MemoryCategory::gradients], 4 * model.parameter_count() / 2);
}

TEST(MemoryModel, ShardsOfGradientsComeInTheBackwardPass) {
  const auto gradients = [](std::int64_t batch, const TrainingShape& shape) {
    TrainingShape other = shape;
    other.model = models::llama_flavor("5M");
    other.batch = batch;
    other.seq = 8;
    other.shards = 4;
    return predict_memory(other).peak[MemoryCategory::gradients];
  };
  const auto shards = static_cast<double>(models::llama_flavor("5M").parameter_count());  // a quarter, in bytes
  for (const int stage : {2, 3}) {
    // With few tokens the peak is at the end of the pass; with many at its beginning, or in the last block's backward.
    EXPECT_NEAR(static_cast<double>(gradients(1, {.zero_stage = stage})), shards, 0.05 * shards) << stage;
    EXPECT_EQ(gradients(1024, {.zero_stage = stage}), 0) << stage;
    EXPECT_GT(gradients(1024, {.zero_stage = stage, .recompute_every = 1}), 0) << stage;
    EXPECT_LT(gradients(1024, {.zero_stage = stage, .recompute_every = 1}), gradients(1, {.zero_stage = stage}))
        << stage;
  }
  EXPECT_EQ(gradients(1024, {.zero_stage = 1}), gradients(1, {.zero_stage = 1}));
}

TEST(MemoryModel, TheExportPutsTheWholeModelOnRankZero) {
  const auto model = models::llama_flavor("5M");
  TrainingShape shape{.model = model, .batch = 1, .seq = 8, .shards = 8};
  const std::int64_t without = predict_memory(shape).peak.total();
  shape.exports_at_end = true;
  const TrainingMemory memory = predict_memory(shape);
  EXPECT_GT(memory.peak.total(), without + 3 * model.parameter_count());
  // The other ranks need memory for the largest parameter at once.
  const std::int64_t largest = 4 * model.vocab_size * model.dim;
  EXPECT_NEAR(static_cast<double>(memory.first_rank_only),
              1.4 * static_cast<double>(4 * model.parameter_count() - largest), 2);  // with gaps in the heap
  EXPECT_GT(memory.total() - memory.first_rank_only, without);
  shape.shards = 1;
  EXPECT_EQ(predict_memory(shape).first_rank_only, 0);
}

TEST(MemoryModel, ValidationInLargeBatchesIsTheMost) {
  TrainingShape shape{.model = models::llama_flavor("5M"), .batch = 1, .seq = 256, .shards = 4};
  const auto activations = [&](std::int64_t batch) {
    shape.validation_batch = batch;
    return predict_memory(shape).peak[MemoryCategory::activations];
  };
  const std::int64_t none = activations(0);
  EXPECT_EQ(activations(-1), none);  // saves less than training on as many
  EXPECT_EQ(activations(1), none);
  // A block's input, the last norm's in- and output and its gradient, in float32; a chunk of logits.
  const std::int64_t tokens = 256 * 256;
  EXPECT_EQ(activations(256), 4 * (4 * tokens * shape.model.dim + 512 * shape.model.vocab_size + 2 * tokens));
}

TEST(MemoryModel, StateOfCutModelsAddsUp) {
  const auto model = models::llama_flavor("5M");
  const std::int64_t p = model.parameter_count(), norms = (2 * model.n_layers + 1) * model.dim;
  const auto state = [](const TrainingMemory& memory) { return memory.peak[MemoryCategory::parameters]; };
  const std::int64_t keys = 2 * model.n_layers * model.n_kv_heads * model.head_dim() * model.dim;  // and values
  ASSERT_EQ(model.n_kv_heads, 2);
  // Every rank has the norms; of four, two have the same key-value head.
  EXPECT_EQ(state(predict_memory({.model = model, .tensor_parallel_size = 2})), 4 * ((p - norms) / 2 + norms));
  EXPECT_EQ(state(predict_memory({.model = model, .tensor_parallel_size = 4})),
            4 * ((p - norms - keys) / 4 + keys / 2 + norms));
  for (const char* name : {"GPipe", "1F1B", "ZBV", "DualPipeV", "Interleaved1F1B"}) {
    TrainingShape shape{.model = model, .batch = 2, .seq = 64};
    shape.pipeline = PipelineShape{schedule::make_schedule({.name = name, .ranks = 2, .micro_batches = 4}), {}};
    shape.pipeline->parts = models::balance_llama(model, shape.pipeline->schedule.stages(), 64);
    const TrainingMemory first = predict_memory_of_stage_rank(shape, 0), last = predict_memory_of_stage_rank(shape, 1);
    EXPECT_EQ(state(first) + state(last), 4 * p) << name;
    EXPECT_EQ(predict_memory(shape).total(), std::max(first.total(), last.total())) << name;
    // All gradients are there at the moment of the peak.
    EXPECT_EQ(first.peak[MemoryCategory::gradients], state(first)) << name;
    EXPECT_EQ(first.peak[MemoryCategory::optimizer], 2 * state(first)) << name;
  }
}

// For sharded stages: gradients are full during a step; for ZeRO-1 as gradients, for the others as buffers beside
// the shards' gradients.
TEST(MemoryModel, StateOfShardedStagesAddsUp) {
  const auto model = models::llama_flavor("5M");
  const auto p = static_cast<double>(model.parameter_count());
  for (const char* name : {"GPipe", "1F1B", "ZBV"}) {
    SCOPED_TRACE(name);
    TrainingShape shape{.model = model, .batch = 1, .seq = 8, .shards = 4};
    shape.pipeline = PipelineShape{schedule::make_schedule({.name = name, .ranks = 2, .micro_batches = 4}), {}};
    shape.pipeline->parts = models::balance_llama(model, shape.pipeline->schedule.stages(), 64);
    const auto rank = [&](std::size_t number) { return predict_memory_of_stage_rank(shape, number); };
    const auto of_both = [&](int stage, bool reshard, MemoryCategory category) {
      shape.zero_stage = stage;
      shape.reshard_after_forward = reshard;
      return static_cast<double>(rank(0).peak[category] + rank(1).peak[category]);
    };
    using enum MemoryCategory;
    const double whole = 4 * p, shards = p, near = 0.05 * p;  // with what rows that are not cut cost
    for (const bool reshard : {false, true}) {
      EXPECT_NEAR(of_both(1, reshard, parameters), whole, near);
      EXPECT_NEAR(of_both(1, reshard, gradients), whole, near);
      EXPECT_NEAR(of_both(1, reshard, optimizer), 2 * shards, near);
      EXPECT_EQ(of_both(1, reshard, buffers), 0);
      EXPECT_NEAR(of_both(2, reshard, parameters), whole, near);
      // At the end of a step a rank has its rows of the averages. On the rank with the loss the peak is before that.
      const std::int64_t one = rank(0).peak[gradients], other = rank(1).peak[gradients];
      EXPECT_EQ(std::min(one, other), 0);
      EXPECT_NEAR(static_cast<double>(std::max(one, other)),
                  static_cast<double>(rank(one > other ? 0 : 1).peak[parameters]) / 4, near);
      EXPECT_NEAR(of_both(2, reshard, buffers), whole, near);
    }
    EXPECT_EQ(of_both(3, false, parameters), of_both(2, true, parameters));
    EXPECT_EQ(of_both(3, false, buffers), of_both(2, true, buffers));
    EXPECT_NEAR(of_both(3, true, parameters), shards, near);
    // Two units of each of two stages; the largest is the embedding's or the output's.
    const auto table = static_cast<double>(4 * model.vocab_size * model.dim);
    if (shape.pipeline->schedule.stages() > 2) continue;
    EXPECT_NEAR(of_both(3, true, buffers), whole + 4 * table, near);
  }
}

// The first and the last stage have tied embeddings; the first stage copies what the last one steps.
TEST(MemoryModel, TiedEmbeddingsOfAPipelineAreSteppedOnce) {
  auto model = models::llama_flavor("5M");
  model.tie_embeddings = true;
  const std::int64_t p = model.parameter_count(), table = model.vocab_size * model.dim;
  using enum MemoryCategory;
  for (const char* name : {"1F1B", "ZBV"}) {  // on two ranks, and on one
    SCOPED_TRACE(name);
    TrainingShape shape{.model = model, .batch = 1, .seq = 8};
    shape.pipeline = PipelineShape{schedule::make_schedule({.name = name, .ranks = 2, .micro_batches = 4}), {}};
    shape.pipeline->parts = models::balance_llama(model, shape.pipeline->schedule.stages(), shape.seq);
    const auto of_both = [&](MemoryCategory category) {
      return predict_memory_of_stage_rank(shape, 0).peak[category] +
             predict_memory_of_stage_rank(shape, 1).peak[category];
    };
    EXPECT_EQ(of_both(parameters), 4 * (p + table));
    EXPECT_EQ(of_both(optimizer), 8 * p);
    // With so few tokens the peak is when the gradients of the copies are summed: each of them, and the sum.
    const std::int64_t added_up = 3 * 4 * table;
    EXPECT_NEAR(static_cast<double>(predict_memory_of_stage_rank(shape, 0).peak[activations]),
                static_cast<double>(added_up), 1e5);
    shape.replicas = 2;
    EXPECT_NEAR(static_cast<double>(predict_memory_of_stage_rank(shape, 0).peak[activations]),
                static_cast<double>(added_up), 1e5);
    shape.replicas = 1;
    shape.shards = 2;
    EXPECT_NEAR(static_cast<double>(of_both(optimizer)), static_cast<double>(4 * p), 0.05 * static_cast<double>(4 * p));
    EXPECT_NEAR(static_cast<double>(predict_memory_of_stage_rank(shape, 0).peak[activations]),
                static_cast<double>(added_up), 1e5);
  }
}

TEST(MemoryModel, BiasesAndNormsOfHeadsCount) {
  models::LlamaConfig model = models::llama_flavor("5M");
  const auto state = [](const TrainingShape& shape) { return predict_memory(shape).peak[MemoryCategory::parameters]; };
  for (const auto family : {models::LlamaFamily::qwen2, models::LlamaFamily::qwen3, models::LlamaFamily::olmo2,
                            models::LlamaFamily::gemma3_text, models::LlamaFamily::gpt_oss}) {
    model.family = family;
    if (model.has_experts()) model.experts = 4, model.experts_per_token = 2, model.activation_limit = 7;
    model.own_head_dim = 48;
    EXPECT_EQ(state({.model = model, .replicas = 2}), 4 * model.parameter_count()) << models::family_name(family);
    const auto p = static_cast<double>(model.parameter_count());
    EXPECT_NEAR(static_cast<double>(state({.model = model, .shards = 2})), 4 * p / 2, 0.05 * 2 * p);
  }
}

models::LlamaConfig of_family(models::LlamaFamily family) {
  models::LlamaConfig model = models::llama_flavor("5M");
  model.family = family;
  if (family == models::LlamaFamily::gpt2) model.n_kv_heads = model.n_heads;
  if (family == models::LlamaFamily::mixtral) {
    model.experts = 4;
    model.experts_per_token = 2;
  }
  return model;
}

// Positions, biases, experts and their gates, in every layout.
TEST(MemoryModel, StateOfGpt2AndMixtralAddsUp) {
  const auto state = [](const TrainingMemory& memory) { return memory.peak[MemoryCategory::parameters]; };
  for (const auto family : {models::LlamaFamily::gpt2, models::LlamaFamily::mixtral}) {
    for (const bool tied : {false, true}) {
      SCOPED_TRACE(models::family_name(family));
      auto model = of_family(family);
      model.tie_embeddings = tied;
      const auto p = static_cast<double>(model.parameter_count());
      EXPECT_EQ(state(predict_memory({.model = model, .replicas = 2})), 4 * model.parameter_count());
      if (!tied) {
        EXPECT_NEAR(static_cast<double>(state(predict_memory({.model = model, .shards = 2}))), 4 * p / 2, 0.05 * 2 * p);
      }
      TrainingShape shape{.model = model, .batch = 2, .seq = 64};
      shape.pipeline = PipelineShape{schedule::make_schedule({.name = "1F1B", .ranks = 2, .micro_batches = 4}), {}};
      shape.pipeline->parts = models::balance_llama(model, 2, 64);
      EXPECT_EQ(state(predict_memory_of_stage_rank(shape, 0)) + state(predict_memory_of_stage_rank(shape, 1)),
                4 * (model.parameter_count() + (tied ? model.vocab_size * model.dim : 0)));
    }
    const auto model = of_family(family);
    const std::int64_t layers = model.n_layers, dim = model.dim;
    const bool gpt2 = model.is_gpt2();
    const std::int64_t whole = gpt2 ? model.max_seq_len * dim + (2 * layers + 1) * 2 * dim + layers * 2 * dim
                                    : (2 * layers + 1) * dim + layers * model.experts * dim;
    EXPECT_EQ(state(predict_memory({.model = model, .tensor_parallel_size = 2})),
              4 * ((model.parameter_count() - whole) / 2 + whole));
    if (!gpt2) continue;
    auto indivisible = model;  // the two tables are whole then
    ++indivisible.vocab_size;
    const std::int64_t tables = 2 * indivisible.vocab_size * dim;
    EXPECT_EQ(state(predict_memory({.model = indivisible, .tensor_parallel_size = 2})),
              4 * ((indivisible.parameter_count() - whole - tables) / 2 + whole + tables));
  }
}

// The memory is that of the micro-batches that a schedule keeps alive: GPipe all, 1F1B at most as many as the stages.
TEST(MemoryModel, ActivationsOfAPipelineFollowItsSchedule) {
  const auto activations = [](const char* name, int micro_batches, std::size_t rank) {
    TrainingShape shape{.model = models::llama_flavor("5M"), .batch = 2, .seq = 512};
    shape.pipeline =
        PipelineShape{schedule::make_schedule({.name = name, .ranks = 2, .micro_batches = micro_batches}), {}};
    shape.pipeline->parts = models::balance_llama(shape.model, shape.pipeline->schedule.stages(), 512);
    return predict_memory_of_stage_rank(shape, rank).peak[MemoryCategory::activations];
  };
  EXPECT_EQ(activations("1F1B", 4, 0), activations("1F1B", 16, 0));
  EXPECT_EQ(activations("1F1B", 2, 0), activations("GPipe", 2, 0));
  const std::int64_t one = activations("GPipe", 4, 0) - activations("GPipe", 3, 0);
  EXPECT_GT(one, 0);
  EXPECT_EQ(activations("GPipe", 10, 0) - activations("GPipe", 3, 0), 7 * one);
  EXPECT_LT(activations("1F1B", 8, 1), activations("1F1B", 8, 0));  // the last stage has one alive
  EXPECT_GT(activations("ZBV", 8, 0), activations("1F1B", 8, 1));
}

}  // namespace
}  // namespace phalanx::plan
