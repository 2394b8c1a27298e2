#include "phalanx/data/jinja/python_text.h"

#include <fmt/format.h>
#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "phalanx/base/utf8.h"

namespace phalanx::jinja {
namespace {

std::size_t width_at(std::string_view text, std::size_t at) {
  const auto lead = static_cast<unsigned char>(text[at]);
  const std::size_t width = lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  return std::min(width, text.size() - at);
}

std::uint32_t code_point_of(std::string_view character) { return first_char(character).code_point; }

bool is_printable(std::uint32_t code_point) {
  if (code_point == ' ') return true;
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(code_point))) {
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
    case UTF8PROC_CATEGORY_ZS:
      return false;
    default:
      return true;
  }
}

std::string escaped_code_point(std::uint32_t code_point) {
  if (code_point <= 0xFF) return fmt::format("\\x{:02x}", code_point);
  return code_point <= 0xFFFF ? fmt::format("\\u{:04x}", code_point) : fmt::format("\\U{:08x}", code_point);
}

std::string repr_of_text(std::string_view text) {
  const bool has_single = text.find('\'') != std::string_view::npos,
             has_double = text.find('"') != std::string_view::npos;
  const char quote = has_single && !has_double ? '"' : '\'';
  std::string out(1, quote);
  for (const std::string_view character : characters_of(text)) {
    const char c = character.front();
    if (c == quote || c == '\\') {
      out += {'\\', c};
    } else if (c == '\n' || c == '\r' || c == '\t') {
      out += c == '\n' ? "\\n" : c == '\r' ? "\\r" : "\\t";
    } else if (is_printable(code_point_of(character))) {
      out += character;
    } else {
      out += escaped_code_point(code_point_of(character));
    }
  }
  return out + quote;
}

std::string repr_of_items(const std::vector<Value>& items) {
  std::string out;
  for (const Value& item : items) out += (out.empty() ? "" : ", ") + repr(item);
  return out;
}

std::string repr_of_list(const List& list) {
  const std::string items =
      list.kind == ListKind::range || list.kind == ListKind::iterator ? "" : repr_of_items(list.items);
  switch (list.kind) {
    case ListKind::list:
      return "[" + items + "]";
    case ListKind::tuple:
      return "(" + items + (list.items.size() == 1 ? ",)" : ")");
    case ListKind::view:
      return list.view_of + "([" + items + "])";
    case ListKind::range:
      throw EvaluationError("a range has no text of its own: put it through the filter list");
    case ListKind::iterator:
      break;
  }
  throw EvaluationError("what this filter gives has no text of its own: put it through the filter list");
}

std::string repr_of_dict(const Dict& dict) {
  std::string out;
  for (const auto& [key, value] : dict.entries()) out += (out.empty() ? "" : ", ") + repr(key) + ": " + repr(value);
  return "{" + out + "}";
}

void append_json_escape(std::uint32_t unit, std::string& out) { out += fmt::format("\\u{:04x}", unit); }

void append_json_character(std::string_view character, bool ensure_ascii, std::string& out) {
  constexpr std::string_view kPlain = "\"\\\n\r\t\b\f", kNames = "\"\\nrtbf";
  const auto c = static_cast<unsigned char>(character.front());
  if (const auto at = kPlain.find(character.front()); at != std::string_view::npos) {
    out += {'\\', kNames[at]};
  } else if (c < 0x20 || (ensure_ascii && c == 0x7F)) {
    append_json_escape(c, out);
  } else if (c < 0x80 || !ensure_ascii) {
    out += character;
  } else if (const std::uint32_t point = code_point_of(character); point <= 0xFFFF) {
    append_json_escape(point, out);
  } else {
    append_json_escape(0xD800 + ((point - 0x10000) >> 10), out);
    append_json_escape(0xDC00 + ((point - 0x10000) & 0x3FF), out);
  }
}

std::string json_text(std::string_view text, bool ensure_ascii) {
  std::string out = "\"";
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t width = width_at(text, at);
    append_json_character(text.substr(at, width), ensure_ascii, out);
    at += width;
  }
  return out + '"';
}

std::string json_number(const Value& value) {
  if (value.is_none()) return "null";
  if (value.is_bool()) return value.truth() ? "true" : "false";
  if (value.is_integer()) return fmt::format("{}", value.integer());
  const double real = value.real();
  if (std::isnan(real)) return "NaN";
  if (std::isinf(real)) return real > 0 ? "Infinity" : "-Infinity";
  return float_text(real);
}

class JsonWriter {
 public:
  explicit JsonWriter(const JsonStyle& style) : style_(style) {}
  std::string text() && { return std::move(out_); }

  void write(const Value& value) {
    if (value.is_text()) {
      out_ += json_text(value.text(), style_.ensure_ascii);
    } else if (value.is_list(ListKind::list) || value.is_list(ListKind::tuple)) {
      write_list(value.list().items);
    } else if (value.is_dict()) {
      write_dict(value.dict());
    } else if (value.is_none() || value.is_number()) {
      out_ += json_number(value);
    } else {
      throw EvaluationError(fmt::format("Object of type {} is not JSON serializable", value.type_name()));
    }
  }

 private:
  void begin_item(bool is_first) {
    if (!is_first) out_ += style_.item_separator;
    new_line();
  }
  void new_line() {
    if (!style_.indent) return;
    out_ += '\n';
    for (int i = 0; i < level_; ++i) out_ += *style_.indent;
  }
  void write_list(const std::vector<Value>& items) {
    if (items.empty()) {
      out_ += "[]";
      return;
    }
    out_ += '[';
    ++level_;
    for (std::size_t i = 0; i < items.size(); ++i) {
      begin_item(i == 0);
      write(items[i]);
    }
    --level_;
    new_line();
    out_ += ']';
  }
  void write_dict(const Dict& dict) {
    if (dict.entries().empty()) {
      out_ += "{}";
      return;
    }
    std::vector<const Dict::Entry*> entries;
    for (const auto& entry : dict.entries()) entries.push_back(&entry);
    if (style_.sort_keys) sort(entries);
    out_ += '{';
    ++level_;
    for (const auto* entry : entries) {
      begin_item(entry == entries.front());
      const Value& key = entry->key;
      out_ += json_text(key.is_text() ? key.text() : json_number(key), style_.ensure_ascii) + style_.key_separator;
      write(entry->value);
    }
    --level_;
    new_line();
    out_ += '}';
  }
  static void sort(std::vector<const Dict::Entry*>& entries) {
    if (!std::ranges::all_of(entries, [](const auto* entry) { return entry->key.is_text(); })) {
      throw EvaluationError("sort_keys: a key is no text");
    }
    std::ranges::stable_sort(entries, {}, [](const auto* entry) -> const std::string& { return entry->key.text(); });
  }

  const JsonStyle& style_;
  std::string out_;
  int level_ = 0;
};

template <class Map>
std::string mapped(std::string_view text, const Map& map) {
  std::string out;
  for (const std::string_view character : characters_of(text)) {
    append_utf8(static_cast<std::uint32_t>(map(static_cast<utf8proc_int32_t>(code_point_of(character)))), out);
  }
  return out;
}

struct Span {
  std::size_t begin = 0, end = 0;
};

std::vector<Span> words_of(std::string_view text) {
  std::vector<Span> words;
  bool is_inside = false;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t width = width_at(text, at);
    const bool is_space = is_python_space(code_point_of(text.substr(at, width)));
    if (!is_space && !is_inside) words.push_back({at, at});
    at += width;
    if (!is_space) words.back().end = at;
    is_inside = !is_space;
  }
  return words;
}

bool is_letter(std::string_view character) {
  const auto category = utf8proc_category(static_cast<utf8proc_int32_t>(code_point_of(character)));
  return category == UTF8PROC_CATEGORY_LU || category == UTF8PROC_CATEGORY_LL || category == UTF8PROC_CATEGORY_LT;
}

constexpr std::uint32_t kCapitalDottedI = 0x130, kCapitalSigma = 0x3A3;

/// Letters whose capital form is several letters: the common ones of Unicode's SpecialCasing.
std::string_view special_upper(std::uint32_t code_point) {
  switch (code_point) {
    case 0x00DF:
      return "SS";
    case 0x0149:
      return "\u02BCN";
    case 0x01F0:
      return "J\u030C";
    case 0x0587:
      return "\u0535\u0552";
    case 0xFB00:
      return "FF";
    case 0xFB01:
      return "FI";
    case 0xFB02:
      return "FL";
    case 0xFB03:
      return "FFI";
    case 0xFB04:
      return "FFL";
    case 0xFB05:
    case 0xFB06:
      return "ST";
    default:
      return "";
  }
}

}  // namespace

std::string float_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  constexpr int kMostDigits = 16;
  std::array<char, 64> buffer{};
  const auto end =
      std::to_chars(buffer.data(), buffer.data() + buffer.size(), value, std::chars_format::scientific).ptr;
  const std::string_view scientific(buffer.data(), static_cast<std::size_t>(end - buffer.data()));
  const int exponent = std::atoi(std::string(scientific.substr(scientific.find('e') + 1)).c_str());
  if (exponent < -4 || exponent >= kMostDigits) return std::string(scientific);
  const auto fixed = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value, std::chars_format::fixed).ptr;
  std::string text(buffer.data(), static_cast<std::size_t>(fixed - buffer.data()));
  return text.find('.') == std::string::npos ? text + ".0" : text;
}

std::string repr(const Value& value) { return value.is_text() ? repr_of_text(value.text()) : str(value); }

std::string str(const Value& value) {
  if (value.is_text()) return value.text();
  if (value.is_undefined()) return "";
  if (value.is_none()) return "None";
  if (value.is_bool()) return value.truth() ? "True" : "False";
  if (value.is_integer()) return fmt::format("{}", value.integer());
  if (value.is_float()) return float_text(value.real());
  if (value.is_list()) return repr_of_list(value.list());
  if (value.is_dict()) return repr_of_dict(value.dict());
  throw EvaluationError(fmt::format("a value of type '{}' has no text of its own", value.type_name()));
}

std::string to_json(const Value& value, const JsonStyle& style) {
  JsonWriter writer(style);
  writer.write(value);
  return std::move(writer).text();
}

std::vector<std::string_view> characters_of(std::string_view text) {
  std::vector<std::string_view> characters;
  characters.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t width = width_at(text, at);
    characters.push_back(text.substr(at, width));
    at += width;
  }
  return characters;
}

std::int64_t code_points(std::string_view text) {
  return std::ranges::count_if(text, [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}

bool is_python_space(std::uint32_t c) {
  return (c >= 9 && c <= 13) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

std::size_t find(std::string_view text, std::string_view part, std::size_t from) {
  if (from > text.size() || part.size() > text.size() - from) return std::string_view::npos;
  if (part.empty()) return from;
  const void* found = memmem(text.data() + from, text.size() - from, part.data(), part.size());
  if (found == nullptr) return std::string_view::npos;
  return static_cast<std::size_t>(static_cast<const char*>(found) - text.data());
}

std::string_view strip(std::string_view text, std::optional<std::string_view> set, Sides sides) {
  auto wanted = set ? characters_of(*set) : std::vector<std::string_view>();
  std::ranges::sort(wanted);
  const auto goes = [&](std::string_view character) {
    if (!set) return is_python_space(code_point_of(character));
    return std::ranges::binary_search(wanted, character);
  };
  while (sides.left && !text.empty()) {
    const std::size_t width = width_at(text, 0);
    if (!goes(text.substr(0, width))) break;
    text.remove_prefix(width);
  }
  while (sides.right && !text.empty()) {
    std::size_t start = text.size() - 1;
    while (start > 0 && (static_cast<unsigned char>(text[start]) & 0xC0) == 0x80) --start;
    if (!goes(text.substr(start))) break;
    text.remove_suffix(text.size() - start);
  }
  return text;
}

std::vector<std::string> split_at_spaces(std::string_view text, std::int64_t limit, bool from_right) {
  const std::vector<Span> words = words_of(text);
  const std::size_t most = limit < 0 ? words.size() : std::min(static_cast<std::size_t>(limit), words.size());
  const std::size_t rest = words.size() - most;  // words that stay together
  std::vector<std::string> parts;
  if (rest > 0 && from_right) parts.emplace_back(text.substr(0, words[rest - 1].end));
  for (std::size_t i = 0; i < most; ++i) {
    const Span& word = words[from_right ? rest + i : i];
    parts.emplace_back(text.substr(word.begin, word.end - word.begin));
  }
  if (rest > 0 && !from_right) parts.emplace_back(text.substr(words[most].begin));
  return parts;
}

std::vector<std::string> split_at(std::string_view text, std::string_view separator, std::int64_t limit,
                                  bool from_right) {
  if (from_right) {
    const std::string text_back(text.rbegin(), text.rend()), separator_back(separator.rbegin(), separator.rend());
    auto parts = split_at(text_back, separator_back, limit, false);
    std::ranges::reverse(parts);
    for (std::string& part : parts) std::ranges::reverse(part);
    return parts;
  }
  std::vector<std::string> parts;
  while (limit < 0 || static_cast<std::int64_t>(parts.size()) < limit) {
    const std::size_t found = find(text, separator);
    if (found == std::string_view::npos) break;
    parts.emplace_back(text.substr(0, found));
    text.remove_prefix(found + separator.size());
  }
  parts.emplace_back(text);
  return parts;
}

std::vector<std::string> split_lines(std::string_view text, bool keep_ends) {
  const auto ends_line = [](std::uint32_t c) {
    return (c >= 10 && c <= 13) || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 || c == 0x2029;
  };
  std::vector<std::string> lines;
  for (std::size_t start = 0, at = 0; at < text.size();) {
    const std::size_t width = width_at(text, at);
    const bool is_end = ends_line(code_point_of(text.substr(at, width)));
    const std::size_t end = at;
    at += width;
    if (is_end && text[end] == '\r' && at < text.size() && text[at] == '\n') ++at;
    if (!is_end && at < text.size()) continue;
    lines.emplace_back(text.substr(start, (is_end && !keep_ends ? end : at) - start));
    start = at;
  }
  return lines;
}

std::string replace(std::string_view text, std::string_view old, std::string_view by, std::int64_t limit) {
  std::string out;
  std::int64_t done = 0;
  const auto may_go_on = [&] { return limit < 0 || done < limit; };
  if (old.empty()) {
    for (const std::string_view character : characters_of(text)) {
      if (may_go_on()) out += by;
      ++done;
      out += character;
    }
    return may_go_on() ? out.append(by) : out;
  }
  for (; may_go_on(); ++done) {
    const std::size_t found = find(text, old);
    if (found == std::string_view::npos) break;
    out.append(text.substr(0, found)).append(by);
    text.remove_prefix(found + old.size());
  }
  return out.append(text);
}

std::string lower(std::string_view text) {
  const auto characters = characters_of(text);
  std::string out;
  for (std::size_t i = 0; i < characters.size(); ++i) {
    const std::uint32_t c = code_point_of(characters[i]);
    if (c == kCapitalDottedI) {
      out += "i\u0307";
    } else if (c == kCapitalSigma) {
      const bool ends_word =
          i > 0 && is_letter(characters[i - 1]) && (i + 1 == characters.size() || !is_letter(characters[i + 1]));
      out += ends_word ? "\u03C2" : "\u03C3";
    } else {
      out += mapped(characters[i], utf8proc_tolower);
    }
  }
  return out;
}

std::string upper(std::string_view text) {
  std::string out;
  for (const std::string_view character : characters_of(text)) {
    const std::string_view special = special_upper(code_point_of(character));
    out += special.empty() ? mapped(character, utf8proc_toupper) : std::string(special);
  }
  return out;
}

std::string capitalize(std::string_view text) {
  if (text.empty()) return "";
  const std::size_t width = width_at(text, 0);
  return mapped(text.substr(0, width), utf8proc_totitle) + lower(text.substr(width));
}

std::string title(std::string_view text) {
  std::string out;
  bool is_inside = false;
  for (const std::string_view character : characters_of(text)) {
    out += is_inside ? lower(character) : mapped(character, utf8proc_totitle);
    is_inside = is_letter(character);
  }
  return out;
}

std::string title_of_words(std::string_view text) {
  std::string out, word;
  const auto end_word = [&] {
    if (word.empty()) return;
    const std::size_t width = width_at(word, 0);
    out += upper(std::string_view(word).substr(0, width)) + lower(std::string_view(word).substr(width));
    word.clear();
  };
  for (const std::string_view character : characters_of(text)) {
    const bool is_between = is_python_space(code_point_of(character)) ||
                            std::string_view("-({[<").find(character) != std::string_view::npos;
    if (!is_between) {
      word += character;
      continue;
    }
    end_word();
    out += character;
  }
  end_word();
  return out;
}

std::int64_t count_words(std::string_view text) {
  const auto is_part = [](std::string_view character) {
    const auto category = utf8proc_category(static_cast<utf8proc_int32_t>(code_point_of(character)));
    return character == "_" || (category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO) ||
           (category >= UTF8PROC_CATEGORY_ND && category <= UTF8PROC_CATEGORY_NO);
  };
  std::int64_t words = 0;
  bool is_inside = false;
  for (const std::string_view character : characters_of(text)) {
    const bool is_word = is_part(character);
    words += is_word && !is_inside;
    is_inside = is_word;
  }
  return words;
}

std::string escape_html(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '\'':
        out += "&#39;";
        break;
      case '"':
        out += "&#34;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

}  // namespace phalanx::jinja
