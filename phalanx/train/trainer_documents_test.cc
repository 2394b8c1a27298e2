// Runs whose documents are kept apart: every layout has the losses of one rank, although ranks and micro-batches have
// unequal numbers of labels, and a run resumes where it was.
#include <fmt/format.h>

#include <map>
#include <set>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/case_sample.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/data/token_file_writer.h"
#include "phalanx/train/context_balance.h"
#include "phalanx/train/testing/trainer_test_support.h"
#include "phalanx/train/training_data.h"

namespace phalanx::train {
namespace {

class TrainerDocumentsTest : public TrainerTest {
 protected:
  TrainerDocumentsTest() {
    // Lengths from 1 to 61; one document in thirty is longer than a sequence of 32.
    data::TokenFileWriter writer(path("documents"), {.vocab_size = 512}),
        with_mask(path("masked"), {.vocab_size = 512, .has_mask = true});
    std::uint32_t state = 7;
    for (std::size_t at = 0; at < tokens_.size();) {
      state = state * 1664525U + 1013904223U;
      const std::size_t length = 1 + (state >> 24U) % ((state >> 8U) % 30 == 0 ? 61 : 23);
      const std::size_t end = std::min(at + length, tokens_.size());
      const std::vector<std::int32_t> ids(tokens_.begin() + static_cast<std::ptrdiff_t>(at),
                                          tokens_.begin() + static_cast<std::ptrdiff_t>(end));
      writer.add_document(ids);
      // Of some documents the end is trained, of some all, of some nothing.
      std::vector<std::uint8_t> is_trained(ids.size(), 0);
      for (std::size_t i = at % 4 * ids.size() / 4; i < ids.size() && at % 5 != 0; ++i) is_trained[i] = 1;
      with_mask.add_document(ids, is_trained);
      at = end;
    }
    writer.finish();
    with_mask.finish();
  }
  std::vector<std::string> separate(std::vector<std::string> more = {}) const {
    more.insert(more.begin(),
                {"--training.dataset_path=" + path("documents"), "--training.attn_mask_type=block_causal"});
    return more;
  }
  std::vector<std::string> packed(std::vector<std::string> more = {}) const {
    more.insert(more.begin(), "--training.packing=best_fit");
    return separate(std::move(more));
  }
  /// In the last step: less than whole sequences would need, as attention is within documents.
  double flops_per_token(const std::string& run) const {
    const nlohmann::json last = lines_with(run, "tflops").back();
    const double flops = last["tflops"].get<double>() * 1e12 / last["tps"].get<double>();
    EXPECT_LT(flops, 0.99 * config::model_config(config(run)).flops_per_token(32)) << run;
    return flops;
  }
  std::vector<std::string> masked(std::vector<std::string> more = {}) const {
    more.push_back("--training.dataset_path=" + path("masked"));
    return packed(std::move(more));
  }
  static std::vector<Layout> layouts() {
    const auto with = [](std::vector<std::string> keys, const std::vector<std::string>& more) {
      keys.insert(keys.end(), more.begin(), more.end());
      return keys;
    };
    const std::vector<std::string> one_row = {"--training.local_batch_size=1"},
                                   recomputed = {"--activation_checkpoint.mode=selective"},
                                   zbv = {"--parallelism.pipeline_parallel_schedule=ZBV"};
    return {{"accumulated", 1, 1, 1, one_row},
            {"ddp", 4},
            {"ddp accumulated", 2, 1, 1, with(one_row, recomputed)},
            {"zero1", 4, 1, 1, sharded(1)},
            {"zero2 accumulated", 2, 1, 1, with(sharded(2), one_row)},
            {"zero3", 4, 1, 1, with(sharded(3), recomputed)},
            {"zero2 reduced once", 2, 1, 1,
             with(with(sharded(2), one_row), {"--parallelism.fsdp_reduce_each_microbatch=never"})},
            {"hsdp", 4, 1, 1, sharded(3, 2)},
            {"hsdp accumulated", 4, 1, 1, with(sharded(3, 2), one_row)},
            {"tp", 2, 2},
            {"tp whole tokens", 2, 2, 1, {"--parallelism.no-enable_sequence_parallel"}},
            {"pp", 2, 1, 2},
            {"pp interleaved", 2, 1, 2, {"--parallelism.pipeline_parallel_schedule=Interleaved1F1B"}},
            {"pp zbv ddp", 4, 1, 2, zbv},
            {"pp tp", 4, 2, 2, recomputed},
            {"pp zero3", 4, 1, 2, sharded(3)},
            {"zero3 tp", 4, 2, 1, sharded(3)},
            {"cp4", 4, 1, 1, {}, 4},
            {"cp2 zero3 tp", 8, 2, 1, with(sharded(3, 2), recomputed), 2},
            {"cp2 pp accumulated", 4, 1, 2, recomputed, 2},
            {"cp2 headtail", 2, 1, 1, {"--parallelism.context_parallel_load_balancer=headtail"}, 2},
            {"cp4 ring", 4, 1, 1, {"--parallelism.context_parallel_exchange=ring"}, 4}};
  }
};

TEST_F(TrainerDocumentsTest, EveryLayoutHasTheLossesOfOneRank) {
  const std::map<std::string, std::vector<std::string>> kinds = {
      {"packed", packed()},
      {"separate", separate()},
      {"masked", masked()},
      {"masked, separate", masked({"--training.packing=none"})}};
  const std::set<std::string> of_separate = {"ddp", "zero3", "tp", "pp", "cp4"},
                              of_masked = {"ddp accumulated", "zero2 accumulated", "hsdp",        "zero3 tp",
                                           "pp tp",           "pp zero3",          "cp2 zero3 tp"};
  for (const auto& [kind, keys] : kinds) {
    train(config_of({"one"}, kind, keys), 1);
    const std::vector<double> expected = losses(kind);
    const double validation = result_.validation_loss.value();
    ASSERT_EQ(expected.size(), 12U);
    EXPECT_LT(expected.back(), expected.front() - 0.5);
    const double flops = flops_per_token(kind);
    std::vector<Layout> those = layouts();
    std::erase_if(those, [&](const Layout& one) {
      if (kind.ends_with("separate")) return !of_separate.contains(one.name);
      return kind == "masked" && !of_separate.contains(one.name) && !of_masked.contains(one.name);
    });
    for (const Layout& layout : sampled(those, kind == "packed" ? 4 : 2)) {
      SCOPED_TRACE(kind + ", " + layout.name);
      const std::string run = kind + " " + layout.name;
      train(config_of(layout, run, keys), layout.ranks);
      expect_same_losses(losses(run), expected);
      EXPECT_NEAR(flops_per_token(run), flops, 1e-9 * flops);
      EXPECT_NEAR(result_.validation_loss.value(), validation, kLossTolerance * validation);
    }
  }
}

TEST_F(TrainerDocumentsTest, ARunGoesOnWhereItWasWithAnotherNumberOfRanks) {
  const auto of = [&](const std::string& run, int steps, int local) {
    return config(run, packed({fmt::format("--training.steps={}", steps), "--lr_scheduler.decay_ratio=0",
                               fmt::format("--training.local_batch_size={}", local)}));
  };
  const Weights whole = train(of("whole", 50, 4), 2);  // into the second epoch
  train(of("parts", 9, 4), 2);
  train(of("parts", 37, 1), 4);
  train(of("parts", 50, 4), 2);
  expect_same_losses(losses("parts"), losses("whole"));
  // On the same ranks to the bit.
  train(of("bits", 20, 4), 2);
  EXPECT_EQ(train(of("bits", 50, 4), 2), whole);
}

TEST_F(TrainerDocumentsTest, ARunGoesOnWithSequencesThatAreCutOtherwise) {
  const std::string headtail = "--parallelism.context_parallel_load_balancer=headtail";
  train(config_of({.name = "one"}, "whole", packed()), 1);
  train_in_parts({{.name = "cp4", .ranks = 4, .keys = packed(), .cp = 4},
                  {.name = "cp2 headtail", .ranks = 2, .keys = packed({headtail}), .cp = 2},
                  {.name = "one", .keys = packed()}},
                 "parts");
  expect_same_losses(losses("parts"), losses("whole"));
}

TEST_F(TrainerDocumentsTest, SaysHowEvenlyRanksShareAttentionsWork) {
  const auto said = [&](const std::vector<std::string>& more) {
    std::vector<std::string> keys = packed({"--parallelism.context_parallel_degree=4"});
    keys.insert(keys.end(), more.begin(), more.end());
    const config::TrainConfig given = config("run", keys);
    const config::RunPlan plan = config::plan_run(given, 4);
    return context_balance_text(*open_training_data(given, plan, at::kCPU, 0).dataloader, plan);
  };
  const auto ratio_of = [](const std::string& text, const std::string& before) {
    const std::size_t at = text.find(before);
    EXPECT_NE(at, std::string::npos) << text;
    return at == std::string::npos ? 0 : std::stod(text.substr(at + before.size()));
  };
  const std::string by_work = said({}), headtail = said({"--parallelism.context_parallel_load_balancer=headtail"});
  EXPECT_THAT(by_work, StartsWith("blocks of packed sequences, by attention's work; worst rank / mean: 1."));
  EXPECT_THAT(headtail, StartsWith("heads and tails of packed sequences; attention's work, worst rank / mean: 1."));
  EXPECT_EQ(ratio_of(by_work, "(heads and tails: "), ratio_of(headtail, "mean: "));
  EXPECT_LT(ratio_of(by_work, "mean: "), 1.05);
  EXPECT_GT(ratio_of(headtail, "mean: "), 1.05);
  EXPECT_EQ(said({"--parallelism.context_parallel_exchange=ring"}), headtail);
  EXPECT_THAT(said({"--parallelism.context_parallel_exchange=heads"}), HasSubstr("the same work"));
  EXPECT_EQ(said({"--training.packing=none", "--training.attn_mask_type=causal"}), "");
}

TEST_F(TrainerDocumentsTest, AMaskedRunGoesOnWithItsMaskAlone) {
  const auto of = [&](const std::string& run, int steps) {
    return config(run, masked({fmt::format("--training.steps={}", steps), "--lr_scheduler.decay_ratio=0"}));
  };
  const Weights whole = train(of("whole", 20), 2);
  EXPECT_NE(train(config("all tokens", packed({"--training.steps=20", "--lr_scheduler.decay_ratio=0"})), 2), whole);
  train(of("parts", 7), 2);
  EXPECT_EQ(train(of("parts", 20), 2), whole);
  // The same tokens, of which others are trained.
  const data::TokenFile file(path("masked"));
  data::TokenFileWriter writer(path("masked"), {.vocab_size = 512, .has_mask = true});
  for (std::int64_t i = 0; i < file.document_count(); ++i) {
    std::vector<std::int64_t> ids(static_cast<std::size_t>(file.document(i).size()));
    file.read(file.document(i).begin, ids);
    std::vector<std::uint8_t> is_trained(ids.size(), 0);
    is_trained.back() = 1;
    writer.add_document(std::vector<std::int32_t>(ids.begin(), ids.end()), is_trained);
  }
  writer.finish();
  EXPECT_THAT(refusal<CheckpointError>(of("parts", 21), 2),
              AllOf(HasSubstr("[training] dataset_path"), HasSubstr(", mask ")));
}

TEST_F(TrainerDocumentsTest, SettingsAndFilesThatDoNotFitAreRefused) {
  EXPECT_THAT(
      error_text<ConfigError>([&] {
        train(config("run", {"--training.dataset_path=" + path("documents"), "--training.packing=best_fit"}), 1);
      }),
      HasSubstr("set attn_mask_type = \"block_causal\""));
  EXPECT_THAT(error_text<DataError>([&] { train(config("run", {"--training.attn_mask_type=block_causal"}), 1); }),
              HasSubstr("does not list its documents"));
  train(config("run", packed({"--training.steps=2"})), 1);
  EXPECT_THAT(error_text<CheckpointError>([&] { train(config("run", separate({"--training.steps=3"})), 1); }),
              HasSubstr("[training] packing"));
}

}  // namespace
}  // namespace phalanx::train
