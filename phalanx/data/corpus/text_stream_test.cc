#include "phalanx/data/corpus/text_stream.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <random>
#include <set>

#include "phalanx/base/error.h"
#include "phalanx/base/ignored_label.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/data/corpus/corpus.h"
#include "phalanx/data/data_loader.h"
#include "phalanx/data/testing/small_data.h"

namespace phalanx::data::text_stream_test {
namespace {

constexpr std::int64_t kSeq = 16;

/// Three files of records. Each text is its number, some letters and a full stop, so that texts can be told apart.
class TextStreamTest : public ::testing::Test {
 protected:
  TextStreamTest() {
    std::mt19937 random(5);
    for (int file = 0; file < 3; ++file) {
      std::ofstream out(path(file));
      for (int i = 0; i < 40 + 7 * file; ++i) {
        std::string text = fmt::format("{}.{}:", file, i);
        for (std::uint32_t letters = random() % 60; letters > 0; --letters)
          text += static_cast<char>('a' + random() % 26);
        if (i % 11 == 5) out << "{\"text\": null}\n";
        if (i % 13 == 7) out << "\n";
        out << nlohmann::json{{"id", i}, {"text", text}}.dump() << "\n";
        texts_.push_back(text);
      }
    }
  }
  std::string path(int file) const { return (folder_.path() / fmt::format("part-{}.jsonl", file)).string(); }

  struct Options {
    std::int64_t batch = 1, seq_len = kSeq, window = 17, workers = 1;
    bool shuffle = true, separate = false, pack = false, special_tokens = true;
    std::uint64_t seed = 3;
    std::string field = "text";
  };
  std::unique_ptr<TextStream> stream(const Options& options) const {
    return std::make_unique<TextStream>(
        TextWindows(list_corpus({folder_.path().string()}, {.field = options.field}).documents, tokenizer_,
                    {.seq_len = options.seq_len,
                     .shuffle = options.shuffle,
                     .seed = options.seed,
                     .separate_documents = options.separate || options.pack,
                     .pack = options.pack,
                     .window = options.window,
                     .workers = options.workers,
                     .special_tokens = options.special_tokens}),
        options.batch);
  }

  struct Row {
    std::vector<std::int64_t> inputs, labels;
    std::vector<std::int32_t> ends;
    friend bool operator==(const Row&, const Row&) = default;
  };
  static Row row_of(const BatchSource& source, std::int64_t step, std::int64_t row) {
    Row one{std::vector<std::int64_t>(static_cast<std::size_t>(source.seq_len())), {}, {}};
    one.labels = one.inputs;
    one.ends = source.fill(step, {row, row + 1}, one.inputs, one.labels);
    return one;
  }
  static std::vector<Row> rows_of(const BatchSource& source, std::int64_t first, std::int64_t end) {
    std::vector<Row> rows;
    for (std::int64_t step = first; step < end; ++step) {
      std::int64_t labels = 0;
      for (std::int64_t row = 0; row < source.global_batch_size(); ++row) {
        rows.push_back(row_of(source, step, row));
        labels += std::ssize(rows.back().labels) - std::ranges::count(rows.back().labels, kIgnoredLabel);
      }
      EXPECT_EQ(source.label_count(step), labels);
    }
    return rows;
  }
  /// The texts in rows in order, cut where a text ends.
  std::vector<std::string> texts_in(const std::vector<Row>& rows) const {
    std::vector<std::string> found(1);
    const std::int64_t end = *tokenizer_.end_of_text();
    for (const Row& row : rows) {
      for (std::size_t i = 0; i < row.inputs.size(); ++i) {
        if (row.labels[i] == kIgnoredLabel && row.inputs[i] == 0) continue;  // padding
        if (row.inputs[i] == end) {
          found.emplace_back();
        } else {
          found.back() += tokenizer_.decode(std::vector<std::int64_t>{row.inputs[i]});
        }
      }
    }
    return found;
  }

  TempDirectory folder_{"text-stream"}, made_{"text-stream-made"};
  std::vector<std::string> texts_;
  BpeTokenizer tokenizer_ = small_tokenizer("the quick brown fox jumps over the lazy dog");
};

TEST_F(TextStreamTest, ReadsTheTextsOfTheFilesInOrderAndEpochAfterEpoch) {
  const auto one = stream({.window = 1000, .shuffle = false});
  std::vector<std::string> found = texts_in(rows_of(*one, 0, 1200));
  ASSERT_GT(found.size(), 2 * texts_.size());
  // The end token of a window's last text is a label alone: windows follow each other without it.
  std::string all, expected;
  for (const auto& text : found) all += text;
  for (int epoch = 0; epoch < 10; ++epoch) {
    for (const auto& text : texts_) expected += text;
  }
  EXPECT_EQ(all, expected.substr(0, all.size()));
}

TEST_F(TextStreamTest, AnEpochHasEveryTextOnceInAnotherOrder) {
  const auto one = stream({.separate = true, .pack = true});
  std::multiset<std::string> found;
  std::vector<std::string> order;
  std::int64_t epoch = 0;
  for (std::int64_t step = 0; epoch == 0; ++step) {
    const Row row = row_of(*one, step, 0);
    for (std::size_t i = 1; i < row.ends.size(); ++i) {
      std::string text;
      for (std::int32_t at = row.ends[i - 1]; at < row.ends[i]; ++at) {
        const auto place = static_cast<std::size_t>(at);
        if (row.labels[place] != kIgnoredLabel) text += tokenizer_.decode(std::vector<std::int64_t>{row.inputs[place]});
      }
      if (!text.empty()) order.push_back(text);
    }
    epoch = one->saved_position(step + 1).at("data.epoch");
  }
  // Texts longer than a row are cut, so only the sum of all is compared, and each whole text is there once.
  for (const std::string& text : order) found.insert(text);
  std::size_t bytes = 0, all = 0;
  for (const auto& text : found) bytes += text.size();
  for (const auto& text : texts_) all += text.size();
  EXPECT_EQ(bytes, all);
  for (const auto& text : texts_) {
    if (text.size() >= 10) continue;
    EXPECT_EQ(found.count(text), 1U) << text;
  }
  EXPECT_NE(order.front().substr(0, 4), "0.0:");
}

TEST_F(TextStreamTest, WithoutShufflingItsRowsAreThoseOfATokenFileOfTheSameTexts) {
  const EncodingSummary made =
      encode_corpus(list_corpus({folder_.path().string()}).documents, tokenizer_, made_.path().string() + "/made");
  for (const bool separate : {false, true}) {
    const DataLoader file(TokenFile(made.path),
                          {.seq_len = kSeq, .global_batch_size = 2, .shuffle = false, .separate_documents = separate});
    const auto texts = stream({.batch = 2, .window = 1000, .shuffle = false, .separate = separate});
    const std::int64_t steps = (file.sample_count() - 1) / 2;
    EXPECT_EQ(rows_of(*texts, 0, steps), rows_of(file, 0, steps));
  }
}

TEST_F(TextStreamTest, TokensOfTheTemplateAreAroundEachText) {
  tokenizer_ = with_template(tokenizer_, {*tokenizer_.id_of("t")}, {*tokenizer_.id_of("z")});
  for (const bool special : {true, false}) {
    const EncodingSummary made = encode_corpus(list_corpus({folder_.path().string()}).documents, tokenizer_,
                                               made_.path().string() + "/made", {.special_tokens = special});
    const DataLoader file(TokenFile(made.path), {.seq_len = kSeq, .global_batch_size = 2, .shuffle = false});
    const auto texts = stream({.batch = 2, .window = 1000, .shuffle = false, .special_tokens = special});
    const std::int64_t steps = (file.sample_count() - 1) / 2;
    EXPECT_EQ(rows_of(*texts, 0, steps), rows_of(file, 0, steps));
    EXPECT_EQ(row_of(*texts, 0, 0).inputs.front() == *tokenizer_.id_of("t"), special);
  }
  const auto with = stream({}), without = stream({.special_tokens = false});
  rows_of(*with, 0, 1);
  EXPECT_THAT(without->resume(with->describe(), with->saved_position(1)).differences,
              ElementsAre(HasSubstr("[stream] special_tokens")));
  EXPECT_THAT(stream({})->resume(with->describe(), with->saved_position(1)).differences, IsEmpty());
}

TEST_F(TextStreamTest, PackedRowsAreThoseOfAPackedTokenFileOfTheSameTexts) {
  const EncodingSummary made =
      encode_corpus(list_corpus({folder_.path().string()}).documents, tokenizer_, made_.path().string() + "/made");
  const DataLoader file(
      TokenFile(made.path),
      {.seq_len = kSeq, .global_batch_size = 2, .shuffle = false, .separate_documents = true, .pack = true});
  const auto texts = stream({.batch = 2, .window = 1000, .shuffle = false, .pack = true});
  EXPECT_EQ(rows_of(*texts, 0, file.sample_count() / 2), rows_of(file, 0, file.sample_count() / 2));
}

TEST_F(TextStreamTest, RowsDependOnNeitherWorkersNorBatchSizesNorWhoAsks) {
  for (const bool pack : {false, true}) {
    const auto expected = rows_of(*stream({.pack = pack}), 0, 400);
    for (const std::int64_t workers : {2, 5}) {
      EXPECT_EQ(rows_of(*stream({.workers = workers, .pack = pack}), 0, 400), expected);
    }
    EXPECT_EQ(rows_of(*stream({.batch = 100, .pack = pack}), 0, 4), expected) << "a batch of many windows";
    // A rank of four asks for its rows alone, and for some of them twice.
    const auto shared = stream({.batch = 8, .pack = pack});
    const RowRange mine = shared->rows_of({.rank = 2, .ranks = 4});
    for (std::int64_t step = 0; step < 50; ++step) {
      for (std::int64_t row = mine.begin; row < mine.end; ++row) {
        ASSERT_EQ(row_of(*shared, step, row), expected[static_cast<std::size_t>(step * 8 + row)]);
      }
    }
    EXPECT_EQ(row_of(*shared, 49, 0), expected[49 * 8]);
    EXPECT_EQ(row_of(*shared, 3, 1), expected[25]) << "an earlier step is made again";
  }
}

TEST_F(TextStreamTest, ARunThatStopsAnywhereReadsTheSame) {
  for (const bool pack : {false, true}) {
    const auto expected = rows_of(*stream({.pack = pack}), 0, 700);
    std::mt19937 random(pack ? 1 : 2);
    std::vector<Row> seen;
    nlohmann::json saved;
    std::map<std::string, std::int64_t> position;
    std::int64_t step = 0;
    while (seen.size() < 600) {
      const auto now = stream({.batch = 1 + static_cast<std::int64_t>(random() % 9),
                               .workers = 1 + static_cast<std::int64_t>(random() % 3),
                               .pack = pack});
      if (!saved.is_null()) {
        const StreamResume resume = now->resume(nlohmann::json::parse(saved.dump()), position);
        ASSERT_THAT(resume.differences, IsEmpty());
        now->begin_at(step, resume.position);
        EXPECT_EQ(now->saved_position(step), position) << "nothing was read";
      }
      const std::int64_t steps = 1 + static_cast<std::int64_t>(random() % 5);
      const auto more = rows_of(*now, step, step + steps);
      seen.insert(seen.end(), more.begin(), more.end());
      step += steps;
      saved = now->describe();
      position = now->saved_position(step);
      EXPECT_EQ(position.at(kTokensRead), std::ssize(seen) * kSeq);
    }
    EXPECT_TRUE(std::ranges::equal(seen, std::span(expected).first(seen.size())));
  }
}

TEST_F(TextStreamTest, OtherTextsAndOrdersAreDifferences) {
  const auto before = stream({});
  rows_of(*before, 0, 5);
  const nlohmann::json saved = before->describe();
  const auto position = before->saved_position(5);
  ASSERT_GT(position.at("data.row"), 0);
  const auto differences = [&](const Options& options) { return stream(options)->resume(saved, position).differences; };
  EXPECT_THAT(differences({.workers = 4}), IsEmpty());
  EXPECT_THAT(differences({.window = 18}), ElementsAre(HasSubstr("[stream] window")));
  EXPECT_THAT(differences({.shuffle = false}), ElementsAre(HasSubstr("[training] shuffle")));
  EXPECT_THAT(differences({.pack = true}), ElementsAre(HasSubstr("[training] packing")));
  EXPECT_THAT(differences({.seed = 9}), ElementsAre(HasSubstr("[debug] seed")));
  EXPECT_THAT(differences({.seq_len = 8}), ElementsAre(HasSubstr("[training] seq_len")));
  std::ofstream(path(1), std::ios::app) << "{\"text\": \"one more\"}\n";
  EXPECT_THAT(differences({}), ElementsAre(AllOf(HasSubstr("[stream] paths: file 2"), HasSubstr("part-1.jsonl"))));
  std::ofstream(folder_.path() / "part-9.jsonl") << "{\"text\": \"one more\"}\n";
  EXPECT_THAT(differences({}), Contains(HasSubstr("read 3 files; this one reads 4")));

  const auto now = stream({});
  const DataLoader file(counting_file(made_.path() / "t.bin", 200), {.seq_len = kSeq, .global_batch_size = 1});
  EXPECT_THAT(now->resume(file.describe(), position).differences,
              ElementsAre(HasSubstr("t.bin; this one reads texts")));
  EXPECT_THAT(file.resume(saved, position).differences, ElementsAre(HasSubstr("read texts; this one reads t.bin")));
  nlohmann::json odd = now->describe();
  odd.erase("window");
  EXPECT_THAT(error_text<DataError>([&] { now->resume(odd, position); }), HasSubstr("malformed"));
  EXPECT_THAT(error_text<DataError>([&] {
                now->resume(now->describe(), {{kTokensRead, 5}});
              }),
              HasSubstr("data.epoch of its manifest"));
}

TEST_F(TextStreamTest, AWrongRecordIsAnErrorWithFileAndLineWhenItIsReached) {
  std::ofstream(path(1)) << "{\"text\": \"fine\"}\n{\"text\": \"fine\"}\n{\"text\": 5}\n";
  const auto one = stream({.window = 10, .shuffle = false});
  rows_of(*one, 0, 20);  // of the first file
  const auto message = error_text<DataError>([&] { rows_of(*one, 20, 200); });
  EXPECT_THAT(message, AllOf(HasSubstr("part-1.jsonl, line 3"), HasSubstr("expected a string, found number")));
  EXPECT_EQ(error_text<DataError>([&] { rows_of(*one, 20, 200); }), message) << "asked again";
  std::ofstream(path(0)) << "{\"other\": 1}\n";
  EXPECT_THAT(error_text<DataError>([&] { rows_of(*stream({.shuffle = false}), 0, 1); }),
              AllOf(HasSubstr("part-0.jsonl, line 1"), HasSubstr("no field \"text\"")));
}

TEST_F(TextStreamTest, AFileThatGrowsWhileItIsReadIsAnError) {
  const auto one = stream({.shuffle = false});
  std::ofstream(path(2), std::ios::app) << "{\"text\": \"one more\"}\n";
  EXPECT_THAT(error_text<DataError>([&] { rows_of(*one, 0, 2000); }),
              HasSubstr("part-2.jsonl changed while it was read"));
}

TEST_F(TextStreamTest, RecordsWithoutTextAreCounted) {
  ::testing::internal::CaptureStderr();
  rows_of(*stream({.shuffle = false}), 0, 2000);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("13 of 154 records have no text (null or empty) and are left out"));
}

// A skip of many records must not outlive who reads them.
TEST_F(TextStreamTest, RecordsThatArePassedOverCanStopTheReader) {
  const Document file = list_corpus({path(0)}).documents.front();
  int passed = 0;
  each_record(
      file, 7, [](std::int64_t, std::string_view) {}, [&] { ++passed; });
  EXPECT_EQ(passed, 7);
  std::atomic<bool> stop = true;
  const TextWindows windows({file}, tokenizer_, {.seq_len = kSeq});
  windows.each({.record = std::int64_t{1} << 40}, stop, [](TextWindow) { return true; });  // returns
}

TEST_F(TextStreamTest, FilesWithoutATextAreAnErrorAndNotAnEndlessSearch) {
  for (int file = 0; file < 3; ++file) std::ofstream(path(file)) << "{\"text\": null}\n{\"text\": \"\"}\n";
  EXPECT_THAT(error_text<DataError>([&] { rows_of(*stream({}), 0, 1); }), HasSubstr("nothing to train on"));
}

TEST_F(TextStreamTest, EndsWhileItReadsAhead) {
  for (int i = 0; i < 20; ++i) {
    const auto one = stream({.workers = 3});
    if (i % 2 == 0) row_of(*one, 0, 0);
  }
}

}  // namespace
}  // namespace phalanx::data::text_stream_test
