#include "phalanx/data/corpus/documents.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>
#include <vector>

#include "phalanx/base/byte_order_mark.h"
#include "phalanx/base/error.h"
#include "phalanx/base/json_text.h"
#include "phalanx/base/mapped_file.h"
#include "phalanx/data/corpus/column_texts.h"
#include "phalanx/data/corpus/record_text.h"

namespace phalanx::data {
namespace {

using nlohmann::json;

constexpr std::size_t kReadBytes = std::size_t{1} << 20;

using UseRecord = std::function<void(std::int64_t number, std::string_view text)>;

/// Which records of a file are wanted.
struct FromRecord {
  std::int64_t first = 0;
  std::function<void()> passed_over = {};
  bool passes_over(std::int64_t number) const {
    if (number >= first) return false;
    if (passed_over) passed_over();
    return true;
  }
};

/// Rows and lines that shift under the reader would be read twice, or never, or differently by two ranks.
void require_unchanged(const Document& source) {
  if (!source.listed) return;
  const FileState found = state_of(source.path);
  if (found == *source.listed) return;
  const std::string what = found.bytes == source.listed->bytes
                               ? fmt::format("it has {} bytes as before, but was written to", found.bytes)
                               : fmt::format("it had {} bytes and has {}", source.listed->bytes, found.bytes);
  throw DataError(fmt::format(
      "{} changed while it was read: {}; expected the file that was listed at the start; begin again once it is whole, "
      "or read a copy",
      source.shown(), what));
}

/// Divides the records of one file into those for training and those that are held out.
class RecordTaker {
 public:
  RecordTaker(const Document& source, const UseRecord& use)
      : source_(source), use_(use), hold_out_(source.held_out_fraction) {}

  void take(std::int64_t number, std::string_view text) {
    if (text.empty()) return skip();
    if (source_.left_out && std::ranges::binary_search(*source_.left_out, number)) return;
    const bool held = source_.held_out_fraction > 0 && hold_out_.takes(static_cast<std::int64_t>(text.size()));
    if (held != source_.is_held_out) return;
    use_(number, text);
    ++count_.documents;
  }
  void skip() { ++count_.empty; }
  TextCount count() const { return count_; }

 private:
  const Document& source_;
  const UseRecord& use_;
  HoldOut hold_out_;
  TextCount count_;
};

std::string keys_of(const json& record) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : record.items()) keys.push_back(fmt::format("\"{}\"", key));
  return fmt::format("{}", fmt::join(keys, ", "));
}

/// The value of "a.b" in {"a": {"b": value}}; null if there is none.
json* nested_value(json& record, std::string_view field) {
  json* at = &record;
  while (!field.empty()) {
    const std::size_t dot = std::min(field.find('.'), field.size());
    const auto found = at->is_object() ? at->find(field.substr(0, dot)) : at->end();
    if (!at->is_object() || found == at->end()) return nullptr;
    at = &*found;
    field.remove_prefix(std::min(dot + 1, field.size()));
  }
  return at;
}

/// The text of one record; nothing if it is null.
std::optional<std::string> text_in(json record, const std::string& field, const std::string& where) {
  json* found = record.contains(field) ? &record[field] : nested_value(record, field);
  if (found == nullptr) {
    for (const char* key : {"messages", "conversations"}) {
      if (!record.contains(key) || !record[key].is_array()) continue;
      throw DataError(fmt::format(
          "{}: conversations (\"{}\") and no field \"{}\": expected plain text; `phalanx tokenize --chat` turns "
          "conversations into token files, by the model's chat template",
          where, key, field));
    }
    throw DataError(fmt::format("{}: no field \"{}\" that would hold the text; it has {}: name one by --field", where,
                                field, record.empty() ? "none" : keys_of(record)));
  }
  if (found->is_null()) return std::nullopt;
  if (!found->is_string()) {
    throw DataError(fmt::format("{}: \"{}\": expected a string, found {}", where, field, found->type_name()));
  }
  return std::move(found->get_ref<std::string&>());
}

TextCount each_json_line(const Document& source, const FromRecord& from, const UseRecord& use,
                         const Advance& bytes_done) {
  RecordTaker records(source, use);
  TextReader in(source.path, source.compression);
  std::string pending;  // the beginning of a line
  RecordText texts(source.field);
  std::int64_t number = 0;
  const auto take_line = [&](std::string& whole) {
    if (from.passes_over(number++)) return;
    if (const auto text = texts.find(whole)) return records.take(number - 1, *text);
    std::string_view line = whole;
    const std::string where = fmt::format("{}, line {}", source.shown(), number);
    if (number == 1) line = text_after_mark<DataError>(line, source.shown());
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) return;
    if (const auto text = text_in(parse_json_object<DataError>(line, where), source.field, where)) {
      records.take(number - 1, *text);
    } else {
      records.skip();
    }
  };
  for (std::string part = in.read(kReadBytes); !part.empty(); part = in.read(kReadBytes)) {
    std::string_view rest = part;
    for (std::size_t end = rest.find('\n'); end != std::string_view::npos; end = rest.find('\n')) {
      pending.append(rest.substr(0, end));
      take_line(pending);
      pending.clear();
      rest.remove_prefix(end + 1);
    }
    pending.append(rest);
    if (bytes_done && source.compression == Compression::none) bytes_done(part.size());
  }
  if (!pending.empty()) take_line(pending);
  if (bytes_done && source.compression != Compression::none) bytes_done(static_cast<std::uint64_t>(source.size()));
  return records.count();
}

TextCount whole_text(const Document& source, const std::function<void(std::string_view)>& use,
                     const Advance& bytes_done) {
  if (source.compression == Compression::none) {
    const MappedFile file(source.path, MappedFile::Access::sequential);
    if (static_cast<std::int64_t>(file.size()) < source.end) {
      throw DataError(fmt::format("{}: became shorter while it was read: expected {} bytes, found {}", source.shown(),
                                  source.end, file.size()));
    }
    use(file.text().substr(static_cast<std::size_t>(source.begin), static_cast<std::size_t>(source.size())));
  } else {
    TextReader in(source.path, source.compression);
    std::string text;
    for (std::string part = in.read(kReadBytes); !part.empty(); part = in.read(kReadBytes)) text += part;
    use(text_after_mark<DataError>(text, source.shown()));
  }
  if (bytes_done) bytes_done(static_cast<std::uint64_t>(source.size()));
  return {.documents = 1};
}

TextCount each_row(const Document& source, const FromRecord& from, const UseRecord& use, const Advance& bytes_done) {
  RecordTaker records(source, use);
  std::int64_t number = 0;
  const auto each = source.format == TextFormat::arrow ? each_arrow_text : each_parquet_text;
  each(source.path, source.field, [&](std::optional<std::string_view> text) {
    if (from.passes_over(number++)) return;
    if (text) {
      records.take(number - 1, *text);
    } else {
      records.skip();
    }
  });
  if (bytes_done) bytes_done(static_cast<std::uint64_t>(source.size()));
  return records.count();
}

TextCount each_record_from(const Document& source, const FromRecord& from, const UseRecord& use,
                           const Advance& bytes_done) {
  // What is read of a plain text is a range, which does not shift when the file grows.
  const bool is_range = source.format == TextFormat::text && source.compression == Compression::none;
  if (!is_range) require_unchanged(source);
  TextCount count;
  if (source.format == TextFormat::json_lines) {
    count = each_json_line(source, from, use, bytes_done);
  } else if (source.format == TextFormat::parquet || source.format == TextFormat::arrow) {
    count = each_row(source, from, use, bytes_done);
  } else if (from.first == 0) {
    count = whole_text(
        source, [&](std::string_view text) { use(0, text); }, bytes_done);
  }
  if (!is_range) require_unchanged(source);
  return count;
}

}  // namespace

FileState state_of(const std::string& path) {
  std::error_code error;
  const auto bytes = std::filesystem::file_size(path, error);
  const auto modified = error ? std::filesystem::file_time_type() : std::filesystem::last_write_time(path, error);
  if (error) throw FileError(fmt::format("cannot look at {}: {}", path, error.message()), error.value());
  return {.bytes = static_cast<std::int64_t>(bytes), .modified = modified.time_since_epoch().count()};
}

bool HoldOut::takes(std::int64_t size) {
  const auto bytes = static_cast<double>(size);
  all_ += bytes;
  const bool take = aside_ + bytes / 2 <= fraction_ * all_;
  if (take) aside_ += bytes;
  return take;
}

TextCount each_text(const Document& source, const std::function<void(std::string_view)>& use,
                    const Advance& bytes_done) {
  return each_numbered_text(
      source, [&](std::int64_t, std::string_view text) { use(text); }, bytes_done);
}

TextCount each_numbered_text(const Document& source, const UseRecord& use, const Advance& bytes_done) {
  return each_record_from(source, {}, use, bytes_done);
}

TextCount each_record(const Document& source, std::int64_t first, const UseRecord& use,
                      const std::function<void()>& passed_over) {
  require_unchanged(source);
  return each_record_from(source, {first, passed_over}, use, {});
}

}  // namespace phalanx::data
