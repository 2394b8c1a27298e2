#include "phalanx/data/corpus/record_signs.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <vector>

#include "phalanx/base/byte_order_mark.h"

namespace phalanx::data {
namespace {

using nlohmann::json;

constexpr std::string_view kBlanks = " \t\r\n";
constexpr std::size_t kLinesSeen = 256;
constexpr std::array kFields = {"text", "messages", "conversations", "instruction", "prompt", "completion", "content"};

std::string_view after_blanks(std::string_view text) {
  return text.substr(std::min(text.find_first_not_of(kBlanks), text.size()));
}

std::string_view without_blanks(std::string_view text) {
  text = after_blanks(text);
  return text.substr(0, text.find_last_not_of(kBlanks) + 1);
}

bool names_a_field(std::string_view text) {
  return std::ranges::any_of(
      kFields, [&](const char* field) { return text.find(fmt::format("\"{}\"", field)) != std::string_view::npos; });
}

/// The end of the JSON value at the start of the text; npos if it does not end.
std::size_t end_of_value(std::string_view text) {
  std::int64_t depth = 0;
  bool in_string = false;
  for (std::size_t at = 0; at < text.size(); ++at) {
    const char c = text[at];
    if (in_string) {
      if (c == '\\') ++at;
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '{' || c == '[') {
      ++depth;
    } else if (c == '}' || c == ']') {
      --depth;
    } else {
      continue;
    }
    if (depth <= 0 && !in_string) return at + 1;
  }
  return std::string_view::npos;
}

json parsed(std::string_view text) { return json::parse(text, nullptr, /*allow_exceptions=*/false); }

std::vector<std::string> names_in(const json& object) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : object.items()) keys.push_back(key);
  return keys;
}

/// Whether this is a list of records: of objects that have a field of texts, or all the same keys.
bool is_list_of_records(const json& list) {
  if (!list.is_array() || list.empty() || !list[0].is_object()) return false;
  if (std::ranges::any_of(kFields, [&](const char* field) { return list[0].contains(field); })) return true;
  return list.size() > 1 && list[1].is_object() && !list[0].empty() && names_in(list[0]) == names_in(list[1]);
}

/// For one object that is the whole file.
std::optional<RecordSigns> signs_of(const json& whole, bool spans_lines) {
  const auto has = [&](const char* key) { return whole.contains(key); };
  if (has("format") && whole["format"] == "phalanx.tokens") {
    return RecordSigns{.what = "the description of a token file, which is no text",
                       .instead = "give the texts themselves"};
  }
  if (has("model") && has("added_tokens") && whole["model"].is_object()) {
    return RecordSigns{.what = "a tokenizer, which is no text", .instead = "give it as --tokenizer"};
  }
  if (has("_data_files") || (has("features") && has("splits"))) {
    return RecordSigns{.what = "a description of a data set (datasets package)", .instead = "give the data beside it"};
  }
  const auto is_text = [&](const char* key) { return has(key) && whole[key].is_string(); };
  const auto is_list = [&](const char* key) { return has(key) && whole[key].is_array(); };
  const bool is_record = is_text("text") || is_text("instruction") || is_text("prompt") || is_text("completion") ||
                         is_list("messages") || is_list("conversations");
  if (is_record && spans_lines) return RecordSigns{.what = "one record in JSON", .command = "jq -c . {} > data.jsonl"};
  if (is_record) return RecordSigns{.what = "JSON lines", .is_json_lines = true};
  constexpr std::array kLists = {"data",      "rows",  "records",    "examples", "samples",
                                 "instances", "train", "validation", "test"};
  for (const auto& item : whole.items()) {
    const std::string& key = item.key();
    const json& value = item.value();
    if (!value.is_array() || value.empty() || !value[0].is_object()) continue;
    const bool is_named = std::ranges::find(kLists, key) != kLists.end();
    const bool has_field = std::ranges::any_of(
        kFields, [&](std::string_view field) { return field != "content" && value[0].contains(field); });
    if (!is_named && !has_field) continue;
    return RecordSigns{.what = fmt::format("a list of records in JSON (\"{}\")", key),
                       .command = fmt::format("jq -c '.[\"{}\"][]' {{}} > data.jsonl", key)};
  }
  return std::nullopt;
}

/// Calls `use` for each line that is not blank, until it returns false.
template <class Use>
void each_line(std::string_view text, Use&& use) {
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = without_blanks(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
    if (!line.empty() && !use(line, /*is_last=*/text.empty())) return;
  }
}

bool is_comment(std::string_view line) { return line.starts_with('#') || line.starts_with("//"); }

/// Whether most lines, except comments, are records, whatever the first line is.
bool are_mostly_records(std::string_view text) {
  std::size_t lines = 0, records = 0, texts = 0;
  each_line(text, [&](std::string_view line, bool) {
    if (is_comment(line)) return true;
    if (line.ends_with(',')) line.remove_suffix(1);
    ++lines;
    const bool is_python = line.starts_with("{'") && line.ends_with('}') && line.find("': ") != line.npos;
    if (is_python || (line.starts_with('{') && parsed(line).is_object())) {
      ++records;
      if (names_a_field(line)) ++texts;
    }
    return lines < kLinesSeen && !(lines == 16 && records == 0);
  });
  return (records > 1 && 2 * records > lines) || (texts > 0 && 2 * texts >= lines);
}

bool are_lines_of_strings(std::string_view text) {
  std::size_t strings = 0;
  bool all = true;
  each_line(text, [&](std::string_view line, bool is_last) {
    const bool is_string =
        line.size() > 1 && line.front() == '"' && end_of_value(line) == line.size() && parsed(line).is_string();
    if (is_string) ++strings;
    if (!is_string && !(is_last && strings > 1)) all = false;  // the last one may be truncated
    return all && strings < kLinesSeen;
  });
  return all && strings > 1;
}

std::string_view without_comments(std::string_view text) {
  for (text = after_blanks(text); is_comment(text); text = after_blanks(text)) {
    text.remove_prefix(std::min(text.find('\n'), text.size()));
  }
  return text;
}

/// The cells of one row; nothing if it does not end, or if a quote is inside a cell. Advances `text` past the row.
std::optional<std::vector<std::string>> take_row(std::string_view& text, char separator) {
  std::vector<std::string> cells(1);
  bool in_quotes = false;
  for (std::size_t at = 0; at < text.size(); ++at) {
    const char c = text[at];
    if (c == '"') {
      if (!in_quotes && !cells.back().empty() && text[at - 1] != '"') return std::nullopt;
      in_quotes = !in_quotes;
    } else if (!in_quotes && c == separator) {
      cells.emplace_back();
    } else if (!in_quotes && c == '\n') {
      text.remove_prefix(at + 1);
      return cells;
    } else if (c != '\r') {
      cells.back() += c;
    }
  }
  if (in_quotes) return std::nullopt;
  text = {};
  return cells;
}

/// A header of short names, then rows with as many cells.
bool is_table(std::string_view text, char separator) {
  text = after_blanks(text);
  const auto header = take_row(text, separator);
  if (!header || header->size() < 2) return false;
  for (const std::string& name : *header) {
    const bool is_name = !name.empty() && name.size() <= 32 && std::ranges::all_of(name, [](unsigned char c) {
      return std::isalnum(c) != 0 || c == '_' || c == '-' || c == '.';
    });
    if (!is_name) return false;
  }
  constexpr std::array kColumns = {"id", "label", "title", "body", "question", "answer", "input", "output", "url"};
  const bool is_known = std::ranges::any_of(*header, [&](const std::string& name) {
    return std::ranges::find(kFields, name) != kFields.end() || std::ranges::find(kColumns, name) != kColumns.end();
  });
  std::size_t rows = 0;
  while (!text.empty() && rows < kLinesSeen) {
    const std::string_view before = text;
    const auto row = take_row(text, separator);
    if (row && row->size() == 1 && row->front().empty()) continue;
    if (!row || row->size() != header->size()) return rows > 0 && before.find('\n') == before.npos;  // truncated
    ++rows;
  }
  return rows >= (is_known ? 1U : 3U);
}

}  // namespace

std::optional<RecordSigns> records_in(std::string_view head) {
  std::string_view text = without_comments(without_utf8_mark(head));
  if (text.starts_with('\x1e') && (after_blanks(text.substr(1)).starts_with('{'))) {
    return RecordSigns{.what = "a sequence of JSON records (RFC 7464)", .command = "tr -d '\\036' < {} > data.jsonl"};
  }
  const RecordSigns json_lines{.what = "JSON lines", .is_json_lines = true};
  if (text.starts_with('{') || text.starts_with('[')) {
    const bool is_list = text.starts_with('[');
    const std::size_t end = end_of_value(text);
    if (end == std::string_view::npos) {  // longer than the part that is seen, or broken
      const std::string_view inside = after_blanks(text.substr(1));
      const bool is_whole = head.size() < kRecordProbe;
      const bool has_field = names_a_field(text.substr(0, 4096));
      if (is_list && inside.starts_with('{') && (has_field || !is_whole)) {
        return RecordSigns{.what = "a list of records in JSON", .command = "jq -c '.[]' {} > data.jsonl"};
      }
      if (!is_list && inside.starts_with('"') && !is_whole) {
        return has_field ? json_lines : RecordSigns{.what = "a JSON value of more than 16 MiB"};
      }
      const bool is_line = text.find('\n') == std::string_view::npos;
      if (!is_list && inside.starts_with('"') && has_field && is_line) return json_lines;
    } else if (const json value = parsed(text.substr(0, end)); !value.is_discarded()) {
      std::string_view rest = text.substr(end);
      const bool ends_line = without_blanks(rest.substr(0, rest.find('\n'))).find_first_not_of(',') == rest.npos;
      rest = after_blanks(rest);
      if (rest.starts_with(',')) rest = after_blanks(rest.substr(1));
      const bool spans_lines = text.substr(0, end).find('\n') != std::string_view::npos;
      if (is_list) {
        if (is_list_of_records(value)) {
          return RecordSigns{.what = "a list of records in JSON", .command = "jq -c '.[]' {} > data.jsonl"};
        }
        if (!value.empty() && ends_line && rest.starts_with('[') &&
            parsed(rest.substr(0, end_of_value(rest))).is_array()) {
          return RecordSigns{.what = "lists in JSON, one after the other",
                             .command = "jq -c '{{text: .[0]}}' {} > data.jsonl"};
        }
        if (rest.empty()) return std::nullopt;
      } else if (rest.starts_with('{')) {
        if (!spans_lines) return json_lines;
        return RecordSigns{.what = "records in JSON, one after the other", .command = "jq -c . {} > data.jsonl"};
      } else if (rest.empty()) {
        if (auto signs = signs_of(value, spans_lines)) return signs;
        if (!spans_lines && names_a_field(text.substr(0, 4096))) return json_lines;
        return std::nullopt;
      } else if (!spans_lines && ends_line && names_a_field(text.substr(0, end))) {
        return json_lines;
      }
    }
  }
  if (are_mostly_records(head)) return json_lines;
  return std::nullopt;
}

std::optional<RecordSigns> data_in(std::string_view head) {
  if (auto records = records_in(head)) return records;
  const std::string_view text = without_utf8_mark(head);
  if (are_lines_of_strings(text)) {
    return RecordSigns{.what = "strings in JSON, one a line", .command = "jq -c '{{text: .}}' {} > data.jsonl"};
  }
  for (const char separator : {',', '\t'}) {
    if (is_table(text, separator)) return RecordSigns{.what = "a table", .separator = separator};
  }
  return std::nullopt;
}

}  // namespace phalanx::data
