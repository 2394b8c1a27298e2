// BatchSource: what a run trains on, as rows of token ids. Row i of step s is the same whatever the ranks, the batch's
// division among them and the number of threads.
//
// There is one token file (data_loader.h), several that are blended by weight (blended_loader.h), or texts that are
// tokenised on the way (corpus/text_stream.h). A batch has rows
// 0 .. global_batch_size - 1. Rank r of d owns rows [r*B/d, (r+1)*B/d). Of these, micro-batch m of M is the m-th of M
// equal parts. So rows run over ranks first and over micro-batches within a rank. The union over ranks and
// micro-batches is the global batch, for any d and M. B must be a multiple of d*M; the error of check_batch()
// names the nearest valid choices.
//
//   const RowRange rows = source.rows_of({.rank = 0, .ranks = 2, .micro_batch = 0, .micro_batches = 2});
//   source.fill(step, rows, inputs, labels);  // int64 buffers of rows.size() * seq_len
//   saved = source.describe(); integers = source.saved_position(step);             // into a checkpoint
//   const StreamResume resume = source.resume(saved, integers);                    // when the run goes on
//   if (resume.differences.empty()) source.begin_at(step, resume.position);
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace phalanx::data {

class DataLoader;

/// The key of a checkpoint's integers for the number of tokens that have been read; padding counts.
inline constexpr const char* kTokensRead = "data.tokens";

/// Padding is a piece of this many places after another, so that attention over it costs little.
inline constexpr std::int64_t kPaddingPiece = 64;

/// A position in the stream of tokens that a run reads: the number of tokens of this epoch that have been read. In a
/// shuffled or packed epoch these are the tokens of its first token / seq_len samples, padding included. In a blend all
/// rows are of epoch 0. Of texts that are tokenised on the way it is the number of tokens of all rows, and the rest
/// says where the window of the next row begins, and how many of its rows have been read (corpus/text_stream.h).
struct StreamPosition {
  std::int64_t epoch = 0;
  std::int64_t token = 0;
  std::int64_t file = 0, record = 0, row = 0;
  friend bool operator==(const StreamPosition&, const StreamPosition&) = default;
};

struct StreamResume {
  /// Where the stream continues; if there are differences, its beginning.
  StreamPosition position;
  /// Why the data are not the saved stream, one reason a line: "[training] dataset_path: the checkpoint's run read
  /// ..., this one reads ...". Empty: every token is read once, as if the run had never stopped.
  std::vector<std::string> differences;
  /// For the log: how the same stream is read differently, such as with another sequence length.
  std::vector<std::string> notes;
};

/// Rows [begin, end) of a global batch.
struct RowRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const { return end - begin; }
  friend bool operator==(const RowRange&, const RowRange&) = default;
};

/// A data-parallel rank and the micro-batch of its gradient accumulation.
struct BatchShare {
  std::int64_t rank = 0;
  std::int64_t ranks = 1;
  std::int64_t micro_batch = 0;
  std::int64_t micro_batches = 1;
};

/// Throws ConfigError, with the nearest valid batch sizes and rank counts, unless ranks * micro_batches divides the
/// batch.
void check_batch(std::int64_t global_batch_size, std::int64_t ranks, std::int64_t micro_batches = 1);

/// What has been read of a data set.
struct SetCount {
  std::string name;
  std::int64_t sequences = 0;
  double epochs = 0;
  friend bool operator==(const SetCount&, const SetCount&) = default;
};

/// One thread at a time calls it, unless a class says otherwise.
class BatchSource {
 public:
  virtual ~BatchSource() = default;

  virtual std::int64_t seq_len() const = 0;
  virtual std::int64_t global_batch_size() const = 0;
  /// Whether fill() says where documents end.
  virtual bool separates_documents() const = 0;
  RowRange rows_of(const BatchShare& share) const;

  /// Writes the inputs and labels of the given rows, row-major [rows, seq_len] each. Throws ConfigError if sizes do not
  /// match. Returns cumulative lengths of the documents: 0, then the end of each, counted over all rows; empty if they
  /// are not separated.
  virtual std::vector<std::int32_t> fill(std::int64_t step, RowRange rows, std::span<std::int64_t> inputs,
                                         std::span<std::int64_t> labels) const = 0;
  /// How many terms the loss of the global batch of `step` has: tokens with a label, or pairs of documents.
  virtual std::int64_t label_count(std::int64_t step) const = 0;

  /// Of each row the numbers of its pairs, in their order in it: pair i is documents 2 i and 2 i + 1 of the file. Empty
  /// where documents are no pairs.
  virtual std::vector<std::vector<std::int64_t>> pairs_of(std::int64_t /*step*/, RowRange /*rows*/) const { return {}; }

  /// What is read (stream_description.h), and how much of it before `step`.
  virtual nlohmann::json describe() const = 0;
  virtual std::map<std::string, std::int64_t> saved_position(std::int64_t step) const = 0;
  /// Throws DataError if what was saved is malformed, of a later version, or without a position.
  virtual StreamResume resume(const nlohmann::json& saved,
                              const std::map<std::string, std::int64_t>& saved_position) const = 0;
  /// From now on the position before `step` is `position`.
  virtual void begin_at(std::int64_t step, StreamPosition position) = 0;

  /// For the log: names ("data") and what they hold.
  virtual std::vector<std::pair<std::string, std::string>> in_words() const = 0;
  /// Of the data sets of a blend, before `step`; empty where there is only one.
  virtual std::vector<SetCount> counts_before(std::int64_t /*step*/) const { return {}; }
  /// For the metrics, how much has been read before `step`, which is at most the step after the last one asked for.
  virtual std::vector<SetCount> progress_at(std::int64_t step) const { return counts_before(step); }
  /// Calls `use` with the name and the loader of each token file; "" where there is only one.
  virtual void each_file(const std::function<void(const std::string& name, const DataLoader& loader)>& /*use*/) const {}

 protected:
  /// Throws ConfigError unless `step` >= 0, the rows are within the global batch, and the buffers are of their size.
  void check_request(std::int64_t step, RowRange rows, std::size_t inputs, std::size_t labels) const;
};

}  // namespace phalanx::data
