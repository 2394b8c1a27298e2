// The texts in one column of a Parquet file, by Arrow C++ where Phalanx was built with it.
//
//   each_parquet_text("part-0.parquet", "text", [&](std::optional<std::string_view> text) { ... });
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace phalanx::data {

/// Whether this build reads Parquet.
bool reads_parquet();

/// Row by row; nothing for a null. DataError for a file that cannot be read, a column that is not there or holds no
/// strings; and, where Phalanx was built without Arrow C++, what to install or to do instead.
void each_parquet_text(const std::string& path, const std::string& column,
                       const std::function<void(std::optional<std::string_view>)>& use);

}  // namespace phalanx::data
