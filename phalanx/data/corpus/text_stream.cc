#include "phalanx/data/corpus/text_stream.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <filesystem>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/human.h"
#include "phalanx/base/ignored_label.h"
#include "phalanx/base/mapped_file.h"
#include "phalanx/base/start_thread.h"
#include "phalanx/data/corpus/corpus.h"
#include "phalanx/data/stream_description.h"
#include "phalanx/data/token_sidecar.h"
#include "phalanx/data/tokenizer/tokenizer_fingerprint.h"

namespace phalanx::data {
namespace {

using nlohmann::json;

constexpr std::size_t kAhead = 2;  // windows
constexpr const char* kEpoch = "data.epoch";
constexpr const char* kFile = "data.file";
constexpr const char* kRecord = "data.record";
constexpr const char* kRow = "data.row";

json described_file(const Document& file) {
  const MappedFile content(file.path);
  return {{"name", std::filesystem::path(file.path).filename().string()},
          {"bytes", content.size()},
          {"content", hash_of_ids(TokenType::u8, content.bytes())}};
}

/// Whether the tokens of the tokenizer's template stand around texts; null: it has none.
json special_tokens_of(const json& description) {
  return description.contains("special_tokens") ? description.at("special_tokens") : json();
}

/// Where the two descriptions of a stream differ in what decides the rows.
std::vector<std::string> differences_of(const json& saved, const json& now) {
  std::vector<std::string> found;
  const auto add = [&](const std::string& key, const std::string& before, const std::string& after) {
    found.push_back(fmt::format("{}: the checkpoint's run read {}; this one reads {}", key, before, after));
  };
  const json &before = saved.at("files"), &after = now.at("files");
  if (before.size() != after.size()) {
    add("[stream] paths", fmt::format("{} files", before.size()), fmt::format("{}", after.size()));
  }
  for (std::size_t i = 0; i < std::min(before.size(), after.size()); ++i) {
    // A file that was moved or copied is the same.
    if (before[i].at("bytes") == after[i].at("bytes") && before[i].at("content") == after[i].at("content")) continue;
    const auto text = [](const json& file) {
      return fmt::format("{} ({} bytes, content {})", file.at("name").get<std::string>(),
                         file.at("bytes").get<std::int64_t>(), file.at("content").get<std::string>().substr(0, 12));
    };
    add(fmt::format("[stream] paths: file {}", i + 1), text(before[i]), text(after[i]));
    break;
  }
  const std::pair<const char*, const char*> keys[] = {{"field", "[stream] field"},
                                                      {"window", "[stream] window"},
                                                      {"packing", "[training] packing"},
                                                      {"shuffle", "[training] shuffle"},
                                                      {"tokenizer", "the tokenizer in [model] hf_assets_path"},
                                                      {"document_end", "the token that ends a text"}};
  for (const auto& [key, label] : keys) {
    if (saved.at(key) != now.at(key)) add(label, saved.at(key).dump(), now.at(key).dump());
  }
  if (special_tokens_of(saved) != special_tokens_of(now)) {
    add("[stream] special_tokens", special_tokens_of(saved).dump(), special_tokens_of(now).dump());
  }
  if (saved.at("shuffle") == true && now.at("shuffle") == true && saved.at("seed") != now.at("seed")) {
    add("[debug] seed", saved.at("seed").dump(), now.at("seed").dump());
  }
  return found;
}

}  // namespace

/// Makes windows ahead of who reads them.
class TextStream::Reader {
 public:
  struct Place {
    const TextWindow* window;
    std::int64_t row;  // in it
  };

  /// `first_row`: the number of the first window's first row, which may be negative.
  Reader(const TextWindows& windows, TextCursor begin, std::int64_t first_row)
      : first_row_(first_row),
        next_row_(first_row),
        thread_(start_thread("the reader of texts", [this, &windows, begin] { run(windows, begin); })) {}

  ~Reader() {
    stop_ = true;
    {
      const std::lock_guard lock(mutex_);
      changed_.notify_all();
    }
    thread_.join();
  }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  /// Whether rows from this one on are still to be had.
  bool has(std::int64_t row) {
    const std::lock_guard lock(mutex_);
    return row >= (ready_.empty() ? first_row_ : ready_.front().first_row);
  }

  /// Rows before `oldest` are no longer needed.
  void forget_before(std::int64_t oldest) {
    const std::lock_guard lock(mutex_);
    while (ready_.size() > 1 && ready_[1].first_row <= oldest) ready_.pop_front();
  }

  /// Waits for the row. The window lives until forget_before() of a later row.
  Place find(std::int64_t row) {
    std::unique_lock lock(mutex_);
    asked_ = std::max(asked_, row);
    changed_.notify_all();
    changed_.wait(lock, [&] { return row < next_row_ || error_; });
    if (row >= next_row_) std::rethrow_exception(error_);
    const auto after = std::ranges::upper_bound(ready_, row, {}, &Ready::first_row);
    const Ready& found = *(after - 1);
    return {found.window.get(), row - found.first_row};
  }

  /// Where the row is, without waiting for it where it follows the last window that was asked for.
  std::pair<TextCursor, std::int64_t> position_of(std::int64_t row) {
    {
      const std::lock_guard lock(mutex_);
      for (const Ready& one : ready_) {
        const std::int64_t rows = std::ssize(one.window->rows);
        if (row >= one.first_row && row < one.first_row + rows) return {one.window->begin, row - one.first_row};
        if (row == one.first_row + rows) return {one.window->end, 0};
      }
    }
    const Place place = find(row);
    return {place.window->begin, place.row};
  }

 private:
  struct Ready {
    std::int64_t first_row;
    std::unique_ptr<const TextWindow> window;
  };

  void run(const TextWindows& windows, TextCursor begin) {
    try {
      windows.each(begin, stop_, [&](TextWindow window) {
        std::unique_lock lock(mutex_);
        const std::int64_t rows = std::ssize(window.rows);
        ready_.push_back({next_row_, std::make_unique<const TextWindow>(std::move(window))});
        next_row_ += rows;
        changed_.notify_all();
        changed_.wait(lock, [&] { return stop_ || unread() < kAhead; });
        return !stop_;
      });
    } catch (...) {
      const std::lock_guard lock(mutex_);
      error_ = std::current_exception();
      changed_.notify_all();
    }
  }

  std::size_t unread() const {
    return static_cast<std::size_t>(
        std::ranges::count_if(ready_, [&](const Ready& one) { return one.first_row > asked_; }));
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Ready> ready_;
  std::int64_t first_row_, next_row_;
  std::int64_t asked_ = -1;  // the last row
  std::exception_ptr error_;
  std::atomic<bool> stop_ = false;
  std::thread thread_;  // the last member: it uses the others
};

TextStream::TextStream(TextWindows windows, std::int64_t global_batch_size)
    : windows_(std::move(windows)), global_batch_size_(global_batch_size) {
  if (global_batch_size < 1)
    throw ConfigError(fmt::format("global_batch_size {} must be 1 or more", global_batch_size));
}

TextStream::~TextStream() = default;

std::int64_t TextStream::number_of(std::int64_t step, std::int64_t row) const {
  if (step >= first_step_) return (step - first_step_) * global_batch_size_ + row;
  throw ConfigError(fmt::format("step {}: expected one from {} on, where the data begin", step, first_step_));
}

TextStream::Reader& TextStream::reader_at(std::int64_t step) const {
  const std::int64_t oldest = number_of(step, 0);
  if (reader_ && !reader_->has(oldest)) reader_.reset();
  if (!reader_) {
    reader_ = std::make_unique<Reader>(windows_, TextCursor{first_.epoch, first_.file, first_.record}, -first_.row);
  }
  reader_->forget_before(oldest);
  return *reader_;
}

void TextStream::fill_row(const TextWindow& window, std::int64_t row, std::span<std::int64_t> inputs,
                          std::span<std::int64_t> labels, std::int64_t at, std::vector<std::int32_t>& ends) const {
  const std::int64_t seq = seq_len();
  const bool separate = separates_documents();
  std::int64_t filled = 0;
  for (const TextWindow::Piece& piece : window.rows[static_cast<std::size_t>(row)]) {
    const auto first = window.tokens.begin() + piece.begin;
    std::copy(first, first + piece.count, inputs.begin() + filled);
    std::copy(first + 1, first + piece.count + 1, labels.begin() + filled);
    if (separate) {
      auto start = std::ranges::upper_bound(window.starts, piece.begin);
      for (; start != window.starts.end() && *start <= piece.begin + piece.count; ++start) {
        const std::int64_t place = filled + *start - piece.begin;
        labels[static_cast<std::size_t>(place - 1)] = kIgnoredLabel;
        if (*start < piece.begin + piece.count) ends.push_back(static_cast<std::int32_t>(at + place));
      }
    }
    filled += piece.count;
    if (separate) ends.push_back(static_cast<std::int32_t>(at + filled));
  }
  std::fill(inputs.begin() + filled, inputs.end(), 0);
  std::fill(labels.begin() + filled, labels.end(), kIgnoredLabel);
  while (separate && filled < seq) {
    filled = std::min(filled + kPaddingPiece, seq);
    ends.push_back(static_cast<std::int32_t>(at + filled));
  }
}

std::vector<std::int32_t> TextStream::fill(std::int64_t step, RowRange rows, std::span<std::int64_t> inputs,
                                           std::span<std::int64_t> labels) const {
  check_request(step, rows, inputs.size(), labels.size());
  const auto seq = static_cast<std::size_t>(seq_len());
  Reader& reader = reader_at(step);
  std::vector<std::int32_t> ends;
  if (separates_documents()) ends.push_back(0);
  for (std::int64_t row = rows.begin; row < rows.end; ++row) {
    const Reader::Place place = reader.find(number_of(step, row));
    const std::size_t at = static_cast<std::size_t>(row - rows.begin) * seq;
    fill_row(*place.window, place.row, inputs.subspan(at, seq), labels.subspan(at, seq), static_cast<std::int64_t>(at),
             ends);
  }
  return ends;
}

std::int64_t TextStream::label_count(std::int64_t step) const {
  Reader& reader = reader_at(step);
  std::int64_t sum = 0;
  for (std::int64_t row = 0; row < global_batch_size_; ++row) {
    const Reader::Place place = reader.find(number_of(step, row));
    sum += place.window->labels[static_cast<std::size_t>(place.row)];
  }
  return sum;
}

json TextStream::describe() const {
  if (!description_.is_null()) return description_;
  json files = json::array();
  for (const Document& file : windows_.files()) files.push_back(described_file(file));
  const TextWindowOptions& options = windows_.options();
  description_ = {{"version", kTextStreamVersion},
                  {"files", files},
                  {"field", windows_.files().front().field},
                  {"tokenizer", tokenizer_fingerprint(windows_.tokenizer())},
                  {"document_end", windows_.document_end()},
                  {"window", options.window},
                  {"packing", options.pack ? "best_fit" : "none"},
                  {"seq_len", options.seq_len},
                  {"shuffle", options.shuffle},
                  {"seed", options.seed}};
  const BpeModel& model = windows_.tokenizer().model();
  if (!model.prefix.empty() || !model.suffix.empty()) description_["special_tokens"] = options.special_tokens;
  return description_;
}

std::map<std::string, std::int64_t> TextStream::saved_position(std::int64_t step) const {
  const std::int64_t number = number_of(step, 0);
  std::pair<TextCursor, std::int64_t> at{{first_.epoch, first_.file, first_.record}, first_.row};
  if (number > 0) {
    if (!reader_ || !reader_->has(number)) reader_at(step);
    at = reader_->position_of(number);
  }
  return {{kTokensRead, first_.token + number * seq_len()},
          {kEpoch, at.first.epoch},
          {kFile, at.first.file},
          {kRecord, at.first.record},
          {kRow, at.second}};
}

std::vector<SetCount> TextStream::progress_at(std::int64_t step) const {
  const std::map<std::string, std::int64_t> position = saved_position(step);
  const double files = static_cast<double>(position.at(kFile)) / static_cast<double>(windows_.files().size());
  return {{.name = "texts",
           .sequences = position.at(kTokensRead) / seq_len(),
           .epochs = static_cast<double>(position.at(kEpoch)) + files}};
}

StreamResume TextStream::resume(const json& saved, const std::map<std::string, std::int64_t>& saved_position) const {
  StreamResume resume;
  if (stream_version(saved) != kTextStreamVersion) {
    resume.differences.push_back(
        fmt::format("[stream] paths: the checkpoint's run read {}; this one reads texts", stream_text(saved)));
    return resume;
  }
  std::int64_t seq_before = 0;
  try {
    resume.differences = differences_of(saved, describe());
    seq_before = saved.at("seq_len");
  } catch (const json::exception&) {
    throw DataError(
        "the checkpoint's description of its texts is malformed: expected files, field, tokenizer, document_end, "
        "window, "
        "packing, seq_len, shuffle and seed");
  }
  const auto integer = [&](const char* key) {
    const auto found = saved_position.find(key);
    if (found != saved_position.end() && found->second >= 0) return found->second;
    throw DataError(
        fmt::format("the checkpoint does not say how much of the texts has been read ({} of its manifest)", key));
  };
  const StreamPosition position{.epoch = integer(kEpoch),
                                .token = integer(kTokensRead),
                                .file = integer(kFile),
                                .record = integer(kRecord),
                                .row = integer(kRow)};
  if (seq_before != seq_len() && position.row > 0) {
    resume.differences.push_back(fmt::format(
        "[training] seq_len: the checkpoint's run read {} tokens a sequence; this one reads {}, and {} rows "
        "of the present window have been read",
        seq_before, seq_len(), position.row));
  } else if (seq_before != seq_len()) {
    resume.notes.push_back(
        fmt::format("[training] seq_len: the checkpoint's run read {} tokens a sequence; this one reads {}: it goes on "
                    "with the next "
                    "window of texts",
                    seq_before, seq_len()));
  }
  if (position.file > std::ssize(windows_.files())) {
    throw DataError(fmt::format("the checkpoint's position in the texts is in file {} of {}", position.file + 1,
                                windows_.files().size()));
  }
  if (resume.differences.empty()) resume.position = position;
  return resume;
}

std::vector<std::pair<std::string, std::string>> TextStream::in_words() const {
  const TextWindowOptions& options = windows_.options();
  const auto& files = windows_.files();
  return {
      {"data", fmt::format("texts of {} file{}, {}, tokenised by {} thread{} ahead of the step, {} documents at a time",
                           with_commas(std::ssize(files)), files.size() == 1 ? "" : "s",
                           human_bytes(static_cast<std::uint64_t>(total_bytes(files))), options.workers,
                           options.workers == 1 ? "" : "s", with_commas(options.window))}};
}

void TextStream::begin_at(std::int64_t step, StreamPosition position) {
  if (position.epoch < 0 || position.token < 0 || position.file < 0 || position.record < 0 || position.row < 0) {
    throw ConfigError("a position in texts has a negative number");
  }
  reader_.reset();
  first_step_ = step;
  first_ = position;
}

}  // namespace phalanx::data
