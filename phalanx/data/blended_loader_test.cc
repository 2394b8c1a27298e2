#include "phalanx/data/blended_loader.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <set>

#include "phalanx/base/error.h"
#include "phalanx/base/ignored_label.h"
#include "phalanx/base/process_stats.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/data/stream_description.h"
#include "phalanx/data/testing/small_data.h"

namespace phalanx::data::blended_loader_test {
namespace {

constexpr std::int64_t kSeq = 5;

struct Blend {
  std::vector<double> weights{7, 2, 1};
  std::vector<std::string> names{"a", "b", "c"};
  std::int64_t batch = 4, seq_len = kSeq;
  bool shuffle = true, separate = false, pack = false;
  std::uint64_t seed = 3;
};

class BlendedLoaderTest : public ::testing::Test {
 protected:
  /// Tokens of set i are 1000 i and more. Each set has documents of 3, 4, 5, ... tokens.
  void SetUp() override {
    for (int set = 0; set < 3; ++set) {
      TokenFileWriter writer((folder_.path() / std::string(1, static_cast<char>('a' + set))).string(),
                             {.vocab_size = 4000});
      std::int32_t next = 1000 * set;
      for (int length = 3; length < 12 + 6 * set; ++length) {
        std::vector<std::int32_t> document(static_cast<std::size_t>(length));
        std::iota(document.begin(), document.end(), next);
        next += length;
        writer.add_document(document);
      }
      writer.finish();
    }
  }

  DataLoader rows(int set, const Blend& blend) const {
    return {TokenFile((folder_.path() / std::string(1, static_cast<char>('a' + set))).string()),
            {.seq_len = blend.seq_len,
             .global_batch_size = 1,
             .shuffle = blend.shuffle,
             .seed = blend.seed,
             .separate_documents = blend.separate || blend.pack,
             .pack = blend.pack}};
  }

  BlendedLoader loader(const Blend& blend, const std::vector<int>& sets = {0, 1, 2}) const {
    std::vector<BlendedLoader::Part> parts;
    for (std::size_t i = 0; i < sets.size(); ++i) {
      parts.push_back({.name = blend.names[i], .weight = blend.weights[i], .rows = rows(sets[i], blend)});
    }
    return {std::move(parts), blend.batch};
  }

  struct Read {
    std::vector<std::int64_t> inputs, labels;
    std::vector<std::int32_t> ends;
  };
  static Read read(const BatchSource& source, std::int64_t step, RowRange rows) {
    const auto size = static_cast<std::size_t>(rows.size() * source.seq_len());
    Read read{std::vector<std::int64_t>(size), std::vector<std::int64_t>(size), {}};
    read.ends = source.fill(step, rows, read.inputs, read.labels);
    return read;
  }

  /// All rows of the steps, each as its inputs.
  static std::vector<std::vector<std::int64_t>> all_rows(const BatchSource& source, std::int64_t first,
                                                         std::int64_t end) {
    std::vector<std::vector<std::int64_t>> rows;
    for (std::int64_t step = first; step < end; ++step) {
      for (std::int64_t row = 0; row < source.global_batch_size(); ++row) {
        rows.push_back(read(source, step, {row, row + 1}).inputs);
      }
    }
    return rows;
  }

  TempDirectory folder_{"blend"};
};

TEST_F(BlendedLoaderTest, RowsOfEachSetAreThoseOfTheSetAloneInItsOwnOrderAndEpochs) {
  const Blend blend;
  const BlendedLoader blended = loader(blend);
  const auto mixed = all_rows(blended, 0, 50);
  std::map<int, std::int64_t> next;
  for (const auto& row : mixed) {
    const int set = static_cast<int>(row[0] / 1000);
    const auto of_set = read(rows(set, blend), next[set]++, {0, 1}).inputs;
    ASSERT_EQ(row, of_set);
  }
  EXPECT_EQ(next[0], 140);
  EXPECT_EQ(next[1], 40);
  EXPECT_EQ(next[2], 20);
  const std::vector<SetCount> counts = blended.counts_before(50);
  ASSERT_EQ(counts.size(), 3U);
  EXPECT_EQ(counts[0].sequences, 140);
  EXPECT_EQ(counts[0].name, "a");
  EXPECT_DOUBLE_EQ(counts[0].epochs, 140.0 / static_cast<double>(rows(0, blend).sample_count()));
  EXPECT_GT(counts[0].epochs, 10) << "a small set with a large weight is read again and again";
}

TEST_F(BlendedLoaderTest, TheBatchIsTheSameForAllRanksMicroBatchesAndBatchSizes) {
  for (const bool pack : {false, true}) {
    const Blend one{.batch = 1, .separate = true, .pack = pack};
    Blend eight = one;
    eight.batch = 8;
    const BlendedLoader single = loader(one), large = loader(eight);
    EXPECT_EQ(all_rows(single, 0, 40), all_rows(large, 0, 5));
    const Read whole = read(large, 3, {0, 8});
    std::vector<std::int64_t> labels;
    for (std::int64_t rank = 0; rank < 4; ++rank) {
      for (std::int64_t micro = 0; micro < 2; ++micro) {
        const Read part =
            read(large, 3, large.rows_of({.rank = rank, .ranks = 4, .micro_batch = micro, .micro_batches = 2}));
        labels.insert(labels.end(), part.labels.begin(), part.labels.end());
      }
    }
    EXPECT_EQ(labels, whole.labels);
    EXPECT_EQ(large.label_count(3),
              static_cast<std::int64_t>(whole.labels.size()) - std::ranges::count(whole.labels, kIgnoredLabel));
  }
}

TEST_F(BlendedLoaderTest, DocumentsEndWhereTheSetsFileSays) {
  for (const bool pack : {false, true}) {
    const Blend blend{.batch = 8, .separate = true, .pack = pack};
    const BlendedLoader blended = loader(blend);
    const Read batch = read(blended, 2, {2, 6});
    std::vector<std::int32_t> expected{0};
    for (std::int64_t row = 2; row < 6; ++row) {
      const Read one = read(blended, 2, {row, row + 1});
      for (std::size_t i = 1; i < one.ends.size(); ++i) {
        expected.push_back(static_cast<std::int32_t>((row - 2) * kSeq) + one.ends[i]);
      }
    }
    EXPECT_EQ(batch.ends, expected);
    EXPECT_EQ(batch.ends.back(), 4 * kSeq);
    for (std::size_t i = 0; i < batch.labels.size(); ++i) {
      if (batch.labels[i] == kIgnoredLabel) continue;
      ASSERT_EQ(batch.labels[i], batch.inputs[i] + 1);
    }
  }
  EXPECT_THAT(read(loader({}), 0, {0, 4}).ends, IsEmpty());
}

TEST_F(BlendedLoaderTest, LabelsAreCountedAsTheyAreFilledAlsoWhereASetHasAMask) {
  const std::string masked = (folder_.path() / "masked").string();
  TokenFileWriter writer(masked, {.vocab_size = 4000, .has_mask = true});
  for (int length = 3; length < 14; ++length) {
    std::vector<std::int32_t> document(static_cast<std::size_t>(length), 7);
    std::vector<std::uint8_t> is_trained(document.size());
    for (std::size_t i = 0; i < is_trained.size(); ++i) is_trained[i] = i % 3 == 1 ? 1 : 0;
    writer.add_document(document, is_trained);
  }
  writer.finish();
  for (const auto& [separate, pack] : {std::pair(false, false), {true, false}, {true, true}}) {
    SCOPED_TRACE(pack ? "packed" : separate ? "block_causal" : "causal");
    const Blend blend{.batch = 6, .separate = separate, .pack = pack};
    std::vector<BlendedLoader::Part> parts;
    parts.push_back({.name = "texts", .weight = 1, .rows = rows(0, blend)});
    parts.push_back(
        {.name = "chats",
         .weight = 2,
         .rows = {TokenFile(masked),
                  {.seq_len = kSeq, .global_batch_size = 1, .separate_documents = separate, .pack = pack}}});
    const BlendedLoader blended(std::move(parts), blend.batch);
    for (std::int64_t step = 0; step < 20; ++step) {
      const Read batch = read(blended, step, {0, blend.batch});
      const std::int64_t labels = std::ssize(batch.labels) - std::ranges::count(batch.labels, kIgnoredLabel);
      ASSERT_EQ(blended.label_count(step), labels) << step;
      ASSERT_LT(labels, 5 * blend.batch) << "the mask leaves labels out";
    }
  }
}

// With one seed for all, two files of equally many samples would have one order for ever.
TEST_F(BlendedLoaderTest, SetsOfOneSizeHaveOrdersOfTheirOwn) {
  EXPECT_EQ(seed_of_set(3, 0), 3U) << "the first set keeps the order that it has alone";
  std::set<std::uint64_t> seeds;
  for (const std::uint64_t seed : {3U, 4U}) {
    for (std::size_t set = 0; set < 100; ++set) seeds.insert(seed_of_set(seed, set));
  }
  EXPECT_EQ(seeds.size(), 200U);
  const auto order = [&](std::size_t set) {
    Blend blend{.seq_len = 2};
    blend.seed = seed_of_set(3, set);
    return all_rows(rows(0, blend), 0, 30);
  };
  EXPECT_NE(order(0), order(1));
  EXPECT_NE(order(1), order(2));
}

TEST_F(BlendedLoaderTest, ARunThatStopsAnywhereAndGoesOnWithAnotherBatchReadsTheSame) {
  for (const bool pack : {false, true}) {
    const Blend straight{.batch = 1, .pack = pack};
    const auto expected = all_rows(loader(straight), 0, 400);
    std::mt19937 random(pack ? 1 : 2);
    std::vector<std::vector<std::int64_t>> seen;
    nlohmann::json saved;
    std::map<std::string, std::int64_t> position;
    std::int64_t step = 0;
    while (seen.size() < 300) {
      Blend blend = straight;
      blend.batch = 1 + static_cast<std::int64_t>(random() % 9);
      BlendedLoader now = loader(blend);
      if (!saved.is_null()) {
        const StreamResume resume = now.resume(nlohmann::json::parse(saved.dump()), position);
        ASSERT_THAT(resume.differences, IsEmpty());
        now.begin_at(step, resume.position);
      }
      const std::int64_t steps = 1 + static_cast<std::int64_t>(random() % 5);
      const auto more = all_rows(now, step, step + steps);
      seen.insert(seen.end(), more.begin(), more.end());
      step += steps;
      saved = now.describe();
      position = now.saved_position(step);
      EXPECT_EQ(now.counts_before(step)[0].sequences, now.schedule().counts(std::ssize(seen))[0]);
    }
    EXPECT_TRUE(std::ranges::equal(seen, std::span(expected).first(seen.size())));
  }
}

TEST_F(BlendedLoaderTest, OtherSetsWeightsAndOrdersAreDifferencesAndNamesAreNotes) {
  const Blend blend;
  const nlohmann::json saved = loader(blend).describe();
  const std::map<std::string, std::int64_t> position{{kTokensRead, 35 * kSeq}};
  const auto differences = [&](const BatchSource& now) {
    const StreamResume resume = now.resume(saved, position);
    if (!resume.differences.empty()) {
      EXPECT_EQ(resume.position, StreamPosition{});
    }
    return resume.differences;
  };
  EXPECT_THAT(differences(loader(blend)), IsEmpty());

  Blend other = blend;
  other.names = {"web", "b", "c"};
  const StreamResume renamed = loader(other).resume(saved, position);
  EXPECT_THAT(renamed.differences, IsEmpty());
  EXPECT_THAT(renamed.notes, ElementsAre(HasSubstr("data set 1 was called 'a' and is now 'web'")));

  other = blend;
  other.weights = {6, 3, 1};
  EXPECT_THAT(
      differences(loader(other)),
      ElementsAre(HasSubstr("weight: the checkpoint's run read 7 of 'a', 2 of 'b', 1 of 'c'; this one reads 6 of "
                            "'a', 3 of 'b', 1 of 'c'")));
  EXPECT_THAT(differences(loader(blend, {1, 0, 2})),
              ElementsAre(HasSubstr("data set 1 ('a'): [training] dataset_path"), HasSubstr("data set 2 ('b')")));
  EXPECT_THAT(differences(loader(blend, {0, 1})), ElementsAre(HasSubstr("weight")));
  other = blend;
  other.seed = 4;
  EXPECT_THAT(differences(loader(other)), Contains(HasSubstr("data set 3 ('c'): [debug] seed")));
  other = blend;
  other.pack = true;
  EXPECT_THAT(differences(loader(other)), Contains(HasSubstr("[training] packing")));
  other = blend;
  other.seq_len = 7;
  EXPECT_THAT(differences(loader(other)), ElementsAre(HasSubstr("[training] seq_len")));

  // One file and a blend are other data, both ways.
  EXPECT_THAT(differences(rows(0, blend)),
              ElementsAre(HasSubstr("the checkpoint's run read a blend of \"a\", \"b\", \"c\"; this one reads a.bin")));
  const StreamResume from_one = loader(blend).resume(describe_stream(rows(0, blend)), position);
  EXPECT_THAT(from_one.differences, ElementsAre(HasSubstr("the checkpoint's run read a.bin; this one blends a, b, c")));
}

TEST_F(BlendedLoaderTest, WhatWasSavedIsCheckedBeforeItIsBelieved) {
  const BlendedLoader now = loader({});
  const auto refusal = [&](const nlohmann::json& saved, std::int64_t tokens) {
    return error_text<DataError>([&] { now.resume(saved, {{kTokensRead, tokens}}); });
  };
  const nlohmann::json saved = now.describe();
  EXPECT_THAT(refusal(saved, 7), HasSubstr("inside a sequence of 5"));
  EXPECT_THAT(refusal(saved, -5), HasSubstr("-5 tokens"));
  EXPECT_THAT(error_text<DataError>([&] { now.resume(saved, {}); }), HasSubstr("how much of the data has been read"));
  nlohmann::json later = saved;
  later["version"] = 99;
  EXPECT_THAT(refusal(later, 0), HasSubstr("version 99"));
  for (const char* key : {"sets", "seq_len"}) {
    nlohmann::json without = saved;
    without.erase(key);
    EXPECT_THAT(refusal(without, 0), HasSubstr("malformed")) << key;
  }
  nlohmann::json odd = saved;
  odd["sets"][1]["stream"] = 5;
  EXPECT_THAT(refusal(odd, 0), HasSubstr("no JSON object"));
  BlendedLoader moved = loader({});
  EXPECT_THROW(moved.begin_at(3, {1, 0}), ConfigError);
  EXPECT_THROW(moved.begin_at(3, {0, 4}), ConfigError);
  moved.begin_at(3, {0, 10});
  std::vector<std::int64_t> inputs(kSeq), labels(kSeq);
  EXPECT_THROW(moved.fill(2, {0, 1}, inputs, labels), ConfigError) << "steps before the beginning do not exist";
}

// Ten files of a billion tokens each, sparse on the disk: nothing but the mapping is made.
TEST_F(BlendedLoaderTest, LargeFilesOpenAtOnceAndCostNoMemory) {
  constexpr std::int64_t kTokens = 1'000'000'000;
  std::vector<std::string> paths;
  for (int set = 0; set < 10; ++set) {
    paths.push_back((folder_.path() / ("large-" + std::to_string(set) + ".bin")).string());
    std::ofstream(paths.back()) << "";
    std::filesystem::resize_file(paths.back(), 2 * kTokens);
    std::fstream file(paths.back(), std::ios::in | std::ios::out | std::ios::binary);
    for (std::int64_t at = 0; at < 2 * kTokens; at += kTokens / 64) {
      file.seekp(at);
      file.write("\7\0", 2);  // not zeros alone
    }
  }
  const auto resident = [] {
    std::ifstream status("/proc/self/statm");
    std::int64_t pages = 0, in_memory = 0, shared = 0;
    status >> pages >> in_memory >> shared;
    return (in_memory - shared) * 4096;
  };
  const std::int64_t before = resident();
  const double begin = process_cpu_seconds();
  std::vector<BlendedLoader::Part> parts;
  for (const std::string& path : paths) {
    parts.push_back({.name = path,
                     .weight = 1,
                     .rows = {TokenFile(path, {.vocab_size = 1000, .type = TokenType::u16}),
                              {.seq_len = 2048, .global_batch_size = 1}}});
  }
  const BlendedLoader blended(std::move(parts), 64);
  read(blended, 1'000'000, {0, 64});
  const double seconds = process_cpu_seconds() - begin;
  const nlohmann::json description = blended.describe();
  const double described = process_cpu_seconds() - begin - seconds;
  std::printf(
      "10 files of 10^9 tokens: opened and a batch of 64 read in %.1f ms of processor time, described in %.1f ms\n",
      1e3 * seconds, 1e3 * described);
  EXPECT_LT(seconds, 1.0);
  EXPECT_LT(resident() - before, 16 << 20);
}

}  // namespace
}  // namespace phalanx::data::blended_loader_test
