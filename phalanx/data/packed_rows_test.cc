// Which documents share a row, and what a loader makes of them.
#include "phalanx/data/packed_rows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/data/data_loader.h"
#include "phalanx/data/stream_description.h"
#include "phalanx/data/testing/small_data.h"

namespace phalanx::data::packed_rows_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Piece = PackedRows::Piece;

class PackedRowsTest : public ::testing::Test {
 protected:
  /// Documents of these lengths; the ids count from 0 over the whole file.
  TokenFile documents(const std::vector<std::int64_t>& lengths) {
    const std::string prefix = (folder_.path() / std::to_string(files_++)).string();
    TokenFileWriter writer(prefix, {.vocab_size = 1 << 20});
    std::int32_t next = 0;
    for (const std::int64_t length : lengths) {
      std::vector<std::int32_t> ids(static_cast<std::size_t>(length));
      std::iota(ids.begin(), ids.end(), next);
      next += static_cast<std::int32_t>(length);
      writer.add_document(ids);
    }
    writer.finish();
    return TokenFile(prefix);
  }
  static PackedRowsOptions whole(const TokenFile& tokens, std::int64_t seq_len, bool shuffle = false) {
    return {.seq_len = seq_len, .range = {0, tokens.size()}, .shuffle = shuffle, .seed = 3};
  }
  static std::vector<std::int64_t> many_lengths() {
    std::vector<std::int64_t> lengths;
    for (std::int64_t i = 0; i < 500; ++i) lengths.push_back(1 + i * i * 7 % 61);
    return lengths;
  }

  TempDirectory folder_{"packed"};
  int files_ = 0;
};

TEST_F(PackedRowsTest, BestFitPutsTheLongestFirstIntoTheFullestRow) {
  // Places: 6, 3, 4, 1, 2. Rows of 7: 6 + 1, 4 + 3, 2.
  const TokenFile tokens = documents({7, 4, 5, 2, 3});
  const PackedRows rows(tokens, whole(tokens, 7));
  ASSERT_EQ(rows.row_count(), 3);
  EXPECT_THAT(rows.row(0, 0), ElementsAre(Piece{0, 6}, Piece{16, 1}));
  EXPECT_THAT(rows.row(0, 1), ElementsAre(Piece{7, 3}, Piece{11, 4}));
  EXPECT_THAT(rows.row(0, 2), ElementsAre(Piece{18, 2}));
  EXPECT_EQ(rows.statistics().documents, 5);
  EXPECT_EQ(rows.statistics().labels, 16);
  EXPECT_EQ(rows.label_count(0, 1), 7);
}

TEST_F(PackedRowsTest, CutsOnlyWhatIsLongerThanARowAndSkipsSingleTokens) {
  // 11 places: parts of 4, 4 and 3, whose labels follow each other without a gap.
  const TokenFile tokens = documents({1, 12, 0, 2});
  const PackedRows rows(tokens, whole(tokens, 4));
  ASSERT_EQ(rows.row_count(), 3);
  EXPECT_THAT(rows.row(0, 0), ElementsAre(Piece{1, 4}));
  EXPECT_THAT(rows.row(0, 1), ElementsAre(Piece{5, 4}));
  EXPECT_THAT(rows.row(0, 2), ElementsAre(Piece{9, 3}, Piece{13, 1}));
  EXPECT_EQ(rows.statistics().documents, 2);
  EXPECT_EQ(rows.statistics().skipped, 2);
  EXPECT_EQ(rows.statistics().cut, 1);
}

TEST_F(PackedRowsTest, EveryTokenButTheFirstIsALabelOnceAnEpoch) {
  const std::vector<std::int64_t> lengths = many_lengths();
  const TokenFile tokens = documents(lengths);
  std::set<std::int64_t> expected;
  for (std::int64_t begin = 0; const std::int64_t length : lengths) {
    for (std::int64_t i = 1; i < length; ++i) expected.insert(begin + i);
    begin += length;
  }
  for (const bool shuffle : {false, true}) {
    PackedRowsOptions options = whole(tokens, 50, shuffle);
    options.window = 64;
    const PackedRows rows(tokens, options);
    for (const std::int64_t epoch : {0, 1}) {
      std::multiset<std::int64_t> labels;
      for (std::int64_t row = 0; row < rows.row_count(); ++row) {
        std::int64_t filled = 0;
        for (const Piece& piece : rows.row(epoch, row)) {
          for (std::int64_t i = 1; i <= piece.count; ++i) labels.insert(piece.begin + i);
          filled += piece.count;
        }
        EXPECT_LE(filled, 50);
        EXPECT_GT(filled, 0);
        EXPECT_EQ(filled, rows.label_count(epoch, row));
      }
      EXPECT_TRUE(std::ranges::equal(labels, expected));
      EXPECT_EQ(rows.statistics().labels, std::ssize(expected));
    }
    // Best fit wastes little: at most a row of each of the 8 windows, and some.
    EXPECT_LT(rows.row_count() * 50, rows.statistics().labels * 11 / 10 + 8 * 50);
  }
}

TEST_F(PackedRowsTest, EpochsHaveTheSameRowsInAnotherOrder) {
  const TokenFile tokens = documents(many_lengths());
  PackedRowsOptions options = whole(tokens, 50, true);
  options.window = 64;
  const PackedRows rows(tokens, options), again(tokens, options);
  const auto epoch = [](const PackedRows& of, std::int64_t number) {
    std::vector<std::int64_t> first;
    for (std::int64_t row = 0; row < of.row_count(); ++row) first.push_back(of.row(number, row).front().begin);
    return first;
  };
  std::vector<std::int64_t> one = epoch(rows, 0), two = epoch(rows, 1);
  EXPECT_EQ(one, epoch(again, 0));
  EXPECT_NE(one, two);
  std::ranges::sort(one);
  std::ranges::sort(two);
  EXPECT_EQ(one, two);
}

TEST_F(PackedRowsTest, ARangeCutsTheDocumentAtItsEnd) {
  const TokenFile tokens = documents({5, 6, 5});
  const PackedRows front(tokens, {.seq_len = 8, .range = {0, 8}, .shuffle = false});
  const PackedRows back(tokens, {.seq_len = 8, .range = {8, 16}, .shuffle = false});
  EXPECT_THAT(front.row(0, 0), ElementsAre(Piece{0, 4}, Piece{5, 2}));
  EXPECT_THAT(back.row(0, 0), ElementsAre(Piece{8, 2}, Piece{11, 4}));
  EXPECT_THAT(error_text<DataError>([&] {
                PackedRows(tokens, {.seq_len = 8, .range = {4, 6}});
              }),
              HasSubstr("no document of two tokens"));
}

struct Loaded {
  std::vector<std::int64_t> inputs, labels;
  std::vector<std::int32_t> ends;
};

Loaded load(const DataLoader& loader, std::int64_t step, RowRange rows) {
  const auto size = static_cast<std::size_t>(rows.size() * loader.seq_len());
  Loaded loaded{std::vector<std::int64_t>(size), std::vector<std::int64_t>(size), {}};
  loaded.ends = loader.fill(step, rows, loaded.inputs, loaded.labels);
  return loaded;
}

TEST_F(PackedRowsTest, ALoaderPadsRowsAndSaysWhereDocumentsEnd) {
  const TokenFile tokens = documents({7, 4, 5, 2, 3});
  const DataLoader loader(
      tokens, {.seq_len = 7, .global_batch_size = 3, .shuffle = false, .separate_documents = true, .pack = true});
  const Loaded all = load(loader, 0, {0, 3});
  constexpr std::int64_t kNone = kIgnoredLabel;
  EXPECT_THAT(all.inputs, ElementsAre(0, 1, 2, 3, 4, 5, 16, /**/ 7, 8, 9, 11, 12, 13, 14, /**/ 18, 19, 0, 0, 0, 0, 0));
  EXPECT_THAT(all.labels, ElementsAre(1, 2, 3, 4, 5, 6, 17, /**/ 8, 9, 10, 12, 13, 14, 15, /**/ 19, 20, kNone, kNone,
                                      kNone, kNone, kNone));
  EXPECT_THAT(all.ends, ElementsAre(0, 6, 7, 10, 14, 16, 21));
  EXPECT_EQ(loader.token_at(0, 1), 7);
  EXPECT_EQ(loader.label_count(0), 16);
  // Each rank's part has its own boundaries, and the second step is the second epoch.
  const Loaded last = load(loader, 1, {2, 3});
  EXPECT_THAT(last.ends, ElementsAre(0, 2, 7));
  EXPECT_EQ(loader.position_of(1), (StreamPosition{.epoch = 1, .token = 0}));
}

TEST_F(PackedRowsTest, WithoutPackingASequenceIsCutWhereADocumentEnds) {
  const TokenFile tokens = documents({3, 6, 0, 2, 4});
  const DataLoader loader(tokens, {.seq_len = 5, .global_batch_size = 2, .shuffle = false, .separate_documents = true});
  const Loaded all = load(loader, 0, {0, 2});
  constexpr std::int64_t kNone = kIgnoredLabel;
  EXPECT_THAT(all.inputs, ElementsAre(0, 1, 2, 3, 4, /**/ 5, 6, 7, 8, 9));
  EXPECT_THAT(all.labels, ElementsAre(1, 2, kNone, 4, 5, /**/ 6, 7, 8, kNone, 10));
  EXPECT_THAT(all.ends, ElementsAre(0, 3, 5, 9, 10));
  EXPECT_EQ(loader.label_count(0), 8);
}

TEST_F(PackedRowsTest, AStreamGoesOnWhereItWasWhateverTheBatchSize) {
  const TokenFile tokens = documents(many_lengths());
  const DataLoaderOptions options{
      .seq_len = 50, .global_batch_size = 12, .seed = 3, .separate_documents = true, .pack = true};
  const DataLoader before(tokens, options);
  DataLoaderOptions smaller = options;
  smaller.global_batch_size = 4;
  DataLoader after(tokens, smaller);
  const StreamResume resume = resume_stream(describe_stream(before), tokens_read(before, 40), after);
  EXPECT_TRUE(resume.differences.empty());
  after.begin_at(100, resume.position);
  EXPECT_EQ(load(before, 40, {0, 12}).inputs, [&] {
    std::vector<std::int64_t> inputs;
    for (std::int64_t step = 100; step < 103; ++step) {
      const Loaded part = load(after, step, {0, 4});
      inputs.insert(inputs.end(), part.inputs.begin(), part.inputs.end());
    }
    return inputs;
  }());

  // Neither without packing nor, in the middle of an epoch, with other rows.
  const DataLoader unpacked(tokens, {.seq_len = 50, .global_batch_size = 12, .seed = 3, .separate_documents = true});
  EXPECT_THAT(
      resume_stream(describe_stream(before), tokens_read(before, 40), unpacked).differences,
      ElementsAre(AllOf(HasSubstr("[training] packing"), HasSubstr("whole documents, packed by best fit; this one "
                                                                   "reads consecutive tokens"))));
  DataLoaderOptions longer = options;
  longer.seq_len = 64;
  EXPECT_THAT(resume_stream(describe_stream(before), tokens_read(before, 40), DataLoader(tokens, longer)).differences,
              ElementsAre(HasSubstr("is packed in sequences of 50")));
}

// The divisor of a step's loss: in every mode, over epochs, and after a resume.
TEST_F(PackedRowsTest, TheNumberOfLabelsIsThatOfTheLabels) {
  const TokenFile tokens = documents(many_lengths());
  for (const bool pack : {false, true}) {
    for (const bool shuffle : {false, true}) {
      DataLoader loader(tokens, {.seq_len = 50,
                                 .global_batch_size = 6,
                                 .shuffle = shuffle,
                                 .seed = 3,
                                 .separate_documents = true,
                                 .pack = pack});
      for (const std::int64_t from : {0, 70}) {
        if (from > 0) loader.begin_at(from, {.epoch = 1, .token = 100});
        for (std::int64_t step = from; step < from + 60; ++step) {
          const Loaded all = load(loader, step, {0, 6});
          EXPECT_EQ(loader.label_count(step), std::ssize(all.labels) - std::ranges::count(all.labels, kIgnoredLabel))
              << "step " << step << (pack ? ", packed" : "") << (shuffle ? ", shuffled" : "");
          EXPECT_EQ(all.ends.back(), 6 * 50);
        }
      }
    }
  }
}

TEST_F(PackedRowsTest, LongPaddingIsCutIntoPieces) {
  const TokenFile tokens = documents({3, 3});
  const DataLoader loader(tokens, {.seq_len = 200, .global_batch_size = 1, .separate_documents = true, .pack = true});
  EXPECT_THAT(load(loader, 0, {0, 1}).ends, ElementsAre(0, 2, 4, 68, 132, 196, 200));
}

TEST_F(PackedRowsTest, AFileThatListsNoDocumentsIsRefused) {
  // An index of one sequence whose writer ended no document.
  const std::vector<std::uint16_t> ids = {1, 2, 3, 4};
  std::string index("MMIDIDX\0\0", 9);
  const auto append = [&index](auto value) { index.append(reinterpret_cast<const char*>(&value), sizeof(value)); };
  append(std::uint64_t{1});
  append(std::uint8_t{8});
  append(std::uint64_t{1});
  append(std::uint64_t{0});
  append(std::int32_t{4});
  append(std::int64_t{0});
  write_file(folder_.path() / "unended.idx", index);
  write_file(folder_.path() / "unended.bin", std::string(reinterpret_cast<const char*>(ids.data()), 8));
  const TokenFile unended((folder_.path() / "unended").string());
  EXPECT_FALSE(unended.lists_documents());
  EXPECT_THAT(error_text<DataError>(
                  [&] { DataLoader(unended, {.seq_len = 2, .global_batch_size = 1, .separate_documents = true}); }),
              HasSubstr("an index without document bounds"));

  const TokenFile raw = counting_file(folder_.path() / "raw.bin", 100);
  EXPECT_THAT(error_text<DataError>(
                  [&] { DataLoader(raw, {.seq_len = 5, .global_batch_size = 1, .separate_documents = true}); }),
              AllOf(HasSubstr("does not list its documents"), HasSubstr("phalanx tokenize")));
  const TokenFile tokens = documents({5, 6});
  EXPECT_THROW(DataLoader(tokens, {.seq_len = 5, .global_batch_size = 1, .pack = true}), ConfigError);
}

/// Documents of tokens 0, 1, ...; `mask`: one string a document, 'x' where a token is trained.
class MaskedFileTest : public PackedRowsTest {
 protected:
  TokenFile masked(const std::vector<std::string>& mask, const std::string& name = "masked") {
    TokenFileWriter writer((folder_.path() / name).string(), {.vocab_size = 1 << 20, .has_mask = true});
    for (const std::string& document : mask) {
      std::vector<std::int32_t> ids(document.size());
      std::iota(ids.begin(), ids.end(), static_cast<std::int32_t>(writer.size()));
      std::vector<std::uint8_t> is_trained;
      for (const char one : document) is_trained.push_back(one == 'x' ? 1 : 0);
      writer.add_document(ids, is_trained);
    }
    writer.finish();
    return TokenFile((folder_.path() / name).string());
  }
  std::string refusal(const std::string& name = "masked") {
    return error_text<DataError>([&] { const TokenFile file((folder_.path() / name).string()); });
  }
  /// The labels of all rows of an epoch, and that label_count() agrees.
  static std::vector<std::int64_t> labels_of_epoch(const DataLoader& dataloader) {
    std::vector<std::int64_t> all;
    for (std::int64_t step = 0; step < dataloader.sample_count() / dataloader.global_batch_size(); ++step) {
      const auto count = static_cast<std::size_t>(dataloader.global_batch_size() * dataloader.seq_len());
      std::vector<std::int64_t> inputs(count), labels(count);
      dataloader.fill(step, {0, dataloader.global_batch_size()}, inputs, labels);
      const auto counted = std::ranges::count_if(labels, [](std::int64_t one) { return one != kIgnoredLabel; });
      EXPECT_EQ(dataloader.label_count(step), counted) << "step " << step;
      all.insert(all.end(), labels.begin(), labels.end());
    }
    return all;
  }
};

TEST_F(MaskedFileTest, LabelsAreTrainedTokensAlone) {
  const TokenFile tokens = masked({"..xx.x", ".x", "x..x"});
  EXPECT_EQ(tokens.trained_count({0, tokens.size()}), 6);
  EXPECT_EQ(tokens.trained_count({1, 4}), 2);
  constexpr std::int64_t none = kIgnoredLabel;
  // Rows of 5: documents of 5 places; of 3 and 1. The first token of a document is no label, although it is trained.
  const DataLoaderOptions packed{
      .seq_len = 5, .global_batch_size = 1, .shuffle = false, .separate_documents = true, .pack = true};
  EXPECT_THAT(labels_of_epoch(DataLoader(tokens, packed)), ElementsAre(none, 2, 3, none, 5, 7, none, none, 11, none));
  EXPECT_EQ(DataLoader(tokens, packed).packed_rows()->statistics().labels, 5);
  EXPECT_EQ(DataLoader(tokens, packed).packed_rows()->statistics().places, 9);
  // Consecutive tokens, documents apart or not.
  EXPECT_THAT(labels_of_epoch(DataLoader(
                  tokens, {.seq_len = 5, .global_batch_size = 1, .shuffle = false, .separate_documents = true})),
              ElementsAre(none, 2, 3, none, 5, none, 7, none, none, none));
  EXPECT_THAT(labels_of_epoch(DataLoader(tokens, {.seq_len = 5, .global_batch_size = 1, .shuffle = false})),
              ElementsAre(none, 2, 3, none, 5, none, 7, 8, none, none));
}

TEST_F(MaskedFileTest, NoPackedRowIsWithoutLabels) {
  // Left out: a document whose only trained token is its first, one of none, a part of the third that has none, and one
  // of a single token.
  const TokenFile tokens = masked({"x...", "....", "..x.........x", "x", ".x"});
  const PackedRows rows(tokens, whole(tokens, 4));
  ASSERT_EQ(rows.row_count(), 3);
  EXPECT_THAT(rows.row(0, 0), ElementsAre(Piece{8, 4}));
  EXPECT_THAT(rows.row(0, 1), ElementsAre(Piece{16, 4}));
  EXPECT_THAT(rows.row(0, 2), ElementsAre(Piece{22, 1}));
  for (std::int64_t row = 0; row < 3; ++row) EXPECT_EQ(rows.label_count(0, row), 1);
  const PackedRows::Statistics& seen = rows.statistics();
  EXPECT_EQ(seen.documents, 2);
  EXPECT_EQ(seen.untrained, 3);
  EXPECT_EQ(seen.skipped, 1);
  EXPECT_EQ(seen.cut, 1);
  EXPECT_EQ(seen.labels, 3);
  const TokenFile none = masked({"x..", "..."}, "none");
  EXPECT_THAT(error_text<DataError>([&] { const PackedRows packed(none, whole(none, 4)); }),
              HasSubstr("no document of two tokens with a trained one among the 2"));
}

TEST_F(MaskedFileTest, AMaskBelongsToItsFile) {
  masked({"..xx", "x.x."});
  EXPECT_EQ(refusal(), "");
  masked({"..xx", "xx.."}, "other");
  const auto file = [&](const std::string& name) { return folder_.path() / name; };
  const std::string mask = read_file(file("masked.mask")), sidecar = read_file(file("masked.json"));
  write_file(file("masked.mask"), read_file(file("other.mask")));
  EXPECT_THAT(refusal(), AllOf(HasSubstr("masked.mask: its content is"), HasSubstr("the mask of another file")));
  write_file(file("masked.mask"), mask.substr(1));
  EXPECT_THAT(refusal(), AllOf(HasSubstr("masked.mask: 7 bytes"), HasSubstr("has 8 tokens")));
  std::filesystem::remove(file("masked.mask"));
  EXPECT_THAT(refusal(), AllOf(HasSubstr("masked.mask: no such file"), HasSubstr("only some tokens of")));
  // Without what describes it, a mask is not silently left out.
  write_file(file("masked.mask"), mask);
  std::filesystem::remove(file("masked.json"));
  EXPECT_THAT(refusal(), HasSubstr("does not name it: expected the three as they were made together"));
  // A program that knows no masks refuses the description by its version.
  EXPECT_THAT(sidecar, HasSubstr("\"version\": 2"));
  const auto told = [&](const std::string& from, const std::string& to) {
    std::string changed = sidecar;
    changed.replace(changed.find(from), from.size(), to);
    write_file(file("masked.json"), changed);
    return refusal();
  };
  EXPECT_THAT(told("\"version\": 2", "\"version\": 1"), HasSubstr("none in version 1"));
  EXPECT_THAT(told("\"version\": 2", "\"version\": 3"), HasSubstr("a later version of Phalanx"));
  EXPECT_THAT(told("\"mask\"", "\"musk\""), HasSubstr("the hash of the mask"));
}

TEST_F(MaskedFileTest, ATokenFileInItsPlaceHasNoMask) {
  masked({"..xx", "x.x."});
  TokenFileWriter writer((folder_.path() / "masked").string(), {.vocab_size = 10});
  writer.add_document(std::vector<std::int32_t>{1, 2, 3});
  EXPECT_THAT(
      error_text<DataError>([&] { writer.add_document(std::vector<std::int32_t>{1}, std::vector<std::uint8_t>{1}); }),
      HasSubstr("expected a writer with a mask"));
  writer.finish();
  EXPECT_TRUE(TokenFile((folder_.path() / "masked").string()).mask().empty());
  EXPECT_FALSE(std::filesystem::exists(folder_.path() / "masked.mask"));
}

TEST_F(MaskedFileTest, AFileOfThatNameThatNothingNamesIsLeftAlone) {
  const auto file = [&](const char* name) { return folder_.path() / name; };
  write_file(file("masked.mask"), "a picture");
  for (const bool has_mask : {false, true}) {
    EXPECT_THAT(error_text<DataError>([&] {
                  const TokenFileWriter writer(file("masked").string(), {.vocab_size = 10, .has_mask = has_mask});
                }),
                AllOf(HasSubstr("masked.mask exists and"), HasSubstr("masked.json does not name it")));
  }
  EXPECT_EQ(read_file(file("masked.mask")), "a picture");
  EXPECT_FALSE(std::filesystem::exists(file("masked.bin")));
}

TEST_F(PackedRowsTest, PairsShareARowOneBehindTheOther) {
  std::vector<std::int64_t> lengths;
  for (std::int64_t i = 0; i < 200; ++i) lengths.push_back(2 + i * i * 7 % 15);
  const TokenFile tokens = documents(lengths);
  for (const bool shuffle : {false, true}) {
    const DataLoader loader(tokens, {.seq_len = 40,
                                     .global_batch_size = 3,
                                     .shuffle = shuffle,
                                     .seed = 3,
                                     .separate_documents = true,
                                     .pack = true,
                                     .pairs = true});
    std::map<std::int64_t, int> seen;
    std::int64_t counted = 0;
    for (std::int64_t row = 0; row < loader.sample_count(); ++row) {
      const std::vector<PackedRows::Piece> pieces = loader.packed_rows()->row(0, row);
      const std::vector<std::int64_t> pairs = loader.pairs_of_samples(row, 1).at(0);
      ASSERT_EQ(pieces.size(), 2 * pairs.size());
      EXPECT_EQ(loader.packed_rows()->label_count(0, row), std::ssize(pairs));
      counted += std::ssize(pairs);
      std::int64_t places = 0;
      for (std::size_t i = 0; i < pieces.size(); ++i) {
        const TokenRange document = tokens.document(2 * pairs[i / 2] + static_cast<std::int64_t>(i % 2));
        EXPECT_EQ(pieces[i], (Piece{document.begin, document.size() - 1}));
        places += pieces[i].count;
      }
      EXPECT_LE(places, 40);
      for (const std::int64_t pair : pairs) ++seen[pair];
    }
    EXPECT_EQ(counted, 100);
    EXPECT_EQ(seen.size(), 100U);
    EXPECT_TRUE(std::ranges::all_of(seen, [](const auto& one) { return one.second == 1; }));
    // Of a step.
    const auto of_step = loader.pairs_of(1, {0, 3});
    EXPECT_EQ(loader.label_count(1), std::ssize(of_step[0]) + std::ssize(of_step[1]) + std::ssize(of_step[2]));
    EXPECT_EQ(describe_stream(loader)["packing"]["pairs"], true);
    const DataLoader single(tokens, {.seq_len = 40,
                                     .global_batch_size = 3,
                                     .shuffle = shuffle,
                                     .seed = 3,
                                     .separate_documents = true,
                                     .pack = true});
    EXPECT_TRUE(single.pairs_of(0, {0, 3}).empty());
    EXPECT_THAT(resume_stream(describe_stream(loader), 0, single).differences,
                ElementsAre(AllOf(HasSubstr("[training] packing"), HasSubstr("pairs of documents"))));
  }
  const auto refusal = [&](const std::vector<std::int64_t>& sizes) {
    return error_text<DataError>([&] {
      DataLoader(documents(sizes),
                 {.seq_len = 10, .global_batch_size = 1, .separate_documents = true, .pack = true, .pairs = true});
    });
  };
  EXPECT_THAT(refusal({3, 3, 4}), HasSubstr("3 documents: expected pairs of them"));
  EXPECT_THAT(refusal({3, 3, 7, 6}),
              HasSubstr("the pair of documents 2 and 3 takes 11 places: expected at most seq_len 10"));
  EXPECT_THAT(refusal({3, 3, 14, 2}), HasSubstr("the pair of documents 2 and 3 has one without a trained label, or"));
  EXPECT_THAT(refusal({1, 3}), HasSubstr("the pair of documents 0 and 1 has one"));
}

TEST_F(MaskedFileTest, AnotherMaskIsAnotherStream) {
  const DataLoaderOptions options{.seq_len = 4, .global_batch_size = 1, .separate_documents = true, .pack = true};
  const DataLoader first(masked({"..xx", "x.x.", ".x.x"}), options);
  const auto saved = describe_stream(first);
  const auto told = [&](TokenFile file) {
    return resume_stream(saved, 4, DataLoader(std::move(file), options)).differences;
  };
  EXPECT_TRUE(told(masked({"..xx", "x.x.", ".x.x"}, "copy")).empty());
  EXPECT_THAT(told(masked({"..xx", "x.xx", ".x.x"}, "other")),
              ElementsAre(AllOf(HasSubstr("[training] dataset_path"), HasSubstr(", mask "), HasSubstr("other.bin"))));
  EXPECT_THAT(told(documents({4, 4, 4})), ElementsAre(AllOf(HasSubstr(", mask "), HasSubstr(", no mask"))));
}

}  // namespace
}  // namespace phalanx::data::packed_rows_test
