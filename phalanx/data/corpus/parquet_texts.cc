#include "phalanx/data/corpus/parquet_texts.h"

#include <fmt/format.h>

#include "phalanx/base/error.h"

#ifdef PHALANX_WITH_PARQUET
#include <arrow/api.h>
#include <arrow/io/file.h>
#include <arrow/util/config.h>
#include <fmt/ranges.h>
#include <parquet/arrow/reader.h>

#include <memory>
#endif

namespace phalanx::data {

#ifdef PHALANX_WITH_PARQUET

namespace {

using UseText = std::function<void(std::optional<std::string_view>)>;

template <class Array>
void each_value(const arrow::Array& values, const UseText& use) {
  const auto& strings = static_cast<const Array&>(values);
  for (std::int64_t row = 0; row < strings.length(); ++row) {
    if (strings.IsNull(row)) {
      use(std::nullopt);
    } else {
      use(strings.GetView(row));
    }
  }
}

// A categorical column: each row is an index into the distinct texts.
template <class Array>
void each_indexed_value(const arrow::DictionaryArray& indices, const UseText& use) {
  const auto& strings = static_cast<const Array&>(*indices.dictionary());
  for (std::int64_t row = 0; row < indices.length(); ++row) {
    if (indices.IsNull(row) || strings.IsNull(indices.GetValueIndex(row))) {
      use(std::nullopt);
    } else {
      use(strings.GetView(indices.GetValueIndex(row)));
    }
  }
}

bool is_plain_string(arrow::Type::type type) {
  return type == arrow::Type::STRING || type == arrow::Type::LARGE_STRING;
}

bool holds_texts(const arrow::DataType& type) {
#if ARROW_VERSION_MAJOR >= 15
  if (type.id() == arrow::Type::STRING_VIEW) return true;
#endif
  if (type.id() != arrow::Type::DICTIONARY) return is_plain_string(type.id());
  return is_plain_string(static_cast<const arrow::DictionaryType&>(type).value_type()->id());
}

void each_text(const arrow::Array& values, const UseText& use) {
  if (values.type_id() == arrow::Type::DICTIONARY) {
    const auto& indices = static_cast<const arrow::DictionaryArray&>(values);
    return indices.dictionary()->type_id() == arrow::Type::STRING
               ? each_indexed_value<arrow::StringArray>(indices, use)
               : each_indexed_value<arrow::LargeStringArray>(indices, use);
  }
#if ARROW_VERSION_MAJOR >= 15
  if (values.type_id() == arrow::Type::STRING_VIEW) return each_value<arrow::StringViewArray>(values, use);
#endif
  return values.type_id() == arrow::Type::STRING ? each_value<arrow::StringArray>(values, use)
                                                 : each_value<arrow::LargeStringArray>(values, use);
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

void each_parquet_text(const std::string& path, const std::string& column, const UseText& use) {
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
  const std::shared_ptr<arrow::DataType> type = schema->field(index)->type();
  if (!holds_texts(*type)) {
    throw DataError(fmt::format("{}: column \"{}\": expected strings, found {}", path, column, type->ToString()));
  }
  for (int group = 0; group < reader->num_row_groups(); ++group) {
    std::shared_ptr<arrow::ChunkedArray> values;
    require_ok(reader->RowGroup(group)->Column(index)->Read(&values), path);
    for (const auto& chunk : values->chunks()) each_text(*chunk, use);
  }
}

#else

bool reads_parquet() { return false; }

void each_parquet_text(const std::string& path, const std::string& /*column*/,
                       const std::function<void(std::optional<std::string_view>)>& /*use*/) {
  throw DataError(fmt::format(
      "{0} is a Parquet file, and Phalanx was built without Arrow C++: install libarrow-dev and "
      "libparquet-dev (https://arrow.apache.org/install), or the Python package pyarrow and name its folder by "
      "cmake -DPHALANX_PYARROW=..., and build again; or write its text as JSON lines:\n"
      "    python3 -c \"import datasets; datasets.Dataset.from_parquet('{0}').to_json('data.jsonl')\"",
      path));
}

#endif

}  // namespace phalanx::data
