// The methods of Python's str, dict and list that templates call. Those that would change a value do not exist, as in
// Jinja's sandbox.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string_view>

#include "phalanx/base/utf8.h"
#include "phalanx/data/jinja/functions.h"
#include "phalanx/data/jinja/operators.h"
#include "phalanx/data/jinja/python_text.h"
#include "phalanx/data/jinja/run.h"

namespace phalanx::jinja {
namespace {

using Methods = std::map<std::string_view, Native>;

Value same_kind(const Value& text, std::string made) { return {std::move(made), text.is_markup()}; }

Value texts(const Value& receiver, const std::vector<std::string>& parts) {
  std::vector<Value> made;
  for (const std::string& part : parts) made.push_back(same_kind(receiver, part));
  return Value::list(std::move(made));
}

Value stripped(const char* name, const Value& text, const Arguments& arguments, Sides sides) {
  const Bound bound(name, arguments, {"chars"});
  if (bound.is_none_or_missing(0)) return same_kind(text, std::string(strip(text.text(), {}, sides)));
  const std::string set = bound.text(0);
  return same_kind(text, std::string(strip(text.text(), set, sides)));
}

Value split(const char* name, const Value& text, const Arguments& arguments, bool from_right) {
  const Bound bound(name, arguments, {"sep", "maxsplit"});
  const std::int64_t limit = bound.integer_or(1, -1);
  if (bound.is_none_or_missing(0)) return texts(text, split_at_spaces(text.text(), limit, from_right));
  const std::string separator = bound.text(0);
  if (separator.empty()) throw EvaluationError("empty separator");
  return texts(text, split_at(text.text(), separator, limit, from_right));
}

Value partition(const char* name, const Value& text, const Arguments& arguments, bool from_right) {
  const std::string separator = Bound(name, arguments, {"sep"}).text(0);
  if (separator.empty()) throw EvaluationError("empty separator");
  auto parts = split_at(text.text(), separator, 1, from_right);
  if (parts.size() == 2) {
    parts.insert(parts.begin() + 1, separator);
  } else {
    parts.insert(from_right ? parts.begin() : parts.end(), 2, "");
  }
  return Value::list(texts(text, parts).list().items, ListKind::tuple);
}

/// The part of a text between two positions in code points.
std::string between(const Value& text, const Bound& bound, std::size_t from) {
  if (!bound.has(from) && !bound.has(from + 1)) return text.text();
  const auto position = [&](std::size_t index) {
    return bound.is_none_or_missing(index) ? std::nullopt : std::optional(bound.integer(index));
  };
  return slice_of(text, position(from), position(from + 1), 1).text();
}

bool has_affix(const char* name, const Value& text, const Arguments& arguments, bool at_start) {
  const Bound bound(name, arguments, {"prefix", "start", "end"});
  const std::string part = between(text, bound, 1);
  const auto matches = [&](const Value& affix) {
    if (!affix.is_text()) throw EvaluationError(fmt::format("{} takes a str or a tuple of str", name));
    return at_start ? part.starts_with(affix.text()) : part.ends_with(affix.text());
  };
  const Value& wanted = bound.at(0);
  if (!wanted.is_list(ListKind::tuple)) return matches(wanted);
  return std::ranges::any_of(wanted.list().items, matches);
}

std::int64_t position_of(const char* name, const Value& text, const Arguments& arguments, bool from_right) {
  const Bound bound(name, arguments, {"sub", "start", "end"});
  if (bound.has(1) || bound.has(2)) throw EvaluationError(fmt::format("{} with a start is not supported", name));
  const auto parts = split_at(
      text.text(), bound.text(0).empty() ? throw EvaluationError("empty text to find") : bound.text(0), 1, from_right);
  return parts.size() == 2 ? code_points(parts.front()) : -1;
}

Value index_or_fail(const char* name, const Value& text, const Arguments& arguments, bool from_right) {
  const std::int64_t position = position_of(name, text, arguments, from_right);
  if (position < 0) throw EvaluationError("substring not found");
  return position;
}

Value padded(Run& run, const char* name, const Value& text, const Arguments& arguments, double share_left) {
  const Bound bound(name, arguments, {"width", "fillchar"});
  const std::string fill = bound.has(1) ? bound.text(1) : " ";
  if (code_points(fill) != 1) throw EvaluationError("The fill character must be exactly one character long");
  const std::int64_t missing = std::max<std::int64_t>(bound.integer(0) - code_points(text.text()), 0);
  run.charge(static_cast<std::size_t>(missing) * fill.size());
  const std::int64_t width = bound.integer(0);
  // str.center() puts the odd one to the left if the width is odd.
  const std::int64_t left = share_left == 0.5 ? missing / 2 + (missing & width & 1) : share_left == 0 ? 0 : missing;
  std::string made;
  for (std::int64_t i = 0; i < left; ++i) made += fill;
  made += text.text();
  for (std::int64_t i = left; i < missing; ++i) made += fill;
  return same_kind(text, std::move(made));
}

template <class Is>
bool all_characters(const Value& text, const Is& is) {
  const auto characters = characters_of(text.text());
  return !characters.empty() && std::ranges::all_of(characters, is);
}

bool is_ascii_digit(std::string_view c) { return c.size() == 1 && c[0] >= '0' && c[0] <= '9'; }
bool is_ascii_letter(std::string_view c) {
  return c.size() == 1 && ((c[0] >= 'a' && c[0] <= 'z') || (c[0] >= 'A' && c[0] <= 'Z'));
}
void require_ascii(const char* name, const Value& text) {
  if (std::ranges::any_of(text.text(), [](char c) { return static_cast<unsigned char>(c) >= 0x80; })) {
    throw EvaluationError(fmt::format("{} of text outside of ASCII is not supported", name));
  }
}

Value joined(Run& run, const Value& separator, const Arguments& arguments) {
  const auto items = Bound("join", arguments, {"iterable"}).at(0).iterate();
  run.charge(separator.text().size() * items.size());
  std::string made;
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (!items[i].is_text()) {
      throw EvaluationError(fmt::format("sequence item {}: expected str instance, {} found", i, items[i].type_name()));
    }
    if (i > 0) made += separator.text();
    made += items[i].text();
  }
  return same_kind(separator, std::move(made));
}

Value replaced(Run& run, const Value& text, const Arguments& arguments) {
  const Bound bound("replace", arguments, {"old", "new", "count"});
  const std::string old = bound.text(0), by = bound.text(1);
  run.charge(text.text().size() / std::max<std::size_t>(old.size(), 1) * by.size());
  return same_kind(text, replace(text.text(), old, by, bound.integer_or(2, -1)));
}

Value without_prefix(const Value& text, const Arguments& arguments) {
  const std::string prefix = Bound("removeprefix", arguments, {"prefix"}).text(0);
  return same_kind(text, text.text().starts_with(prefix) ? text.text().substr(prefix.size()) : text.text());
}

Value without_suffix(const Value& text, const Arguments& arguments) {
  const std::string suffix = Bound("removesuffix", arguments, {"suffix"}).text(0);
  const std::size_t rest = text.text().size() - std::min(suffix.size(), text.text().size());
  return same_kind(text, text.text().ends_with(suffix) ? text.text().substr(0, rest) : text.text());
}

std::int64_t count_in_text(const Value& text, const Arguments& arguments) {
  const std::string part = Bound("count", arguments, {"sub"}).text(0);
  if (part.empty()) return code_points(text.text()) + 1;
  return static_cast<std::int64_t>(split_at(text.text(), part, -1, false).size()) - 1;
}

/// str.format() with {}, {0} and {name}, without format specifications.
Value formatted(const Value& text, const Arguments& arguments) {
  const std::string& format = text.text();
  std::string made;
  std::size_t next = 0;
  for (std::size_t at = 0; at < format.size(); ++at) {
    if (format[at] != '{' && format[at] != '}') {
      made += format[at];
      continue;
    }
    if (at + 1 < format.size() && format[at + 1] == format[at]) {
      made += format[at++];
      continue;
    }
    const std::size_t end = format.find('}', at);
    if (format[at] == '}' || end == std::string::npos) throw EvaluationError("format: a single brace");
    const std::string field = format.substr(at + 1, end - at - 1);
    if (field.find_first_of("!:.[") != std::string::npos) {
      throw EvaluationError(fmt::format("format: the field {{{}}} is not supported", field));
    }
    const auto named = std::ranges::find(arguments.named, field, &std::pair<std::string, Value>::first);
    const bool is_number =
        !field.empty() && field.size() < 6 && std::ranges::all_of(field, [](char c) { return c >= '0' && c <= '9'; });
    const std::size_t index = field.empty() ? next++ : is_number ? std::stoul(field) : arguments.positional.size();
    if (named == arguments.named.end() && index >= arguments.positional.size()) {
      throw EvaluationError(fmt::format("format: no argument for {{{}}}", field));
    }
    made += str(named != arguments.named.end() ? named->second : arguments.positional[index]);
    at = end;
  }
  return same_kind(text, std::move(made));
}

void no_arguments(const char* name, const Arguments& arguments) { Bound(name, arguments, {}); }

const Methods& text_methods() {
  static const Methods kMethods = {
      {"capitalize",
       [](Run&, const Value& s, const Arguments& a) {
         no_arguments("capitalize", a);
         return same_kind(s, capitalize(s.text()));
       }},
      {"casefold",
       [](Run&, const Value& s, const Arguments& a) {
         no_arguments("casefold", a);
         require_ascii("casefold", s);
         return same_kind(s, lower(s.text()));
       }},
      {"center", [](Run& run, const Value& s, const Arguments& a) { return padded(run, "center", s, a, 0.5); }},
      {"count", [](Run&, const Value& s, const Arguments& a) { return Value(count_in_text(s, a)); }},
      {"encode", nullptr},
      {"endswith", [](Run&, const Value& s, const Arguments& a) { return Value(has_affix("endswith", s, a, false)); }},
      {"expandtabs", nullptr},
      {"find", [](Run&, const Value& s, const Arguments& a) { return Value(position_of("find", s, a, false)); }},
      {"format", [](Run&, const Value& s, const Arguments& a) { return formatted(s, a); }},
      {"format_map", nullptr},
      {"index", [](Run&, const Value& s, const Arguments& a) { return index_or_fail("index", s, a, false); }},
      {"isalnum",
       [](Run&, const Value& s, const Arguments&) {
         require_ascii("isalnum", s);
         return Value(all_characters(s, [](std::string_view c) { return is_ascii_letter(c) || is_ascii_digit(c); }));
       }},
      {"isalpha",
       [](Run&, const Value& s, const Arguments&) {
         require_ascii("isalpha", s);
         return Value(all_characters(s, is_ascii_letter));
       }},
      {"isascii",
       [](Run&, const Value& s, const Arguments&) {
         return Value(std::ranges::all_of(s.text(), [](char c) { return static_cast<unsigned char>(c) < 0x80; }));
       }},
      {"isdecimal",
       [](Run&, const Value& s, const Arguments&) {
         require_ascii("isdecimal", s);
         return Value(all_characters(s, is_ascii_digit));
       }},
      {"isdigit",
       [](Run&, const Value& s, const Arguments&) {
         require_ascii("isdigit", s);
         return Value(all_characters(s, is_ascii_digit));
       }},
      {"isidentifier", nullptr},
      {"islower", [](Run&, const Value& s,
                     const Arguments&) { return Value(lower(s.text()) == s.text() && upper(s.text()) != s.text()); }},
      {"isnumeric",
       [](Run&, const Value& s, const Arguments&) {
         require_ascii("isnumeric", s);
         return Value(all_characters(s, is_ascii_digit));
       }},
      {"isprintable", nullptr},
      {"isspace",
       [](Run&, const Value& s, const Arguments&) {
         return Value(all_characters(s, [](std::string_view c) { return is_python_space(first_char(c).code_point); }));
       }},
      {"istitle", nullptr},
      {"isupper", [](Run&, const Value& s,
                     const Arguments&) { return Value(upper(s.text()) == s.text() && lower(s.text()) != s.text()); }},
      {"join", joined},
      {"ljust", [](Run& run, const Value& s, const Arguments& a) { return padded(run, "ljust", s, a, 0); }},
      {"lower",
       [](Run&, const Value& s, const Arguments& a) {
         no_arguments("lower", a);
         return same_kind(s, lower(s.text()));
       }},
      {"lstrip", [](Run&, const Value& s,
                    const Arguments& a) { return stripped("lstrip", s, a, {.left = true, .right = false}); }},
      {"maketrans", nullptr},
      {"partition", [](Run&, const Value& s, const Arguments& a) { return partition("partition", s, a, false); }},
      {"removeprefix", [](Run&, const Value& s, const Arguments& a) { return without_prefix(s, a); }},
      {"removesuffix", [](Run&, const Value& s, const Arguments& a) { return without_suffix(s, a); }},
      {"replace", replaced},
      {"rfind", [](Run&, const Value& s, const Arguments& a) { return Value(position_of("rfind", s, a, true)); }},
      {"rindex", [](Run&, const Value& s, const Arguments& a) { return index_or_fail("rindex", s, a, true); }},
      {"rjust", [](Run& run, const Value& s, const Arguments& a) { return padded(run, "rjust", s, a, 1); }},
      {"rpartition", [](Run&, const Value& s, const Arguments& a) { return partition("rpartition", s, a, true); }},
      {"rsplit", [](Run&, const Value& s, const Arguments& a) { return split("rsplit", s, a, true); }},
      {"rstrip", [](Run&, const Value& s,
                    const Arguments& a) { return stripped("rstrip", s, a, {.left = false, .right = true}); }},
      {"split", [](Run&, const Value& s, const Arguments& a) { return split("split", s, a, false); }},
      {"splitlines",
       [](Run&, const Value& s, const Arguments& a) {
         return texts(s, split_lines(s.text(), Bound("splitlines", a, {"keepends"}).flag(0)));
       }},
      {"startswith",
       [](Run&, const Value& s, const Arguments& a) { return Value(has_affix("startswith", s, a, true)); }},
      {"strip", [](Run&, const Value& s, const Arguments& a) { return stripped("strip", s, a, {}); }},
      {"swapcase", nullptr},
      {"title",
       [](Run&, const Value& s, const Arguments& a) {
         no_arguments("title", a);
         return same_kind(s, title(s.text()));
       }},
      {"translate", nullptr},
      {"upper",
       [](Run&, const Value& s, const Arguments& a) {
         no_arguments("upper", a);
         return same_kind(s, upper(s.text()));
       }},
      {"zfill", nullptr},
  };
  return kMethods;
}

Value entries_of(const Value& dict, const char* view, bool with_keys, bool with_values) {
  std::vector<Value> made;
  for (const auto& [key, value] : dict.dict().entries()) {
    made.push_back(with_keys && with_values ? Value::list({key, value}, ListKind::tuple) : with_keys ? key : value);
  }
  return Value::list(std::move(made), ListKind::view, view);
}

const Methods& dict_methods() {
  static const Methods kMethods = {
      {"copy",
       [](Run&, const Value& d, const Arguments& a) {
         no_arguments("copy", a);
         return d;
       }},
      {"fromkeys", nullptr},
      {"get",
       [](Run&, const Value& d, const Arguments& a) {
         const Bound bound("get", a, {"key", "default"});
         const Value* found = d.dict().find(bound.at(0));
         return found != nullptr ? *found : bound.at_or(1, None{});
       }},
      {"items",
       [](Run&, const Value& d, const Arguments& a) {
         no_arguments("items", a);
         return entries_of(d, "dict_items", true, true);
       }},
      {"keys",
       [](Run&, const Value& d, const Arguments& a) {
         no_arguments("keys", a);
         return entries_of(d, "dict_keys", true, false);
       }},
      {"values",
       [](Run&, const Value& d, const Arguments& a) {
         no_arguments("values", a);
         return entries_of(d, "dict_values", false, true);
       }},
  };
  return kMethods;
}

const Methods& list_methods() {
  static const Methods kMethods = {
      {"copy",
       [](Run&, const Value& list, const Arguments& a) {
         no_arguments("copy", a);
         return list;
       }},
      {"count",
       [](Run&, const Value& list, const Arguments& a) {
         const Value wanted = Bound("count", a, {"value"}).at(0);
         return Value(std::ranges::count_if(list.list().items, [&](const Value& item) { return equal(item, wanted); }));
       }},
      {"index",
       [](Run&, const Value& list, const Arguments& a) {
         const Value wanted = Bound("index", a, {"value"}).at(0);
         const auto& items = list.list().items;
         const auto found = std::ranges::find_if(items, [&](const Value& item) { return equal(item, wanted); });
         if (found == items.end()) throw EvaluationError("the value is not in list");
         return Value(std::int64_t{found - items.begin()});
       }},
  };
  return kMethods;
}

const Methods* methods_of(const Value& receiver) {
  if (receiver.is_text()) return &text_methods();
  if (receiver.is_dict()) return &dict_methods();
  return receiver.is_list(ListKind::list) || receiver.is_list(ListKind::tuple) ? &list_methods() : nullptr;
}

/// Python's methods that change their object: undefined in the sandbox, even where a dict has such a key.
bool is_changing(const Value& receiver, std::string_view name) {
  static constexpr std::string_view kOfDicts[] = {"clear", "pop", "popitem", "setdefault", "update"};
  static constexpr std::string_view kOfLists[] = {"append", "clear",  "extend",  "insert",
                                                  "pop",    "remove", "reverse", "sort"};
  if (receiver.is_dict()) return std::ranges::find(kOfDicts, name) != std::end(kOfDicts);
  return receiver.is_list(ListKind::list) && std::ranges::find(kOfLists, name) != std::end(kOfLists);
}

}  // namespace

std::optional<Value> method_of(const Value& receiver, std::string_view name) {
  const Methods* methods = methods_of(receiver);
  if (methods == nullptr) return std::nullopt;
  const std::string full = fmt::format("{}.{}", receiver.type_name(), name);
  if (is_changing(receiver, name)) {
    return Undefined{fmt::format("access to attribute '{}' of '{}' object is unsafe.", name, receiver.type_name())};
  }
  const auto found = methods->find(name);
  if (found == methods->end()) return std::nullopt;
  if (found->second != nullptr) return native_function(full, found->second, receiver);
  return native_function(full, [](Run&, const Value&, const Arguments&) -> Value {
    throw EvaluationError("this method is not supported");
  });
}

}  // namespace phalanx::jinja
