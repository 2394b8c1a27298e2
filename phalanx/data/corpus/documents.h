// Documents of a corpus: where they are stored, and their texts one after another.
//
// A file of text is one document. A file of JSON lines or a Parquet file holds one document per record, in the named
// field. All may be compressed by gzip or zstd. A UTF-8 byte order mark before a text is not part of it.
//
//   const Document source{.path = "data.jsonl.gz", .format = TextFormat::json_lines, .compression = Compression::gzip};
//   each_text(source, [&](std::string_view text) { trainer.add(text); });
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "phalanx/data/corpus/text_reader.h"

namespace phalanx::data {

/// What a file was when it was listed.
struct FileState {
  std::int64_t bytes = 0;
  std::int64_t modified = 0;  // ticks of the file system's clock
  friend bool operator==(const FileState&, const FileState&) = default;
};

/// Throws FileError for a file that is not there.
FileState state_of(const std::string& path);

enum class TextFormat : std::uint8_t { text, json_lines, parquet, arrow };

/// Bytes [begin, end) of a text file, or a file of records. The range is the whole file, unless a single text file was
/// cut for validation.
struct Document {
  std::string path = {};
  std::int64_t begin = 0;
  std::int64_t end = 0;  // for a compressed file or a file of records: its size on disk
  TextFormat format = TextFormat::text;
  Compression compression = Compression::none;
  std::string field = "text";            // the field of a record that holds its text; "a.b": b of the object a
  double held_out_fraction = 0;          // of a file of records: the share of records that is set aside
  bool is_held_out = false;              // true: this is those records; false: the others
  std::string name = {};                 // for messages; empty: the path
  std::optional<FileState> listed = {};  // a file that is another by the time that it is read is an error
  /// Of a file of records: the numbers of those to leave out, ascending (leave_out_duplicates()).
  std::shared_ptr<const std::vector<std::int64_t>> left_out = {};
  const std::string& shown() const { return name.empty() ? path : name; }
  std::int64_t size() const { return end - begin; }
};

/// Chooses which documents are set aside. Each goes to the side that brings the share set aside nearest to what it
/// should be by then.
class HoldOut {
 public:
  explicit HoldOut(double fraction) : fraction_(fraction) {}
  bool takes(std::int64_t size);

 private:
  double fraction_;
  double all_ = 0, aside_ = 0;
};

/// Progress: units done since the last call.
using Advance = std::function<void(std::uint64_t)>;

struct TextCount {
  std::int64_t documents = 0;
  std::int64_t empty = 0;  // records without text, which are skipped
  std::int64_t records() const { return documents + empty; }
};

/// Passes every document's text to `use`. Each text is in memory as a whole, except that of a plain file. Throws
/// DataError that names the file, the line or row, and the error; also where the file is no longer as it was listed.
TextCount each_text(const Document& source, const std::function<void(std::string_view)>& use,
                    const Advance& bytes_done = {});

/// As each_text(), with each record's number, counted as for each_record().
TextCount each_numbered_text(const Document& source,
                             const std::function<void(std::int64_t number, std::string_view text)>& use,
                             const Advance& bytes_done = {});

/// As each_text(), from record number `first` on, with each record's number. A record is a line or a row, counted from
/// 0 with those that have no text; a file of text is one record. Records before `first` are passed over without a look
/// at what they hold; `passed_over`, if set, is called for each. REQUIRES: nothing of the source is held out.
TextCount each_record(const Document& source, std::int64_t first,
                      const std::function<void(std::int64_t number, std::string_view text)>& use,
                      const std::function<void()>& passed_over = {});

}  // namespace phalanx::data
