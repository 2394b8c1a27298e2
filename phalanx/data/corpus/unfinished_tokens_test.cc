// A call that encodes a corpus, stopped at any point, goes on to the same files.
#include "phalanx/data/corpus/unfinished_tokens.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/testing/faulty_file_system.h"
#include "phalanx/base/testing/folder_test.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/data/corpus/corpus.h"

namespace phalanx::data {
namespace {

using std::string_literals::operator""s;

/// Records, of which some are set aside and some left out, and then texts.
class UnfinishedTokensTest : public FolderTest {
 protected:
  struct Stop {};

  UnfinishedTokensTest() {
    paths_ = {path("records.jsonl")};
    std::string records;
    for (int i = 0; i < 300; ++i) records += fmt::format("{{\"text\": \"record number {} of some\"}}\n", i % 250);
    write("records.jsonl", records + "{\"text\": null}\n");
    for (int i = 0; i < 40; ++i) {
      std::string text;
      for (int line = 0; line < 10; ++line) text += fmt::format("line {} of file {}\n", line, i);
      paths_.push_back(write(fmt::format("{}.txt", i), text));
    }
    documents_ = listed();
    tokenizer_ = train_tokenizer(documents_, {.vocab_size = 270});
    whole_ = encode_corpus(documents_, *tokenizer_, path("whole"), {.tokens_kept_at_once = 0});
  }

  std::vector<Document> listed() const {
    std::vector<Document> all = list_corpus(paths_).documents;
    leave_out_duplicates(all);
    return split_corpus(all, 0.2).train;
  }
  std::string files(const std::string& prefix) const {
    return read_file(path(prefix + ".bin")) + read_file(path(prefix + ".idx")) + read_file(path(prefix + ".json"));
  }
  EncodingSummary encode(const std::vector<Document>& documents, EncodingOptions options = {}) const {
    options.tokens_kept_at_once = kept_at_once_;
    return encode_corpus(documents, *tokenizer_, path("again"), options);
  }
  /// After some calls that report progress.
  void stop_after(std::int64_t calls, const std::vector<Document>& documents) const {
    EXPECT_THROW(encode(documents, {.bytes_done =
                                        [&](std::uint64_t) {
                                          if (calls-- == 0) throw Stop();
                                        }}),
                 Stop);
  }
  void expect_whole(const EncodingSummary& again) const {
    EXPECT_TRUE(files("again") == files("whole"));
    const auto numbers = [](const EncodingSummary& one) {
      return std::tuple(one.documents, one.tokens, one.bytes, one.empty, one.lengths, one.unigram_entropy);
    };
    EXPECT_EQ(numbers(again), numbers(whole_));
    for (const char* ending : {".bin.tmp", ".idx.tmp", ".json.tmp", ".unfinished"}) {
      EXPECT_FALSE(std::filesystem::exists(path("again"s + ending))) << ending;
    }
  }

  std::vector<std::string> paths_;
  std::vector<Document> documents_;
  std::optional<BpeTokenizer> tokenizer_;
  EncodingSummary whole_;
  std::int64_t kept_at_once_ = 60;
};

TEST_F(UnfinishedTokensTest, AStoppedCallGoesOnToTheSameFiles) {
  std::int64_t before = 0;
  for (const std::int64_t calls : {2, 9, 25}) {
    stop_after(calls, documents_);
    EXPECT_TRUE(unfinished_tokens(path("again")));
    const EncodingSummary again = encode(documents_);
    EXPECT_GT(again.taken_over, before);
    EXPECT_LT(again.taken_over, again.documents);
    EXPECT_GT(again.bytes_taken_over, 0);
    before = again.taken_over;
    expect_whole(again);
  }
  stop_after(9, documents_);  // and once more, while it goes on
  stop_after(25, documents_);
  expect_whole(encode(documents_));
}

TEST_F(UnfinishedTokensTest, NothingIsTakenOverOfOtherInputsOrOptions) {
  stop_after(25, documents_);
  EXPECT_EQ(encode(documents_, {.end_of_text = false}).taken_over, 0);
  stop_after(25, documents_);
  EXPECT_EQ(encode(documents_, {.set_aside = "of another text"}).taken_over, 0);
  stop_after(25, documents_);
  EXPECT_EQ(encode(list_corpus(paths_).documents).taken_over, 0);  // nothing left out, nothing set aside
  stop_after(25, documents_);
  write("39.txt", "another text in file 39");
  EXPECT_EQ(encode(listed()).taken_over, 0);
}

// The ids in PREFIX.bin.tmp are of another command, or did not reach the disk.
TEST_F(UnfinishedTokensTest, IdsAreTakenOverThatAreThoseThatWereKept) {
  const auto damage = [&](const std::string& file, const std::function<void(std::string&)>& change) {
    stop_after(25, documents_);
    std::string bytes = read_file(path(file));
    change(bytes);
    write_file(path(file), bytes);
    const EncodingSummary again = encode(documents_);
    expect_whole(again);
    return again.taken_over;
  };
  const std::int64_t all = damage("again.unfinished", [](std::string&) {});
  EXPECT_GT(all, 100);
  EXPECT_EQ(damage("again.bin.tmp", [](std::string& bytes) { bytes = std::string(bytes.size(), '\1'); }), 0);
  EXPECT_EQ(damage("again.bin.tmp", [](std::string& bytes) { bytes.clear(); }), 0);
  const std::int64_t half = damage("again.bin.tmp", [](std::string& bytes) { bytes.resize(bytes.size() / 2); });
  EXPECT_GT(half, 0);
  EXPECT_LT(half, all);
  EXPECT_LT(damage("again.bin.tmp", [](std::string& bytes) { bytes[bytes.size() / 2] ^= 1; }), all);
  EXPECT_EQ(damage("again.unfinished", [](std::string& bytes) { bytes += std::string(400, '\0'); }), all);
  EXPECT_LT(damage("again.unfinished", [](std::string& bytes) { bytes.pop_back(); }), all);
  EXPECT_EQ(damage("again.unfinished", [](std::string& bytes) { bytes.resize(10); }), 0);
}

TEST_F(UnfinishedTokensTest, AFailureAtAnyOperationLosesNothing) {
  kept_at_once_ = 1000;
  std::int64_t taken_over = 0;
  FaultyFileSystem counting(posix_file_system());
  encode(documents_, {.file_system = &counting});
  ASSERT_GT(counting.operations(), 20);
  for (const Fault kind : {Fault::error, Fault::full, Fault::crash}) {
    for (std::int64_t n = 0; n < counting.operations(); ++n) {
      SCOPED_TRACE(fmt::format("operation {}, kind {}", n, static_cast<int>(kind)));
      for (const char* ending : {".bin", ".idx", ".json", ".bin.tmp", ".idx.tmp", ".json.tmp", ".unfinished"}) {
        std::filesystem::remove(path("again"s + ending));
      }
      FaultyFileSystem fs(posix_file_system(), {.fail_at = n, .kind = kind});
      try {
        encode(documents_, {.file_system = &fs});
      } catch (const std::exception&) {
      }
      const EncodingSummary again = encode(documents_);
      expect_whole(again);
      taken_over += again.taken_over;
    }
  }
  EXPECT_GT(taken_over, 0);
}

TEST_F(UnfinishedTokensTest, ACallThatHasKeptNothingLeavesNothing) {
  const auto documents =
      list_corpus({write("a.txt", "a text"), write("b.jsonl", "{\"text\": \"a\"}\nno record\n")}).documents;
  EXPECT_THROW(encode(documents), DataError);
  for (const char* ending : {".bin.tmp", ".unfinished"}) {
    EXPECT_FALSE(std::filesystem::exists(path("again"s + ending))) << ending;
  }
}

TEST_F(UnfinishedTokensTest, ItsFileIsNoTextForWhoeverListsFiles) {
  stop_after(25, documents_);
  EXPECT_THAT(list_corpus({path("0.txt"), path("again.un*")}).skipped, ElementsAre(path("again.unfinished")));
}

}  // namespace
}  // namespace phalanx::data
