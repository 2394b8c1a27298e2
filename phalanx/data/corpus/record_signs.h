// Whether what is given as text holds records, chats or a data set, which are never taken for text without a word.
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
  std::string command = {};    // that makes JSON lines of the file {}, where one does
  bool is_json_lines = false;  // may be read as they are
  char separator = '\0';       // of a table
  std::string instead = {};    // what to give in its place, where it is no data
};

/// Bytes from a file's start in which a record is looked for: one may be long. A JSON value that does not end in them
/// is no text either.
inline constexpr std::size_t kRecordProbe = std::size_t{16} << 20;

/// Of a file that begins so: records in JSON, or what describes data. JSON that is a document of its own is nothing.
std::optional<RecordSigns> records_in(std::string_view head);

/// Those, strings as lines, and a table without a name that says so.
std::optional<RecordSigns> data_in(std::string_view head);

}  // namespace phalanx::data
