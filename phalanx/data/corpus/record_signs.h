// Detects whether a file given as text holds records, chats or a data set. These are never silently taken for text.
//
//   if (const auto found = data_in(contents)) throw DataError(fmt::format("{} looks like {}", path, found->what));
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace phalanx::data {

struct RecordSigns {
  std::string what;            // "JSON lines", "a list of records in JSON", ...
  std::string command = {};    // converts the file {} to JSON lines; empty: no command does
  bool is_json_lines = false;  // the file can be read as it is
  char separator = '\0';       // of a table
  std::string instead = {};    // what to give instead, if the file is not data
};

/// Bytes from the start of a file in which a record is searched: a record may be long. A JSON value that does not end
/// in them is not text either.
inline constexpr std::size_t kRecordProbe = std::size_t{16} << 20;

/// For a file that begins with `head`: records in JSON, or a description of data. JSON that is one document is nothing.
std::optional<RecordSigns> records_in(std::string_view head);

/// The same, and also lines of JSON strings, and a table whose file name does not show that it is one.
std::optional<RecordSigns> data_in(std::string_view head);

}  // namespace phalanx::data
