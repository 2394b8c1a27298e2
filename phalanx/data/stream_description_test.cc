// Tests the promise of docs/data.md: whatever changes between a stop and the next start, no token is skipped or read
// twice.
#include "phalanx/data/stream_description.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/data/testing/small_data.h"

namespace phalanx::data {
namespace {

using nlohmann::json;

/// The position of each token in the file: token k is k.
class StreamTest : public ::testing::Test {
 protected:
  TokenFile counting(int count, const std::string& name = "counting.bin", int first = 0) {
    return counting_file(folder_.path() / name, count, first);
  }
  TempDirectory folder_{"stream"};
};

/// A job that is stopped and restarted, each time with other numbers. Only what a checkpoint stores is saved.
class StoppedJob {
 public:
  struct Start {
    std::int64_t seq_len = 0, ranks = 1, micro_batches = 1, rows = 1, steps = 1;  // rows: of one micro-batch
  };

  StoppedJob(TokenFile tokens, DataLoaderOptions options) : tokens_(std::move(tokens)), options_(options) {}

  void run(const Start& start) {
    options_.seq_len = start.seq_len;
    options_.global_batch_size = start.ranks * start.micro_batches * start.rows;
    DataLoader dataloader(tokens_, options_);
    if (!saved_.is_null()) {
      const StreamResume resume = resume_stream(json::parse(saved_.dump()), position_, dataloader);
      ASSERT_THAT(resume.differences, IsEmpty());
      dataloader.begin_at(step_, resume.position);
    }
    for (std::int64_t i = 0; i < start.steps; ++i, ++step_) read_step(dataloader, start);
    saved_ = describe_stream(dataloader);
    position_ = tokens_read(dataloader, step_);
    epoch_ = dataloader.position_of(step_).epoch;
  }

  /// Inputs in the order of the global batches, all ranks and micro-batches together.
  const std::vector<std::int64_t>& read() const { return read_; }
  std::int64_t epoch() const { return epoch_; }

 private:
  void read_step(const DataLoader& dataloader, const Start& start) {
    const std::int64_t seq = start.seq_len;
    for (std::int64_t rank = 0; rank < start.ranks; ++rank) {
      for (std::int64_t m = 0; m < start.micro_batches; ++m) {
        const RowRange rows = dataloader.rows_of(
            {.rank = rank, .ranks = start.ranks, .micro_batch = m, .micro_batches = start.micro_batches});
        std::vector<std::int64_t> inputs(static_cast<std::size_t>(rows.size() * seq)), labels(inputs.size());
        dataloader.fill(step_, rows, inputs, labels);
        for (std::size_t k = 0; k < inputs.size(); ++k) ASSERT_EQ(labels[k], inputs[k] + 1);
        read_.insert(read_.end(), inputs.begin(), inputs.end());
      }
    }
  }

  TokenFile tokens_;
  DataLoaderOptions options_;
  std::int64_t step_ = 0, position_ = 0, epoch_ = 0;
  json saved_;
  std::vector<std::int64_t> read_;
};

StoppedJob::Start random_start(std::mt19937& random, std::int64_t seq_len) {
  const auto of = [&](std::initializer_list<std::int64_t> choices) {
    return choices.begin()[random() % choices.size()];
  };
  return {.seq_len = seq_len,
          .ranks = of({1, 2, 3, 4, 8}),
          .micro_batches = of({1, 2, 3}),
          .rows = of({1, 2, 5}),
          .steps = of({1, 2, 3, 7})};
}

TEST_F(StreamTest, ShuffledEpochsHaveEverySampleOnceOverAnyNumberOfResumes) {
  for (std::uint32_t seed = 0; seed < 40; ++seed) {
    std::mt19937 random(seed);
    const std::int64_t seq = 1 + static_cast<std::int64_t>(random() % 9);
    const int size = 60 + static_cast<int>(random() % 200);
    StoppedJob job(counting(size), {.shuffle = true, .seed = seed});
    int resumes_after_first_epoch = 0;
    for (int start = 0; start < 4 || job.epoch() < 2 || resumes_after_first_epoch < 2; ++start) {
      resumes_after_first_epoch += job.epoch() >= 1;
      ASSERT_NO_FATAL_FAILURE(job.run(random_start(random, seq)));
    }
    const std::int64_t per_epoch = (size - 1) / seq * seq;
    std::vector<std::int64_t> all(static_cast<std::size_t>(per_epoch));
    std::iota(all.begin(), all.end(), 0);
    std::vector<std::vector<std::int64_t>> epochs;
    for (std::size_t at = 0; at + all.size() <= job.read().size(); at += all.size()) {
      epochs.emplace_back(job.read().begin() + static_cast<std::ptrdiff_t>(at),
                          job.read().begin() + static_cast<std::ptrdiff_t>(at + all.size()));
      std::ranges::sort(epochs.back());
      ASSERT_EQ(epochs.back(), all) << "seed " << seed << ", epoch " << epochs.size();
    }
    ASSERT_GE(epochs.size(), 2u);
    // And the very order of a job that never stopped.
    StoppedJob never(counting(size), {.shuffle = true, .seed = seed});
    never.run({.seq_len = seq, .steps = static_cast<std::int64_t>(job.read().size()) / seq});
    ASSERT_EQ(job.read(), never.read());
  }
}

TEST_F(StreamTest, WithoutShufflingTheSequenceLengthMayChangeAtEveryResume) {
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    std::mt19937 random(seed);
    const int size = 60 + static_cast<int>(random() % 200);
    StoppedJob job(counting(size), {.shuffle = false});
    std::int64_t longest = 0;
    for (int start = 0; start < 4 || job.epoch() < 3; ++start) {
      const std::int64_t seq = 1 + static_cast<std::int64_t>(random() % 12);
      longest = std::max(longest, seq);
      ASSERT_NO_FATAL_FAILURE(job.run(random_start(random, seq)));
    }
    // Token after token, until too few for one more sequence are left: then from the beginning.
    std::int64_t expected = 0;
    for (const std::int64_t token : job.read()) {
      if (token == 0 && expected != 0) {
        ASSERT_LE(size - 1 - expected, longest - 1) << "seed " << seed << ": an epoch ended too soon";
        expected = 0;
      }
      ASSERT_EQ(token, expected) << "seed " << seed;
      ++expected;
    }
  }
}

TEST_F(StreamTest, AShuffledStreamChangesItsSequenceLengthBetweenEpochsOnly) {
  // 100 samples of 10 tokens; then 50 of 20.
  const TokenFile tokens = counting(1001);
  DataLoader before(tokens, {.seq_len = 10, .global_batch_size = 20, .seed = 3});
  DataLoader after(tokens, {.seq_len = 20, .global_batch_size = 10, .seed = 3});
  const json saved = describe_stream(before);
  const StreamResume border = resume_stream(saved, tokens_read(before, 5), after);
  EXPECT_THAT(border.differences, IsEmpty());
  EXPECT_EQ(border.position, (StreamPosition{1, 0}));
  EXPECT_THAT(border.notes, ElementsAre(AllOf(HasSubstr("10 tokens a sequence"), HasSubstr("reads 20"))));
  after.begin_at(5, border.position);
  std::vector<std::int64_t> seen;
  for (std::int64_t row = 0; row < 50; ++row) seen.push_back(after.token_at(5 + row / 10, row % 10));
  std::ranges::sort(seen);
  for (std::int64_t k = 0; k < 50; ++k) EXPECT_EQ(seen[static_cast<std::size_t>(k)], 20 * k);

  const StreamResume inside = resume_stream(saved, tokens_read(before, 7), after);
  EXPECT_THAT(inside.differences,
              ElementsAre(AllOf(HasSubstr("[training] seq_len"), HasSubstr("10 tokens"), HasSubstr("reads 20"),
                                HasSubstr("epoch 2 is shuffled"), HasSubstr("40 of 100"))));
}

TEST_F(StreamTest, AnotherStreamIsTold) {
  const TokenFile tokens = counting(1000);
  const DataLoaderOptions options{.seq_len = 10, .global_batch_size = 4, .seed = 3};
  const DataLoader dataloader(tokens, options);
  const json saved = describe_stream(dataloader);
  const auto told = [&](TokenFile file, const std::function<void(DataLoaderOptions&)>& change) {
    DataLoaderOptions other = options;
    change(other);
    const StreamResume resume = resume_stream(saved, 80, DataLoader(std::move(file), other));
    EXPECT_EQ(resume.position, StreamPosition{}) << "other data begin at their beginning";
    return resume.differences;
  };
  const auto nothing = [](DataLoaderOptions&) {};
  EXPECT_THAT(told(counting(1000, "other.bin", 1), nothing),
              ElementsAre(AllOf(HasSubstr("[training] dataset_path"), HasSubstr("counting.bin (1000 uint16 tokens"),
                                HasSubstr("other.bin (1000"))));
  EXPECT_THAT(told(counting(1001, "other.bin"), nothing), ElementsAre(HasSubstr("1001 uint16 tokens")));
  EXPECT_THAT(
      told(tokens,
           [](DataLoaderOptions& o) {
             o.range = TokenRange{0, 900};
           }),
      ElementsAre(AllOf(HasSubstr("[validation]"), HasSubstr("tokens [0, 1000)"), HasSubstr("tokens [0, 900)"))));
  EXPECT_THAT(
      told(tokens, [](DataLoaderOptions& o) { o.shuffle = false; }),
      ElementsAre(AllOf(HasSubstr("[training] shuffle"), HasSubstr("shuffled by seed 3"), HasSubstr("in order"))));
  EXPECT_THAT(told(tokens, [](DataLoaderOptions& o) { o.seed = 4; }),
              ElementsAre(AllOf(HasSubstr("[debug] seed"), HasSubstr("seed 3"), HasSubstr("seed 4"))));
  json of_index = saved;
  of_index["index"] = "0123456789abcdef";
  EXPECT_THAT(resume_stream(of_index, 80, dataloader).differences,
              ElementsAre(AllOf(HasSubstr("index 0123456789ab)"), HasSubstr("no index)"))));
  // The same file somewhere else, and a seed that nothing is shuffled by, are no difference.
  EXPECT_THAT(resume_stream(saved, 80, DataLoader(counting(1000, "moved.bin"), options)).differences, IsEmpty());
  DataLoaderOptions ordered = options;
  ordered.shuffle = false;
  const json in_order = describe_stream(DataLoader(tokens, ordered));
  ordered.seed = 9;
  EXPECT_THAT(resume_stream(in_order, 80, DataLoader(tokens, ordered)).differences, IsEmpty());
}

TEST_F(StreamTest, MalformedDescriptionsAreErrors) {
  const DataLoader dataloader(counting(1000), {.seq_len = 10, .global_batch_size = 4});
  const json good = describe_stream(dataloader);
  const auto refused = [&](const char* key, const json& value, std::int64_t tokens = 80) {
    json bad = good;
    bad[key] = value;
    return error_text<DataError>([&] { resume_stream(bad, tokens, dataloader); });
  };
  EXPECT_THAT(refused("version", 9), HasSubstr("version 9: expected 1 to 4"));
  EXPECT_THAT(refused("seq_len", "ten"), HasSubstr("malformed"));
  EXPECT_THAT(refused("seq_len", 0), HasSubstr("of no stream"));
  EXPECT_THAT(refused("range", json::array({5})), HasSubstr("malformed"));
  EXPECT_THAT(refused("name", "elsewhere", -1), HasSubstr("position is -1"));
  EXPECT_THAT(refused("name", "elsewhere", 85), HasSubstr("inside a sequence of 10"));
  EXPECT_EQ(refused("name", "elsewhere"), "");
}

}  // namespace
}  // namespace phalanx::data
