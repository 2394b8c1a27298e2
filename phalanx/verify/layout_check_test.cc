// Layouts are compared with one rank, and no correct layout is found wrong. For wrong ones see
// layout_mutations_test.cc.
#include "phalanx/verify/layout_check.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/roll.h>
#include <ATen/ops/zeros_like.h>

#include <c10/core/GradMode.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <mutex>
#include <set>

#include "phalanx/base/testing/case_sample.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/data/token_file_writer.h"
#include "phalanx/nn/linear.h"
#include "phalanx/parallel/end_of_backward.h"
#include "phalanx/train/testing/trainer_test_support.h"
#include "phalanx/verify/layout_side.h"

namespace phalanx::verify {
namespace {

TEST(TensorDifference, SaysHowFarAndWhere) {
  const at::Tensor expected = at::arange(6, at::TensorOptions(at::kFloat)).view({2, 3});
  at::Tensor found = expected.clone();
  EXPECT_EQ(difference_of(found, expected, 1).relative, 0);
  found[1][0] += 0.5;
  const TensorDifference d = difference_of(found, expected, 5, {10, 20});
  EXPECT_DOUBLE_EQ(d.relative, 0.1);
  EXPECT_EQ(d.index, (std::vector<std::int64_t>{11, 20}));
  EXPECT_DOUBLE_EQ(d.found, 3.5);
  EXPECT_DOUBLE_EQ(d.expected, 3);
  EXPECT_EQ(d.ulps, 1 << 21);  // of 2^23 numbers from 2 to 4
  found[0][1] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(difference_of(found, expected, 5).relative, std::numeric_limits<double>::infinity());
  EXPECT_EQ(difference_of(found, expected, 5).index, (std::vector<std::int64_t>{0, 1}));
  EXPECT_EQ(difference_of(expected, at::zeros_like(expected), 0).relative, std::numeric_limits<double>::infinity());
}

TEST(TensorDifference, CountsTheNumbersBetween) {
  EXPECT_EQ(ulps_between(1, 1), 0);
  EXPECT_EQ(ulps_between(0.0F, -0.0F), 0);
  EXPECT_EQ(ulps_between(1, std::nextafter(1.0F, 2.0F)), 1);
  const float least = std::numeric_limits<float>::denorm_min();
  EXPECT_EQ(ulps_between(-least, least), 2);
  EXPECT_EQ(ulps_between(std::numeric_limits<float>::quiet_NaN(), 0), std::numeric_limits<std::int64_t>::max());
}

class LayoutCheckTest : public train::TrainerTest {
 protected:
  struct Layout {
    std::string name;
    int ranks = 2;
    std::vector<std::string> keys = {};
  };
  static std::vector<std::string> degrees(int replicas, int shards, int stage = 3) {
    return {"--parallelism.data_parallel_replicate_degree=" + std::to_string(replicas),
            "--parallelism.data_parallel_shard_degree=" + std::to_string(shards),
            "--parallelism.zero_stage=" + std::to_string(stage)};
  }
  static std::vector<std::string> tensor(int degree, std::vector<std::string> more = {}) {
    more.push_back("--parallelism.tensor_parallel_degree=" + std::to_string(degree));
    return more;
  }
  static std::vector<std::string> pipeline(int degree, std::vector<std::string> more = {}) {
    more.push_back("--parallelism.pipeline_parallel_degree=" + std::to_string(degree));
    return more;
  }
  static std::vector<Layout> layouts() {
    return {{"ddp_2", 2},
            {"ddp_4", 4},
            {"zero1_2", 2, degrees(1, 2, 1)},
            {"zero2_2", 2, degrees(1, 2, 2)},
            {"zero3_2", 2, degrees(1, 2, 3)},
            {"hsdp_2x2", 4, degrees(2, 2, 3)},
            {"tp_2", 2, tensor(2)},
            {"tp_2_whole_tokens", 2, tensor(2, {"--parallelism.no-enable_sequence_parallel"})},
            {"tp_4_tied", 4, tensor(4, {"--model.tie_embeddings"})},
            {"ddp_2_tp_2", 4, tensor(2)},
            {"zero3_2_tp_2", 4, tensor(2, degrees(1, 2, 3))},
            {"pp_2", 2, pipeline(2)},
            {"pp_2_zbv", 2, pipeline(2, {"--parallelism.pipeline_parallel_schedule=ZBV"})},
            {"pp_2_ddp_2_zb1p", 4, pipeline(2, {"--parallelism.pipeline_parallel_schedule=ZB1P"})},
            {"pp_2_tp_2", 4, tensor(2, pipeline(2))},
            {"pp_2_zero3_2", 4, pipeline(2, degrees(1, 2, 3))},
            {"pp_2_zero2_2_zbv_tied", 4,
             pipeline(2, {"--parallelism.data_parallel_shard_degree=2", "--parallelism.zero_stage=2",
                          "--parallelism.pipeline_parallel_schedule=ZBV", "--model.tie_embeddings"})}};
  }

  config::TrainConfig config_of(const Layout& layout) const {
    std::vector<std::string> keys = {"--model.flavor=debug",           "--training.dataset_path=" + path("tokens.bin"),
                                     "--training.seq_len=32",          "--training.local_batch_size=1",
                                     "--training.global_batch_size=8", "--training.steps=10",
                                     "--lr_scheduler.warmup_steps=2",  "--optimizer.lr=3e-3"};
    keys.insert(keys.end(), layout.keys.begin(), layout.keys.end());
    return config::parse_config("", "test", keys);
  }

  Layout packed(Layout layout) const {
    layout.keys.insert(layout.keys.begin(), {"--training.dataset_path=" + path("documents"),
                                             "--training.attn_mask_type=block_causal", "--training.packing=best_fit"});
    return layout;
  }

  /// Rank 0's result; all ranks must agree.
  LayoutCheck check(const Layout& layout, std::int64_t steps) const {
    LayoutCheck result;
    std::mutex mutex;
    std::vector<std::string> texts;
    run_local_ranks(layout.ranks, [&](const std::shared_ptr<Communicator>& world) {
      LayoutCheck mine = check_layout(config_of(layout), {.world = world}, {.steps = steps});
      const std::lock_guard lock(mutex);
      texts.push_back(mine.finding ? mine.finding->text() : "");
      if (world->rank() == 0) result = std::move(mine);
    });
    for (const std::string& text : texts) EXPECT_EQ(text, texts[0]);
    return result;
  }
};

/// The names of the parameters that differ at all.
std::vector<std::string> names_of_different(const std::vector<ParameterCheck>& checks) {
  std::vector<std::string> names;
  for (const ParameterCheck& check : checks) {
    if (check.difference.relative > 0) names.push_back(check.name);
  }
  return names;
}

TEST_F(LayoutCheckTest, RaisesNoAlarmWhereAllIsRight) {
  for (const Layout& layout : sampled(layouts(), 8)) {
    const LayoutCheck found = check(layout, 5);
    EXPECT_FALSE(found.finding) << layout.name << ": " << found.finding->text();
    ASSERT_EQ(found.steps.size(), 5U);
    for (const StepCheck& step : found.steps) {
      // The same gradients give the same bits in every layout.
      EXPECT_THAT(names_of_different(step.updates), IsEmpty()) << layout.name;
      EXPECT_GT(step.expected_loss, 1);
      EXPECT_EQ(step.gradients.size(), step.updates.size());
      EXPECT_GT(step.gradients.size(), 10U);
    }
  }
}

// Weights and moments of 16 bits, rounded stochastically.
TEST_F(LayoutCheckTest, StateOf16BitsIsThatOfOneRank) {
  const std::set<std::string> names = {"ddp_2", "zero1_2", "zero2_2",      "zero3_2",
                                       "tp_2",  "pp_2",    "zero3_2_tp_2", "pp_2_zero3_2"};
  std::vector<Layout> some = layouts();
  std::erase_if(some, [&](const Layout& layout) { return !names.contains(layout.name); });
  ASSERT_EQ(some.size(), names.size());
  for (Layout layout : sampled(some, 3)) {
    layout.keys.insert(layout.keys.end(), {"--training.dtype=bfloat16", "--training.mixed_precision_param=bfloat16",
                                           "--optimizer.no-master_weights", "--optimizer.state_dtype=bfloat16"});
    const LayoutCheck found = check(layout, 3);
    EXPECT_FALSE(found.finding) << layout.name << ": " << found.finding->text();
    for (const StepCheck& step : found.steps) {
      EXPECT_THAT(names_of_different(step.updates), IsEmpty()) << layout.name;
    }
  }
}

// Documents kept apart and packed, in every layout: losses, gradients, and no token seen by another document.
TEST_F(LayoutCheckTest, PackedDocumentsAreThoseOfOneRank) {
  write_documents();
  const std::set<std::string> of_bfloat16 = {"ddp_2", "ddp_4", "tp_2", "pp_2"};
  std::vector<Layout> some = layouts();
  std::erase_if(some, [&](const Layout& layout) { return !of_bfloat16.contains(layout.name); });
  ASSERT_EQ(some.size(), of_bfloat16.size());
  const auto expect_right = [&](const Layout& layout, const std::string& type) {
    Layout typed = packed(layout);
    typed.keys.push_back("--training.mixed_precision_param=" + type);
    typed.keys.emplace_back("--activation_checkpoint.mode=selective");
    const LayoutCheck found = check(typed, 2);
    EXPECT_FALSE(found.finding) << layout.name << ", " << type << ": " << found.finding->text();
    EXPECT_GE(found.documents_compared.value_or(0), 2) << layout.name;
  };
  for (const Layout& layout : sampled(layouts(), 5)) expect_right(layout, "float32");
  for (const Layout& layout : sampled(some, 1)) expect_right(layout, "bfloat16");
}

// Linear layers in float8: every layout has those of one rank, and a wrong one is still found.
TEST_F(LayoutCheckTest, LayersInFloat8AreThoseOfOneRank) {
  write_documents();
  const std::vector<Layout> some = {{"one", 1},
                                    {"ddp_2", 2},
                                    {"zero3_2", 2, degrees(1, 2, 3)},
                                    {"tp_2", 2, tensor(2)},
                                    {"zero3_tp", 4, tensor(2, degrees(1, 2))},
                                    {"pp_2", 2, pipeline(2)}};
  for (const std::string recipe : {"tensorwise", "rowwise"}) {
    for (const Layout& layout : sampled(some, 2)) {
      SCOPED_TRACE(layout.name + " " + recipe);
      Layout typed = packed(layout);
      typed.keys.insert(typed.keys.end(),
                        {"--model.ffn_hidden=192", "--training.mixed_precision_param=bfloat16",
                         "--model.converters=quantize.linear.float8", "--quantize.linear.float8.recipe_name=" + recipe,
                         "--activation_checkpoint.mode=selective"});
      const LayoutCheck found = check(typed, 2);
      EXPECT_FALSE(found.finding) << found.finding->text();
      EXPECT_GE(found.documents_compared.value_or(0), 2);
      const bool is_said = std::ranges::any_of(
          found.notes, [](const std::string& note) { return note.find("looked at without float8") != note.npos; });
      EXPECT_EQ(is_said, recipe == "tensorwise");
      const auto text = tolerance_text(config_of(typed), layout.ranks, found.tolerance);
      EXPECT_THAT(text, HasSubstr(layout.ranks == 1 ? "the same bits" : "four times what rounding to float8 changes"));
    }
  }
}

// A row for each document: there is nothing to compare, which is said.
TEST_F(LayoutCheckTest, ThatNoDocumentsWereComparedIsSaid) {
  data::TokenFileWriter writer(path("documents"), {.vocab_size = 512});
  for (int i = 0; i < 20; ++i) writer.add_document(std::vector<std::int32_t>(33, i));
  writer.finish();
  const LayoutCheck found = check(packed({"ddp_2", 2}), 1);
  EXPECT_FALSE(found.finding);
  EXPECT_EQ(found.documents_compared, 0);
  EXPECT_THAT(found.notes, Contains(HasSubstr("was not looked at")));
}

// A layer that adds a little of the token before: across the boundary, too.
TEST_F(LayoutCheckTest, ADocumentThatSeesAnotherIsFound) {
  write_documents();
  for (const Layout& layout : {Layout{"ddp_2", 2}, Layout{"tp_2", 2, tensor(2)}, Layout{"pp_2", 2, pipeline(2)}}) {
    const config::TrainConfig config = config_of(packed(layout));
    run_local_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
      const auto leak = [](LayoutSide& side) {
        for (nn::Module* const module : side.modules()) {
          for (const auto& layer : dynamic_cast<models::Llama&>(*module).layers) {
            layer->add_post_forward_hook(
                [](nn::Module&, const at::Tensor& out) { return out + at::roll(out, 1, out.dim() - 2) * 1e-3; });
          }
        }
      };
      const LayoutCheck found = check_layout(config, {.world = world, .prepare = leak}, {.steps = 1});
      ASSERT_TRUE(found.finding) << layout.name;
      EXPECT_EQ(found.finding->what, "loss of another document");
      EXPECT_THAT(found.finding->text(), HasSubstr("crosses the boundary between two documents"));
    });
  }
}

// The gradient of GPT-2's key biases is zero in theory: a softmax does not see what is added to all of its inputs.
TEST_F(LayoutCheckTest, AGradientThatIsNothingButRoundingRaisesNoAlarm) {
  const std::vector<std::string> gpt2 = {"--model.name=gpt2"};
  for (const Layout& layout : {Layout{"ddp_2", 2, gpt2}, Layout{"tp_2", 2, tensor(2, gpt2)},
                               Layout{"pp_2_tp_2", 4, pipeline(2, tensor(2, gpt2))}}) {
    const LayoutCheck found = check(layout, 3);
    EXPECT_FALSE(found.finding) << layout.name << ": " << found.finding->text();
  }
}

TEST_F(LayoutCheckTest, AGradientThatShouldBeZeroIsComparedWithTheModels) {
  const std::string name = "layers.0.attention.wk.bias";
  // The gradient of this model has a norm of about 2.
  for (const auto& [wrong_by, is_found] : {std::pair(1e-11, false), {1e-6, true}, {1e-3, true}}) {
    LayoutCheck result;
    run_local_ranks(2, [&, wrong_by = wrong_by](const std::shared_ptr<Communicator>& world) {
      LayoutCheckContext context{.world = world};
      context.observer = [&](std::int64_t step, const std::vector<NamedTensor>& parameters) {
        if (step == 0) return;
        for (const NamedTensor& p : parameters) {
          if (p.name == name) p.tensor.grad().add_(wrong_by);
        }
      };
      const LayoutCheck found =
          check_layout(config_of({"tp_2", 2, tensor(2, {"--model.name=gpt2"})}), context, {.steps = 1});
      if (world->rank() == 0) result = found;
    });
    ASSERT_EQ(result.finding.has_value(), is_found) << wrong_by;
    if (!is_found) continue;
    EXPECT_EQ(result.finding->parameter, name);
  }
}

// How far two runs diverge depends on the learning rate and the model; a layout is checked one step at a time.
TEST_F(LayoutCheckTest, NoLearningRateRaisesAnAlarm) {
  const auto in = [](const std::string& type, const std::string& lr, std::vector<std::string> more) {
    more.push_back("--training.mixed_precision_param=" + type);
    more.push_back("--optimizer.lr=" + lr);
    more.emplace_back("--training.global_batch_size=4");
    more.emplace_back("--training.local_batch_size=2");
    return more;
  };
  const auto expect_none = [&](Layout layout, const std::string& type, const std::string& lr) {
    layout.keys = in(type, lr, layout.keys);
    const LayoutCheck found = check(layout, 3);
    EXPECT_FALSE(found.finding) << layout.name << ", " << type << ", lr " << lr << ": " << found.finding->text();
  };
  const std::vector<std::pair<std::string, std::string>> rates = {
      {"bfloat16", "1e-5"}, {"bfloat16", "1e-2"}, {"bfloat16", "1e-1"}, {"bfloat16", "1"},
      {"float16", "1e-1"},  {"float16", "1"},     {"float32", "1e-1"}};
  for (const auto& [type, lr] : sampled(rates, 3)) {
    expect_none({"tp", 2, tensor(2)}, type, lr);
    expect_none({"zero3", 2, degrees(1, 2)}, type, lr);
    expect_none({"zero3 tp", 4, tensor(2, degrees(1, 2))}, type, lr);
  }
  expect_none({"pp zero2", 4, pipeline(2, degrees(1, 2, 2))}, "bfloat16", "1");
  expect_none({"ddp", 2}, "bfloat16", "1e-1");
  Layout sgd{"zero2, SGD", 2, degrees(1, 2, 2)};
  sgd.keys.insert(sgd.keys.end(), {"--optimizer.name=SGD", "--optimizer.momentum=0.9"});
  expect_none(sgd, "bfloat16", "1e-1");
}

// With so much rounding even a gradient of zeros would pass: this is reported.
TEST_F(LayoutCheckTest, AStepThatRoundingDecidesIsSaidToSayLittle) {
  const auto notes_at = [&](const std::string& lr) {
    const Layout tp{"tp", 2, tensor(2, {"--training.mixed_precision_param=bfloat16", "--optimizer.lr=" + lr})};
    const LayoutCheck found = check(tp, 5);
    EXPECT_FALSE(found.finding) << found.finding->text();
    return found.notes;
  };
  EXPECT_THAT(notes_at("1e-3"), IsEmpty());
  EXPECT_THAT(
      notes_at("1"),
      Contains(ContainsRegex("step [2-5]: rounding to 16 bits alone changes the gradient of '[a-z0-9_.]+' on one "
                             "rank by [0-9.e-]+ of its norm, so this step says little of it: a lower .optimizer. lr")));
}

// Only one rank updates a weight wrongly, after correct gradients.
TEST_F(LayoutCheckTest, AWrongUpdateIsFoundAtEveryLearningRate) {
  const std::vector<Layout> some = {{"ddp", 4},
                                    {"zero3 tp", 4, tensor(2, degrees(1, 2))},
                                    {"pp tp", 4, tensor(2, pipeline(2))},
                                    {"pp zero2", 4, pipeline(2, degrees(1, 2, 2))}};
  for (const Layout& layout : sampled(some, 2)) {
    for (const std::string type : {"bfloat16", "float32"}) {
      for (const std::string lr : {"1e-4", "1"}) {
        Layout one = layout;
        one.keys.insert(one.keys.end(), {"--training.mixed_precision_param=" + type, "--optimizer.lr=" + lr});
        LayoutCheck result;
        run_local_ranks(4, [&](const std::shared_ptr<Communicator>& world) {
          const auto observer = [&](std::int64_t step, const std::vector<NamedTensor>& parameters) {
            if (step != 2 || world->rank() != 3) return;
            const at::NoGradGuard no_grad;
            for (const NamedTensor& p : parameters) {
              if (p.name == "layers.1.feed_forward.w2.weight") p.tensor.add_(std::stod(lr));
            }
          };
          LayoutCheck mine = check_layout(config_of(one), {.world = world, .observer = observer}, {.steps = 3});
          if (world->rank() == 0) result = std::move(mine);
        });
        ASSERT_TRUE(result.finding) << layout.name << ", " << type << ", lr " << lr;
        EXPECT_EQ(result.finding->what, "update") << result.finding->text();
        EXPECT_EQ(result.finding->step, 2);
        EXPECT_EQ(result.finding->rank, 3);
        EXPECT_EQ(result.finding->parameter, "layers.1.feed_forward.w2.weight") << result.finding->text();
      }
    }
  }
}

// What the layout's optimizer does differently is far below the size of a weight.
TEST_F(LayoutCheckTest, AWrongUpdateThatIsSmallBesideItsWeightIsFound) {
  struct Case {
    std::string optimizer, lr;
    std::string wrong;  // a key of the layout's optimizer alone
  };
  for (const Case& one : {Case{"AdamW", "1e-4", "--optimizer.weight_decay=0.05"},
                          Case{"AdamW", "1e-7", R"(--optimizer.groups=[{params = ["*.wo.*"], lr_factor = 1.01}])"},
                          Case{"SGD", "1e-6", "--optimizer.weight_decay=0.05"},
                          Case{"SGD", "1e-6", R"(--optimizer.groups=[{params = ["*.wo.*"], lr_factor = 2}])"},
                          Case{"Lion", "1e-6", "--optimizer.weight_decay=0.05"},
                          Case{"Lion", "1e-6", R"(--optimizer.groups=[{params = ["*.wo.*"], lr_factor = 1.01}])"},
                          Case{"Muon", "1e-6", "--muon.weight_decay=0.05"}}) {
    for (const Layout& layout : {Layout{"ddp", 2}, Layout{"zero3", 2, degrees(1, 2)}, Layout{"pp", 2, pipeline(2)}}) {
      Layout typed = layout;
      typed.keys.insert(typed.keys.end(), {"--optimizer.name=" + one.optimizer, "--optimizer.lr=" + one.lr});
      Layout wrong = typed;
      wrong.keys.push_back(one.wrong);
      LayoutCheck result;
      run_local_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
        const auto other_optimizer = [&](LayoutSide& side) {
          side.optimizer_step = std::make_unique<train::OptimizerStep>(
              config_of(wrong), side.model->parameters(), side.model->grad_norm_group(), side.model->frozen(),
              side.model->mesh().world().get());
        };
        LayoutCheck mine = check_layout(config_of(typed), {.world = world, .prepare = other_optimizer}, {.steps = 1});
        if (world->rank() == 0) result = std::move(mine);
      });
      ASSERT_TRUE(result.finding) << one.optimizer << ", " << one.wrong << ", " << layout.name;
      EXPECT_EQ(result.finding->what, "update") << result.finding->text();
    }
  }
}

/// Muon orthogonalises whole matrices: the ranks put them together.
TEST_F(LayoutCheckTest, MuonUpdatesAsOnOneRankInEveryLayout) {
  std::vector<Layout> all = layouts();
  all.push_back({"zero3_2_offloaded", 2, degrees(1, 2, 3)});
  all.back().keys.emplace_back("--training.enable_cpu_offload");
  for (const Layout& layout : sampled(all, 6)) {
    Layout muon = layout;
    muon.keys.insert(muon.keys.end(), {"--optimizer.name=Muon", "--muon.lr=0.02", "--optimizer.no_decay=*norm*",
                                       R"(--optimizer.groups=[{params = ["*.w[13].*"], lr_factor = 0.5}])"});
    const LayoutCheck found = check(muon, 3);
    EXPECT_FALSE(found.finding) << layout.name << ": " << found.finding->text();
    for (const StepCheck& step : found.steps) {
      EXPECT_THAT(names_of_different(step.updates), IsEmpty()) << layout.name;
    }
  }
}

// A run skips a step that overflows and halves the scale. The check names each halving.
TEST_F(LayoutCheckTest, AnOverflowOfFloat16IsANoteWithStepParameterAndScale) {
  Layout layout{"zero3 tp", 4, tensor(2, degrees(1, 2))};
  layout.keys.insert(layout.keys.end(), {"--training.mixed_precision_param=float16", "--training.local_batch_size=4",
                                         "--training.initial_loss_scale=16777216"});
  const LayoutCheck found = check(layout, 2);
  EXPECT_FALSE(found.finding) << found.finding->text();
  ASSERT_THAT(found.notes, Not(IsEmpty()));
  std::int64_t scale = 16777216;
  for (const std::string& note : found.notes) {
    EXPECT_THAT(note,
                ContainsRegex("step [12]: float16 overflow: the gradient of '[a-z0-9_.]+' on (one rank|rank 0) is not "
                              "finite with the loss scaled by " +
                              std::to_string(scale)));
    EXPECT_THAT(note, HasSubstr("compared with " + std::to_string(scale / 2) +
                                ", where [training] initial_loss_scale may begin"));
    scale /= 2;
  }
}

class RecomputedLayoutTest : public LayoutCheckTest {
 protected:
  /// In the layout only, the output projection of the attention of layers.0 goes through `use`, which gets the step.
  using Use = std::function<at::Tensor(const at::Tensor& weight, std::int64_t step)>;
  LayoutCheck check_spoilt(const Layout& layout, const Use& use) const {
    LayoutCheck result;
    run_local_ranks(layout.ranks, [&](const std::shared_ptr<Communicator>& world) {
      const auto step = std::make_shared<std::int64_t>(1);
      LayoutCheckContext context{.world = world};
      context.observer = [step](std::int64_t done, const auto&) { *step = done + 1; };
      context.prepare = [&use, step](LayoutSide& side) {
        for (nn::Module* model : side.model->modules()) {
          auto* const wo = dynamic_cast<nn::Module*>(model->named_modules()["layers.0.attention.wo"].get());
          wo->set_parameter_use("weight", [&use, step](const at::Tensor& weight) { return use(weight, *step); });
        }
      };
      LayoutCheck mine = check_layout(config_of(layout), context, {.steps = 3});
      if (world->rank() == 0) result = std::move(mine);
    });
    return result;
  }
  static std::vector<std::string> in(const std::string& type, std::vector<std::string> more = {}) {
    more.push_back("--training.mixed_precision_param=" + type);
    more.emplace_back("--training.global_batch_size=2");
    more.emplace_back("--activation_checkpoint.mode=full");
    return more;
  }
};

TEST_F(RecomputedLayoutTest, AStaleCopyOfAWeightIsNamedInEveryPrecision) {
  for (const std::string type : {"bfloat16", "float16", "float32"}) {
    at::Tensor before;
    const LayoutCheck found = check_spoilt({"one", 1, in(type)}, [&](const at::Tensor& weight, std::int64_t step) {
      if (step == 1) before = weight.detach().clone();
      return step == 1 ? weight : weight + (before - weight).detach();
    });
    ASSERT_TRUE(found.finding) << type;
    EXPECT_EQ(found.finding->step, 2) << type;
    EXPECT_EQ(found.finding->what, "output") << found.finding->text();
    EXPECT_EQ(found.finding->parameter, "layers.0.attention.wo.weight") << found.finding->text();
    EXPECT_THAT(found.finding->cause, HasSubstr("stale: computed with the weight of the step before"));
  }
}

// Far less than what two layouts may differ by in 16 bits.
TEST_F(RecomputedLayoutTest, WhatRecomputationAloneChangesIsFoundHoweverSmall) {
  for (const Layout& layout : {Layout{"ddp", 2, in("bfloat16")}, Layout{"tp", 2, tensor(2, in("bfloat16"))},
                               Layout{"zero3", 2, degrees(1, 2)}, Layout{"zero3", 2, in("float16", degrees(1, 2))}}) {
    const bool is_recomputed = layout.keys.size() > 3 || layout.name != "zero3";
    const LayoutCheck found = check_spoilt(
        layout, [](const at::Tensor& weight, std::int64_t) { return inside_backward() ? weight * 1.0005 : weight; });
    EXPECT_EQ(found.finding.has_value(), is_recomputed) << layout.name;
    if (!found.finding) continue;
    EXPECT_EQ(found.finding->step, 1);
    EXPECT_EQ(found.finding->tolerance, 0);
    EXPECT_THAT(found.finding->cause, HasSubstr("recomputation: the same layout without it has other bits"));
  }
}

// No loss scale can fix this: it is not an overflow of scaled gradients but a wrong value, named as in other
// precisions.
TEST_F(RecomputedLayoutTest, WhatIsNotFiniteAtAnyScaleIsWrong) {
  const LayoutCheck found = check_spoilt({"ddp", 2, in("float16")}, [](const at::Tensor& weight, std::int64_t step) {
    return step >= 2 && inside_backward() ? weight / 0.0 : weight;
  });
  ASSERT_TRUE(found.finding);
  EXPECT_EQ(found.finding->step, 2);
  EXPECT_THAT(found.finding->text(), HasSubstr("finite"));
  ASSERT_EQ(found.notes.size(), 1U);
  EXPECT_THAT(found.notes[0], HasSubstr("is not finite with the loss scaled by 65536, nor by anything down to 0.5"));
}

// The one rank does not overflow then, so the note names a rank of the layout.
TEST_F(RecomputedLayoutTest, WhatIsNotFiniteOnceIsANoteWithItsRank) {
  std::atomic<int> recomputations = 0;
  const LayoutCheck found = check_spoilt({"ddp", 2, in("float16")}, [&](const at::Tensor& weight, std::int64_t) {
    return inside_backward() && recomputations++ < 2 ? weight / 0.0 : weight;
  });
  EXPECT_FALSE(found.finding) << found.finding->text();
  ASSERT_EQ(found.notes.size(), 1U);
  EXPECT_THAT(found.notes[0], ContainsRegex("step 1: float16 overflow: the gradient of '[a-z0-9_.]+' on rank 0 is not "
                                            "finite with the loss scaled by 65536"));
  EXPECT_THAT(found.notes[0], HasSubstr("compared with 32768, where [training] initial_loss_scale may begin"));
}

// The same in 16 bits, where rounding matters most. Tensor parallelism rounds activations between ranks, so a small
// change shows only in the gradients, and a large one where it begins.
TEST_F(RecomputedLayoutTest, AWeightThatIsUsedWronglyIsFoundIn16BitsAtEveryLearningRate) {
  struct Case {
    Layout layout;
    double factor;
    bool is_placed;
  };
  for (const std::string type : {"bfloat16", "float16"}) {
    for (const Case& one : {Case{{"tp", 2, tensor(2)}, 1.25, false}, Case{{"tp", 2, tensor(2)}, -2, true},
                            Case{{"zero3", 2, degrees(1, 2, 3)}, 1.1, true}}) {
      for (const std::string lr : {"1e-4", "1e-1"}) {
        Layout layout = one.layout;
        for (const std::string& key : in(type)) layout.keys.push_back(key);
        layout.keys.emplace_back("--activation_checkpoint.mode=none");
        layout.keys.push_back("--optimizer.lr=" + lr);
        const LayoutCheck found = check_spoilt(layout, [&](const at::Tensor& weight, std::int64_t step) {
          return step >= 2 ? weight * one.factor : weight;
        });
        ASSERT_TRUE(found.finding) << layout.name << ", " << type << ", lr " << lr;
        EXPECT_EQ(found.finding->step, 2);
        if (!one.is_placed) continue;
        EXPECT_EQ(found.finding->parameter, "layers.0.attention.wo.weight") << found.finding->text();
      }
    }
  }
}

TEST_F(RecomputedLayoutTest, OneRankHasTheSameBits) {
  for (const std::string type : {"bfloat16", "float16", "float32"}) {
    const LayoutCheck found = check({"one", 1, in(type)}, 3);
    EXPECT_FALSE(found.finding) << found.finding->text();
    EXPECT_EQ(found.tolerance.gradient, 0);
    for (const StepCheck& step : found.steps) EXPECT_EQ(step.loss, step.expected_loss);
  }
}

}  // namespace
}  // namespace phalanx::verify
