#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>

#include "phalanx/data/jinja/functions.h"
#include "phalanx/data/jinja/operators.h"
#include "phalanx/data/jinja/python_text.h"
#include "phalanx/data/jinja/run.h"

namespace phalanx::jinja {
namespace {

Value like(const Value& input, std::string text) { return {std::move(text), input.is_markup()}; }

JsonStyle json_style(const Arguments& arguments) {
  constexpr std::int64_t kDeepestIndent = 32;
  const Bound bound("tojson", arguments, {"ensure_ascii", "indent", "separators", "sort_keys"});
  JsonStyle style{.ensure_ascii = bound.flag(0), .sort_keys = bound.flag(3)};
  if (!bound.is_none_or_missing(1)) {
    const Value& indent = bound.at(1);
    if (!indent.is_text() && bound.integer(1) > kDeepestIndent) {
      throw EvaluationError(fmt::format("tojson: an indent of more than {}", kDeepestIndent));
    }
    style.indent = indent.is_text()
                       ? indent.text()
                       : std::string(static_cast<std::size_t>(std::max<std::int64_t>(bound.integer(1), 0)), ' ');
    if (style.indent->size() > kDeepestIndent)
      throw EvaluationError(fmt::format("tojson: an indent of more than {}", kDeepestIndent));
    style.item_separator = ",";
  }
  if (!bound.is_none_or_missing(2)) {
    const auto separators = bound.at(2).iterate();
    if (separators.size() != 2 || !separators[0].is_text() || !separators[1].is_text()) {
      throw EvaluationError("tojson: separators are two texts");
    }
    style.item_separator = separators[0].text();
    style.key_separator = separators[1].text();
  }
  return style;
}

Value tojson(Run& run, const Value& input, const Arguments& arguments) {
  const JsonStyle style = json_style(arguments);
  const std::size_t per_value = style.item_separator.size() + style.key_separator.size() +
                                (style.indent ? style.indent->size() * static_cast<std::size_t>(input.depth()) : 0);
  run.charge(static_cast<std::size_t>(input.weight()) / 48 * per_value);
  return Value(to_json(input, style));
}

Value trim(Run&, const Value& input, const Arguments& arguments) {
  const Bound bound("trim", arguments, {"chars"});
  const std::string text = str(input);
  if (bound.is_none_or_missing(0)) return like(input, std::string(strip(text)));
  const std::string set = bound.text(0);
  return like(input, std::string(strip(text, set)));
}

Value replace_filter(Run& run, const Value& input, const Arguments& arguments) {
  const Bound bound("replace", arguments, {"old", "new", "count"});
  const std::string text = str(input), old = str(bound.at(0)), by = str(bound.at(1));
  run.charge((text.size() / std::max<std::size_t>(old.size(), 1) + 1) * by.size());
  return Value(replace(text, old, by, bound.integer_or(2, -1)));
}

Value indent(Run& run, const Value& input, const Arguments& arguments) {
  const Bound bound("indent", arguments, {"width", "first", "blank"});
  constexpr std::int64_t kWidest = 1000;
  const Value width = bound.at_or(0, 4);
  if (!width.is_text() && bound.integer_or(0, 4) > kWidest)
    throw EvaluationError(fmt::format("indent: wider than {}", kWidest));
  const std::string by =
      width.is_text() ? width.text()
                      : std::string(static_cast<std::size_t>(std::max<std::int64_t>(bound.integer_or(0, 4), 0)), ' ');
  // Jinja adds a newline before it cuts the text into lines, so that an empty last line stays.
  const auto lines = split_lines(str(input) + "\n", false);
  run.charge(lines.size() * by.size());
  std::string made = bound.flag(1) ? by : "";
  for (std::size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) made += "\n" + (lines[i].empty() && !bound.flag(2) ? "" : by);
    made += lines[i];
  }
  return like(input, std::move(made));
}

Value truncate(Run&, const Value& input, const Arguments& arguments) {
  const Bound bound("truncate", arguments, {"length", "killwords", "end", "leeway"});
  const std::int64_t length = bound.integer_or(0, 255), leeway = bound.integer_or(3, 5);
  const std::string text = str(input), end = bound.has(2) ? bound.text(2) : "...";
  if (length < code_points(end)) throw EvaluationError("truncate: the length is smaller than that of the end");
  if (code_points(text) <= length + leeway) return like(input, text);
  const std::string kept = slice_of(Value(text), std::nullopt, length - code_points(end), 1).text();
  return like(input, (bound.flag(1) ? kept : split_at(kept, " ", 1, true).front()) + end);
}

Value center(Run& run, const Value& input, const Arguments& arguments) {
  const Bound bound("center", arguments, {"width"});
  return call_value(run, *method_of(Value(str(input)), "center"),
                    {.positional = {bound.integer_or(0, 80)}, .named = {}});
}

[[noreturn]] void fail_too_large(std::string_view number) {
  throw EvaluationError(fmt::format("int: {} does not fit the 64 bits of a whole number", number));
}

/// Without single underscores between digits, which may be letters in other bases than ten; nothing where an underscore
/// stands elsewhere.
std::optional<std::string> without_separators(std::string_view text, bool has_letters) {
  std::string digits;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto is_digit = [&](std::size_t at) {
      if (at >= text.size()) return false;
      const auto c = static_cast<unsigned char>(text[at]);
      return has_letters ? std::isalnum(c) != 0 : std::isdigit(c) != 0;
    };
    if (text[i] != '_') {
      digits += text[i];
    } else if (i == 0 || !is_digit(i - 1) || !is_digit(i + 1)) {
      return std::nullopt;
    }
  }
  return digits;
}

/// int() of Python: a whole number with white space around it, underscores between its digits and, in the bases 2, 8
/// and 16, a prefix such as 0x; or nothing. Throws EvaluationError for a number of more than 64 bits.
std::optional<std::int64_t> whole_in(std::string_view text, int base) {
  text = strip(text);
  const bool is_negative = text.starts_with('-');
  if (is_negative || text.starts_with('+')) text.remove_prefix(1);
  const std::string_view prefixes = base == 16 ? "xX" : base == 8 ? "oO" : base == 2 ? "bB" : "";
  if (text.size() > 2 && text.front() == '0' && prefixes.find(text[1]) != std::string_view::npos) {
    text.remove_prefix(text[2] == '_' ? 3 : 2);
  }
  const auto digits = without_separators(text, base > 10);
  if (!digits || digits->empty() || digits->front() == '-') return std::nullopt;
  std::int64_t value = 0;
  const auto read = std::from_chars(digits->data(), digits->data() + digits->size(), value, base);
  if (read.ptr != digits->data() + digits->size()) return std::nullopt;
  if (read.ec == std::errc::result_out_of_range) fail_too_large(text);
  if (read.ec != std::errc()) return std::nullopt;
  return is_negative ? -value : value;
}

std::optional<double> real_in(std::string_view text) {
  text = strip(text);
  if (text.starts_with('+')) text.remove_prefix(1);
  const auto digits = without_separators(text, /*has_letters=*/false);
  if (!digits || digits->empty()) return std::nullopt;
  double value = 0;
  const auto read = std::from_chars(digits->data(), digits->data() + digits->size(), value);
  if (read.ptr != digits->data() + digits->size()) return std::nullopt;
  if (read.ec == std::errc::result_out_of_range) throw EvaluationError(fmt::format("float: {} does not fit", text));
  if (read.ec != std::errc()) return std::nullopt;
  return value;
}

/// Nothing for what is not finite.
std::optional<std::int64_t> truncated(double value) {
  if (!std::isfinite(value)) return std::nullopt;
  if (std::abs(value) >= 9.2e18) fail_too_large(fmt::format("{}", value));
  return static_cast<std::int64_t>(value);
}

Value to_int(Run&, const Value& input, const Arguments& arguments) {
  const Bound bound("int", arguments, {"default", "base"});
  const Value otherwise = bound.at_or(0, 0);
  const std::int64_t base = bound.integer_or(1, 10);
  if (base < 2 || base > 36) throw EvaluationError("int: the base is outside of 2 to 36");
  if (input.is_undefined()) fail_undefined(input);
  if (input.is_integer() || input.is_bool()) return input.integer();
  std::optional<std::int64_t> value;
  if (input.is_float()) value = truncated(input.real());
  if (input.is_text()) {
    value = whole_in(input.text(), static_cast<int>(base));
    if (const auto real = value ? std::nullopt : real_in(input.text())) value = truncated(*real);
  }
  return value ? Value(*value) : otherwise;
}

Value to_float(Run&, const Value& input, const Arguments& arguments) {
  const Bound bound("float", arguments, {"default"});
  if (input.is_undefined()) fail_undefined(input);
  if (input.is_number()) return input.real();
  const auto value = input.is_text() ? real_in(input.text()) : std::nullopt;
  return value ? Value(*value) : bound.at_or(0, 0.0);
}

Value absolute(Run&, const Value& input, const Arguments&) {
  if (!input.is_number()) throw EvaluationError(fmt::format("bad operand type for abs(): '{}'", input.type_name()));
  if (input.is_float()) return std::abs(input.real());
  return input.integer() < 0 ? negative(input) : Value(input.integer());
}

Value round_filter(Run&, const Value& input, const Arguments& arguments) {
  const Bound bound("round", arguments, {"precision", "method"});
  const std::string method = bound.has(1) ? bound.text(1) : "common";
  const std::int64_t precision = bound.integer_or(0, 0);
  if (!input.is_number()) throw EvaluationError(fmt::format("round: '{}' is no number", input.type_name()));
  if (precision < 0 || precision > 15) throw EvaluationError("round: the precision is outside of 0 to 15");
  if (method == "common") {
    if (!input.is_float()) return input.integer();
    // The decimal digits of the exact value, half to even, as Python rounds.
    const std::string digits = fmt::format("{:.{}f}", input.real(), static_cast<int>(precision));
    return real_in(digits).value_or(input.real());
  }
  if (method != "ceil" && method != "floor") throw EvaluationError("round: method must be common, ceil or floor");
  const double scale = std::pow(10.0, static_cast<double>(precision));
  const double scaled = input.real() * scale;
  return (method == "ceil" ? std::ceil(scaled) : std::floor(scaled)) / scale;
}

std::string percent_encoded(const std::string& text, std::string_view safe) {
  std::string made;
  for (const char c : text) {
    const bool is_plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                          std::string_view("_.-~").find(c) != std::string_view::npos ||
                          safe.find(c) != std::string_view::npos;
    made += is_plain ? std::string(1, c) : fmt::format("%{:02X}", static_cast<unsigned char>(c));
  }
  return made;
}

Value urlencode(Run&, const Value& input, const Arguments& arguments) {
  const Bound bound("urlencode", arguments, {});
  if (!input.is_dict() && (input.is_text() || !input.is_iterable())) return Value(percent_encoded(str(input), "/"));
  throw EvaluationError("urlencode: a dict or a list is not supported");
}

Value wordcount(Run&, const Value& input, const Arguments&) { return count_words(str(input)); }

Value default_value(Run&, const Value& input, const Arguments& arguments) {
  const Bound bound("default", arguments, {"default_value", "boolean"});
  const bool is_wanting = input.is_undefined() || (bound.flag(1) && !input.truth());
  return is_wanting ? bound.at_or(0, "") : input;
}

Value format_filter(Run&, const Value& input, const Arguments& arguments) {
  if (!arguments.named.empty()) throw EvaluationError("format: named arguments are not supported");
  return like(input, format_text(str(input), Value::list(arguments.positional, ListKind::tuple)));
}

struct TextFilterEntry {
  std::string_view name;
  Filter filter;
};
constexpr auto kFilters = std::to_array<TextFilterEntry>({
    {"abs", absolute},
    {"capitalize", [](Run&, const Value& v, const Arguments&) { return like(v, capitalize(str(v))); }},
    {"center", center},
    {"d", default_value},
    {"default", default_value},
    {"e", [](Run&, const Value& v, const Arguments&) { return v.is_markup() ? v : Value(escape_html(str(v)), true); }},
    {"escape",
     [](Run&, const Value& v, const Arguments&) { return v.is_markup() ? v : Value(escape_html(str(v)), true); }},
    {"float", to_float},
    {"forceescape", [](Run&, const Value& v, const Arguments&) { return Value(escape_html(str(v)), true); }},
    {"format", format_filter},
    {"indent", indent},
    {"int", to_int},
    {"lower", [](Run&, const Value& v, const Arguments&) { return like(v, lower(str(v))); }},
    {"replace", replace_filter},
    {"round", round_filter},
    {"safe", [](Run&, const Value& v, const Arguments&) { return Value(str(v), true); }},
    {"string", [](Run&, const Value& v, const Arguments&) { return v.is_text() ? v : Value(str(v)); }},
    {"title", [](Run&, const Value& v, const Arguments&) { return like(v, title_of_words(str(v))); }},
    {"tojson", tojson},
    {"trim", trim},
    {"truncate", truncate},
    {"upper", [](Run&, const Value& v, const Arguments&) { return like(v, upper(str(v))); }},
    {"urlencode", urlencode},
    {"wordcount", wordcount},
});

/// One %-field: "%5.2f" is {.minus = false, .zero = false, .width = 5, .precision = 2, .type = 'f'}.
struct Field {
  bool minus = false, zero = false;
  int width = 0, precision = -1;
  char type = 's';
};

Field field_at(const std::string& format, std::size_t& at) {
  Field field;
  const auto number = [&] {
    int value = 0;
    for (; at < format.size() && format[at] >= '0' && format[at] <= '9'; ++at)
      value = std::min(value * 10 + (format[at] - '0'), 1001);
    if (value > 1000) throw EvaluationError("format: a width of more than 1000");
    return value;
  };
  for (; at < format.size() && (format[at] == '-' || format[at] == '0'); ++at) {
    (format[at] == '-' ? field.minus : field.zero) = true;
  }
  field.width = number();
  if (at < format.size() && format[at] == '.') {
    ++at;
    field.precision = number();
  }
  if (at >= format.size()) throw EvaluationError("incomplete format");
  field.type = format[at++];
  return field;
}

std::string formatted_value(const Field& field, const Value& value) {
  if (field.type == 's' || field.type == 'r') {
    std::string text = field.type == 's' ? str(value) : repr(value);
    return field.precision < 0 ? text : slice_of(Value(std::move(text)), std::nullopt, field.precision, 1).text();
  }
  if (value.is_undefined()) fail_undefined(value);
  if (!value.is_number())
    throw EvaluationError(fmt::format("%{} format: a real number is required, not {}", field.type, value.type_name()));
  if (field.type == 'd' || field.type == 'i') {
    const auto whole = value.is_float() ? truncated(value.real()) : std::optional(value.integer());
    if (!whole || field.precision >= 0) throw EvaluationError("format: this number is not supported by %d");
    return fmt::format("{}", *whole);
  }
  const int precision = field.precision < 0 ? 6 : field.precision;
  if (field.type == 'f') return fmt::format("{:.{}f}", value.real(), precision);
  if (field.type == 'e') return fmt::format("{:.{}e}", value.real(), precision);
  if (field.type == 'g') return fmt::format("{:.{}g}", value.real(), precision);
  if (field.type == 'x' && !value.is_float()) return fmt::format("{:x}", value.integer());
  throw EvaluationError(fmt::format("unsupported format character '{}'", field.type));
}

std::string padded(const Field& field, std::string text) {
  const auto missing = static_cast<std::int64_t>(field.width) - code_points(text);
  if (missing <= 0) return text;
  const auto count = static_cast<std::size_t>(missing);
  if (field.minus) return text + std::string(count, ' ');
  if (!field.zero || field.type == 's' || field.type == 'r') return std::string(count, ' ') + text;
  return text.insert(text.starts_with('-') ? 1 : 0, count, '0');
}

}  // namespace

std::string format_text(const std::string& format, const Value& arguments) {
  const std::vector<Value> values =
      arguments.is_list(ListKind::tuple) ? arguments.list().items : std::vector<Value>{arguments};
  std::string made;
  std::size_t used = 0;
  for (std::size_t at = 0; at < format.size();) {
    if (format[at] != '%') {
      made += format[at++];
      continue;
    }
    const Field field = field_at(format, ++at);
    if (field.type == '%') {
      made += '%';
      continue;
    }
    if (used == values.size()) throw EvaluationError("not enough arguments for format string");
    made += padded(field, formatted_value(field, values[used++]));
  }
  if (used < values.size()) throw EvaluationError("not all arguments converted during string formatting");
  return made;
}

Filter text_filter(std::string_view name) {
  const auto found = std::ranges::find(kFilters, name, &TextFilterEntry::name);
  return found == kFilters.end() ? nullptr : found->filter;
}

std::vector<std::string> text_filter_names() {
  std::vector<std::string> names;
  for (const TextFilterEntry& filter : kFilters) names.emplace_back(filter.name);
  return names;
}

}  // namespace phalanx::jinja
