#include "phalanx/data/parquet_texts.h"

#include <fmt/format.h>

#include "phalanx/base/error.h"

#ifdef PHALANX_WITH_PARQUET
#include <arrow/api.h>
#include <arrow/io/file.h>
#include <fmt/ranges.h>
#include <parquet/arrow/reader.h>

#include <memory>
#endif

namespace phalanx::data {

#ifdef PHALANX_WITH_PARQUET

namespace {

template <class Array>
void each_value(const arrow::Array& values, const std::function<void(std::optional<std::string_view>)>& use) {
  const auto& strings = static_cast<const Array&>(values);
  for (std::int64_t row = 0; row < strings.length(); ++row) {
    if (strings.IsNull(row)) {
      use(std::nullopt);
    } else {
      use(strings.GetView(row));
    }
  }
}

void require_ok(const arrow::Status& status, const std::string& path) {
  if (!status.ok()) throw DataError(fmt::format("{}: cannot be read as Parquet: {}", path, status.ToString()));
}

template <class T>
T value_of(arrow::Result<T> result, const std::string& path) {
  require_ok(result.status(), path);
  return std::move(result).ValueUnsafe();
}

}  // namespace

bool reads_parquet() { return true; }

void each_parquet_text(const std::string& path, const std::string& column,
                       const std::function<void(std::optional<std::string_view>)>& use) {
  const auto file = value_of(arrow::io::ReadableFile::Open(path), path);
  parquet::arrow::FileReaderBuilder builder;
  require_ok(builder.Open(file), path);
  std::unique_ptr<parquet::arrow::FileReader> reader;
  require_ok(builder.Build(&reader), path);
  std::shared_ptr<arrow::Schema> schema;
  require_ok(reader->GetSchema(&schema), path);
  const int index = schema->GetFieldIndex(column);
  if (index < 0) {
    throw DataError(fmt::format("{}: no column \"{}\" that would hold the text; it has {}: name one by --field", path,
                                column, fmt::join(schema->field_names(), ", ")));
  }
  const auto type = schema->field(index)->type()->id();
  if (type != arrow::Type::STRING && type != arrow::Type::LARGE_STRING) {
    throw DataError(fmt::format("{}: column \"{}\": expected strings, found {}", path, column,
                                schema->field(index)->type()->ToString()));
  }
  for (int group = 0; group < reader->num_row_groups(); ++group) {
    std::shared_ptr<arrow::ChunkedArray> values;
    require_ok(reader->RowGroup(group)->Column(index)->Read(&values), path);
    for (const auto& chunk : values->chunks()) {
      if (type == arrow::Type::STRING) {
        each_value<arrow::StringArray>(*chunk, use);
      } else {
        each_value<arrow::LargeStringArray>(*chunk, use);
      }
    }
  }
}

#else

bool reads_parquet() { return false; }

void each_parquet_text(const std::string& path, const std::string& /*column*/,
                       const std::function<void(std::optional<std::string_view>)>& /*use*/) {
  throw DataError(fmt::format(
      "{0} is a Parquet file, and Phalanx was built without Arrow C++: install libarrow-dev and "
      "libparquet-dev (https://arrow.apache.org/install) and build again, or write its text as JSON lines:\n"
      "    python3 -c \"import datasets; datasets.Dataset.from_parquet('{0}').to_json('data.jsonl')\"",
      path));
}

#endif

}  // namespace phalanx::data
