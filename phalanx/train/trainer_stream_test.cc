// Runs on texts that are tokenised on the way: every layout has the losses of one rank, and a run resumes where it was.
#include <fmt/format.h>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/case_sample.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/data/corpus/corpus.h"
#include "phalanx/data/testing/small_data.h"
#include "phalanx/data/token_file_writer.h"
#include "phalanx/data/tokenizer/tokenizer_fingerprint.h"
#include "phalanx/train/testing/trainer_test_support.h"

namespace phalanx::train::trainer_stream_test {
namespace {

class TrainerStreamTest : public TrainerTest {
 protected:
  TrainerStreamTest() {
    const auto tokenizer = data::small_tokenizer("one two three four five six seven eight nine ten");
    tokenizer.save(path("tokenizer.json"));
    const char* const words[] = {"one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"};
    std::filesystem::create_directory(path("texts"));
    std::uint32_t state = 9;
    for (int file = 0; file < 3; ++file) {
      std::ofstream out(path("texts") + fmt::format("/{}.jsonl", file));
      for (int i = 0; i < 60; ++i) {
        state = state * 1664525U + 1013904223U;
        std::string text;
        for (std::uint32_t n = 1 + (state >> 24U) % 20, word = state >> 16U; n > 0; --n, ++word) {
          text += (text.empty() ? "" : " ") + std::string(words[word % 10]);
        }
        out << nlohmann::json{{"body", text}}.dump() << "\n";
      }
    }
    data::encode_corpus(data::list_corpus({path("texts") + "/0.jsonl"}, {.field = "body"}).documents, tokenizer,
                        path("held out"));
  }
  std::vector<std::string> texts(std::vector<std::string> more = {}) const {
    more.insert(more.begin(), {"--training.dataset_path=", "--stream.paths=" + path("texts"), "--stream.field=body",
                               "--stream.window=25", "--model.hf_assets_path=" + path("tokenizer.json"),
                               "--validation.dataset_path=" + path("held out")});
    return more;
  }
};

TEST_F(TrainerStreamTest, EveryLayoutHasTheLossesOfOneRank) {
  const std::vector<std::string> packed = {"--training.attn_mask_type=block_causal", "--training.packing=best_fit"};
  const std::vector<Layout> layouts = {{"accumulated", 1, 1, 1, {"--training.local_batch_size=1"}},
                                       {"ddp", 4},
                                       {"zero3", 4, 1, 1, sharded(3)},
                                       {"tp", 2, 2},
                                       {"pp", 2, 1, 2}};
  for (const auto& [kind, keys] : std::map<std::string, std::vector<std::string>>{{"cut", {}}, {"packed", packed}}) {
    train(config_of({"one"}, kind, texts(keys)), 1);
    const std::vector<double> expected = losses(kind);
    ASSERT_EQ(expected.size(), 12U);
    EXPECT_LT(expected.back(), expected.front() - 0.5);
    for (const Layout& layout : sampled(layouts, 2)) {
      SCOPED_TRACE(kind + ", " + layout.name);
      train(config_of(layout, kind + " " + layout.name, texts(keys)), layout.ranks);
      expect_same_losses(losses(kind + " " + layout.name), expected);
    }
  }
}

TEST_F(TrainerStreamTest, ARunGoesOnAtAnyStepToTheBitAndWithOtherRanksAndWorkers) {
  const auto of = [&](const std::string& run, int steps, int local, int workers = 1) {
    return config(run, texts({fmt::format("--training.steps={}", steps), "--lr_scheduler.decay_ratio=0",
                              fmt::format("--training.local_batch_size={}", local),
                              fmt::format("--stream.workers={}", workers)}));
  };
  const Weights whole = train(of("whole", 40, 4), 2);  // into the second epoch
  for (const int steps : sampled(std::vector<int>{2, 5, 31}, 1)) {
    const std::string run = fmt::format("after {}", steps);
    train(of(run, steps, 4, 3), 2);
    EXPECT_TRUE(train(of(run, 40, 4), 2) == whole) << run;
    EXPECT_EQ(losses(run), losses("whole"));
  }
  EXPECT_GT(CheckpointReader(path("whole") + "/checkpoint/step-40").manifest().integers.at("data.epoch"), 0);
  const nlohmann::json read = lines_with("whole", "loss").back()["sets"]["texts"];
  EXPECT_EQ(read["sequences"], 40 * 8);
  EXPECT_GE(read["epochs"].get<double>(), 1);
  train(of("other ranks", 7, 4), 2);
  train(of("other ranks", 40, 1), 4);
  expect_same_losses(losses("other ranks"), losses("whole"));
}

TEST_F(TrainerStreamTest, OtherTextsAreRefusedUnlessAskedFor) {
  train(config("run", texts({"--training.steps=2"})), 1);
  std::ofstream(path("texts") + "/1.jsonl", std::ios::app) << "{\"body\": \"one more\"}\n";
  EXPECT_THAT(
      refusal<CheckpointError>(config("run", texts({"--training.steps=4"}))),
      AllOf(HasSubstr("[stream] paths: file 2: the checkpoint's run read 1.jsonl"), HasSubstr("allow_data_mismatch")));
  EXPECT_THAT(refusal<CheckpointError>(config("run", {"--training.steps=4"})), HasSubstr("read texts"));
  train(config("run", texts({"--training.steps=4", "--checkpoint.allow_data_mismatch"})), 1);
  EXPECT_EQ(state_in("run", 4).integers.at("data.tokens"), 2 * 8 * 32);
  train(config("file", {"--training.steps=2"}), 1);
  EXPECT_THAT(refusal<CheckpointError>(config("file", texts({"--training.steps=4"}))),
              HasSubstr("this one reads texts"));
  train(config("file", texts({"--training.steps=4", "--checkpoint.allow_data_mismatch"})), 1);
  EXPECT_EQ(result_.step, 4);
}

TEST_F(TrainerStreamTest, HeldOutFilesHaveTheSameAroundTheirDocumentsAsTheTexts) {
  const data::BpeTokenizer tokenizer = data::BpeTokenizer::load(path("tokenizer.json"));
  const std::int64_t end = tokenizer.end_of_text().value();
  const auto held_out = [&](std::int64_t document_end, std::optional<bool> special_tokens) {
    data::TokenFileWriter writer(path("others"), {.vocab_size = tokenizer.vocab_size(),
                                                  .tokenizer = data::tokenizer_fingerprint(tokenizer),
                                                  .document_end = document_end,
                                                  .special_tokens = special_tokens});
    for (int i = 0; i < 100; ++i) writer.add_document(std::vector<std::int32_t>(19, 1));
    writer.finish();
    return config("run", texts({"--training.steps=1", "--validation.dataset_path=" + path("others")}));
  };
  EXPECT_THAT(refusal<ConfigError>(held_out(7, {})),
              AllOf(HasSubstr(fmt::format("texts of [stream] paths end by token {}", end)), HasSubstr("files by 7"),
                    HasSubstr("allow_tokenizer_mismatch")));
  EXPECT_THAT(refusal<ConfigError>(held_out(end, false)),
              AllOf(HasSubstr("have the tokens of the tokenizer's template around them, unlike"),
                    HasSubstr("[stream] special_tokens")));
  for (const std::optional<bool> same : {std::optional<bool>(), std::optional(true)}) train(held_out(end, same), 1);
}

TEST_F(TrainerStreamTest, SettingsThatDoNotFitAreRefusedBeforeAnyStep) {
  const auto message = [&](const std::vector<std::string>& more) {
    return error_text<ConfigError>([&] { config("run", texts(more)); });
  };
  EXPECT_THAT(message({"--training.dataset_path=" + path("tokens.bin")}), HasSubstr("remove one of them"));
  EXPECT_THAT(message({"--model.hf_assets_path="}), HasSubstr("expected the tokenizer for the texts"));
  EXPECT_THAT(message({"--validation.dataset_path="}), HasSubstr("no part of the texts can be held out"));
  EXPECT_THAT(refusal<DataError>(config("run", texts({"--stream.paths=" + path("nowhere")}))),
              HasSubstr("no such file or directory"));
  EXPECT_THAT(refusal<DataError>(config("run", texts({"--stream.field=text"}))),
              AllOf(HasSubstr(".jsonl, line 1"), HasSubstr("no field \"text\"")));
}

}  // namespace
}  // namespace phalanx::train::trainer_stream_test
