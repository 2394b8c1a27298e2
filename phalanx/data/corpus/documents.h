// Documents of a corpus: where they lie, and their texts one after another.
//
// A file of text is one document. A file of JSON lines or a Parquet file holds one a record, in the field that is
// named. All may be compressed by gzip or zstd; a mark of UTF-8 before a text is no part of it.
//
//   const Document source{.path = "data.jsonl.gz", .format = TextFormat::json_lines, .compression = Compression::gzip};
//   each_text(source, [&](std::string_view text) { trainer.add(text); });
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "phalanx/data/corpus/text_reader.h"

namespace phalanx::data {

enum class TextFormat : std::uint8_t { text, json_lines, parquet };

/// Bytes [begin, end) of a text file: the whole file, unless a single file was cut for validation; or a file of
/// records.
struct Document {
  std::string path = {};
  std::int64_t begin = 0;
  std::int64_t end = 0;  // of a compressed file or one of records, its size on the disk
  TextFormat format = TextFormat::text;
  Compression compression = Compression::none;
  std::string field = "text";    // of a record, that holds its text
  double held_out_fraction = 0;  // of a file of records: that these are set aside,
  bool is_held_out = false;      // and this stands for those, not for the others
  std::string name = {};         // in messages, where that is not its path
  const std::string& shown() const { return name.empty() ? path : name; }
  std::int64_t size() const { return end - begin; }
};

/// Which documents are set aside: each goes where it brings the share of those nearest to what it should be by then.
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
  std::int64_t empty = 0;  // records without text, which are passed over
};

/// Gives every document's text to `use`. A text, but for a plain file, is in memory as a whole. DataError names the
/// file, the line or row, and what is wrong with it.
TextCount each_text(const Document& source, const std::function<void(std::string_view)>& use,
                    const Advance& bytes_done = {});

}  // namespace phalanx::data
