// TextStream: rows of texts that are read, tokenised, shuffled and put into rows ahead of
// the step, without a token file.
//
// The rows, one after the other, are those of the windows of text_windows.h. So row i of step s is a function of the
// files, the options, s and where the run began. Every rank reads and tokenises all texts and takes its own rows:
// nothing is divided among ranks, and the number of labels of a batch is known without asking another rank. A run
// resumes exactly, with any number of ranks, any batch size and any number of workers.
//
// A position is where the window of the next row begins, and how many of its rows have been read. To go on, the file
// that holds it is read from its start without a look at the records before, and that window is tokenised again.
//
// A thread of this object reads ahead by two windows, from the first call that needs a row. Earlier rows than those of
// the last step asked for are made again from where the run began. An error in a record comes with the first call that
// needs what comes after the last whole window before it.
//
//   TextStream stream(std::move(windows), /*global_batch_size=*/64);
//   stream.fill(step, rows, inputs, labels);   // waits if the rows are not there yet
//
// One thread at a time may call the methods of an object.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>

#include "phalanx/data/batch_source.h"
#include "phalanx/data/corpus/text_windows.h"

namespace phalanx::data {

class TextStream : public BatchSource {
 public:
  TextStream(TextWindows windows, std::int64_t global_batch_size);
  ~TextStream() override;
  TextStream(const TextStream&) = delete;
  TextStream& operator=(const TextStream&) = delete;

  std::int64_t seq_len() const override { return windows_.options().seq_len; }
  std::int64_t global_batch_size() const override { return global_batch_size_; }
  bool separates_documents() const override { return windows_.options().separate_documents; }

  std::vector<std::int32_t> fill(std::int64_t step, RowRange rows, std::span<std::int64_t> inputs,
                                 std::span<std::int64_t> labels) const override;
  std::int64_t label_count(std::int64_t step) const override;

  nlohmann::json describe() const override;
  std::map<std::string, std::int64_t> saved_position(std::int64_t step) const override;
  StreamResume resume(const nlohmann::json& saved,
                      const std::map<std::string, std::int64_t>& saved_position) const override;
  void begin_at(std::int64_t step, StreamPosition position) override;

  std::vector<std::pair<std::string, std::string>> in_words() const override;
  /// Of all texts, called "texts". The epochs count whole files alone.
  std::vector<SetCount> progress_at(std::int64_t step) const override;

  const TextWindows& windows() const { return windows_; }

 private:
  class Reader;
  std::int64_t number_of(std::int64_t step, std::int64_t row) const;
  Reader& reader_at(std::int64_t step) const;
  void fill_row(const TextWindow& window, std::int64_t row, std::span<std::int64_t> inputs,
                std::span<std::int64_t> labels, std::int64_t at, std::vector<std::int32_t>& ends) const;

  TextWindows windows_;
  std::int64_t global_batch_size_;
  std::int64_t first_step_ = 0;  // as begin_at() says
  StreamPosition first_;
  mutable std::unique_ptr<Reader> reader_;
  mutable nlohmann::json description_;  // the files' content is looked at once
};

}  // namespace phalanx::data
