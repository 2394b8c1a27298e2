// Runs that train a part of their model: what checkpoints hold of them, from which layout to which they go on, and what
// is refused.
#include <ATen/ops/equal.h>

#include <set>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/testing/case_sample.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/checkpoint/files/peft_adapter.h"
#include "phalanx/checkpoint/weights.h"
#include "phalanx/config/model_config.h"
#include "phalanx/models/config/frozen_parameters.h"
#include "phalanx/models/config/training_flops.h"
#include "phalanx/train/testing/trainer_test_support.h"

namespace phalanx::train {
namespace trained_part_test {

class TrainedPartRunTest : public TrainerTest {
 protected:
  /// Of the saved state: what the optimizer has, without the moments' names.
  std::set<std::string> stepped_in(const std::string& run, int step) const {
    std::set<std::string> names;
    for (const NamedTensor& one : state_in(run, step).tensors) {
      const std::string begin = "optimizer.", end = ".exp_avg";
      if (one.name.starts_with(begin) && one.name.ends_with(end)) {
        names.insert(one.name.substr(begin.size(), one.name.size() - begin.size() - end.size()));
      }
    }
    return names;
  }
  static at::Tensor tensor_of(const TrainState& state, const std::string& name) {
    const auto found = std::ranges::find(state.tensors, name, &NamedTensor::name);
    EXPECT_NE(found, state.tensors.end()) << name;
    return found->tensor;
  }
  const std::vector<std::string> frozen_ = {"--training.frozen=tok_embeddings*,layers.0.*,*norm*",
                                            "--optimizer.no_decay=*norm*"};
  const std::vector<std::string> lora_ = {"--lora.rank=4", "--lora.dropout=0.1", "--lora.target_modules=q_proj,w[13]"};
};

TEST_F(TrainedPartRunTest, CheckpointsHoldFrozenWeightsAndTheStateOfTheTrainedOnes) {
  train(config("frozen", frozen_), 1);
  EXPECT_THAT(
      stepped_in("frozen", 12),
      ElementsAre("layers.1.attention.wk.weight", "layers.1.attention.wo.weight", "layers.1.attention.wq.weight",
                  "layers.1.attention.wv.weight", "layers.1.feed_forward.w1.weight", "layers.1.feed_forward.w2.weight",
                  "layers.1.feed_forward.w3.weight", "output.weight"));
  const TrainState state = state_in("frozen", 12);
  EXPECT_TRUE(tensor_of(state, "model.norm.weight").eq(1).all().item<bool>());
  train(config("lora", lora_), 1);
  for (const std::string& name : stepped_in("lora", 12)) EXPECT_THAT(name, HasSubstr(".lora_")) << name;
  EXPECT_EQ(stepped_in("lora", 12).size(), 12U);
  EXPECT_LT(losses("lora").back(), losses("lora").front());
}

TEST_F(TrainedPartRunTest, GoesOnInAnyLayout) {
  for (const auto& [run, keys] : {std::pair{"frozen", frozen_}, std::pair{"lora", lora_}}) {
    SCOPED_TRACE(run);
    train(config(run, keys), 1);
    const std::vector<Layout> layouts = {{.name = "zero3", .ranks = 2, .keys = sharded(3)},
                                         {.name = "tp2", .ranks = 2, .tp = 2},
                                         {.name = "pp2_zero3_2", .ranks = 4, .pp = 2, .keys = sharded(3, 2)},
                                         {.name = "ddp", .ranks = 2}};
    const std::string parts = run + std::string("-in-parts");
    for (std::size_t i = 0; i < layouts.size(); ++i) {
      train(config_of(layouts[i], parts, keys), layouts[i].ranks, stop_after_first_step());
      EXPECT_EQ(result_.step, static_cast<std::int64_t>(i) + 1) << layouts[i].name;
    }
    const std::vector<double> whole = losses(run);
    expect_same_losses(losses(parts), {whole.begin(), whole.begin() + std::ssize(layouts)});
  }
}

TEST_F(TrainedPartRunTest, ABaseInFewerBitsIsSavedAsItIsAndGoesOnInAnyLayout) {
  for (const std::string type : {"bfloat16", "nf4"}) {
    SCOPED_TRACE(type);
    std::vector<std::string> keys = {"--lora.base_dtype=" + type, "--model.dim=128", "--model.ffn_hidden=256"};
    keys.insert(keys.end(), lora_.begin(), lora_.end());
    train(config(type, keys), 1);
    EXPECT_LT(losses(type).back(), losses(type).front());
    const TrainState state = state_in(type, 12);
    const bool is_nf4 = type == "nf4";
    EXPECT_EQ(tensor_of(state, "model.layers.0.attention.wq.weight").scalar_type(), is_nf4 ? at::kByte : at::kBFloat16);
    EXPECT_EQ(tensor_of(state, "model.tok_embeddings.weight").scalar_type(), at::kBFloat16);
    EXPECT_EQ(tensor_of(state, "model.layers.0.attention.wq.lora_A").scalar_type(), at::kFloat);
    const std::vector<Layout> layouts = {{.name = "zero3", .ranks = 2, .keys = sharded(3)},
                                         {.name = "tp2", .ranks = 2, .tp = 2},
                                         {.name = "pp2_zero3_2", .ranks = 4, .pp = 2, .keys = sharded(3, 2)},
                                         {.name = "ddp", .ranks = 2}};
    const std::string parts = type + "-in-parts";
    for (const Layout& layout : layouts) train(config_of(layout, parts, keys), layout.ranks, stop_after_first_step());
    const std::vector<double> whole = losses(type);
    expect_same_losses(losses(parts), {whole.begin(), whole.begin() + std::ssize(layouts)});
    std::vector<std::string> other = keys;
    other[0] = "--lora.base_dtype=float32";
    other.emplace_back("--training.steps=14");
    EXPECT_THAT(refusal<CheckpointError>(config(type, other)), HasSubstr("[lora] base_dtype: saved"));
    // A new run that begins with its weights and adapters has the same base.
    other.emplace_back("--checkpoint.initial_load_path=" + path(type + "/checkpoint"));
    EXPECT_THAT(refusal<CheckpointError>(config("new", other)),
                HasSubstr("on a base in " + type + ", and [lora] base_dtype is \"float32\""));
    other[0] = keys[0];
    train(config("goes-on-" + type, other), 1);
    EXPECT_LT(losses("goes-on-" + type).front(), losses(type).front());
    train(config_of({.name = "pp2", .ranks = 2, .pp = 2}, "goes-on-pp2-" + type, other), 2);
    expect_same_losses(losses("goes-on-pp2-" + type), losses("goes-on-" + type));
  }
}

TEST_F(TrainedPartRunTest, ABaseInFewerBitsIsMadeOfFilesInAnyLayout) {
  const std::vector<std::string> sizes = {"--model.dim=128", "--model.ffn_hidden=256"};
  std::vector<std::string> whole = sizes;
  whole.emplace_back("--checkpoint.last_save_in_hf");
  train(config("base", whole), 1);
  for (const std::string type : {"bfloat16", "nf4"}) {
    std::vector<std::string> keys = {"--lora.base_dtype=" + type, "--checkpoint.initial_load_in_hf",
                                     "--checkpoint.initial_load_path=" + path("base/hf"), "--training.steps=3"};
    keys.insert(keys.end(), sizes.begin(), sizes.end());
    keys.insert(keys.end(), lora_.begin(), lora_.end());
    train(config("one-" + type, keys), 1);
    EXPECT_LT(losses("one-" + type).front(), losses("base").front() - 0.1);  // it begins with the weights of the files
    const std::vector<Layout> layouts = {{.name = "zero3", .ranks = 2, .keys = sharded(3)},
                                         {.name = "tp2", .ranks = 2, .tp = 2},
                                         {.name = "pp2_zero3_2", .ranks = 4, .pp = 2, .keys = sharded(3, 2)},
                                         {.name = "ddp", .ranks = 2}};
    for (const Layout& layout : sampled(layouts, 2)) {
      SCOPED_TRACE(type + ", " + layout.name);
      train(config_of(layout, layout.name + type, keys), layout.ranks);
      expect_same_losses(losses(layout.name + type), losses("one-" + type));
    }
  }
}

TEST_F(TrainedPartRunTest, ABaseInFewerBitsThatIsNotThereIsRefused) {
  const auto said = [&](std::vector<std::string> keys, int ranks = 1) {
    keys.emplace_back("--lora.base_dtype=nf4");
    if (ranks > 0) keys.emplace_back("--lora.rank=4");
    return error_text<ConfigError>([&] { train(config("a", keys), std::max(ranks, 1)); });
  };
  EXPECT_THAT(said({}, 0), AllOf(HasSubstr("base_dtype is \"nf4\", but rank is 0"), HasSubstr("1 or more")));
  EXPECT_THAT(said({"--training.mixed_precision_param=float16"}), HasSubstr("expected \"bfloat16\" or \"float32\""));
  EXPECT_THAT(said({"--model.ffn_hidden=176"}),
              AllOf(HasSubstr("rows of layers.0.feed_forward.w2 have 176 elements"), HasSubstr("multiples of 64")));
  EXPECT_THAT(said({"--model.dim=64", "--model.ffn_hidden=256", "--parallelism.tensor_parallel_degree=2"}, 2),
              AllOf(HasSubstr("tensor_parallel_degree 2: rows of layers.0.attention.wo have 64 elements, 1 x 64"),
                    HasSubstr("expected a degree that divides 1")));
}

TEST_F(TrainedPartRunTest, WrongPatternsAndChangesAreRefused) {
  EXPECT_THAT(refusal<ConfigError>(config("a", {"--training.frozen=layers.0.attention.q_proj*"})),
              AllOf(HasSubstr("[training] frozen: pattern 'layers.0.attention.q_proj*' matches none"),
                    HasSubstr("the nearest is 'layers.0.attention.")));
  EXPECT_THAT(refusal<ConfigError>(config("b", {"--training.frozen=*"})), HasSubstr("nothing is left to train"));
  EXPECT_FALSE(std::filesystem::exists(path("a")));  // refused before the run's folder is made
  EXPECT_THAT(refusal<ConfigError>(config("c", {"--lora.rank=4", "--lora.target_modules=q_porj"})),
              AllOf(HasSubstr("'q_porj' matches none"), HasSubstr("did you mean 'q_proj'?")));
  EXPECT_THAT(refusal<ConfigError>(config("d", {"--lora.rank=4", "--training.frozen=*lora*"})),
              HasSubstr("nothing is left to train"));
  train(config("e", frozen_), 1);
  EXPECT_THAT(refusal<CheckpointError>(config("e", {"--training.steps=14"})), HasSubstr("[training] frozen: saved"));
  train(config("f", lora_), 1);
  EXPECT_THAT(refusal<CheckpointError>(config("f", {"--training.steps=14", "--lora.rank=8", lora_[1], lora_[2]})),
              HasSubstr("[lora] rank: saved 4, now 8"));
}

TEST_F(TrainedPartRunTest, ACheckpointWithAdaptersGoesOnOnlyWithTheSameOnes) {
  train(config("base"), 1);
  const std::string weights = "--checkpoint.initial_load_path=";
  train(config("lora", {weights + path("base/checkpoint"), lora_[0], lora_[2]}), 1);
  const std::string from = weights + path("lora/checkpoint");
  EXPECT_THAT(refusal<CheckpointError>(config("a", {from})),
              AllOf(HasSubstr("is of a run that trained adapters (rank 4, alpha 16), which this run without [lora]"),
                    HasSubstr("`phalanx checkpoint merge`")));
  EXPECT_THAT(refusal<CheckpointError>(config("b", {from, lora_[0], "--lora.target_modules=q_proj,w1"})),
              AllOf(HasSubstr("it has rank 4, alpha 16 and 6 layers, and this run rank 4, alpha 16 and 4 layers"),
                    HasSubstr("only it has layers.0.feed_forward.w3, layers.1.feed_forward.w3")));
  EXPECT_THAT(refusal<CheckpointError>(config("c", {from, lora_[0], lora_[2], "--lora.alpha=8"})),
              HasSubstr("has rank 4, alpha 16 and 6 layers, and this run rank 4, alpha 8 and 6 layers"));
  EXPECT_THAT(refusal<CheckpointError>(config("c", {from, lora_[0], lora_[2], "--lora.use_rslora"})),
              HasSubstr("rank 4, alpha 16 and 6 layers, and this run rank 4, alpha 16 with use_rslora and 6 layers"));
  EXPECT_THAT(refusal<CheckpointError>(
                  config("d", {from, lora_[0], lora_[2], "--lora.initial_adapter=" + path("lora/adapter")})),
              HasSubstr("expected one of the two"));
  // A file of the same tensors does not say alpha.
  std::vector<NamedTensor> tensors;
  for (const NamedTensor& one : state_in("lora", 12).tensors) {
    if (one.name.starts_with("model.")) tensors.push_back({one.name.substr(6), one.tensor});
  }
  export_weights(path("whole.safetensors"), tensors, {}, posix_file_system());
  for (const std::vector<std::string>& keys : {std::vector<std::string>(), {lora_[0], lora_[2]}}) {
    std::vector<std::string> more = {weights + path("whole.safetensors")};
    more.insert(more.end(), keys.begin(), keys.end());
    EXPECT_THAT(refusal<CheckpointError>(config("e", more)),
                AllOf(HasSubstr("holds adapters (layers."), HasSubstr("nothing there says what they add")));
  }
  // Its adapter is one of the first base, and fits that.
  train(config("more", {from, lora_[0], lora_[2]}), 1);
  EXPECT_LT(losses("more").front(), losses("lora").front());
  EXPECT_EQ(read_peft_adapter(path("more/adapter")).base, read_peft_adapter(path("lora/adapter")).base);
  train(config("adapter", {weights + path("base/checkpoint"), lora_[0], lora_[2], "--optimizer.lr=0",
                           "--training.steps=1", "--lora.initial_adapter=" + path("more/adapter")}),
        1);
}

TEST_F(TrainedPartRunTest, AnInitialAdapterIsOneOfTheRunAndTheSameOnAllRanks) {
  train(config("base", {"--checkpoint.enable", "--training.steps=2"}), 1);
  const std::string base = "--checkpoint.initial_load_path=" + path("base/checkpoint");
  train(config("lora", {base, lora_[0], lora_[2], "--training.steps=2"}), 1);
  std::filesystem::copy(path("lora/adapter"), path("copy"));
  const auto with = [&](const std::string& adapter, const std::string& targets) {
    return config("again", {base, lora_[0], "--lora.target_modules=" + targets, "--training.steps=2",
                            "--lora.initial_adapter=" + path(adapter)});
  };
  EXPECT_THAT(refusal<CheckpointError>(with("lora/adapter", "q_proj,wo,w[13]")),
              AllOf(HasSubstr("[lora] initial_adapter '"), HasSubstr("has rank 4, alpha 16 and 6 layers"),
                    HasSubstr("only this run has layers.0.attention.wo, layers.1.attention.wo")));
  config::TrainConfig stabilised = with("lora/adapter", "q_proj,w[13]");
  stabilised.lora.use_rslora = true;
  EXPECT_THAT(refusal<CheckpointError>(stabilised), HasSubstr("alpha 16 with use_rslora and 6 layers"));
  // Another text of the same meaning: ranks that read different files are told, whatever these hold.
  replace_file(path("copy/adapter_config.json"), read_file(path("copy/adapter_config.json")) + "\n");
  const std::string said = error_text<ConfigError>([&] {
    run_local_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
      Trainer(with(world->rank() == 0 ? "copy" : "lora/adapter", "q_proj,w[13]"), {.world = world, .quiet = true});
    });
  });
  EXPECT_THAT(said, HasSubstr("initial adapter"));
}

// Its file has other matrices than the model: joined ones of several layers, and such of which a rank has a part.
TEST_F(TrainedPartRunTest, AnAdapterOfJoinedLayersAndOfTheOutputIsLoadedAndMergedInAnyLayout) {
  for (const std::string family : {"gpt2", "phi3"}) {
    SCOPED_TRACE(family);
    const std::vector<std::string> model = {"--model.name=" + family, "--model.no-tie_embeddings"};
    const auto with = [](std::vector<std::string> keys, const std::vector<std::string>& more) {
      keys.insert(keys.end(), more.begin(), more.end());
      return keys;
    };
    train(config(family, with(model, {"--training.steps=2", "--checkpoint.last_save_in_hf"})), 1);
    const std::vector<std::string> tuned =
        with(model, {"--checkpoint.initial_load_in_hf", "--checkpoint.initial_load_path=" + path(family + "/hf"),
                     "--lora.rank=4", "--lora.target_modules=all-linear,lm_head", "--training.steps=3"});
    train(config(family + "-first", with(tuned, {"--lora.no-zero_b"})), 1);
    const auto again =
        with(tuned, {"--lora.initial_adapter=" + path(family + "-first/adapter"), "--checkpoint.last_save_in_hf"});
    train(config(family + "-one", again), 1);
    EXPECT_LT(losses(family + "-one").front(), losses(family + "-first").front() - 0.01);
    const std::vector<Layout> layouts = {{.name = "zero3", .ranks = 2, .keys = sharded(3)},
                                         {.name = "tp2", .ranks = 2, .tp = 2},
                                         {.name = "pp2_zero3_2", .ranks = 4, .pp = 2, .keys = sharded(3, 2)}};
    for (const Layout& layout : sampled(layouts, 1)) {
      SCOPED_TRACE(layout.name);
      train(config_of(layout, family + layout.name, again), layout.ranks);
      expect_same_losses(losses(family + layout.name), losses(family + "-one"));
      // A run that begins with what it has merged goes on from where it was.
      train(config(family + layout.name + "-merged",
                   with(model, {"--checkpoint.initial_load_in_hf", "--training.steps=1", "--optimizer.lr=0",
                                "--checkpoint.initial_load_path=" + path(family + layout.name + "/hf")})),
            1);
      train(config(family + layout.name + "-kept",
                   with(tuned, {"--training.steps=1", "--optimizer.lr=0",
                                "--lora.initial_adapter=" + path(family + layout.name + "/adapter")})),
            1);
      expect_same_losses(losses(family + layout.name + "-merged"), losses(family + layout.name + "-kept"));
    }
  }
}

TEST_F(TrainedPartRunTest, CountsWhatItComputes) {
  train(config("lora", lora_), 1);
  const auto model = config::model_config(config("lora", lora_));
  const models::LoraOptions lora = config("lora", lora_).lora;
  const double flops = models::training_flops(model, models::frozen_parameters(model, {}, lora), lora).per_token(32);
  EXPECT_LT(flops, 0.9 * model.flops_per_token(32));
  for (const auto& line : lines_with("lora", "loss")) {
    const double tps = line["tps"], tflops = line["tflops"];
    EXPECT_NEAR(tflops, tps * flops / 1e12, 1e-6 * tflops);
  }
  std::ifstream file(path("lora/run.json"));
  EXPECT_THAT(nlohmann::json::parse(file)["environment"]["trained"].get<std::string>(),
              ::testing::MatchesRegex("[0-9,]+ of [0-9,]+ parameters"));
}

}  // namespace trained_part_test
}  // namespace phalanx::train
