#include "phalanx/data/corpus/documents.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "phalanx/base/byte_order_mark.h"
#include "phalanx/base/error.h"
#include "phalanx/base/json_text.h"
#include "phalanx/base/mapped_file.h"
#include "phalanx/data/corpus/parquet_texts.h"

namespace phalanx::data {
namespace {

using nlohmann::json;

constexpr std::size_t kReadBytes = std::size_t{1} << 20;

/// Divides the records of one file into those for training and those that are held out.
class RecordTaker {
 public:
  RecordTaker(const Document& source, const std::function<void(std::string_view)>& use)
      : source_(source), use_(use), hold_out_(source.held_out_fraction) {}

  void take(std::string_view text) {
    if (text.empty()) return skip();
    const bool held = source_.held_out_fraction > 0 && hold_out_.takes(static_cast<std::int64_t>(text.size()));
    if (held != source_.is_held_out) return;
    use_(text);
    ++count_.documents;
  }
  void skip() { ++count_.empty; }
  TextCount count() const { return count_; }

 private:
  const Document& source_;
  const std::function<void(std::string_view)>& use_;
  HoldOut hold_out_;
  TextCount count_;
};

std::string keys_of(const json& record) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : record.items()) keys.push_back(fmt::format("\"{}\"", key));
  return fmt::format("{}", fmt::join(keys, ", "));
}

/// The text of one record; nothing if it is null.
std::optional<std::string> text_in(json record, const std::string& field, const std::string& where) {
  const auto found = record.find(field);
  if (found == record.end()) {
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

TextCount each_json_line(const Document& source, const std::function<void(std::string_view)>& use,
                         const Advance& bytes_done) {
  RecordTaker records(source, use);
  TextReader in(source.path, source.compression);
  std::string pending;  // the beginning of a line
  std::int64_t number = 0;
  const auto take_line = [&](std::string_view line) {
    const std::string where = fmt::format("{}, line {}", source.shown(), ++number);
    if (number == 1) line = text_after_mark<DataError>(line, source.shown());
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) return;
    if (const auto text = text_in(parse_json_object<DataError>(line, where), source.field, where)) {
      records.take(*text);
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

}  // namespace

bool HoldOut::takes(std::int64_t size) {
  const auto bytes = static_cast<double>(size);
  all_ += bytes;
  const bool take = aside_ + bytes / 2 <= fraction_ * all_;
  if (take) aside_ += bytes;
  return take;
}

TextCount each_text(const Document& source, const std::function<void(std::string_view)>& use,
                    const Advance& bytes_done) {
  if (source.format == TextFormat::json_lines) return each_json_line(source, use, bytes_done);
  if (source.format == TextFormat::text) return whole_text(source, use, bytes_done);
  RecordTaker records(source, use);
  each_parquet_text(source.path, source.field, [&](std::optional<std::string_view> text) {
    if (text) {
      records.take(*text);
    } else {
      records.skip();
    }
  });
  if (bytes_done) bytes_done(static_cast<std::uint64_t>(source.size()));
  return records.count();
}

}  // namespace phalanx::data
