// A corpus of texts: finds the files, sets some texts aside for validation, trains a tokenizer on the rest, encodes
// them. It is the work of `phalanx tokenize`, without its command line.
//
//   CorpusListing listing = list_corpus({"README.md", "docs", "src/*.cc"}, {.extensions = {".md", ".cc"}});
//   CorpusSplit split = split_corpus(listing.documents, 0.1);
//   BpeTokenizer tokenizer = train_tokenizer(split.train, {.vocab_size = 4096});
//   EncodingSummary done = encode_corpus(split.train, tokenizer, "data/train");
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "phalanx/base/file.h"
#include "phalanx/data/corpus/documents.h"
#include "phalanx/data/tokenizer/bpe_tokenizer.h"
#include "phalanx/data/tokenizer/bpe_trainer.h"

namespace phalanx::data {

std::int64_t total_bytes(const std::vector<Document>& documents);

struct CorpusOptions {
  std::vector<std::string> extensions;  // of files found in directories, with the dot; empty: all
  std::vector<std::string> exclude;     // shell patterns for names or paths of files and directories
  std::optional<TextFormat> format;     // of every file; unset: detected for each
  std::string field = "text";           // of records
  std::string standard_input;           // a file whose name is meaningless, so that only its content decides
};

struct CorpusListing {
  std::vector<Document> documents;   // in order of the inputs, directories sorted by path; each file once
  std::vector<std::string> skipped;  // files that are not text, from directories and patterns
  std::int64_t empty = 0;            // files of zero bytes
};

/// `inputs` are files, directories (all files below, except hidden ones and linked directories) and shell patterns
/// such as src/*.cc. The content decides what a file holds; for records the name decides too (.jsonl, .ndjson).
/// Throws DataError for an input that does not exist or matches nothing, for a named file that is not text, for records
/// that would be taken for text, for a folder of the datasets package that is not the rows of one split
/// (dataset_folder.h), and if no text is left.
CorpusListing list_corpus(const std::vector<std::string>& inputs, const CorpusOptions& options = {});

/// Leaves out texts that are, byte for byte, that of an earlier document or record: a file of text leaves the list, of
/// a file of records those records are left out from now on (Document::left_out). So what is set aside is set aside of
/// different texts. Reads all texts; takes about 40 bytes of memory a text. Returns how many it found.
std::int64_t leave_out_duplicates(std::vector<Document>& documents, const Advance& bytes_read = {});

struct CorpusSplit {
  std::vector<Document> train;
  std::vector<Document> validation;
};

/// Sets whole documents aside, spread evenly over the corpus, until they hold about `fraction` of its bytes. A corpus
/// of one document is cut at the line break nearest to the start of its last `fraction`. From a file of records,
/// records are set aside. The split depends only on the documents' order and sizes. Throws ConfigError if either side
/// would be empty.
CorpusSplit split_corpus(const std::vector<Document>& documents, double fraction);

BpeTokenizer train_tokenizer(const std::vector<Document>& documents, BpeTrainerOptions options,
                             const Advance& bytes_read = {}, const std::function<void(TrainingProgress)>& merged = {});

struct EncodingOptions {
  bool special_tokens = true;  // put those of the tokenizer's template, such as <s>, around every document
  bool end_of_text = true;     // end every document with the tokenizer's end-of-text token
  Advance bytes_done;
  std::string set_aside = {};  // the content_hash() of the part of this text that was set aside, if any
  std::int64_t threads = 1;    // the files are the same for every number
  /// What is encoded is kept whenever that many tokens more are there, and the same call goes on from what a stopped
  /// one has left (unfinished_tokens.h). 0: never.
  std::int64_t tokens_kept_at_once = std::int64_t{1} << 24;
  FileSystem* file_system = nullptr;  // of what is written; null: the real one
};

struct EncodingSummary {
  std::string path;  // of the ids: PREFIX.bin
  std::int64_t documents = 0;
  std::int64_t taken_over = 0;        // of them, from a call that was stopped
  std::int64_t empty = 0;             // records without text
  std::vector<std::int64_t> lengths;  // documents of 2^i to 2^(i+1) - 1 tokens, by i
  std::int64_t not_utf8 = 0;          // texts with bytes that are not UTF-8; the bytes are encoded as they are
  std::string first_not_utf8 = {};    // the first of their files
  std::int64_t with_special = 0;      // texts that contain special tokens of the tokenizer, encoded as ordinary text
  std::string first_special = {};     // the first: "'<|im_start|>' in chats.txt"
  std::int64_t bytes = 0, bytes_taken_over = 0;
  std::int64_t tokens = 0;       // with those that were put around documents
  double unigram_entropy = 0.0;  // nats per token
};

/// Encodes documents into PREFIX.bin and PREFIX.idx, with a PREFIX.json that names the tokenizer. Memory is bounded
/// (some 8 MiB of text and its ids for each thread) if the split pattern is GPT-2's. Added tokens that occur in the
/// text, for example in a page about <|endoftext|>, are encoded as ordinary text.
EncodingSummary encode_corpus(const std::vector<Document>& documents, const BpeTokenizer& tokenizer,
                              const std::string& prefix, const EncodingOptions& options = {});

}  // namespace phalanx::data
