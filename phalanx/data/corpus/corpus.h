// A corpus of texts: finding their files, setting some aside for validation, training a tokenizer on them, encoding
// them. What `phalanx tokenize` does, without its command line.
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

#include "phalanx/data/corpus/documents.h"
#include "phalanx/data/tokenizer/bpe_tokenizer.h"
#include "phalanx/data/tokenizer/bpe_trainer.h"

namespace phalanx::data {

std::int64_t total_bytes(const std::vector<Document>& documents);

struct CorpusOptions {
  std::vector<std::string> extensions;  // of files found in directories, with the dot; empty: all
  std::vector<std::string> exclude;     // shell patterns for names or paths of files and directories
  std::optional<TextFormat> format;     // of every file; empty: found out for each
  std::string field = "text";           // of records
  std::string standard_input;           // a file whose name says nothing, so that its content decides
};

struct CorpusListing {
  std::vector<Document> documents;   // in order of the inputs, directories sorted by path; each file once
  std::vector<std::string> skipped;  // files that are no text, in directories and by patterns
  std::int64_t empty = 0;            // files without a byte
};

/// `inputs` are files, directories (all files below, but no hidden ones and no linked directories) and shell patterns
/// such as src/*.cc. What a file holds is found from its content, records by their names too (.jsonl, .ndjson).
/// DataError for an input that does not exist or matches nothing, for a file that is named and is no text, for records
/// that would be taken for text, for a folder of the datasets package, and where no text is left.
CorpusListing list_corpus(const std::vector<std::string>& inputs, const CorpusOptions& options = {});

struct CorpusSplit {
  std::vector<Document> train;
  std::vector<Document> validation;
};

/// Sets whole documents, spread evenly over the corpus, aside until they hold about `fraction` of its bytes; a corpus
/// of one document is cut at the line break nearest before the last `fraction` of it; of a file of records it sets
/// records aside. Depends on nothing but the documents' order and sizes. ConfigError where either side would be empty.
CorpusSplit split_corpus(const std::vector<Document>& documents, double fraction);

BpeTokenizer train_tokenizer(const std::vector<Document>& documents, BpeTrainerOptions options,
                             const Advance& bytes_read = {}, const std::function<void(TrainingProgress)>& merged = {});

struct EncodingOptions {
  bool end_of_text = true;  // end every document with the tokenizer's end-of-text token
  Advance bytes_done;
  std::string set_aside = {};  // the content_hash() of what has been set aside of this text, if anything
};

struct EncodingSummary {
  std::string path;  // of the ids: PREFIX.bin
  std::int64_t documents = 0;
  std::int64_t empty = 0;           // records without text
  std::int64_t not_utf8 = 0;        // texts with bytes that are no UTF-8, which are taken as they are,
  std::string first_not_utf8 = {};  // and the first of their files
  std::int64_t with_special = 0;    // texts in which special tokens of the tokenizer stand, taken as ordinary text,
  std::string first_special = {};   // and the first: "'<|im_start|>' in chats.txt"
  std::int64_t bytes = 0;
  std::int64_t tokens = 0;
  double unigram_entropy = 0.0;  // nats a token
};

/// Encodes documents into PREFIX.bin and PREFIX.idx, with PREFIX.json that names the tokenizer, in bounded memory where
/// the split pattern is GPT-2's. Added tokens that stand in the text, a page about <|endoftext|> say, are encoded as
/// ordinary text.
EncodingSummary encode_corpus(const std::vector<Document>& documents, const BpeTokenizer& tokenizer,
                              const std::string& prefix, const EncodingOptions& options = {});

}  // namespace phalanx::data
