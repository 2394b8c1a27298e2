// Runs on several data sets: every layout has the losses of one rank, a run resumes where it was, and the log, the
// metrics and the validation tell the sets apart.
#include <fmt/format.h>

#include <filesystem>
#include <map>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/case_sample.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/data/token_file_writer.h"
#include "phalanx/train/inputs/training_files.h"
#include "phalanx/train/testing/trainer_test_support.h"

namespace phalanx::train::trainer_blend_test {
namespace {

class TrainerBlendTest : public TrainerTest {
 protected:
  TrainerBlendTest() {
    write("large", 0, 4000, 23);
    write("small", 4000, 5000, 9);
    write("third", 5000, 6000, 40);
  }
  void write(const std::string& name, std::size_t begin, std::size_t end, std::size_t longest,
             const std::string& tokenizer = "") const {
    data::TokenFileWriter writer(path(name), {.vocab_size = 512, .tokenizer = tokenizer});
    for (std::size_t at = begin, length = 2; at < end; at += length, length = 2 + (at * 7) % longest) {
      writer.add_document(
          std::vector<std::int32_t>(tokens_.begin() + static_cast<std::ptrdiff_t>(at),
                                    tokens_.begin() + static_cast<std::ptrdiff_t>(std::min(at + length, end))));
    }
    writer.finish();
  }
  std::string set(const std::string& name, double weight, const std::string& more = "") const {
    return fmt::format("{{path = \"{}\", weight = {}{}}}", path(name), weight, more);
  }
  std::vector<std::string> blend(const std::vector<std::string>& sets, std::vector<std::string> more = {}) const {
    std::string text;
    for (const std::string& one : sets) text += (text.empty() ? "" : ", ") + one;
    more.insert(more.begin(), {"--training.dataset_path=", "--training.datasets=[" + text + "]"});
    return more;
  }
  std::vector<std::string> three(std::vector<std::string> more = {}) const {
    return blend({set("large", 0.5), set("small", 0.3), set("third", 0.2)}, std::move(more));
  }
};

TEST_F(TrainerBlendTest, EveryLayoutHasTheLossesOfOneRank) {
  const std::vector<Layout> layouts = {{"accumulated", 1, 1, 1, {"--training.local_batch_size=1"}},
                                       {"ddp", 4},
                                       {"zero3", 4, 1, 1, sharded(3)},
                                       {"tp", 2, 2},
                                       {"pp", 2, 1, 2},
                                       {"zero2 accumulated", 2, 1, 1, sharded(2)}};
  const std::vector<std::string> packed = {"--training.attn_mask_type=block_causal", "--training.packing=best_fit"};
  for (const auto& [kind, keys] : std::map<std::string, std::vector<std::string>>{{"cut", {}}, {"packed", packed}}) {
    train(config_of({"one"}, kind, three(keys)), 1);
    const std::vector<double> expected = losses(kind);
    const double validation = result_.validation_loss.value();
    const nlohmann::json sets = lines_with(kind, "validation_loss").back()["sets"];
    for (const Layout& layout : sampled(layouts, 2)) {
      SCOPED_TRACE(kind + ", " + layout.name);
      const std::string run = kind + " " + layout.name;
      train(config_of(layout, run, three(keys)), layout.ranks);
      expect_same_losses(losses(run), expected);
      EXPECT_NEAR(result_.validation_loss.value(), validation, kLossTolerance * validation);
      const nlohmann::json found = lines_with(run, "validation_loss").back()["sets"];
      for (const char* name : {"large", "small", "third"}) {
        EXPECT_NEAR(found[name]["loss"].get<double>(), sets[name]["loss"].get<double>(), 1e-4) << name;
        EXPECT_EQ(found[name]["labels"], sets[name]["labels"]) << name;
        if (kind == "cut") {
          EXPECT_EQ(found[name]["labels"], found[name]["tokens"]) << name;
        }
      }
    }
  }
}

TEST_F(TrainerBlendTest, ARunGoesOnAtAnyStepToTheBitAndWithOtherRanks) {
  const auto of = [&](const std::string& run, int steps, int local) {
    return config(run, three({fmt::format("--training.steps={}", steps), "--lr_scheduler.decay_ratio=0",
                              fmt::format("--training.local_batch_size={}", local)}));
  };
  const Weights whole = train(of("whole", 24, 4), 2);  // 'small' is read four times
  for (const int steps : {2, 5, 13}) {
    const std::string run = fmt::format("after {}", steps);
    train(of(run, steps, 4), 2);
    EXPECT_TRUE(train(of(run, 24, 4), 2) == whole) << run;
    EXPECT_EQ(losses(run), losses("whole"));
  }
  train(of("other ranks", 7, 4), 2);
  train(of("other ranks", 24, 1), 4);
  expect_same_losses(losses("other ranks"), losses("whole"));
}

TEST_F(TrainerBlendTest, LogMetricsAndValidationTellTheSetsApart) {
  train(config("run", three()), 1);
  const auto lines = lines_with("run", "loss");
  ASSERT_EQ(lines.size(), 12U);
  EXPECT_EQ(lines.back()["sets"]["large"]["sequences"], 48);
  EXPECT_EQ(lines.back()["sets"]["small"]["sequences"], 29);
  EXPECT_EQ(lines.back()["sets"]["third"]["sequences"], 19);
  EXPECT_NEAR(lines.back()["sets"]["small"]["epochs"].get<double>(), 29.0 / 29, 1e-9);  // of (950 - 1) / 32 sequences
  const auto validation = lines_with("run", "validation_loss").back();
  double losses = 0, tokens = 0;
  for (const char* name : {"large", "small", "third"}) {
    const auto& of_set = validation["sets"][name];
    losses += of_set["loss"].get<double>() * of_set["tokens"].get<double>();
    tokens += of_set["tokens"].get<double>();
  }
  EXPECT_EQ(validation["tokens"].get<double>(), tokens);
  EXPECT_NEAR(validation["validation_loss"].get<double>(), losses / tokens, 1e-9) << "each token counts once";
  const auto run = nlohmann::json::parse(std::ifstream(path("run") + "/run.json"));
  EXPECT_THAT(run["environment"]["blend 'small'"].get<std::string>(),
              AllOf(HasSubstr("29 sequences"), HasSubstr("30.21 % of all"), HasSubstr("1.00 epochs")));
  EXPECT_THAT(run["environment"]["data 'large'"].get<std::string>(), HasSubstr("4,000 tokens"));

  const std::string held_out = "--validation.datasets=[{path = \"" + path("third") + "\", name = \"far\"}, {path = \"" +
                               path("small") + "\", range = [0, 200]}]";
  train(config("files", blend({set("large", 1)}, {held_out})), 1);
  const auto of_files = lines_with("files", "validation_loss").back();
  EXPECT_EQ(of_files["sets"]["far"]["tokens"], 31 * 32);
  EXPECT_EQ(of_files["sets"]["small"]["tokens"], 6 * 32);
  EXPECT_FALSE(lines_with("files", "loss").back().contains("sets")) << "one set is no blend";
}

TEST_F(TrainerBlendTest, HeldOutTokensAreNoOtherSets) {
  std::filesystem::copy_file(path("small.bin"), path("copy.bin"));
  std::filesystem::copy_file(path("small.idx"), path("copy.idx"));
  const auto files = [&](const std::vector<std::string>& sets, const std::string& held_out) {
    const auto run = config("run", blend(sets, {"--validation.datasets=[" + held_out + "]"}));
    return open_training_files(run, config::plan_run(run, 1));
  };
  const auto refused = [&](const std::vector<std::string>& sets, const std::string& held_out) {
    return error_text<ConfigError>([&] { files(sets, held_out); });
  };
  const auto held = [&](const std::string& name, const std::string& more = "") {
    return fmt::format("{{path = \"{}\"{}}}", path(name), more);
  };
  const std::string large = set("large", 1);
  const auto range = [](const char* text) { return std::string(", range = ") + text; };
  EXPECT_THAT(refused({large, set("small", 1)}, held("copy")),
              AllOf(HasSubstr("tokens [0, 1000) are read by the training data set 'small'"),
                    HasSubstr("by the held-out data set 'copy'"), HasSubstr("ranges that do not overlap")));
  EXPECT_THAT(refused({large, set("small", 1, range("[0, 501]"))}, held("small", range("[500, 1000]"))),
              HasSubstr("tokens [500, 501) are read by"));
  EXPECT_EQ(refused({large, set("small", 1, range("[0, 500]"))}, held("small", range("[500, 1000]"))), "");
  EXPECT_THAT(refused({large}, held("small") + ", " + held("copy")),
              AllOf(HasSubstr("the held-out data set 'small'"), HasSubstr("the held-out data set 'copy'")));
  EXPECT_THAT(error_text<ConfigError>([&] {
                const auto run = config(
                    "run", {"--training.dataset_path=" + path("small"), "--validation.dataset_path=" + path("small")});
                open_training_files(run, config::plan_run(run, 1));
              }),
              HasSubstr("read by the training data set"));
  // What is trained twice is said.
  EXPECT_THAT(files({large, set("small", 1), set("copy", 1)}, held("third")).lines,
              Contains(AllOf(HasSubstr("read by the training data set 'small'"), HasSubstr("both shares"))));
  EXPECT_THAT(files({large, set("small", 1)}, held("third")).lines, IsEmpty());
  // So is a share that is not the one asked for.
  EXPECT_THAT(files({set("large", 0.99985), set("small", 0.00015)}, held("third")).lines,
              ElementsAre(AllOf(HasSubstr("'small' is 0.0"), HasSubstr("where 0.015 % was asked for"))));
}

TEST_F(TrainerBlendTest, SetsOfOneSizeAreReadInOrdersOfTheirOwn) {
  const auto rows = [&](std::vector<std::string> sets, std::int64_t first) {
    const auto run = config("run", blend(sets, {"--validation.no-enable", "--training.local_batch_size=2"}));
    const TrainingFiles files = open_training_files(run, config::plan_run(run, 1));
    std::vector<std::int64_t> numbers;
    for (std::int64_t row = first; row < 40; row += std::ssize(sets)) {
      std::vector<std::int64_t> inputs(32), labels(32);
      files.train->fill(row / files.train->global_batch_size(),
                        {row % files.train->global_batch_size(), row % files.train->global_batch_size() + 1}, inputs,
                        labels);
      numbers.insert(numbers.end(), inputs.begin(), inputs.end());
    }
    return numbers;
  };
  std::filesystem::copy_file(path("large.bin"), path("again.bin"));
  std::filesystem::copy_file(path("large.idx"), path("again.idx"));
  const std::vector<std::string> both = {set("large", 1), set("again", 1)};
  EXPECT_NE(rows(both, 0), rows(both, 1));
}

TEST_F(TrainerBlendTest, OneTableIsThatFileAlone) {
  train(config("one", {"--training.dataset_path=" + path("large"), "--training.steps=6"}), 1);
  const Weights alone = train(config("one", {"--training.dataset_path=" + path("large"), "--training.steps=12"}), 1);
  train(config("two", {"--training.dataset_path=" + path("large"), "--training.steps=6"}), 1);
  EXPECT_TRUE(train(config("two", blend({set("large", 5)}, {"--training.steps=12"})), 1) == alone);
}

TEST_F(TrainerBlendTest, ARangeIsAllThatIsRead) {
  write_tokens("part.bin", {tokens_.begin() + 1000, tokens_.begin() + 2001});
  const std::vector<std::string> part = {"--training.dataset_path=" + path("part.bin"), "--validation.no-enable"};
  const Weights alone = train(config("alone", part), 1);
  const auto ranged = [&](const std::string& range) {
    return blend({fmt::format("{{path = \"{}\", range = {}}}", path("tokens.bin"), range)}, {"--validation.no-enable"});
  };
  EXPECT_TRUE(train(config("range", ranged("[1000, 2001]")), 1) == alone);
  EXPECT_THAT(refusal<DataError>(config("far", ranged("[1000, 7000]"))),
              AllOf(HasSubstr("'tokens'"), HasSubstr("has 6000 tokens"), HasSubstr("expected an end of at most that")));
  EXPECT_THAT(refusal<DataError>(config("few", ranged("[10, 20]"))), HasSubstr("too few for one sample"));
}

TEST_F(TrainerBlendTest, OtherWeightsSetsAndOrdersAreRefusedAndNamesAreSaid) {
  train(config("run", three({"--training.steps=2"})), 1);
  const auto now = [&](const std::vector<std::string>& sets, std::vector<std::string> more = {}) {
    more.emplace_back("--training.steps=4");
    return config("run", blend(sets, std::move(more)));
  };
  const std::string large = set("large", 0.5), small = set("small", 0.3), third = set("third", 0.2);
  EXPECT_THAT(refusal<CheckpointError>(now({set("large", 0.6), set("small", 0.2), third})),
              AllOf(HasSubstr("5 of 'large', 3 of 'small', 2 of 'third'"), HasSubstr("3 of 'large', 1 of 'small'"),
                    HasSubstr("allow_data_mismatch")));
  EXPECT_THAT(refusal<CheckpointError>(now({large, set("third", 0.3), set("small", 0.2)})), HasSubstr("data set 2"));
  EXPECT_THAT(refusal<CheckpointError>(now({large, small})), HasSubstr("weight"));
  EXPECT_THAT(refusal<CheckpointError>(config("run", {"--training.dataset_path=" + path("large")})),
              HasSubstr("a blend of \"large\", \"small\", \"third\""));
  train(now({set("large", 0.5, ", name = \"web\""), small, third}), 1);
  const auto run = nlohmann::json::parse(std::ifstream(path("run") + "/run.json"));
  EXPECT_THAT(run.at("history").back().dump(), HasSubstr("was called 'large' and is now 'web'"));
  train(config("run", blend({set("large", 0.6), set("small", 0.2), third},
                            {"--training.steps=6", "--checkpoint.allow_data_mismatch"})),
        1);
  EXPECT_EQ(lines_with("run", "loss").back()["sets"]["large"]["sequences"], 10) << "two steps of the new blend";
}

TEST_F(TrainerBlendTest, SetsThatDoNotFitAreRefusedBeforeAnyStep) {
  write("tok a", 0, 3000, 9, "tok1:a");
  write("tok b", 100, 3100, 9, "tok1:b");
  EXPECT_THAT(refusal<ConfigError>(config("run", blend({set("tok a", 1), set("tok b", 1)}))),
              AllOf(HasSubstr("tok b"), HasSubstr("its ids would mean other texts")));
  EXPECT_THAT(refusal<Error>(config("run", blend({set("large", 1), set("nowhere", 1)}))), HasSubstr("nowhere"));
  write_tokens("short.bin", {1, 2, 3});
  EXPECT_THAT(
      refusal<DataError>(config("run", blend({set("large", 1), set("short.bin", 1)}, {"--validation.no-enable"}))),
      AllOf(HasSubstr("short.bin"), HasSubstr("too few for one sample")));
  EXPECT_THAT(refusal<DataError>(config(
                  "run", blend({set("large", 1), set("tokens.bin", 1)}, {"--training.attn_mask_type=block_causal"}))),
              AllOf(HasSubstr("tokens.bin"), HasSubstr("does not list its documents")));
  EXPECT_FALSE(std::filesystem::exists(path("run")));
}

}  // namespace
}  // namespace phalanx::train::trainer_blend_test
