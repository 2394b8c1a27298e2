// A resumed run continues its data: which data, from which token, and with which tokenizer.
#include <fmt/format.h>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/data/token_file_writer.h"
#include "phalanx/train/testing/trainer_test_support.h"

namespace phalanx::train {
namespace {

class TrainerDataTest : public TrainerTest {
 protected:
  TrainerDataTest() {
    // 40 samples of 32 tokens: five steps of eight are an epoch.
    write_tokens("small.bin", {tokens_.begin(), tokens_.begin() + 40 * 32 + 1});
  }
  config::TrainConfig small(const std::string& run, int steps, std::vector<std::string> more = {}) const {
    more.insert(more.begin(), {"--training.dataset_path=" + path("small.bin"), "--validation.no-enable",
                               "--lr_scheduler.decay_ratio=0", fmt::format("--training.steps={}", steps)});
    return config(run, std::move(more));
  }
  std::int64_t tokens_after(const std::string& run, int step) const {
    return CheckpointReader(path(run) + fmt::format("/checkpoint/step-{}", step)).manifest().integers.at("data.tokens");
  }
};

// The second and third run resume inside the second epoch, each with another number of ranks and micro-batches.
TEST_F(TrainerDataTest, ThreeResumesInARowReadWhatOneRunReads) {
  train(small("whole", 13), 1);
  train(small("parts", 4), 1);
  train(small("parts", 7, {"--training.local_batch_size=2"}), 2);
  train(small("parts", 9, {"--training.local_batch_size=1"}), 4);
  train(small("parts", 13), 1);
  expect_same_losses(losses("parts"), losses("whole"));
  EXPECT_EQ(tokens_after("parts", 7), 7 * 8 * 32);
  EXPECT_EQ(tokens_after("parts", 13), tokens_after("whole", 13));
}

TEST_F(TrainerDataTest, AnotherSequenceLengthGoesOnWhereThePlaceIsDefined) {
  // In order: at any step. 32 tokens a sequence, then 16 of them.
  train(small("ordered", 3, {"--training.no-shuffle"}), 1);
  train(small("ordered", 5, {"--training.no-shuffle", "--training.seq_len=16"}), 2);
  EXPECT_EQ(tokens_after("ordered", 5), 3 * 8 * 32 + 2 * 8 * 16);
  // Shuffled: between two epochs.
  train(small("shuffled", 5), 1);
  train(small("shuffled", 6, {"--training.seq_len=16"}), 1);
  EXPECT_EQ(tokens_after("shuffled", 6), 5 * 8 * 32 + 8 * 16);
  EXPECT_THAT(refusal<CheckpointError>(small("shuffled", 9)),
              AllOf(HasSubstr("[training] seq_len: the checkpoint's run read 16 tokens a sequence; this one reads 32"),
                    HasSubstr("epoch 2 is shuffled")));
  EXPECT_EQ(losses("shuffled").size(), 6u);
}

// Validation data change no weight, but the curve: a change is logged and recorded.
TEST_F(TrainerDataTest, OtherValidationDataAreSaidAndKept) {
  write_tokens("held_out.bin", {tokens_.begin() + 2000, tokens_.begin() + 3000});
  const auto with = [&](int steps, const std::string& file) {
    return small("run", steps, {"--validation.enable", "--validation.dataset_path=" + path(file)});
  };
  const auto history = [&] {
    return nlohmann::json::parse(std::ifstream(path("run") + "/run.json")).at("history").back().dump();
  };
  // The flags of small() come first.
  train(with(1, "held_out.bin"), 1);
  std::filesystem::copy_file(path("held_out.bin"), path("moved.bin"));
  train(with(2, "moved.bin"), 1);
  EXPECT_THAT(history(), Not(HasSubstr("validation content")));
  write_tokens("moved.bin", {tokens_.begin() + 3000, tokens_.begin() + 4000});  // the same name and size
  train(with(3, "moved.bin"), 2);
  EXPECT_THAT(history(), HasSubstr("validation content"));
  EXPECT_THAT(history(), Not(HasSubstr("\"validation\"")));  // nothing that could not be compared
}

TEST_F(TrainerDataTest, OtherDataAreRefusedUnlessAskedFor) {
  train(small("run", 3), 1);
  const std::vector<std::pair<std::string, std::string>> changes = {
      {"--training.dataset_path=" + path("tokens.bin"), "[training] dataset_path: the checkpoint's run read small.bin"},
      {"--training.no-shuffle", "[training] shuffle: the checkpoint's run read shuffled by seed 0"},
      {"--debug.seed=5", "[debug] seed"},
      {"--validation.enable",
       "[validation] enable, fraction or dataset_path, or a range of a data set: the checkpoint's run read tokens [0, "
       "1281)"},
  };
  for (const auto& [flag, message] : changes) {
    EXPECT_THAT(refusal<CheckpointError>(small("run", 6, {flag})),
                AllOf(HasSubstr(message), HasSubstr("allow_data_mismatch")))
        << flag;
  }
  std::filesystem::create_directory(path("moved"));
  std::filesystem::rename(path("small.bin"), path("moved/other.bin"));  // the same content
  train(small("run", 4, {"--training.dataset_path=" + path("moved/other.bin")}), 1);
  EXPECT_EQ(tokens_after("run", 4), 4 * 8 * 32);
  train(small("run", 6, {"--training.dataset_path=" + path("tokens.bin"), "--checkpoint.allow_data_mismatch"}), 1);
  EXPECT_EQ(tokens_after("run", 6), 2 * 8 * 32);  // of the new tokens, from their beginning
}

TEST_F(TrainerDataTest, TokenFilesThatDoNotFitAreRefusedBeforeAnyStep) {
  data::TokenFileWriter writer(path("wide"), {.vocab_size = 600, .tokenizer = "tok1:a"});
  writer.add_document(std::vector<std::int32_t>(2000, 7));
  writer.finish();
  EXPECT_THAT(refusal<DataError>(small("run", 2, {"--training.dataset_path=" + path("wide")})),
              AllOf(HasSubstr("a tokenizer of 600 ids"), HasSubstr("vocab_size of 512")));
  std::string ids(4 * 2000, '\0');
  for (int i = 0; i < 2000; ++i) ids[static_cast<std::size_t>(4 * i)] = static_cast<char>(i % 100 + 1);
  std::ofstream(path("ids32.bin"), std::ios::binary) << ids;
  EXPECT_THAT(refusal<DataError>(small("run", 2, {"--training.dataset_path=" + path("ids32.bin")})),
              AllOf(HasSubstr("uint32"), HasSubstr("[training] dataset_dtype")));
  train(small("run", 2, {"--training.dataset_path=" + path("ids32.bin"), "--training.dataset_dtype=uint32"}), 1);
  EXPECT_EQ(result_.step, 2);
}

}  // namespace
}  // namespace phalanx::train
