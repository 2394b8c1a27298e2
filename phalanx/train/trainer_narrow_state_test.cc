// Weights and moments of 16 bits in runs of every kind of layout: [training] dtype, and [optimizer] state_dtype,
// master_weights and stochastic_rounding.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>

#include <fmt/format.h>

#include <filesystem>
#include <numeric>
#include <set>

#include "phalanx/base/env.h"
#include "phalanx/base/testing/case_sample.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/config/run_plan.h"
#include "phalanx/train/model/precision.h"
#include "phalanx/train/testing/trainer_test_support.h"

namespace phalanx::train::trainer_narrow_state_test {
namespace {

using Flags = std::vector<std::string>;

Flags operator+(Flags a, const Flags& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

const Flags kNarrowWeights = {"--training.dtype=bfloat16", "--training.mixed_precision_param=bfloat16"};
const Flags kNarrowMoments = {"--optimizer.state_dtype=bfloat16"};
const Flags kNoMasters = {"--optimizer.no-master_weights"};
const Flags kAll = kNarrowWeights + kNarrowMoments + kNoMasters;

class TrainerNarrowStateTest : public TrainerTest {
 protected:
  /// Layouts in which two halves of a batch have the same gradients, added in the same type: they have the same bits.
  static std::vector<Layout> equal_layouts(bool has_narrow_weights) {
    const Flags halves = {"--training.local_batch_size=4"};
    const Flags reduced = has_narrow_weights ? Flags{"--training.mixed_precision_reduce=bfloat16"} : Flags{};
    return {{.name = "one", .keys = halves},
            {.name = "ddp", .ranks = 2, .keys = halves},
            {.name = "zero1", .ranks = 2, .keys = sharded(1) + reduced},
            {.name = "zero2", .ranks = 2, .keys = sharded(2) + reduced},
            {.name = "zero3", .ranks = 2, .keys = sharded(3) + reduced}};
  }
  static std::vector<Layout> other_layouts() {
    return {
        {.name = "zero3_in_float32", .ranks = 2, .keys = sharded(3)},
        {.name = "tp", .ranks = 2, .tp = 2},
        {.name = "zero3_tp", .ranks = 4, .tp = 2, .keys = sharded(3, 2)},
        {.name = "pp", .ranks = 2, .pp = 2},
        {.name = "pp_ddp", .ranks = 4, .pp = 2},
        {.name = "pp_zero3", .ranks = 4, .pp = 2, .keys = sharded(3, 2)},
        {.name = "pp_tp", .ranks = 4, .tp = 2, .pp = 2},
        {.name = "cp", .ranks = 2, .cp = 2},
        {.name = "hsdp", .ranks = 4, .keys = sharded(3, 2) + Flags{"--parallelism.data_parallel_replicate_degree=2"}}};
  }
  static Flags six_steps() {
    return {"--training.steps=6", "--checkpoint.interval=3", "--validation.freq=6", "--lr_scheduler.warmup_steps=0"};
  }
  /// Makes a run's folder that holds only what another one has saved after a step.
  void copy_step(const std::string& from, const std::string& run, int step) const {
    const std::string folder = "/checkpoint/step-" + std::to_string(step);
    std::filesystem::create_directories(path(run) + "/checkpoint");
    std::filesystem::copy(path(from) + folder, path(run) + folder, std::filesystem::copy_options::recursive);
  }
  /// The tensors of a checkpoint, by name.
  std::map<std::string, at::Tensor> tensors_of(const std::string& run, int step) const {
    std::map<std::string, at::Tensor> found;
    for (const NamedTensor& one : state_in(run, step).tensors) found.emplace(one.name, one.tensor);
    return found;
  }
};

TEST_F(TrainerNarrowStateTest, LayoutsWithTheSameGradientsHaveTheSameBits) {
  struct Case {
    std::string name;
    Flags keys;
    bool has_narrow_weights;
  };
  const std::vector<Case> cases = {{"all", kAll, true},
                                   {"to_nearest", kAll + Flags{"--optimizer.no-stochastic_rounding"}, true},
                                   {"masters", kNarrowWeights, true},
                                   {"wide_moments", kNarrowWeights + kNoMasters, true},
                                   {"moments", kNarrowMoments, false}};
  std::map<std::string, Weights> found;
  for (const Case& one : cases) {
    for (const Layout& layout : first_and_sampled(equal_layouts(one.has_narrow_weights), 1)) {
      const std::string run = one.name + "_" + layout.name;
      SCOPED_TRACE(run);
      const Weights weights = train(config_of(layout, run, one.keys + six_steps()), layout.ranks);
      if (layout.name == "one") found[one.name] = weights;
      EXPECT_TRUE(weights == found[one.name]);
      EXPECT_LT(losses(run).back(), losses(run).front() - 0.05);  // it learns
      if (one.name != "all" && one.name != "moments") continue;
      // A run that goes on, in its own layout and from that of one rank.
      for (const std::string& from : std::set<std::string>{run, one.name + "_one"}) {
        const std::string again = run + "_from_" + from;
        copy_step(from, again, 3);
        EXPECT_TRUE(train(config_of(layout, again, one.keys + six_steps()), layout.ranks) == found[one.name]) << from;
      }
    }
  }
  EXPECT_FALSE(found["all"] == found["to_nearest"]);
  EXPECT_FALSE(found["all"] == found["wide_moments"]);
  const Weights other_seed =
      train(config("seed", Flags{"--training.local_batch_size=4", "--debug.seed=2"} + kAll + six_steps()), 1);
  EXPECT_FALSE(other_seed == found["all"]);
}

// Other layouts add in another order. In bfloat16 that changes the third digit of a gradient.
TEST_F(TrainerNarrowStateTest, OtherLayoutsHaveNearlyTheLossesOfOneRank) {
  train(config("float32", six_steps()), 1);
  for (const auto& [name, keys] : {std::pair{std::string("all"), kAll}, {std::string("masters"), kNarrowWeights}}) {
    train(config(name, keys + six_steps()), 1);
    const std::vector<double> expected = losses(name), wide = losses("float32");
    ASSERT_EQ(expected.size(), 6U);
    for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(expected[i], wide[i], 0.01 * wide[i]) << i;
    std::vector<Layout> layouts = other_layouts();
    if (name == "masters") {
      std::erase_if(layouts, [](const Layout& one) { return one.name != "zero3_tp" && one.name != "pp_ddp"; });
    }
    for (const Layout& layout : sampled(layouts, name == "masters" ? 1 : 3)) {
      const std::string run = name + "_" + layout.name;
      SCOPED_TRACE(run);
      const Weights whole = train(config_of(layout, run, keys + six_steps()), layout.ranks);
      const std::vector<double> losses_found = losses(run);
      ASSERT_EQ(losses_found.size(), expected.size());
      for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(losses_found[i], expected[i], 5e-3 * expected[i]);
      copy_step(run, run + "_again", 3);
      EXPECT_TRUE(train(config_of(layout, run + "_again", keys + six_steps()), layout.ranks) == whole);
      copy_step(name, name + "_as_" + layout.name, 3);
      train(config_of(layout, name + "_as_" + layout.name, keys + six_steps()), layout.ranks);
      EXPECT_NEAR(losses(name + "_as_" + layout.name).back(), expected.back(), 5e-3 * expected.back());
    }
  }
}

TEST_F(TrainerNarrowStateTest, TiedMatricesAndExperts) {
  for (const auto& [name, model] :
       {std::pair{std::string("tied"), Flags{"--model.tie_embeddings"}}, {std::string("experts"), mixture()}}) {
    const Flags keys = model + kAll + six_steps();
    train(config(name, keys), 1);
    const std::vector<double> expected = losses(name);
    const std::vector<Layout> layouts = {
        {.name = "pp", .ranks = 2, .pp = 2},
        {.name = "pp_zero3", .ranks = 4, .pp = 2, .keys = sharded(3, 2)},
        {.name = "zero3",
         .ranks = 2,
         .keys = sharded(3) + (name == "experts" ? Flags{"--parallelism.expert_parallel_degree=2"} : Flags{})}};
    for (const Layout& layout : sampled(layouts, 1)) {
      const std::string run = name + "_" + layout.name;
      SCOPED_TRACE(run);
      train(config_of(layout, run, keys), layout.ranks);
      const std::vector<double> found = losses(run);
      ASSERT_EQ(found.size(), expected.size());
      for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(found[i], expected[i], 1e-2 * expected[i]);
    }
  }
}

TEST_F(TrainerNarrowStateTest, CheckpointsHaveTheTypesOfTheState) {
  const Flags one_step = {"--training.steps=1", "--checkpoint.interval=1", "--validation.no-enable"};
  const std::string weight = "model.layers.0.attention.wq.weight", state = "optimizer.layers.0.attention.wq.weight";
  const auto types = [&](const std::string& run, const Flags& keys, int ranks) {
    train(config(run, keys + one_step), ranks);
    std::map<std::string, at::ScalarType> result;
    const CheckpointReader reader(path(run) + "/checkpoint/step-1");
    for (const ManifestFile& file : reader.manifest().files) {
      const safetensors::File shard((reader.folder() / file.name).string());
      for (const std::string& name : {weight, state + ".exp_avg", state + ".exp_avg_sq", state + ".master"}) {
        const auto* info = shard.find(name);
        if (info != nullptr) result[name.substr(name.rfind('.') + 1)] = scalar_type_of(info->dtype);
      }
    }
    return result;
  };
  using Types = std::map<std::string, at::ScalarType>;
  const at::ScalarType narrow = at::kBFloat16, wide = at::kFloat;
  for (const int ranks : {1, 2}) {
    const Flags layout = ranks == 1 ? Flags{} : sharded(3);
    const std::string of = std::to_string(ranks);
    EXPECT_EQ(types("all" + of, kAll + layout, ranks),
              (Types{{"weight", narrow}, {"exp_avg", narrow}, {"exp_avg_sq", narrow}}));
    EXPECT_EQ(types("masters" + of, kNarrowWeights + layout, ranks),
              (Types{{"weight", narrow}, {"exp_avg", wide}, {"exp_avg_sq", wide}, {"master", wide}}));
    EXPECT_EQ(types("moments" + of, kNarrowMoments + layout, ranks),
              (Types{{"weight", wide}, {"exp_avg", narrow}, {"exp_avg_sq", narrow}}));
  }
}

TEST_F(TrainerNarrowStateTest, AnotherTypeIsRefusedUnlessConversionIsAskedFor) {
  const Flags keys = {"--training.steps=4", "--checkpoint.interval=4", "--validation.no-enable"};
  const Flags goes_on = {"--training.steps=5", "--checkpoint.interval=5", "--validation.no-enable"};
  const std::map<std::string, Flags> kinds = {{"float32", {}},
                                              {"moments", kNarrowMoments},
                                              {"masters", kNarrowWeights},
                                              {"wide_moments", kNarrowWeights + kNoMasters},
                                              {"all", kAll}};
  for (const auto& [from, saved] : kinds) train(config(from, saved + keys), 1);
  std::vector<std::pair<std::string, std::string>> ways;
  for (const auto& [from, saved] : kinds) {
    for (const auto& [to, now] : kinds) {
      if (from != to) ways.emplace_back(from, to);
    }
  }
  for (const auto& [from, to] : sampled(ways, 6)) {
    SCOPED_TRACE(from + " to " + to);
    const Flags& now = kinds.at(to);
    const std::string run = from + "_to_" + to;
    copy_step(from, run, 4);
    const std::string text = refusal<CheckpointError>(config(run, now + goes_on));
    EXPECT_THAT(text, HasSubstr("step-4"));
    EXPECT_THAT(text, HasSubstr("convert_dtype"));
    for (const int ranks : {1, 2}) {
      if (ranks == 2 && from != "all" && to != "all") continue;
      const std::string converted = run + std::to_string(ranks);
      copy_step(from, converted, 4);
      const Flags layout = ranks == 1 ? Flags{} : sharded(3);
      train(config(converted, now + layout + goes_on + Flags{"--checkpoint.convert_dtype"}), ranks);
      EXPECT_EQ(result_.step, 5);
      EXPECT_NEAR(result_.loss, 5.6, 0.8);
    }
  }
  // Masters lose nothing on their way to float32, nor float32 weights on theirs to masters.
  const auto masters = tensors_of("masters", 4);
  const Flags stands_still = {"--optimizer.lr=0", "--checkpoint.convert_dtype"};
  copy_step("masters", "widened", 4);
  train(config("widened", goes_on + stands_still), 1);
  const auto widened = tensors_of("widened", 5);
  copy_step("float32", "narrowed", 4);
  train(config("narrowed", kNarrowWeights + goes_on + stands_still), 1);
  const auto wide = tensors_of("float32", 4), narrowed = tensors_of("narrowed", 5);
  int compared = 0;
  for (const auto& [name, tensor] : wide) {
    if (!name.starts_with("model.")) continue;
    const std::string master = "optimizer." + name.substr(6) + ".master";
    EXPECT_TRUE(at::equal(widened.at(name), masters.at(master))) << name;
    EXPECT_TRUE(at::equal(narrowed.at(master), tensor)) << name;
    EXPECT_TRUE(at::equal(narrowed.at(name), tensor.to(at::kBFloat16))) << name;
    ++compared;
  }
  EXPECT_GT(compared, 10);
}

TEST_F(TrainerNarrowStateTest, AnExportIsInTheTypeThatIsAskedFor) {
  for (const std::string type : {"float32", "bfloat16"}) {
    for (const int ranks : {1, 2}) {
      const std::string run = type + std::to_string(ranks);
      const Flags layout = ranks == 1 ? Flags{} : sharded(3);
      train(config(run, kAll + layout + six_steps() +
                            Flags{"--checkpoint.last_save_in_hf", "--checkpoint.export_dtype=" + type}),
            ranks);
      const safetensors::File file(path(run) + "/hf/model.safetensors");
      const auto* info = file.find("model.layers.0.self_attn.o_proj.weight");
      ASSERT_NE(info, nullptr);
      EXPECT_EQ(scalar_type_of(info->dtype), type == "float32" ? at::kFloat : at::kBFloat16);
      const auto* norm = file.find("model.norm.weight");
      ASSERT_NE(norm, nullptr);
      EXPECT_EQ(scalar_type_of(norm->dtype), type == "float32" ? at::kFloat : at::kBFloat16);
    }
  }
}

// `make losses` takes all rows and 200 steps, and prints the table of docs/narrow_state.md.
TEST_F(TrainerNarrowStateTest, LossesAreNearThoseOfFloat32State) {
  const bool is_long = takes_all_cases();
  const std::ptrdiff_t last = is_long ? 20 : 10;
  const auto mean = [&](const std::string& run, const Flags& keys) {
    train(config(run, Flags{is_long ? "--training.steps=200" : "--training.steps=40",
                            "--training.mixed_precision_param=bfloat16", "--validation.no-enable"} +
                          keys),
          1);
    const std::vector<double> values = losses(run);
    return std::accumulate(values.end() - last, values.end(), 0.0) / static_cast<double>(last);
  };
  struct Row {
    std::string name;
    Flags keys;
    bool rounds = true;
  };
  const std::vector<Row> rows = {{"float32 weights, bfloat16 moments", kNarrowMoments},
                                 {"bfloat16 weights, masters, float32 moments", kNarrowWeights, false},
                                 {"bfloat16 weights, masters, bfloat16 moments", kNarrowWeights + kNarrowMoments},
                                 {"bfloat16 weights, float32 moments", kNarrowWeights + kNoMasters},
                                 {"bfloat16 weights, bfloat16 moments", kAll}};
  const double expected = mean("float32", {});
  fmt::print("float32 weights and moments: {:.4f}\n", expected);
  for (const Row& row : sampled(rows, 2)) {
    std::string line = fmt::format("| {} |", row.name);
    for (const bool stochastic : {true, false}) {
      if (!row.rounds && !stochastic) continue;
      const Flags rounding = stochastic ? Flags{} : Flags{"--optimizer.no-stochastic_rounding"};
      const double found = mean(fmt::format("{} {}", row.name, stochastic), row.keys + rounding);
      line += fmt::format(" {:+.2f} % |", 100 * (found / expected - 1));
      // Weights without masters stop where their updates are lost.
      EXPECT_NEAR(found, expected, (stochastic ? 0.01 : 0.5) * expected) << row.name;
    }
    fmt::print("{}\n", line);
  }
}

TEST_F(TrainerNarrowStateTest, TheStartSaysIt) {
  const auto text = [&](const Flags& keys, int ranks) {
    const config::TrainConfig one = config("run", keys);
    return precision_text(one, config::plan_run(one, ranks));
  };
  EXPECT_EQ(text({}, 1), "float32");
  EXPECT_EQ(text(kNarrowMoments, 1), "float32, bfloat16 moments, rounded stochastically");
  EXPECT_EQ(text(kNarrowWeights, 1),
            "bfloat16 weights, gradients summed in bfloat16, float32 master weights, float32 moments");
  EXPECT_EQ(text(kAll + sharded(3) + Flags{"--optimizer.no-stochastic_rounding"}, 2),
            "bfloat16 weights, gradients summed in float32, no master weights, bfloat16 moments, rounded to nearest");
}

}  // namespace
}  // namespace phalanx::train::trainer_narrow_state_test
