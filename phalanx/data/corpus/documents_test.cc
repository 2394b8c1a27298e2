// Typical inputs: text, JSON lines and tables, plain and compressed; and inputs that must never be taken for text.
#include "phalanx/data/corpus/documents.h"

#include <gtest/gtest.h>
#include <zlib.h>

#include <filesystem>
#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/folder_test.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/data/corpus/column_texts.h"
#include "phalanx/data/corpus/corpus.h"
#include "phalanx/data/corpus/dataset_folder.h"
#include "phalanx/data/token_file.h"

namespace phalanx::data {
namespace {

using std::string_literals::operator""s;

const std::string kRecords =
    "{\"text\": \"first\\nof two lines\", \"id\": 1}\n\n{\"id\": 2, \"text\": \"caf\\u00e9\"}\r\n"
    "{\"text\": null}\n{\"text\": \"\"}\n{\"text\": \"last\"}";

/// The beginning of a stream, and nothing of its schema.
const std::string kArrowStream = "\xff\xff\xff\xff\x78\0\0\0\x10\0\0\0"s + std::string(200, '\1');

/// One frame that holds the text as it is.
std::string zstd_frame(const std::string& text) {
  const std::size_t header = text.size() << 3 | 1;
  return "\x28\xb5\x2f\xfd\x20"s + static_cast<char>(text.size()) + static_cast<char>(header & 255) +
         static_cast<char>(header >> 8 & 255) + static_cast<char>(header >> 16) + text;
}

class DocumentsTest : public FolderTest {
 protected:
  std::string write_gzip(const std::string& name, const std::string& contents) {
    gzFile file = gzopen(path(name).c_str(), "wb");
    gzwrite(file, contents.data(), static_cast<unsigned>(contents.size()));
    gzclose(file);
    return path(name);
  }
  std::vector<std::string> texts_of(const std::vector<std::string>& inputs, const CorpusOptions& options = {}) {
    std::vector<std::string> texts;
    empty_ = 0;
    for (const Document& document : list_corpus(inputs, options).documents) {
      empty_ += each_text(document, [&](std::string_view text) { texts.emplace_back(text); }).empty;
    }
    return texts;
  }
  std::string refused(const std::vector<std::string>& inputs, const CorpusOptions& options = {}) {
    return error_text<DataError>([&] { texts_of(inputs, options); });
  }

  std::int64_t empty_ = 0;
};

TEST_F(DocumentsTest, OneDocumentARecordPlainOrCompressed) {
  const auto expected = ElementsAre("first\nof two lines", "caf\xc3\xa9", "last");
  EXPECT_THAT(texts_of({write("a.jsonl", kRecords)}), expected);
  EXPECT_EQ(empty_, 2);
  EXPECT_THAT(texts_of({write("a.ndjson", "\xEF\xBB\xBF" + kRecords + "\n")}), expected);
  EXPECT_THAT(texts_of({write_gzip("b.jsonl.gz", kRecords)}), expected);
  EXPECT_THAT(texts_of({write("c.txt", kRecords)}, {.format = TextFormat::json_lines}), expected);
  EXPECT_THAT(texts_of({write("d.jsonl", "{\"body\": \"x\"}")}, {.field = "body"}), ElementsAre("x"));
  EXPECT_THAT(texts_of({write("in", kRecords)}, {.standard_input = path("in")}), expected);
  // Several inputs, in their order.
  EXPECT_THAT(texts_of({write("e.md", "# Title\n"), write("f.jsonl", "{\"text\": \"y\"}"), write("g.txt", "z")}),
              ElementsAre("# Title\n", "y", "z"));
  // Lines longer than what is read at a time.
  const std::string longest(3 << 20, 'q');
  EXPECT_THAT(texts_of({write("h.jsonl", "{\"text\": \"" + longest + "\"}\n{\"text\": \"r\"}\n")}),
              ElementsAre(longest, "r"));
}

TEST_F(DocumentsTest, TextIsReadFromGzipAndZstdAndWithoutItsMark) {
  const std::string text = "Once upon a time there was a text.\n";
  EXPECT_THAT(texts_of({write("a.txt", "\xEF\xBB\xBF" + text)}), ElementsAre(text));
  EXPECT_THAT(texts_of({write_gzip("b.txt.gz", "\xEF\xBB\xBF" + text)}), ElementsAre(text));
  const std::string zstd = write("c.txt.zst", zstd_frame(text)),
                    two = write("d.txt.zst", zstd_frame(text) + zstd_frame("x"));
  if (!reads_zstd()) {
    EXPECT_THAT(refused({zstd}), AllOf(HasSubstr("c.txt.zst is compressed by zstd"), HasSubstr("libzstd-dev")));
    return;
  }
  EXPECT_THAT(texts_of({zstd}), ElementsAre(text));
  EXPECT_THAT(texts_of({two}), ElementsAre(text + "x"));
  EXPECT_THAT(texts_of({write("e.jsonl.zst", zstd_frame("{\"text\": \"in a record\"}\n"))}),
              ElementsAre("in a record"));
  const std::string whole = zstd_frame(text);
  EXPECT_THAT(refused({write("f.txt.zst", whole.substr(0, whole.size() - 3))}), HasSubstr("ends too soon"));
  EXPECT_THAT(refused({write("g.txt.zst", whole.substr(0, 4) + std::string(40, '\xff'))}), HasSubstr("is not valid"));
}

TEST_F(DocumentsTest, RecordsThatDoNotFitAreNamedByLine) {
  EXPECT_THAT(
      refused({write("a.jsonl", "{\"text\": \"x\"}\n{\"body\": \"y\", \"id\": 3}\n")}),
      AllOf(HasSubstr("a.jsonl, line 2: no field \"text\""), HasSubstr("\"body\", \"id\""), HasSubstr("--field")));
  EXPECT_THAT(refused({write("b.jsonl", "{\"text\": 3}\n")}),
              HasSubstr("b.jsonl, line 1: \"text\": expected a string"));
  EXPECT_THAT(refused({write("c.jsonl", "{\"text\": \"x\"}\n{\"text\": \n")}),
              HasSubstr("c.jsonl, line 2: not valid JSON"));
  EXPECT_THAT(refused({write("d.jsonl", "\xff\xfe{\0}\0\n\0"s + std::string(40, '\0'))}),
              AllOf(HasSubstr("d.jsonl is UTF-16"), HasSubstr("iconv")));
}

TEST_F(DocumentsTest, RecordsChatsAndDataSetsAreNeverTakenForText) {
  const std::string records = "{\"text\": \"a record of text\"}\n{\"text\": \"another\"}\n";
  EXPECT_THAT(refused({write("a.txt", records)}),
              AllOf(HasSubstr("a.txt looks like JSON lines"), HasSubstr(".jsonl"), HasSubstr("--format text")));
  EXPECT_THAT(refused({write_gzip("a.txt.gz", records)}), HasSubstr("looks like JSON lines"));
  EXPECT_THAT(texts_of({write("CAPITALS.JSONL", records)}), ElementsAre("a record of text", "another"));
  EXPECT_THAT(refused({write("walked/b.md", records)}), HasSubstr("looks like JSON lines"));
  EXPECT_THAT(refused({path("walked")}), HasSubstr("b.md looks like JSON lines"));
  EXPECT_THAT(refused({write("c.json", "[\n  {\"text\": \"a record\"},\n  {\"text\": \"b\"}\n]\n")}),
              AllOf(HasSubstr("a list of records"), HasSubstr("jq -c")));
  EXPECT_THAT(refused({write("d.json", "{\"text\": \"a single line\"}")}), HasSubstr("looks like JSON lines"));
  EXPECT_THAT(texts_of({path("a.txt")}, {.format = TextFormat::text}), ElementsAre(records));
  for (const char* key : {"messages", "conversations"}) {
    EXPECT_THAT(refused({write("chat.jsonl", "{\""s + key + "\": [{\"role\": \"user\", \"content\": \"x\"}]}\n")}),
                AllOf(HasSubstr("line 1: conversations"), HasSubstr("tokenize --chat")));
  }
  EXPECT_THAT(refused({write("e.json", "{\n  \"messages\": [{\"role\": \"user\", \"content\": \"x\"}]\n}\n")}),
              AllOf(HasSubstr("e.json looks like one record in JSON"), HasSubstr("jq -c .")));
  EXPECT_THAT(refused({write("state.json", "{\n  \"_data_files\": [{\"filename\": \"data-0.arrow\"}]\n}\n")}),
              AllOf(HasSubstr("a description of a data set"), HasSubstr("give the data beside it")));
  EXPECT_THAT(refused({write("twice.jsonl", "{\"text\": \"a\", \"text\": \"b\"}\n")}),
              HasSubstr("twice.jsonl, line 1: its key \"text\" is there twice"));
  for (const char* name : {"table.csv", "table.tsv", "walked-table/x.csv"}) {
    EXPECT_THAT(refused({write(name, "id,text\n1,a text\n")}),
                AllOf(HasSubstr("is a table, of which text is one column"), HasSubstr("csv.DictReader"),
                      HasSubstr("--field COLUMN"), HasSubstr("--exclude")));
  }
  EXPECT_THAT(refused({write_gzip("table.csv.gz", "id,text\n1,a text\n")}), HasSubstr("< table.csv > data.jsonl"));
  EXPECT_THAT(refused({path("walked-table")}), HasSubstr("x.csv is a table"));
  EXPECT_THAT(texts_of({path("table.csv")}, {.format = TextFormat::text}), ElementsAre("id,text\n1,a text\n"));
  // JSON that is one document is text, as in a source tree.
  EXPECT_THAT(refused({write("package.json", "{\n  \"name\": \"x\",\n  \"version\": \"1\"\n}\n"),
                       write("small.json", "{\"name\": \"x\"}"), write("list.json", "[1, 2, 3, 4, 5, 6]\n")}),
              "");
}

TEST_F(DocumentsTest, RecordsAreSeenWhateverTheFileBeginsWith) {
  const auto way_out = AllOf(HasSubstr("--format text"), HasSubstr("--exclude"));
  const auto expect_refused = [&](const std::string& contents, const std::string& what) {
    EXPECT_THAT(refused({write("x.txt", contents)}), AllOf(HasSubstr("x.txt looks like " + what), way_out)) << contents;
    EXPECT_THAT(texts_of({path("x.txt")}, {.format = TextFormat::text}), SizeIs(1)) << contents;
  };
  expect_refused("{\n  \"text\": \"a\",\n  \"id\": 3\n}\n{\n  \"text\": \"b\"\n}\n",
                 "records in JSON, one after the other");
  const std::string meta(300'000, 'x');
  const std::string longest = "{\"meta\": \"" + meta + "\", \"text\": \"a\"}\n";
  expect_refused(longest, "JSON lines");
  expect_refused(longest + "{\"text\": \"b\"}\n", "JSON lines");
  expect_refused("[" + longest + "]", "a list of records in JSON");
  EXPECT_THAT(refused({write_gzip("x.txt.gz", longest)}), HasSubstr("looks like JSON lines"));
  expect_refused("{\"text\":\"a\n{\"text\":\"b\"}\n{\"text\":\"c\"}\n", "JSON lines");
  expect_refused("# dump\n{\"text\":\"a\"}\n{\"text\":\"b\"}\n", "JSON lines");
  expect_refused("# dump\n{\n\"text\": \"a\"\n}\n{\n\"text\": \"b\"\n}\n", "records in JSON");
  expect_refused("\x1e{\"text\":\"a\"}\n\x1e{\"text\":\"b\"}\n", "a sequence of JSON records");
  expect_refused("[\"a\",\"b\"]\n[\"c\",\"d\"]\n", "lists in JSON");
  expect_refused("\"hello\"\n\"b\"\n", "strings in JSON");
  expect_refused("{'text': 'a'}\n{'text': 'b'}\n", "JSON lines");
  expect_refused("{\"data\": [{\"title\": \"x\", \"paragraphs\": []}]}", "a list of records in JSON (\"data\")");
  expect_refused("[{\"q\": \"x\", \"a\": \"y\"}, {\"q\": \"z\", \"a\": \"w\"}]", "a list of records in JSON");
  expect_refused("id,text\n1,\"a, b\"\n", "a table");
  expect_refused("title\tbody\na\tb\n", "a table");
  EXPECT_THAT(refused({write("in", "text,label\n\"hello, a\",1\n\"b\",2\n")}, {.standard_input = path("in")}),
              AllOf(HasSubstr("standard input looks like a table"), HasSubstr("--field COLUMN"), way_out));
  EXPECT_THAT(refused({write("in", "[\"a\"]\n[\"b\"]\n")}, {.standard_input = path("in")}), HasSubstr("lists in JSON"));
  // Files of ours.
  expect_refused("{\"version\": \"1.0\", \"added_tokens\": [], \"model\": {\"type\": \"BPE\"}}", "a tokenizer");
  expect_refused("{\n  \"format\": \"phalanx.tokens\",\n  \"version\": 1\n}\n", "the description of a token file");
}

TEST_F(DocumentsTest, TextAboutJsonAndQuotedSpeechStaysText) {
  for (const char* text :
       {"\"Hello,\" she said.\n\"Hi.\"\n", "# Title\n\nA record:\n\n    {\"text\": \"a\"}\n\nwhich is read.\n",
        "{ int x; }\n{ int y; }\n", "[1] A footnote.\n[2] Another.\n", "Hello, world\nand, so on\n",
        "red,green\nblue,white\n", "# notes\n[a link](x.md)\n[another](y.md)\n",
        "{\n \"type\": \"FeatureCollection\",\n \"features\": [\n  {\"id\": 1},\n  {\"id\": 2},\n  {\"id\": 3},\n  "
        "{\"id\": 4}\n ]\n}\n",
        "{\n  \"name\": \"x\",\n  \"authors\": [{\"name\": \"y\"}]\n}\n"}) {
    EXPECT_EQ(refused({write("x.txt", text)}), "") << text;
  }
}

TEST_F(DocumentsTest, WhatFollowsGzipDataIsNotPassedOver) {
  const auto bytes_of = [&](const std::string& name) { return read_file(path(name)); };
  const std::string first = "Once upon a time there was a text.\n", second = "And another.\n";
  write_gzip("1.gz", first), write_gzip("2.gz", second);
  write("both.txt.gz", bytes_of("1.gz") + bytes_of("2.gz"));
  EXPECT_THAT(texts_of({path("both.txt.gz")}), ElementsAre(first + second));
  write("padded.txt.gz", bytes_of("1.gz") + std::string(512, '\0'));
  EXPECT_THAT(texts_of({path("padded.txt.gz")}), ElementsAre(first));
  EXPECT_THAT(refused({write("plain.txt.gz", bytes_of("1.gz") + second)}),
              AllOf(HasSubstr("plain.txt.gz is damaged"), HasSubstr("is followed by something else after 35 bytes")));
  EXPECT_THAT(refused({write("cut.txt.gz", bytes_of("1.gz").substr(0, 30))}), HasSubstr("ends too soon"));
}

TEST_F(DocumentsTest, NamedFilesThatAreNoTextAreErrors) {
  const std::string rest(200, '\1');
  EXPECT_THAT(refused({write("a.pdf", "%PDF-1.7\n" + rest)}), AllOf(HasSubstr("a.pdf is a PDF: expected UTF-8 text")));
  EXPECT_THAT(refused({write("b.bin", "ids\0ids"s)}), HasSubstr("b.bin is binary"));
  EXPECT_THAT(refused({write("c.txt", "\xff\xfeO\0n\0c\0e\0 \0u\0p\0o\0n\0"s)}), HasSubstr("UTF-16 or UTF-32 text"));
  EXPECT_THAT(refused({write_gzip("d.gz", std::string(100, '\0'))}), HasSubstr("d.gz is binary when unpacked"));
  EXPECT_THAT(refused({write("e.txt", "\xff\xfeh\0i\0"s)}), AllOf(HasSubstr("UTF-16LE"), HasSubstr("iconv")));
  EXPECT_THAT(refused({write("f.txt", "\xEF\xBB\xBF"s)}), HasSubstr("1 empty"));
  EXPECT_THAT(refused({write("g.parquet", "Once upon a time there was a text\n")}),
              HasSubstr("g.parquet is no Parquet file"));
  EXPECT_THAT(refused({write("h.txt", "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976\n")}),
              HasSubstr("h.txt: it is a Git LFS pointer"));
  EXPECT_THAT(refused({"/dev/zero"}), AllOf(HasSubstr("/dev/zero is no regular file"), HasSubstr("standard input, -")));
  write("in", "ids\0ids"s);
  EXPECT_EQ(refused({path("in")}, {.standard_input = path("in")}).substr(0, 24), "standard input is binary");
  write("folder/a.txt", "text"), write("folder/b.bin", "ids\0ids"s);
  EXPECT_THAT(list_corpus({path("folder")}).skipped, ElementsAre(path("folder/b.bin")));
  EXPECT_THAT(list_corpus({path("folder/*")}).skipped, ElementsAre(path("folder/b.bin")));
}

TEST_F(DocumentsTest, ParquetIsReadOrItIsSaidWhatToInstall) {
  const std::string file = write("a.parquet", "PAR1" + std::string(200, '\1') + "PAR1");
  EXPECT_THAT(refused({file}), AllOf(HasSubstr("a.parquet"), HasSubstr("Parquet")));
  if (reads_columns()) return;
  EXPECT_THAT(refused({file}), AllOf(HasSubstr("libparquet-dev"), HasSubstr("to_json")));
}

// scripts/parquet_test.py reads files that the packages wrote.
TEST_F(DocumentsTest, ArrowIsReadOrItIsSaidWhatToInstall) {
  const std::string file = write("a.arrow", kArrowStream);
  EXPECT_THAT(refused({file}), AllOf(HasSubstr("a.arrow"), HasSubstr("Arrow")));
  EXPECT_THAT(refused({write("feather", "ARROW1\0\0"s + std::string(200, '\1'))}), HasSubstr("Arrow"));
  EXPECT_THAT(refused({write("b.arrow", "Once upon a time there was a text\n")}),
              HasSubstr("b.arrow is no Arrow file, whatever its name says: it is text"));
  write("set/data-00000-of-00001.arrow", kArrowStream);
  write("set/state.json", R"({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]})");
  EXPECT_THAT(refused({path("set")}), HasSubstr("Arrow"));
  if (reads_columns()) {
    EXPECT_THAT(refused({file}), HasSubstr("the stream of Arrow ends too soon, after 212 bytes"));
    return;
  }
  EXPECT_THAT(refused({file}), AllOf(HasSubstr("libparquet-dev"), HasSubstr("from_file"), HasSubstr("to_json")));
  EXPECT_THAT(refused({path("set")}),
              AllOf(HasSubstr("a folder of the datasets package"), HasSubstr("load_from_disk")));
}

TEST_F(DocumentsTest, FoldersOfTheDatasetsPackageAreTheirFiles) {
  const std::string folder = path("set");
  const auto files = [&] { return dataset_files(folder); };
  const auto refusal = [&] { return error_text<DataError>(files); };
  write("set/b.arrow", kArrowStream), write("set/a.arrow", kArrowStream), write("set/c.arrow", kArrowStream);
  EXPECT_FALSE(files());  // Arrow files of anybody's
  write("set/dataset_info.json", "{}");
  EXPECT_THAT(refusal(), AllOf(HasSubstr("is a cache of the datasets package"), HasSubstr("*-train*.arrow")));
  write("set/state.json", "{}");
  EXPECT_THAT(refusal(), AllOf(HasSubstr("state.json: expected \"_data_files\""), HasSubstr("save it again")));
  write("set/state.json",
        R"({"_data_files": [{"filename": "b.arrow"}, {"filename": "a.arrow"}], "_indices_files": []})");
  EXPECT_EQ(files(), (std::vector<std::filesystem::path>{folder + "/b.arrow", folder + "/a.arrow"}));
  for (const char* key : {"_indices_files", "_indices_data_files"}) {
    write("set/state.json", R"({"_data_files": [{"filename": "b.arrow"}], ")"s + key + R"(": [{"filename": "i"}]})");
    EXPECT_THAT(refusal(), AllOf(HasSubstr(key), HasSubstr("flatten_indices()")));
  }
  write("cut/state.json", R"({"_data_files": [{"filename": "gone.arrow"}]})");
  EXPECT_THAT(refused({path("cut")}), AllOf(HasSubstr("lists gone.arrow"), HasSubstr("copy the whole folder")));
  write("set/state.json", R"({"_data_files": [{"filename": "gone.arrow"}]})");
  EXPECT_THAT(refusal(), AllOf(HasSubstr("lists gone.arrow"), HasSubstr("copy the whole folder")));
  write("set/dataset_dict.json", R"({"splits": ["test", "train"]})");
  EXPECT_THAT(refusal(),
              AllOf(HasSubstr("the splits of a data set, test, train"), HasSubstr("such as " + folder + "/test")));
  EXPECT_THAT(refused({folder}), HasSubstr("the splits of a data set"));
  write("notes/state.json", "{\"volume\": 11, \"of\": \"a program that is no data set\"}\n");
  EXPECT_FALSE(dataset_files(path("notes")));
}

TEST_F(DocumentsTest, RecordsAreSetAsideForValidation) {
  std::string records;
  for (int i = 0; i < 100; ++i) records += "{\"text\": \"record number " + std::to_string(i) + "\"}\n";
  const CorpusSplit split = split_corpus(list_corpus({write("a.jsonl", records)}).documents, 0.2);
  ASSERT_EQ(split.train.size(), 1u);
  ASSERT_EQ(split.validation.size(), 1u);
  const BpeTokenizer tokenizer = train_tokenizer(split.train, {.vocab_size = 270});
  std::uint64_t done = 0;
  const EncodingSummary train =
      encode_corpus(split.train, tokenizer, path("train"), {.bytes_done = [&](std::uint64_t bytes) { done += bytes; }});
  const EncodingSummary validation = encode_corpus(split.validation, tokenizer, path("validation"));
  EXPECT_EQ(done, records.size());
  EXPECT_EQ(train.documents + validation.documents, 100);
  EXPECT_EQ(validation.documents, 20);
  EXPECT_EQ(TokenFile(validation.path).document_count(), 20);
  const CorpusSplit one = split_corpus(list_corpus({write("b.jsonl", "{\"text\": \"x\"}")}).documents, 0.1);
  EXPECT_THROW(encode_corpus(one.validation, tokenizer, path("none")), DataError);
  EXPECT_FALSE(std::filesystem::exists(path("none.bin")));
}

}  // namespace
}  // namespace phalanx::data
