#include "phalanx/data/corpus/corpus.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/folder_test.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/data/corpus/token_statistics.h"
#include "phalanx/data/token_file.h"

namespace phalanx::data {
namespace {

class CorpusTest : public FolderTest {
 protected:
  std::vector<std::string> names(const CorpusListing& listing) {
    std::vector<std::string> out;
    for (const Document& d : listing.documents) out.push_back(std::filesystem::relative(d.path, folder()).string());
    return out;
  }
};

TEST_F(CorpusTest, ListsFilesDirectoriesAndPatternsOnceAndInOrder) {
  write("b/two.md", "two"), write("b/one.cc", "one"), write("b/deep/three.md", "3"), write("b/.hidden.md", "x");
  write("b/.git/config.md", "x"), write("b/image.md", std::string("P\0N", 3)), write("b/empty.md", "");
  write("b/generated/g.md", "g"), write("a.txt", "a");
  std::filesystem::create_directory_symlink(path("b"), path("b/loop"));
  const CorpusListing all = list_corpus({path("b"), path("*.txt"), path("a.txt"), path("b/two.md")});
  EXPECT_THAT(names(all), ElementsAre("b/deep/three.md", "b/generated/g.md", "b/one.cc", "b/two.md", "a.txt"));
  EXPECT_THAT(all.skipped, ElementsAre(path("b/image.md")));
  EXPECT_EQ(all.empty, 1);
  EXPECT_EQ(total_bytes(all.documents), 3 + 3 + 1 + 1 + 1);
  EXPECT_THAT(names(list_corpus({path("b")}, {.extensions = {".md"}, .exclude = {"generated"}})),
              ElementsAre("b/deep/three.md", "b/two.md"));
  EXPECT_THAT(names(list_corpus({path("b")}, {.exclude = {"*.md"}})), ElementsAre("b/one.cc"));
  // A file that is named is taken whatever its extension.
  EXPECT_THAT(names(list_corpus({path("a.txt")}, {.extensions = {".md"}})), ElementsAre("a.txt"));
}

TEST_F(CorpusTest, InputsWithoutTextAreErrors) {
  write("empty.md", ""), write("image.png", std::string("\0", 1));
  EXPECT_THAT(error_text([&] { list_corpus({path("nowhere")}); }),
              AllOf(HasSubstr("nowhere"), HasSubstr("no such file")));
  EXPECT_THAT(error_text([&] { list_corpus({path("*.zip")}); }), HasSubstr("*.zip: matches no file"));
  EXPECT_THAT(error_text([&] { list_corpus({folder()}); }),
              AllOf(HasSubstr("no text in"), HasSubstr("1 binary; 1 empty")));
  EXPECT_THAT(error_text([&] { list_corpus({folder()}, {.extensions = {".cc"}}); }), HasSubstr("no file fits"));
}

TEST_F(CorpusTest, ValidationTakesAboutTheFractionFromAllOver) {
  std::vector<Document> documents;
  for (int i = 0; i < 200; ++i) documents.push_back({fmt::format("d{}", i), 0, 100 + (i * 37) % 900});
  const CorpusSplit split = split_corpus(documents, 0.1);
  EXPECT_NEAR(static_cast<double>(total_bytes(split.validation)) / total_bytes(documents), 0.1, 0.01);
  EXPECT_EQ(split.train.size() + split.validation.size(), 200u);
  std::set<std::string> train, validation;
  for (const Document& d : split.train) train.insert(d.path);
  for (const Document& d : split.validation) {
    validation.insert(d.path);
    EXPECT_EQ(train.count(d.path), 0u);
  }
  // Not the tail alone: some from each half.
  const auto half = std::count_if(split.validation.begin(), split.validation.end(),
                                  [](const Document& d) { return std::stoi(d.path.substr(1)) < 100; });
  EXPECT_GT(half, 3);
  EXPECT_LT(half, static_cast<std::ptrdiff_t>(validation.size()) - 3);
  EXPECT_TRUE(split_corpus(documents, 0.0).validation.empty());
  EXPECT_THROW(split_corpus(documents, 1.0), ConfigError);
  EXPECT_THAT(error_text([&] {
                split_corpus({{"x", 0, 1000}, {"y", 0, 10}}, 0.0001);
              }),
              HasSubstr("no document for validation"));
}

TEST_F(CorpusTest, OneDocumentIsCutAtALineBreak) {
  const std::string path = write("one.txt", "aaaa\nbbbb\ncccc\ndddd\neeee\n");
  const CorpusSplit split = split_corpus(list_corpus({path}).documents, 0.3);
  ASSERT_EQ(split.train.size(), 1u);
  ASSERT_EQ(split.validation.size(), 1u);
  EXPECT_EQ(split.train[0].end, 15);
  EXPECT_EQ(split.validation[0].begin, 15);
  EXPECT_EQ(split.validation[0].end, 25);
  EXPECT_THROW(split_corpus(list_corpus({write("line.txt", "no line break")}).documents, 0.3), ConfigError);
}

TEST_F(CorpusTest, EncodedCorpusDecodesToItsDocuments) {
  std::vector<std::string> texts = {"first text, with a literal <|endoftext|> in it\n", "second\n",
                                    std::string("caf\xe9 \xff and so on, and so on\n")};
  std::string large;
  while (large.size() < (9u << 20)) large += fmt::format("line {} of a long file\n\n", large.size() % 1000);
  texts.push_back(large);  // several chunks
  std::vector<std::string> paths;
  for (std::size_t i = 0; i < texts.size(); ++i) paths.push_back(write(fmt::format("{}.txt", i), texts[i]));
  const auto documents = list_corpus(paths).documents;
  std::uint64_t read = 0, encoded = 0;
  const BpeTokenizer tokenizer = train_tokenizer(documents, {.vocab_size = 300}, [&](std::uint64_t n) { read += n; });
  const EncodingSummary summary = encode_corpus(documents, tokenizer, path("new/folder/train"),
                                                {.bytes_done = [&](std::uint64_t n) { encoded += n; }});
  EXPECT_EQ(read, static_cast<std::uint64_t>(total_bytes(documents)));
  EXPECT_EQ(encoded, read);
  EXPECT_EQ(summary.bytes, total_bytes(documents));
  EXPECT_EQ(summary.documents, 4);
  const TokenFile file(summary.path, {.vocab_size = tokenizer.vocab_size()});
  EXPECT_EQ(file.size(), summary.tokens);
  EXPECT_NEAR(unigram_entropy(file, {0, file.size()}), summary.unigram_entropy, 1e-9);
  ASSERT_EQ(file.document_count(), 4);
  for (int i = 0; i < 4; ++i) {
    const TokenRange range = file.document(i);
    std::vector<std::int64_t> ids(static_cast<std::size_t>(range.size()));
    file.read(range.begin, ids);
    EXPECT_EQ(ids.back(), *tokenizer.end_of_text());
    EXPECT_EQ(std::count(ids.begin(), ids.end(), *tokenizer.end_of_text()), 1);
    ids.pop_back();
    EXPECT_TRUE(tokenizer.decode(ids) == texts[static_cast<std::size_t>(i)]) << i;
    EXPECT_TRUE(std::vector<TokenId>(ids.begin(), ids.end()) ==
                tokenizer.encode(texts[static_cast<std::size_t>(i)], {.added_tokens = false}))
        << i;
  }
  BpeTrainer bare({.vocab_size = 256, .special_tokens = {}});
  const BpeTokenizer without_end = bare.train();
  EXPECT_THAT(error_text([&] { encode_corpus(documents, without_end, path("x")); }),
              HasSubstr("nor do the files beside it name one"));
  EXPECT_EQ(encode_corpus({documents[1]}, without_end, path("x"), {.end_of_text = false}).tokens, 7);
}

TEST_F(CorpusTest, TheFilesAreTheSameForEveryNumberOfThreads) {
  std::vector<std::string> paths;
  for (int i = 0; i < 50; ++i) {
    std::string text;
    while (std::ssize(text) < 100000 * (i % 5)) text += fmt::format("line {} of file {}\n", text.size() % 999, i);
    paths.push_back(write(fmt::format("{}.txt", i), text + "end\n"));
  }
  const auto documents = list_corpus(paths).documents;
  const BpeTokenizer tokenizer = train_tokenizer(documents, {.vocab_size = 300});
  const EncodingSummary one = encode_corpus(documents, tokenizer, path("one"));
  for (const std::int64_t threads : {2, 5}) {
    std::uint64_t done = 0;
    const EncodingSummary many = encode_corpus(documents, tokenizer, path("many"),
                                               {.bytes_done = [&](std::uint64_t n) { done += n; }, .threads = threads});
    EXPECT_EQ(many.tokens, one.tokens);
    EXPECT_EQ(many.lengths, one.lengths);
    EXPECT_EQ(done, static_cast<std::uint64_t>(total_bytes(documents)));
    for (const char* end : {".bin", ".idx", ".json"}) {
      EXPECT_TRUE(read_file(path("one") + end) == read_file(path("many") + end)) << threads << end;
    }
  }
}

TEST_F(CorpusTest, TextsThatWereSeenAreLeftOutAlsoOfAnotherFile) {
  write("a.jsonl", "{\"text\": \"one\"}\n{\"text\": \"two\"}\n{\"text\": \"one\"}\n");
  write("b.jsonl", "{\"text\": \"two\"}\n{\"text\": \"one \"}\n");
  BpeTrainer trainer({.vocab_size = 257});
  const BpeTokenizer tokenizer = trainer.train();
  write("c.txt", "one");
  std::vector<Document> documents = list_corpus({path("a.jsonl"), path("b.jsonl"), path("c.txt")}).documents;
  EXPECT_EQ(leave_out_duplicates(documents), 3);
  ASSERT_EQ(documents.size(), 2U) << "a text that was a record is no document any more";
  const EncodingSummary first = encode_corpus({documents[0]}, tokenizer, path("first"));
  EXPECT_EQ(first.documents, 2);
  EXPECT_EQ(first.lengths, (std::vector<std::int64_t>{0, 0, 2})) << "two of four tokens";
  EXPECT_EQ(encode_corpus({documents[1]}, tokenizer, path("second")).documents, 1);
}

// The most repeated texts would else be set aside whole, and be missing where they are trained.
TEST_F(CorpusTest, ATextIsSetAsideOrTrainedByItsFirstOccurrence) {
  std::string records;
  for (int i = 0; i < 900; ++i) records += fmt::format("{{\"text\": \"number {}\"}}\n", 100 + i % 90);
  write("a.jsonl", records);
  std::vector<Document> documents = list_corpus({path("a.jsonl")}).documents;
  EXPECT_EQ(leave_out_duplicates(documents), 810);
  const CorpusSplit split = split_corpus(documents, 0.2);
  const auto texts_of = [](const std::vector<Document>& side) {
    std::vector<std::string> texts;
    for (const Document& document : side) {
      each_text(document, [&](std::string_view text) { texts.emplace_back(text); });
    }
    return texts;
  };
  const std::vector<std::string> train = texts_of(split.train), aside = texts_of(split.validation);
  EXPECT_EQ(train.size(), 72U);
  EXPECT_EQ(aside.size(), 18U);
  std::set<std::string> all(train.begin(), train.end());
  all.insert(aside.begin(), aside.end());
  EXPECT_EQ(all.size(), 90U);
}

TEST_F(CorpusTest, RecordsThatShiftWhileTheyAreReadAreAnError) {
  const std::string records = write("a.jsonl", "{\"text\": \"one\"}\n"), plain = write("a.txt", "one");
  const auto documents = list_corpus({records, plain}).documents;
  const auto read = [](const Document& document) {
    return error_text<DataError>([&] { each_text(document, [](std::string_view) {}); });
  };
  const auto read_records = [](const Document& document) {
    return error_text<DataError>([&] { each_record(document, 0, [](std::int64_t, std::string_view) {}); });
  };
  write("a.jsonl", "{\"text\": \"zero\"}\n{\"text\": \"one\"}\n");
  write("a.txt", "one and more");
  EXPECT_THAT(read(documents[0]), AllOf(HasSubstr("a.jsonl changed while it was read"), HasSubstr("had 16 bytes")));
  EXPECT_THAT(read_records(documents[1]), HasSubstr("a.txt changed while it was read"));
  each_text(documents[1], [](std::string_view text) { EXPECT_EQ(text, "one"); });
  std::filesystem::resize_file(records, 16);
  std::filesystem::last_write_time(records, std::filesystem::file_time_type::clock::now() + std::chrono::hours(1));
  EXPECT_THAT(read(documents[0]), HasSubstr("has 16 bytes as before, but was written to"));
  // Also where it grows under the reader.
  const auto again = list_corpus({records}).documents;
  EXPECT_THAT(error_text<DataError>([&] {
                each_text(again[0], [&](std::string_view) { std::ofstream(records, std::ios::app) << "\n"; });
              }),
              HasSubstr("had 16 bytes and has 17"));
}

TEST_F(CorpusTest, AFieldMayBeInsideAnother) {
  write("a.jsonl",
        "{\"meta\": {\"body\": {\"text\": \"inner\"}}}\n{\"meta.body.text\": \"plain\"}\n"
        "{\"meta\": {\"body\": {\"text\": null}}}\n");
  std::vector<std::string> texts;
  const auto read = [&](const std::string& field) {
    for (const Document& document : list_corpus({path("a.jsonl")}, {.field = field}).documents) {
      each_text(document, [&](std::string_view text) { texts.emplace_back(text); });
    }
  };
  read("meta.body.text");
  EXPECT_THAT(texts, ElementsAre("inner", "plain"));
  EXPECT_THAT(error_text<DataError>([&] { read("meta.text"); }),
              AllOf(HasSubstr("line 1"), HasSubstr("no field \"meta.text\"")));
  EXPECT_THAT(error_text<DataError>([&] { read("meta.body"); }), HasSubstr("expected a string, found object"));
}

TEST_F(CorpusTest, AFileThatShrankIsAnError) {
  const std::string path = write("a.txt", "short");
  EXPECT_THAT(error_text([&] {
                train_tokenizer({{path, 0, 50}}, {.vocab_size = 300});
              }),
              AllOf(HasSubstr("became shorter"), HasSubstr("expected 50 bytes, found 5")));
}

}  // namespace
}  // namespace phalanx::data
