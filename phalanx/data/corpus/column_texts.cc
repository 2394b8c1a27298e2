#include "phalanx/data/corpus/column_texts.h"

#include <fmt/format.h>

#include "phalanx/base/error.h"

#ifdef PHALANX_WITH_PARQUET
#include <arrow/api.h>
#include <arrow/io/file.h>
#include <arrow/io/memory.h>
#include <arrow/ipc/reader.h>
#include <arrow/util/config.h>
#include <fmt/ranges.h>
#include <parquet/arrow/reader.h>

#include <memory>

#include "phalanx/base/file_kind.h"
#include "phalanx/base/mapped_file.h"
#endif

namespace phalanx::data {

#ifdef PHALANX_WITH_PARQUET

namespace {

template <class Array>
void each_value(const arrow::Array& values, const UseColumnText& use) {
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
void each_indexed_value(const arrow::DictionaryArray& indices, const UseColumnText& use) {
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

void each_text(const arrow::Array& values, const UseColumnText& use) {
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

/// What messages call a file.
struct FileName {
  std::string path, format;
};

void require_ok(const arrow::Status& status, const FileName& file) {
  if (status.ok()) return;
  throw DataError(fmt::format("{}: cannot be read as {}: {}", file.path, file.format, status.ToString()));
}

template <class T>
T value_of(arrow::Result<T> result, const FileName& file) {
  require_ok(result.status(), file);
  return std::move(result).ValueUnsafe();
}

int index_of_texts(const arrow::Schema& schema, const std::string& column, const FileName& file) {
  const int index = schema.GetFieldIndex(column);
  if (index < 0) {
    throw DataError(fmt::format("{}: no column \"{}\" that would hold the text; it has {}: name one by --field",
                                file.path, column, fmt::join(schema.field_names(), ", ")));
  }
  const std::shared_ptr<arrow::DataType> type = schema.field(index)->type();
  if (!holds_texts(*type)) {
    throw DataError(fmt::format("{}: column \"{}\": expected strings, found {}", file.path, column, type->ToString()));
  }
  return index;
}

void each_text_of(const arrow::RecordBatch& batch, int index, const FileName& file, const UseColumnText& use) {
  const auto column = batch.column(index);
  require_ok(column->ValidateFull(), file);  // offsets in a damaged file may point anywhere
  each_text(*column, use);
}

DataError damaged_stream(const FileName& file, std::string_view how, std::int64_t bytes) {
  return DataError(
      fmt::format("{}: the stream of Arrow {} after {} bytes: copy or save the file again", file.path, how, bytes));
}

/// A reader takes the end of the file for the end of its stream, so half a stream would pass for a whole one.
void require_end_of_stream(std::string_view whole, const FileName& file) {
  constexpr std::string_view kEnd("\xff\xff\xff\xff\0\0\0\0", 8);
  if (!whole.ends_with(kEnd)) throw damaged_stream(file, "ends too soon,", std::ssize(whole));
}

}  // namespace

bool reads_columns() { return true; }

void each_parquet_text(const std::string& path, const std::string& column, const UseColumnText& use) {
  const FileName name{path, "Parquet"};
  const auto file = value_of(arrow::io::ReadableFile::Open(path), name);
  parquet::arrow::FileReaderBuilder builder;
  require_ok(builder.Open(file), name);
  std::unique_ptr<parquet::arrow::FileReader> reader;
  require_ok(builder.Build(&reader), name);
  std::shared_ptr<arrow::Schema> schema;
  require_ok(reader->GetSchema(&schema), name);
  const int index = index_of_texts(*schema, column, name);
  for (int group = 0; group < reader->num_row_groups(); ++group) {
    std::shared_ptr<arrow::ChunkedArray> values;
    require_ok(reader->RowGroup(group)->Column(index)->Read(&values), name);
    for (const auto& chunk : values->chunks()) each_text(*chunk, use);
  }
}

void each_arrow_text(const std::string& path, const std::string& column, const UseColumnText& use) {
  const FileName name{path, "Arrow"};
  const MappedFile whole(path);
  const auto bytes = std::make_shared<arrow::io::BufferReader>(
      reinterpret_cast<const std::uint8_t*>(whole.text().data()), std::ssize(whole.text()));
  if (file_kind(whole.text().substr(0, kFileKindProbe), whole.size()) == FileKind::arrow_file) {
    const auto reader = value_of(arrow::ipc::RecordBatchFileReader::Open(bytes), name);
    const int index = index_of_texts(*reader->schema(), column, name);
    for (int batch = 0; batch < reader->num_record_batches(); ++batch) {
      each_text_of(*value_of(reader->ReadRecordBatch(batch), name), index, name, use);
    }
    return;
  }
  require_end_of_stream(whole.text(), name);
  const auto reader = value_of(arrow::ipc::RecordBatchStreamReader::Open(bytes), name);
  const int index = index_of_texts(*reader->schema(), column, name);
  for (;;) {
    std::shared_ptr<arrow::RecordBatch> batch;
    require_ok(reader->ReadNext(&batch), name);
    if (!batch) break;
    each_text_of(*batch, index, name, use);
  }
  const std::int64_t end = value_of(bytes->Tell(), name);
  if (end != std::ssize(whole.text())) throw damaged_stream(name, "is followed by something else,", end);
}

#else

namespace {

[[noreturn]] void say_what_is_missing(const std::string& path, const char* format, const char* read) {
  throw DataError(fmt::format(
      "{0} is {1} file, and Phalanx was built without Arrow C++: install libarrow-dev and "
      "libparquet-dev (https://arrow.apache.org/install), or the Python package pyarrow and name its folder by "
      "cmake -DPHALANX_PYARROW=..., and build again; or write its text as JSON lines:\n"
      "    python3 -c \"import datasets; datasets.Dataset.{2}('{0}').to_json('data.jsonl')\"\n"
      "  and tokenize data.jsonl",
      path, format, read));
}

}  // namespace

bool reads_columns() { return false; }

void each_parquet_text(const std::string& path, const std::string& /*column*/, const UseColumnText& /*use*/) {
  say_what_is_missing(path, "a Parquet", "from_parquet");
}

void each_arrow_text(const std::string& path, const std::string& /*column*/, const UseColumnText& /*use*/) {
  say_what_is_missing(path, "an Arrow", "from_file");
}

#endif

}  // namespace phalanx::data
