#include "phalanx/data/data_loader.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/data/corpus/token_statistics.h"
#include "phalanx/data/permutation.h"
#include "phalanx/data/testing/small_data.h"

namespace phalanx::data {
namespace {

/// Tokens 0, 1, 2, ... as raw uint16.
class DataLoaderTest : public ::testing::Test {
 protected:
  TokenFile counting(int count) {
    return counting_file(directory_.path() / ("counting" + std::to_string(count)), count);
  }
  TempDirectory directory_{"batches"};
};

struct Filled {
  std::vector<std::int64_t> inputs, labels;
  friend bool operator==(const Filled&, const Filled&) = default;
};

Filled filled(const DataLoader& dataloader, std::int64_t step, RowRange rows) {
  const auto count = static_cast<std::size_t>(rows.size() * dataloader.seq_len());
  Filled out{std::vector<std::int64_t>(count), std::vector<std::int64_t>(count)};
  dataloader.fill(step, rows, out.inputs, out.labels);
  return out;
}

TEST_F(DataLoaderTest, SequentialOrderIsSampleAfterSampleModuloTheirNumber) {
  // 23 tokens, 5 a sample: samples 0..3 of tokens [5k, 5k+5]; the last two tokens are no sample's.
  const DataLoader dataloader(counting(23), {.seq_len = 5, .global_batch_size = 3, .shuffle = false});
  EXPECT_EQ(dataloader.sample_count(), 4);
  EXPECT_EQ(filled(dataloader, 0, {0, 3}).inputs,
            (std::vector<std::int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14}));
  EXPECT_EQ(filled(dataloader, 0, {0, 3}).labels,
            (std::vector<std::int64_t>{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}));
  // Step 1 holds samples 3, 4 mod 4, 5 mod 4.
  EXPECT_EQ(filled(dataloader, 1, {0, 3}).inputs,
            (std::vector<std::int64_t>{15, 16, 17, 18, 19, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
}

TEST_F(DataLoaderTest, ShuffledEpochVisitsEverySampleOnceAndEpochsDiffer) {
  const DataLoader dataloader(counting(1001), {.seq_len = 10, .global_batch_size = 8, .seed = 3});
  ASSERT_EQ(dataloader.sample_count(), 100);
  std::vector<std::int64_t> order;
  for (int step = 0; step < 50; ++step) {
    for (int row = 0; row < 8; ++row) order.push_back(dataloader.token_at(step, row) / 10);
  }
  std::vector<std::vector<std::int64_t>> epochs;
  for (int epoch = 0; epoch < 4; ++epoch) {  // 400 samples: epochs end in the middle of a batch
    std::vector<std::int64_t> seen(order.begin() + epoch * 100, order.begin() + (epoch + 1) * 100);
    epochs.push_back(seen);
    std::sort(seen.begin(), seen.end());
    std::vector<std::int64_t> all(100);
    std::iota(all.begin(), all.end(), 0);
    EXPECT_EQ(seen, all) << "epoch " << epoch;
  }
  EXPECT_EQ(std::set(epochs.begin(), epochs.end()).size(), 4u);
  const DataLoader other(counting(1001), {.seq_len = 10, .global_batch_size = 8, .seed = 4});
  EXPECT_NE(filled(dataloader, 0, {0, 8}), filled(other, 0, {0, 8}));
}

// Three steps of 8 samples, then batches of 20, then of 8 again: an epoch of 100 is still read exactly once.
TEST_F(DataLoaderTest, SamplesGoOnWhenTheGlobalBatchChanges) {
  const auto batches_of = [&](std::int64_t size) {
    return DataLoader(counting(1001), {.seq_len = 10, .global_batch_size = size, .seed = 3});
  };
  std::vector<std::int64_t> order;
  std::int64_t step = 0, position = 0;
  for (const auto& [size, steps] : {std::pair<std::int64_t, int>{8, 3}, {20, 3}, {8, 2}}) {
    DataLoader dataloader = batches_of(size);
    dataloader.begin_at(step, {0, 10 * position});
    for (int i = 0; i < steps; ++i, ++step) {
      EXPECT_EQ(dataloader.position_of(step), (StreamPosition{0, 10 * position}));
      for (std::int64_t row = 0; row < size; ++row) order.push_back(dataloader.token_at(step, row) / 10);
      position += size;
    }
  }
  const DataLoader one = batches_of(100);
  std::vector<std::int64_t> epoch;
  for (std::int64_t row = 0; row < 100; ++row) epoch.push_back(one.token_at(0, row) / 10);
  EXPECT_EQ(order, epoch);
}

TEST_F(DataLoaderTest, RanksAndMicroBatchesTogetherAreTheGlobalBatch) {
  const DataLoader dataloader(counting(2001), {.seq_len = 7, .global_batch_size = 48, .seed = 11});
  for (const std::int64_t step : {0, 1, 12, 13}) {
    const Filled whole = filled(dataloader, step, {0, 48});
    for (const std::int64_t ranks : {1, 2, 3, 4, 8}) {
      for (const std::int64_t micro_batches : {1, 2}) {
        Filled joined;
        for (std::int64_t rank = 0; rank < ranks; ++rank) {
          const std::int64_t local = 48 / ranks;
          for (std::int64_t m = 0; m < micro_batches; ++m) {
            const RowRange rows =
                dataloader.rows_of({.rank = rank, .ranks = ranks, .micro_batch = m, .micro_batches = micro_batches});
            EXPECT_GE(rows.begin, rank * local);
            EXPECT_LE(rows.end, (rank + 1) * local);
            const Filled part = filled(dataloader, step, rows);
            joined.inputs.insert(joined.inputs.end(), part.inputs.begin(), part.inputs.end());
            joined.labels.insert(joined.labels.end(), part.labels.begin(), part.labels.end());
          }
        }
        EXPECT_EQ(joined, whole) << ranks << " ranks, " << micro_batches << " micro-batches";
      }
    }
  }
}

TEST_F(DataLoaderTest, LabelsAreTheNextTokens) {
  const DataLoader dataloader(counting(500), {.seq_len = 9, .global_batch_size = 4, .seed = 5});
  const Filled batch = filled(dataloader, 17, {1, 4});
  for (std::size_t i = 0; i < batch.inputs.size(); ++i) EXPECT_EQ(batch.labels[i], batch.inputs[i] + 1);
}

TEST_F(DataLoaderTest, ValidationAndTrainingShareNoToken) {
  const TokenFile tokens = counting(1000);
  const auto split = split_validation(tokens.size(), 0.13);
  EXPECT_EQ(split.train, (TokenRange{0, 870}));
  EXPECT_EQ(split.validation, (TokenRange{870, 1000}));
  const auto tokens_of = [&](TokenRange range) {
    const DataLoader dataloader(tokens, {.seq_len = 16, .global_batch_size = 1, .range = range});
    std::set<std::int64_t> seen;
    for (std::int64_t k = 0; k < dataloader.sample_count(); ++k) {
      std::vector<std::int64_t> inputs(16), labels(16);
      dataloader.fill_samples(k, 1, inputs, labels);
      seen.insert(inputs.begin(), inputs.end());
      seen.insert(labels.begin(), labels.end());
    }
    return seen;
  };
  const auto train = tokens_of(split.train), validation = tokens_of(split.validation);
  EXPECT_EQ(*train.rbegin(), 864);  // 54 samples of 16 and one label
  EXPECT_EQ(*validation.begin(), 870);
  EXPECT_EQ(*validation.rbegin(), 998);
  EXPECT_EQ(split_validation(1000, 0.0).train, (TokenRange{0, 1000}));
  EXPECT_THROW(split_validation(1000, 1.0), ConfigError);
  EXPECT_THROW(split_validation(1000, -0.1), ConfigError);
  EXPECT_THROW(split_validation(10, 0.01), ConfigError);
}

TEST_F(DataLoaderTest, ErrorsNameNumbersAndTheNearestChoices) {
  EXPECT_THAT(error_text([] { check_batch(24, 5); }),
              AllOf(HasSubstr("24"), HasSubstr("5 data-parallel ranks"), HasSubstr("20 or 25"), HasSubstr("4 or 6")));
  EXPECT_THAT(error_text([] { check_batch(8, 2, 3); }),
              AllOf(HasSubstr("of 3 micro-batches"), HasSubstr("6 or 12"), Not(HasSubstr("numbers of ranks"))));
  EXPECT_THAT(error_text([] { check_batch(2, 4); }), AllOf(HasSubstr("can are 4"), HasSubstr("ranks 2")));
  EXPECT_NO_THROW(check_batch(24, 8, 3));
  EXPECT_THROW(check_batch(0, 1), ConfigError);
  EXPECT_THAT(error_text([&] { DataLoader(counting(100), {.seq_len = 100, .global_batch_size = 1}); }),
              AllOf(HasSubstr("counting100"), HasSubstr("100 tokens"), HasSubstr("at least 101")));
  EXPECT_THROW(DataLoader(counting(100), {.seq_len = 4, .global_batch_size = 1, .range = TokenRange{0, 101}}),
               DataError);
  EXPECT_THROW(DataLoader(counting(100), {.seq_len = 4, .global_batch_size = 1, .range = TokenRange{5, 5}}), DataError);
  EXPECT_THROW(DataLoader(counting(100), {.seq_len = 0, .global_batch_size = 1}), ConfigError);
  const DataLoader dataloader(counting(100), {.seq_len = 4, .global_batch_size = 4});
  std::vector<std::int64_t> small(4), right(8);
  EXPECT_THROW(dataloader.fill(0, {0, 2}, right, small), ConfigError);
  EXPECT_THROW(dataloader.fill(0, {3, 5}, right, right), ConfigError);
  EXPECT_THROW(dataloader.fill(-1, {0, 2}, right, right), ConfigError);
  EXPECT_THROW(dataloader.rows_of({.rank = 2, .ranks = 2}), ConfigError);
}

TEST(PermutationTest, IsABijectionForEverySizeAndDependsOnTheKey) {
  for (const std::int64_t size : {1, 2, 3, 4, 5, 7, 16, 17, 100, 1023, 1024, 1025, 4097}) {
    for (const std::uint64_t seed : {0ull, 1ull, ~0ull}) {
      const Permutation order(size, {seed, 2});
      std::vector<bool> seen(size);
      for (std::int64_t k = 0; k < size; ++k) {
        const std::int64_t to = order(k);
        ASSERT_TRUE(to >= 0 && to < size && !seen[to]) << "size " << size << ", " << k << " -> " << to;
        seen[to] = true;
      }
    }
  }
  // Two keys may agree in a few of 1000 positions, not in many, and none of the keys gives the identity.
  const Permutation a(1000, {1, 0}), b(1000, {1, 1}), c(1000, {2, 0});
  int same_epoch = 0, same_seed = 0, fixed = 0;
  for (int k = 0; k < 1000; ++k) {
    same_epoch += a(k) == b(k);
    same_seed += a(k) == c(k);
    fixed += a(k) == k;
  }
  EXPECT_LT(same_epoch, 12);
  EXPECT_LT(same_seed, 12);
  EXPECT_LT(fixed, 12);
}

TEST(PermutationTest, MixesPositionsEvenly) {
  // The first tenth of the samples is spread evenly: about a tenth of them in each tenth of the epoch.
  const Permutation order(10000, {42, 7});
  std::vector<int> bins(10);
  for (int k = 0; k < 1000; ++k) ++bins[order(k) / 1000];
  for (const int bin : bins) EXPECT_NEAR(bin, 100, 40);
}

TEST_F(DataLoaderTest, UnigramEntropyIsThatOfTheDistribution) {
  EXPECT_NEAR(unigram_entropy(std::vector<std::int64_t>{5, 5, 5, 5}), std::log(4.0), 1e-12);
  EXPECT_NEAR(unigram_entropy(std::vector<std::int64_t>{3, 0, 1}), -(0.75 * std::log(0.75) + 0.25 * std::log(0.25)),
              1e-12);
  EXPECT_EQ(unigram_entropy(std::vector<std::int64_t>{}), 0.0);
  EXPECT_EQ(unigram_entropy(std::vector<std::int64_t>{7}), 0.0);
  EXPECT_THROW(token_counts(counting(10), {0, 10}), ConfigError);  // vocab_size not known
  const TokenFile tokens(counting(5000).path(), {.vocab_size = 5000});
  EXPECT_NEAR(unigram_entropy(tokens, {0, 5000}), std::log(5000.0), 1e-9);
  EXPECT_EQ(token_counts(tokens, {10, 12})[11], 1);
}

}  // namespace
}  // namespace phalanx::data
