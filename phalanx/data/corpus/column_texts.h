// Reads the texts in one column of a Parquet or an Arrow file, using Arrow C++ if Phalanx was built with it.
//
//   each_parquet_text("part-0.parquet", "text", [&](std::optional<std::string_view> text) { if (text) add(*text); });
//
// Arrow files are those of Arrow's IPC format: streams, as the datasets package saves them, and files ("Feather V2").
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace phalanx::data {

/// Whether this build reads Parquet and Arrow files.
bool reads_columns();

using UseColumnText = std::function<void(std::optional<std::string_view>)>;

/// Calls `use` for each row; with nothing for a null. A text is there until `use` returns. Throws DataError for a file
/// that cannot be read or ends too soon, for a column that is missing or holds no strings, and for texts of an Arrow
/// file that are not UTF-8. If Phalanx was built without Arrow C++, the DataError says what
/// to install or to do instead.
void each_parquet_text(const std::string& path, const std::string& column, const UseColumnText& use);
void each_arrow_text(const std::string& path, const std::string& column, const UseColumnText& use);

}  // namespace phalanx::data
