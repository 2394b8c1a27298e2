// Preference tuning ([dpo]): the loss and its gradient beside plain operators of torch, every layout beside one rank,
// the reference of a run that goes on, and what is refused.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/log_sigmoid.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>

#include <cmath>
#include <memory>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/case_sample.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/data/chat/tokenized_conversation.h"
#include "phalanx/models/llama.h"
#include "phalanx/train/testing/preference_test.h"

namespace phalanx::train::trainer_dpo_test {
namespace {

class TrainerDpoTest : public PreferenceTest {
 protected:
  static std::vector<std::string> sgd() {
    return {"--optimizer.name=SGD", "--optimizer.lr=0.5", "--optimizer.weight_decay=0", "--lr_scheduler.decay_ratio=0",
            "--training.max_norm=1e9"};
  }

  /// The preferences, as a conversation each: of pair i documents 2 i and 2 i + 1.
  std::vector<data::TokenizedConversation> documents(const std::string& name) const {
    const data::ConversationTokenizer tokenize(data::ChatTemplate(kTemplate, "test"),
                                               data::BpeTokenizer::load(path("assets")));
    std::vector<data::TokenizedConversation> all;
    std::ifstream file(path(name));
    for (std::string line; std::getline(file, line);) {
      const data::Preference preference = data::parse_preference(line, "test");
      all.push_back(tokenize(preference.chosen));
      all.push_back(tokenize(preference.rejected));
    }
    return all;
  }

  /// The log-likelihood of what is trained of a document alone in its row, by log_softmax of the logits.
  static at::Tensor log_likelihood(models::Llama& model, const data::TokenizedConversation& document) {
    const std::vector<std::int64_t> ids(document.tokens.begin(), document.tokens.end());
    const auto count = static_cast<std::int64_t>(ids.size());
    const at::Tensor tokens = at::tensor(ids, at::kLong).unsqueeze(0);
    const at::Tensor mask = at::tensor(std::vector<double>(document.is_trained.begin() + 1, document.is_trained.end()));
    const at::Tensor logits = model.forward(tokens.narrow(1, 0, count - 1));
    const at::Tensor all = at::log_softmax(logits.to(at::kDouble), -1).squeeze(0);
    return all.gather(1, tokens.squeeze(0).narrow(0, 1, count - 1).unsqueeze(1)).squeeze(1).mul(mask).sum();
  }

  struct Plain {
    std::vector<double> losses, norms, chosen, rejected, accuracies;
  };
  /// Steps of gradient descent over all pairs at once, by operators of torch alone.
  Plain plain_steps(int steps, double lr, const std::function<at::Tensor(const at::Tensor& margin)>& loss_of) const {
    models::Llama model(models::llama_flavor("debug"));
    nn::initialise(model, 0);
    const auto all = documents("preferences.jsonl");
    const auto likelihoods = [&] {
      std::vector<at::Tensor> each;
      for (const auto& one : all) each.push_back(log_likelihood(model, one));
      return at::stack(each).view({-1, 2});
    };
    const at::Tensor reference = likelihoods().detach();
    Plain found;
    for (int step = 0; step < steps; ++step) {
      const at::Tensor rewards = 0.1 * (likelihoods() - reference);
      const at::Tensor margin = rewards.select(1, 0) - rewards.select(1, 1), loss = loss_of(margin).mean();
      loss.backward();
      found.losses.push_back(loss.item<double>());
      found.chosen.push_back(rewards.select(1, 0).mean().item<double>());
      found.rejected.push_back(rewards.select(1, 1).mean().item<double>());
      found.accuracies.push_back(margin.gt(0).to(at::kDouble).mean().item<double>());
      const at::NoGradGuard no_grad;
      double squares = 0;
      for (const at::Tensor& p : model.parameters()) {
        squares += p.grad().to(at::kDouble).square().sum().item<double>();
        p.add_(p.grad(), -lr);
        p.mutable_grad().reset();
      }
      found.norms.push_back(std::sqrt(squares));
    }
    return found;
  }

  void expect_near(const std::vector<double>& found, const std::vector<double>& expected, double tolerance,
                   const std::string& what) const {
    ASSERT_EQ(found.size(), expected.size()) << what;
    for (std::size_t i = 0; i < found.size(); ++i) {
      EXPECT_NEAR(found[i], expected[i], tolerance * std::max(1.0, std::abs(expected[i])))
          << what << ", line " << i + 1;
    }
  }
  /// Of the first step rounding decides: all margins are 0.
  void expect_same_accuracies(std::vector<double> found, std::vector<double> expected) const {
    found.at(0) = expected.at(0) = 0;
    expect_near(found, expected, 1e-9, "rewards/accuracies");
  }
  void expect_as_plain(const std::string& run, const Plain& plain) const {
    expect_near(losses(run), plain.losses, 2e-6, "loss");
    expect_near(values_of(run, "grad_norm"), plain.norms, 2e-5, "gradient norm");
    expect_near(values_of(run, "rewards/chosen"), plain.chosen, 2e-5, "rewards/chosen");
    expect_near(values_of(run, "rewards/rejected"), plain.rejected, 2e-5, "rewards/rejected");
    expect_same_accuracies(values_of(run, "rewards/accuracies"), plain.accuracies);
  }
};

TEST_F(TrainerDpoTest, LossGradientAndRewardsAreThoseOfPlainTorch) {
  // A row for each pair and a batch of all of them: a step sees every pair once, as the plain steps do.
  std::vector<std::string> keys = sgd();
  keys.insert(keys.end(),
              {"--training.seq_len=100", "--training.local_batch_size=20", "--training.global_batch_size=20"});
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), keys.begin(), keys.end());
    return more;
  };
  train(tune("sigmoid", keys), 1);
  const Plain plain = plain_steps(4, 0.5, [](const at::Tensor& margin) { return -at::log_sigmoid(margin); });
  EXPECT_NEAR(plain.losses[0], std::log(2), 1e-9);
  EXPECT_LT(plain.losses[3], plain.losses[0] - 1e-3);  // so there is something to compare
  expect_as_plain("sigmoid", plain);

  EXPECT_EQ(nlohmann::json::parse(std::ifstream(path("sigmoid/run.json")))["loss_unit"], "nats per pair");

  train(tune("smooth", with({"--dpo.label_smoothing=0.2"})), 1);
  expect_as_plain("smooth", plain_steps(4, 0.5, [](const at::Tensor& margin) {
                    return -0.8 * at::log_sigmoid(margin) - 0.2 * at::log_sigmoid(-margin);
                  }));
  train(tune("hinge", with({"--dpo.loss_type=hinge"})), 1);
  expect_as_plain("hinge", plain_steps(4, 0.5, [](const at::Tensor& margin) { return at::relu(1 - margin); }));
}

// Rows have two to four pairs, and a step four rows: ranks and micro-batches have unequal numbers of pairs.
TEST_F(TrainerDpoTest, EveryLayoutTrainsAsOneRankDoes) {
  const std::vector<std::string> keys = {"--training.steps=6", "--validation.enable", "--validation.freq=3",
                                         "--dpo.validation_preferences=" + path("held_out.jsonl")};
  train(tune_in({.name = "one"}, "one", keys), 1);
  const std::vector<double> expected = losses("one");
  EXPECT_NEAR(expected[0], std::log(2), 1e-6);
  EXPECT_LT(expected.back(), expected[0] - 0.02);
  const std::vector<Layout> layouts = {
      {.name = "ddp2", .ranks = 2},
      {.name = "ddp4", .ranks = 4},
      {.name = "accumulated", .keys = {"--training.local_batch_size=1"}},
      {.name = "recomputed", .keys = {"--activation_checkpoint.mode=full"}},
      {.name = "zero1", .ranks = 2, .keys = sharded(1)},
      {.name = "zero2", .ranks = 2, .keys = sharded(2)},
      {.name = "zero3", .ranks = 2, .keys = sharded(3)},
      {.name = "zero3_accumulated",
       .ranks = 2,
       .keys = {"--parallelism.data_parallel_shard_degree=-1", "--training.local_batch_size=1"}},
      {.name = "tp2", .ranks = 2, .tp = 2},
      {.name = "tp2_whole", .ranks = 2, .tp = 2, .keys = {"--parallelism.no-enable_sequence_parallel"}},
      {.name = "tp2_overlapped", .ranks = 2, .tp = 2, .keys = {"--parallelism.enable_async_tensor_parallel"}},
      {.name = "pp2", .ranks = 2, .pp = 2, .keys = {"--parallelism.pipeline_parallel_schedule=1F1B"}},
      {.name = "zbv", .ranks = 2, .pp = 2, .keys = {"--parallelism.pipeline_parallel_schedule=ZBVZeroBubble"}},
      {.name = "cp2", .ranks = 2, .cp = 2},
      {.name = "cp3_ring", .ranks = 3, .keys = {"--parallelism.context_parallel_exchange=ring"}, .cp = 3},
      {.name = "cp2_ddp2", .ranks = 4, .cp = 2},
      {.name = "cp2_tp2_zero3_recomputed",
       .ranks = 8,
       .tp = 2,
       .keys = {"--parallelism.data_parallel_shard_degree=2", "--activation_checkpoint.mode=full"},
       .cp = 2},
      {.name = "cp2_pp2_tp2", .ranks = 8, .tp = 2, .pp = 2, .cp = 2}};
  for (const Layout& layout : sampled(layouts, 5)) {
    SCOPED_TRACE(layout.name);
    train(tune_in(layout, layout.name, keys), layout.ranks);
    expect_same_losses(losses(layout.name), expected);
    for (const char* key : {"grad_norm", "rewards/chosen", "rewards/rejected", "rewards/margins", "validation_loss"}) {
      expect_near(values_of(layout.name, key), values_of("one", key), 2e-4, key);
    }
    expect_same_accuracies(values_of(layout.name, "rewards/accuracies"), values_of("one", "rewards/accuracies"));
    EXPECT_EQ(values_of(layout.name, "tokens"), values_of("one", "tokens"));
  }
}

// The reference of a token must not depend on which tokens its rank computes beside it.
TEST_F(TrainerDpoTest, MixturesOfExpertsTrainAsOnOneRank) {
  const std::vector<std::string> keys = {"--model.name=mixtral", "--training.steps=4"};
  train(tune_in({.name = "one"}, "one", keys), 1);
  const std::vector<Layout> layouts = {
      {.name = "ddp2", .ranks = 2},
      {.name = "accumulated", .keys = {"--training.local_batch_size=1"}},
      {.name = "zero3", .ranks = 2, .keys = sharded(3)},
      {.name = "ep2",
       .ranks = 2,
       .keys = {"--parallelism.data_parallel_shard_degree=2", "--parallelism.expert_parallel_degree=2"}},
      {.name = "tp2", .ranks = 2, .tp = 2},
      {.name = "pp2", .ranks = 2, .pp = 2},
      {.name = "cp2", .ranks = 2, .cp = 2}};
  for (const Layout& layout : sampled(layouts, 2)) {
    SCOPED_TRACE(layout.name);
    train(tune_in(layout, layout.name, keys), layout.ranks);
    expect_same_losses(losses(layout.name), losses("one"));
    for (const char* key : {"grad_norm", "rewards/chosen", "rewards/rejected"}) {
      expect_near(values_of(layout.name, key), values_of("one", key), 2e-4, key);
    }
  }
}

TEST_F(TrainerDpoTest, SixteenBitsAreNear) {
  train(tune("float32"), 1);
  for (const std::string type : {"bfloat16", "float16"}) {
    const std::vector<Layout> layouts = {{.name = "one"},
                                         {.name = "tp2", .ranks = 2, .tp = 2},
                                         {.name = "zero3", .ranks = 2, .keys = sharded(3)},
                                         {.name = "pp2", .ranks = 2, .pp = 2}};
    for (const Layout& layout : sampled(layouts, 2)) {
      SCOPED_TRACE(type + " " + layout.name);
      const std::string run = type + layout.name;
      train(tune_in(layout, run, {"--training.mixed_precision_param=" + type}), layout.ranks);
      expect_near(losses(run), losses("float32"), 0.01, "loss");
    }
  }
}

TEST_F(TrainerDpoTest, HeldOutPairsAreMeasuredOnceEach) {
  // While nothing has changed, all rewards are 0.
  train(tune("same", {"--training.steps=1", "--optimizer.lr=0", "--validation.enable",
                      "--dpo.validation_preferences=" + path("held_out.jsonl")}),
        1);
  EXPECT_NEAR(result_.validation_loss.value(), std::log(2), 1e-6);
  const auto line = lines_with("same", "validation_loss").at(0);
  for (const char* key : {"rewards/chosen", "rewards/rejected", "rewards/margins"}) {
    EXPECT_NEAR(line[key].get<double>(), 0, 1e-5) << key;
  }
  // A part of the pairs, which is not trained on then.
  train(tune("part", {"--training.steps=1", "--validation.enable", "--validation.fraction=0.3"}), 1);
  EXPECT_TRUE(result_.validation_loss.has_value());
}

TEST_F(TrainerDpoTest, ARunThatGoesOnHasTheSameReference) {
  const std::vector<std::string> keys = {"--training.steps=12", "--validation.enable", "--validation.freq=100",
                                         "--dpo.validation_preferences=" + path("held_out.jsonl")};
  const Weights whole = train(tune("whole", keys), 1);
  const auto stop = [](int) { return true; };
  train(tune("parts", keys), 1, [asked = std::make_shared<int>(0)](int) { return ++*asked >= 5; });
  ASSERT_EQ(result_.step, 5);
  train(tune("parts", keys), 1, [asked = std::make_shared<int>(0)](int) { return ++*asked >= 3; });
  ASSERT_EQ(result_.step, 8);
  EXPECT_EQ(train(tune("parts", keys), 1), whole);
  EXPECT_EQ(losses("parts"), losses("whole"));
  EXPECT_EQ(values_of("parts", "validation_loss"), values_of("whole", "validation_loss"));

  // In another layout.
  train(tune("moved", keys), 1, [asked = std::make_shared<int>(0)](int) { return ++*asked >= 5; });
  train(tune_in({.ranks = 2, .tp = 2}, "moved", keys), 2,
        [asked = std::make_shared<std::atomic<int>>(0)](int) { return asked->fetch_add(1) / 2 >= 2; });
  ASSERT_EQ(result_.step, 8);
  train(tune_in({.ranks = 2}, "moved", keys), 2);
  expect_same_losses(losses("moved"), losses("whole"));

  // What the checkpoint has no reference of.
  train(tune("other", keys), 1, stop);
  std::vector<std::string> changed = keys;
  write_preferences("others.jsonl", 5, 40);
  changed.back() = "--dpo.validation_preferences=" + path("others.jsonl");
  EXPECT_THAT(refusal<CheckpointError>(tune("other", changed)),
              AllOf(HasSubstr("the held-out preferences are not those with which"), HasSubstr("step-1")));
  EXPECT_THAT(refusal<CheckpointError>(tune("other", {"--training.steps=12"})), HasSubstr("the held-out preferences"));
  write_preferences("preferences.jsonl", 19);
  EXPECT_THAT(refusal<CheckpointError>(tune("other", keys)), HasSubstr("[training] dataset_path"));
}

TEST_F(TrainerDpoTest, TheReferenceOfAdaptersIsTheStart) {
  const std::vector<std::string> adapters = {"--lora.rank=4", "--lora.alpha=8", "--training.steps=5"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), adapters.begin(), adapters.end());
    return more;
  };
  // New ones, and such that already add something: all rewards are 0 at first.
  for (const std::vector<std::string>& more : {std::vector<std::string>{}, {"--lora.no-zero_b"}}) {
    const std::string run = more.empty() ? "zero" : "more";
    train(tune(run, with(more)), 1);
    EXPECT_NEAR(losses(run)[0], std::log(2), 1e-6);
    EXPECT_NEAR(values_of(run, "rewards/chosen")[0], 0, 1e-5);
    EXPECT_LT(losses(run).back(), losses(run)[0]);
  }
  EXPECT_GT(std::abs(losses("more").back() - losses("zero").back()), 1e-4);  // so they are other models
  const std::vector<Layout> layouts = {{.name = "ddp2", .ranks = 2},
                                       {.name = "zero3", .ranks = 2, .keys = sharded(3)},
                                       {.name = "tp2", .ranks = 2, .tp = 2},
                                       {.name = "pp2", .ranks = 2, .pp = 2},
                                       {.name = "cp2", .ranks = 2, .cp = 2}};
  for (const Layout& layout : sampled(layouts, 2)) {
    SCOPED_TRACE(layout.name);
    train(tune_in(layout, layout.name, with({"--lora.no-zero_b"})), layout.ranks);
    expect_same_losses(losses(layout.name), losses("more"));
    for (const char* key : {"grad_norm", "rewards/chosen", "rewards/rejected"}) {
      expect_near(values_of(layout.name, key), values_of("more", key), 2e-4, key);
    }
  }
}

TEST_F(TrainerDpoTest, SaysWhatItLeavesOutAndRefusesWhatIsMalformed) {
  std::ofstream(path("preferences.jsonl"), std::ios::app) << R"({"prompt": "What?", "chosen": "Yes", "rejected": [")"
                                                          << "]}\n";
  EXPECT_THAT(refusal<DataError>(tune("malformed")), HasSubstr("preferences.jsonl, line 21: "));
  write_preferences("preferences.jsonl", 4);
  std::ofstream(path("preferences.jsonl"), std::ios::app)
      << nlohmann::json{{"prompt", "What?"}, {"chosen", std::string(300, 'y')}, {"rejected", "No"}}.dump() << "\n"
      << R"({"prompt": "What?", "chosen": "Yes"})"
      << "\n";
  EXPECT_THAT(refusal<DataError>(tune("lacking")), HasSubstr("line 6: it has no \"rejected\""));
  train(tune("skipped", {"--dpo.skip_malformed", "--training.steps=1", "--training.local_batch_size=1",
                         "--training.global_batch_size=1"}),
        1);
  std::string made;
  for (const auto& entry : std::filesystem::directory_iterator(path("skipped") + "/dpo")) {
    std::ifstream file(entry.path() / "made.txt");
    if (file) std::getline(file, made);
  }
  EXPECT_THAT(made, AllOf(HasSubstr("preferences, train: 4 pairs, "), HasSubstr("1 that was too long is left out"),
                          HasSubstr("1 skipped, the first because of "), HasSubstr("it has no \"rejected\"")));
}

TEST_F(TrainerDpoTest, KeysThatContradictItAreRefused) {
  const auto refused = [&](std::vector<std::string> more) {
    return error_text<ConfigError>([&] { tune("refused", std::move(more)); });
  };
  EXPECT_THAT(refused({"--dpo.beta=0"}), HasSubstr("[dpo] beta is 0"));
  EXPECT_THAT(refused({"--dpo.loss_type=ipo"}), HasSubstr("\"sigmoid\""));
  EXPECT_THAT(refused({"--dpo.loss_type=hinge", "--dpo.label_smoothing=0.1"}), HasSubstr("label_smoothing is 0.1"));
  EXPECT_THAT(refused({"--dpo.label_smoothing=0.5"}), HasSubstr("label_smoothing is 0.5"));
  EXPECT_THAT(refused({"--training.z_loss_weight=1e-4"}), HasSubstr("z_loss_weight is 0.0001"));
  EXPECT_THAT(refused({"--checkpoint.allow_data_mismatch"}),
              HasSubstr("what the reference says of its own pairs alone"));
  EXPECT_THAT(refused({"--model.converters=quantize.linear.float8"}),
              HasSubstr("[model] converters has float8 layers"));
  EXPECT_THAT(refused({"--sft.conversations=" + path("preferences.jsonl")}), HasSubstr("beside [sft] conversations"));
  EXPECT_THAT(refused({"--training.dataset_path=" + path("tokens.bin")}),
              HasSubstr("[training] dataset_path is set beside [dpo] preferences"));
  EXPECT_THAT(refused({"--training.packing=none"}), HasSubstr("but [dpo] trains on whole conversations"));
  EXPECT_THAT(refused({"--checkpoint.no-initial_random_weights"}), HasSubstr("the start and the reference"));
  EXPECT_THAT(refused({"--dpo.preferences=", "--dpo.chat_template=x"}), HasSubstr("[dpo] chat_template is set, but"));
  EXPECT_THAT(refused({"--dpo.validation_preferences=" + path("held_out.jsonl")}),
              HasSubstr("[dpo] validation_preferences is set, but [validation] enable is not"));
}

}  // namespace
}  // namespace phalanx::train::trainer_dpo_test
