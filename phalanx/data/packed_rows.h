// PackedRows: which documents each row of a packed data set holds.
//
// A document of n tokens takes n - 1 places of a row: each token but the last is an input, and its label is the next
// one. So the first token of a document is never a label. Rows have seq_len places; what is left over is padding.
//
// Documents are taken in windows of 65,536. A window's documents are put into rows by best fit, the longest first: each
// into the fullest row that still has room, else into a new row. No document is cut, unless it is longer than a
// row. Then it is cut every seq_len places; each part but the first begins with the last label of the part before,
// and sees none of the tokens before that. A document of a single token has no place and is left out. Where the
// file has a mask, a document, or a part of a cut one, without any trained label is left out too: no row is without
// labels. All this is counted.
//
// With `shuffle` the documents are in an order drawn from the seed, and each epoch takes windows, and rows within a
// window, in an order drawn from (seed, epoch). Otherwise rows are in the order of their first documents. Which
// documents share a row depends on nothing else: not on epochs, ranks or steps.
//
// With `pairs` two consecutive documents are placed as one. None of them is cut or left out.
//
//   const PackedRows rows(tokens, {.seq_len = 2048, .shuffle = true, .seed = 1});
//   for (const PackedRows::Piece& piece : rows.row(/*epoch=*/0, 17))
//     tokens.read(piece.begin, ...);   // count + 1 tokens
//
// The constructor looks at every document's length and at the mask, not at tokens: about a second for 10 million
// documents. Memory is four bytes a row and that of a few windows. Any number of threads may call the const methods.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "phalanx/data/token_file.h"

namespace phalanx::data {

struct PackedRowsOptions {
  std::int64_t seq_len = 0;
  TokenRange range;  // of the file; a document that crosses its ends is cut there
  bool shuffle = true;
  std::uint64_t seed = 0;
  std::int64_t window = 65536;  // documents, or pairs of them
  bool pairs = false;           // documents 2 i and 2 i + 1 of the file share a row, one behind the other
};

class PackedRows {
 public:
  /// `count` places of a row: inputs are tokens [begin, begin + count) of the file, labels one token further.
  struct Piece {
    std::int64_t begin = 0;
    std::int64_t count = 0;
    friend bool operator==(const Piece&, const Piece&) = default;
  };
  struct Statistics {
    std::int64_t documents = 0;  // that have a place
    std::int64_t skipped = 0;    // of less than two tokens
    std::int64_t untrained = 0;  // documents, and parts of cut ones, without a trained label: left out
    std::int64_t cut = 0;        // longer than a row
    std::int64_t places = 0;     // that are no padding
    std::int64_t labels = 0;     // places whose label is trained
    std::int64_t rows = 0;
  };

  /// Throws DataError if the range has no document of two tokens, or none with a trained label. With pairs also if
  /// their number is odd, or if one does not fit into a row or has a document without a trained label.
  /// REQUIRES: of pairs the range is the whole file.
  PackedRows(TokenFile tokens, PackedRowsOptions options);
  ~PackedRows();

  std::int64_t row_count() const { return statistics_.rows; }  // of an epoch
  const Statistics& statistics() const { return statistics_; }
  /// The pieces of a row, in their order in it. REQUIRES: 0 <= row < row_count().
  std::vector<Piece> row(std::int64_t epoch, std::int64_t row) const;
  /// The places of a row that are no padding and whose label is trained; with pairs: their number.
  std::int64_t label_count(std::int64_t epoch, std::int64_t row) const;

 private:
  struct Window;
  struct Place {
    std::int64_t window, row;
  };
  std::int64_t windows() const;
  void require_whole_pair(std::int64_t item, std::span<const Piece> pair) const;
  std::int64_t label_count(const Piece& piece) const;
  Window pack(std::int64_t window, Statistics* statistics) const;
  std::shared_ptr<const Window> window(std::int64_t number) const;
  Place place_of(std::int64_t epoch, std::int64_t row) const;

  TokenFile tokens_;
  PackedRowsOptions options_;
  std::int64_t first_document_ = 0, document_count_ = 0;  // that the range touches
  std::int64_t group_ = 1;                                // documents that share a row: a document, or a pair
  std::int64_t item_count_ = 0;                           // groups
  std::vector<std::vector<std::int32_t>> labels_;         // of each row of each window
  Statistics statistics_;
  struct Cache;
  std::unique_ptr<Cache> cache_;
};

}  // namespace phalanx::data
