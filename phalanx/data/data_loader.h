// DataLoader: which tokens a training step reads, as a pure function of (seed, step).
//
// Without packing, sample k is tokens [k*seq_len, k*seq_len + seq_len] of the range: seq_len inputs and, one token
// further, seq_len labels. Adjacent samples share one token: the last label of one is the first input of the next.
// The global batch of step s (from 0) has rows 0 .. B-1; row i holds sample number g = s*B + i of the run. Epoch
// g / N (N samples in the range) visits every sample exactly once. The order is sample g mod N (shuffle = false) or
// a function of (seed, epoch).
//
// With packing, sample k is a row of whole documents and padding (packed_rows.h). With or without it, documents may be
// kept apart (separate_documents): the first token of a document is then no label, and fill() says where documents end,
// for attention and positions. Where the file has a mask, a token that is not trained is no label either. A place
// without a label has the label kIgnoredLabel.
//
// Nothing depends on the number of ranks, so a resumed run may have another number. If a resumed run changes B or,
// without shuffling, seq_len, begin_at() lets the samples continue after the tokens that have been read: no token is
// skipped, no token is read twice. The rest of that epoch is cut into samples from there on, the later epochs as above.
//
// How rows are divided among ranks: batch_source.h.
//
//   DataLoader dataloader(tokens, {.seq_len = 256, .global_batch_size = 8, .seed = 1});
//   const RowRange rows = dataloader.rows_of({.rank = 0, .ranks = 2, .micro_batch = 0, .micro_batches = 2});
//   dataloader.fill(step, rows, inputs, labels);  // int64 buffers of rows.size() * seq_len
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "phalanx/base/ignored_label.h"
#include "phalanx/data/batch_source.h"
#include "phalanx/data/packed_rows.h"
#include "phalanx/data/token_file.h"

namespace phalanx::data {

struct DataLoaderOptions {
  std::int64_t seq_len = 0;
  std::int64_t global_batch_size = 0;
  bool shuffle = true;
  std::uint64_t seed = 0;
  std::optional<TokenRange> range;  // part of the file to use; unset: all of it
  bool separate_documents = false;  // the file must list its documents
  bool pack = false;                // rows of whole documents; REQUIRES: separate_documents
  bool pairs = false;               // of whole pairs of documents; REQUIRES: pack, and no range
};

class DataLoader : public BatchSource {
 public:
  /// Throws DataError if the range holds no whole sample or reaches outside the file, or if documents are to be
  /// separated and the file does not list them.
  DataLoader(TokenFile tokens, DataLoaderOptions options);

  std::int64_t seq_len() const override { return options_.seq_len; }
  std::int64_t global_batch_size() const override { return options_.global_batch_size; }
  bool separates_documents() const override { return options_.separate_documents; }
  std::int64_t sample_count() const { return sample_count_; }  // per epoch
  const TokenFile& tokens() const { return tokens_; }

  const DataLoaderOptions& options() const { return options_; }
  TokenRange range() const { return range_; }
  std::int64_t epoch_tokens() const { return sample_count_ * options_.seq_len; }

  /// The stream's position before this step.
  StreamPosition position_of(std::int64_t step) const { return place_of(step, 0); }
  /// From now on the position before `step` is `position`.
  /// Throws ConfigError if it is inside a shuffled or packed epoch and between samples.
  void begin_at(std::int64_t step, StreamPosition position) override;

  /// The first token of row `row` of the global batch of `step`, counted from the start of the range.
  std::int64_t token_at(std::int64_t step, std::int64_t row) const;

  std::vector<std::int32_t> fill(std::int64_t step, RowRange rows, std::span<std::int64_t> inputs,
                                 std::span<std::int64_t> labels) const override;
  std::int64_t label_count(std::int64_t step) const override;
  std::vector<std::vector<std::int64_t>> pairs_of(std::int64_t step, RowRange rows) const override;

  nlohmann::json describe() const override;
  std::map<std::string, std::int64_t> saved_position(std::int64_t step) const override;
  StreamResume resume(const nlohmann::json& saved,
                      const std::map<std::string, std::int64_t>& saved_position) const override;
  std::vector<std::pair<std::string, std::string>> in_words() const override {
    return {{"data", tokens_.description()}};
  }
  void each_file(const std::function<void(const std::string&, const DataLoader&)>& use) const override {
    use("", *this);
  }

  /// As fill(), for samples [first, first + count) of the first epoch, which are in the file's order without shuffling.
  std::vector<std::int32_t> fill_samples(std::int64_t first, std::int64_t count, std::span<std::int64_t> inputs,
                                         std::span<std::int64_t> labels) const;

  /// As pairs_of(), for these samples.
  std::vector<std::vector<std::int64_t>> pairs_of_samples(std::int64_t first, std::int64_t count) const;

  /// Null without packing.
  const PackedRows* packed_rows() const { return packed_.get(); }

 private:
  /// Of a sample: its inputs, its labels, and the ends of its documents, counted from `at`.
  struct Row {
    std::span<std::int64_t> inputs, labels;
    std::vector<std::int32_t>& ends;
    std::int64_t at;
  };
  StreamPosition place_of(std::int64_t step, std::int64_t row) const;
  std::int64_t first_token(StreamPosition place) const;
  void check_buffers(std::int64_t rows, std::size_t inputs, std::size_t labels) const;
  template <class PlaceOf>
  std::vector<std::int32_t> fill_rows(std::int64_t rows, std::span<std::int64_t> inputs, std::span<std::int64_t> labels,
                                      const PlaceOf& place_of_row) const;
  void leave_out_untrained(std::int64_t first, std::span<std::int64_t> labels) const;
  void fill_row(StreamPosition place, const Row& row) const;
  void fill_packed_row(StreamPosition place, const Row& row) const;
  std::vector<std::int64_t> pairs_of_row(StreamPosition place) const;
  std::vector<std::int64_t> document_starts(std::int64_t after, std::int64_t last) const;

  TokenFile tokens_;
  DataLoaderOptions options_;
  TokenRange range_;
  std::int64_t sample_count_ = 0;
  std::int64_t first_step_ = 0;  // the arguments of begin_at()
  StreamPosition first_;
  std::int64_t rest_of_epoch_ = 0;  // samples from there to the end of its epoch
  std::shared_ptr<const PackedRows> packed_;
};

}  // namespace phalanx::data
