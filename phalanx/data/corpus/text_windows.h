// TextWindows: texts, tokenised and put into rows, window by window. A window holds some thousand consecutive
// documents. What it holds is a function of the files, the options and where it begins; not of the number of threads.
//
// An epoch reads every document of every file once, files in their order or in one drawn from (seed, epoch). A window
// ends after `window` documents, after about 64 MiB of text, or with its epoch. With `shuffle` its documents are in an
// order drawn from the seed and its beginning. Each document has the tokens around it that the tokenizer's template
// puts there, such as <s>, and is followed by the tokenizer's end-of-text token.
// - Without packing the documents follow each other, cut every seq_len. The last row of a window may end in padding.
// - With packing a document of n tokens takes n - 1 places, rows are filled by best fit (best_fit.h), and only a
//   document longer than a row is cut, as in packed_rows.h.
//
//   const TextWindows windows(listing.documents, tokenizer, {.seq_len = 2048, .seed = 1});
//   windows.each({}, stop, [&](TextWindow window) { use(window); return true; });   // without end: epoch after epoch
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#include "phalanx/data/corpus/documents.h"
#include "phalanx/data/corpus/surrounding_tokens.h"
#include "phalanx/data/tokenizer/bpe_tokenizer.h"

namespace phalanx::data {

struct TextWindowOptions {
  std::int64_t seq_len = 0;
  bool shuffle = true;
  std::uint64_t seed = 0;
  bool separate_documents = false;
  bool pack = false;           // REQUIRES: separate_documents
  std::int64_t window = 4096;  // documents
  std::int64_t workers = 1;    // threads that tokenise
  bool special_tokens = true;  // those of the tokenizer's template
};

/// Where a window begins: at a record of a file, which is counted in the order of the epoch.
struct TextCursor {
  std::int64_t epoch = 0, file = 0, record = 0;
  friend bool operator==(const TextCursor&, const TextCursor&) = default;
};

struct TextWindow {
  /// `count` places of a row: inputs are tokens [begin, begin + count), labels one token further.
  struct Piece {
    std::int64_t begin = 0, count = 0;
  };
  TextCursor begin, end;
  std::vector<TokenId> tokens;
  std::vector<std::int64_t> starts;  // of its documents in `tokens`
  std::vector<std::vector<Piece>> rows;
  std::vector<std::int32_t> labels;  // places of each row that have one
};

class TextWindows {
 public:
  /// Throws DataError if the tokenizer has no token that ends a text.
  TextWindows(std::vector<Document> files, BpeTokenizer tokenizer, TextWindowOptions options);

  const std::vector<Document>& files() const { return files_; }
  const TextWindowOptions& options() const { return options_; }
  const BpeTokenizer& tokenizer() const { return tokenizer_; }
  TokenId document_end() const { return document_end_; }

  /// Calls `use` with each window that has a row, until that returns false or `stop` is set. Throws DataError that
  /// names file and line for what cannot be read, and if an epoch has no document of two tokens.
  void each(TextCursor from, const std::atomic<bool>& stop, const std::function<bool(TextWindow)>& use) const;

 private:
  TextWindow window_of(const std::vector<std::string>& texts, TextCursor begin, TextCursor end,
                       const std::atomic<bool>& stop) const;

  std::vector<Document> files_;
  BpeTokenizer tokenizer_;
  TextWindowOptions options_;
  TokenId document_end_ = 0;
  SurroundingTokens around_;  // of a document
};

}  // namespace phalanx::data
