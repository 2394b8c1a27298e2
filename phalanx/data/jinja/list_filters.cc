#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "phalanx/data/jinja/functions.h"
#include "phalanx/data/jinja/operators.h"
#include "phalanx/data/jinja/python_text.h"
#include "phalanx/data/jinja/run.h"

namespace phalanx::jinja {
namespace {

Value iterator(std::vector<Value> items) { return Value::list(std::move(items), ListKind::iterator); }

Value length(Run&, const Value& input, const Arguments&) {
  const auto size = input.length();
  if (!size) throw EvaluationError(fmt::format("object of type '{}' has no len()", input.type_name()));
  return *size;
}

Value first(Run&, const Value& input, const Arguments&) {
  const auto items = input.iterate();
  return items.empty() ? Value(Undefined{"No first item, sequence was empty."}) : items.front();
}

Value last(Run&, const Value& input, const Arguments&) {
  if (input.is_list(ListKind::iterator)) {
    throw EvaluationError("'generator' object is not reversible");
  }
  const auto items = input.iterate();
  return items.empty() ? Value(Undefined{"No last item, sequence was empty."}) : items.back();
}

/// Python's sort keys of Jinja: text counts without its case.
Value without_case(const Value& value) { return value.is_text() ? Value(lower(value.text())) : value; }

/// The values that the attributes of `path` ("a,b" are two) have, in a list; of no path, the item itself.
Value sort_key(const Value& item, const std::optional<Value>& path, bool has_case) {
  if (!path) return has_case ? item : without_case(item);
  if (!path->is_text()) {
    const Value found = attribute_by_path(item, *path);
    return has_case ? found : without_case(found);
  }
  std::vector<Value> keys;
  for (const std::string& part : split_at(path->text(), ",", -1, false)) {
    const Value found = attribute_by_path(item, Value(part));
    keys.push_back(has_case ? found : without_case(found));
  }
  return Value::list(std::move(keys));
}

std::vector<Value> sorted_by(std::vector<std::pair<Value, Value>> keyed, bool is_reverse) {
  std::ranges::stable_sort(keyed, [&](const auto& left, const auto& right) {
    return is_reverse ? less(right.first, left.first) : less(left.first, right.first);
  });
  std::vector<Value> items;
  for (auto& [key, item] : keyed) items.push_back(std::move(item));
  return items;
}

std::optional<Value> path_in(const Bound& bound, std::size_t index) {
  return bound.is_none_or_missing(index) ? std::nullopt : std::optional(bound.at(index));
}

Value sort(Run&, const Value& input, const Arguments& arguments) {
  const Bound bound("sort", arguments, {"reverse", "case_sensitive", "attribute"});
  std::vector<std::pair<Value, Value>> keyed;
  for (const Value& item : input.iterate()) keyed.emplace_back(sort_key(item, path_in(bound, 2), bound.flag(1)), item);
  return Value::list(sorted_by(std::move(keyed), bound.flag(0)));
}

Value dictsort(Run&, const Value& input, const Arguments& arguments) {
  const Bound bound("dictsort", arguments, {"case_sensitive", "by", "reverse"});
  const std::string by = bound.has(1) ? bound.text(1) : "key";
  if (by != "key" && by != "value") throw EvaluationError("dictsort: by is either 'key' or 'value'");
  if (input.is_undefined()) fail_undefined(input);
  if (!input.is_dict()) throw EvaluationError(fmt::format("dictsort: expected a dict, found '{}'", input.type_name()));
  std::vector<std::pair<Value, Value>> keyed;
  for (const auto& [key, value] : input.dict().entries()) {
    keyed.emplace_back(sort_key(by == "key" ? key : value, std::nullopt, bound.flag(0)),
                       Value::list({key, value}, ListKind::tuple));
  }
  return Value::list(sorted_by(std::move(keyed), bound.flag(2)));
}

Value extreme(const char* name, const Value& input, const Arguments& arguments, bool is_smallest) {
  const Bound bound(name, arguments, {"case_sensitive", "attribute"});
  std::optional<std::pair<Value, Value>> best;
  for (const Value& item : input.iterate()) {
    Value key = sort_key(item, path_in(bound, 1), bound.flag(0));
    if (!best || (is_smallest ? less(key, best->first) : less(best->first, key))) best = {std::move(key), item};
  }
  return best ? best->second : Value(Undefined{"No aggregated item, sequence was empty."});
}

Value unique(Run&, const Value& input, const Arguments& arguments) {
  const Bound bound("unique", arguments, {"case_sensitive", "attribute"});
  Dict seen;
  std::vector<Value> kept;
  for (const Value& item : input.iterate()) {
    const Value found = path_in(bound, 1) ? attribute_by_path(item, bound.at(1)) : item;
    const Value key = bound.flag(0) ? found : without_case(found);
    if (seen.find(key) != nullptr) continue;
    seen.set(key, true);
    kept.push_back(item);
  }
  return iterator(std::move(kept));
}

Value reverse(Run&, const Value& input, const Arguments&) {
  auto items = input.iterate();
  std::ranges::reverse(items);
  if (!input.is_text()) return iterator(std::move(items));
  std::string text;
  for (const Value& character : items) text += character.text();
  return {std::move(text), input.is_markup()};
}

Value join(Run& run, const Value& input, const Arguments& arguments) {
  const Bound bound("join", arguments, {"d", "attribute"});
  const std::string separator = bound.is_none_or_missing(0) ? "" : str(bound.at(0));
  const auto items = input.iterate();
  run.charge(separator.size() * items.size());
  std::string text;
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (i > 0) text += separator;
    text += str(path_in(bound, 1) ? attribute_by_path(items[i], bound.at(1)) : items[i]);
  }
  return Value(std::move(text));
}

Value sum(Run& run, const Value& input, const Arguments& arguments) {
  const Bound bound("sum", arguments, {"attribute", "start"});
  Value total = bound.at_or(1, 0);
  for (const Value& item : input.iterate()) {
    total = arithmetic(run, "+", total, path_in(bound, 0) ? attribute_by_path(item, bound.at(0)) : item);
    if (!total.is_number()) run.charge(static_cast<std::size_t>(total.weight()));
  }
  return total;
}

Value items(Run&, const Value& input, const Arguments&) {
  if (input.is_undefined()) return iterator({});
  if (!input.is_dict()) throw EvaluationError("Can only get item pairs from a mapping.");
  std::vector<Value> pairs;
  for (const auto& [key, value] : input.dict().entries()) pairs.push_back(Value::list({key, value}, ListKind::tuple));
  return iterator(std::move(pairs));
}

Value attr(Run&, const Value& input, const Arguments& arguments) {
  const std::string name = Bound("attr", arguments, {"name"}).text(0);
  if (input.is_undefined()) fail_undefined(input);
  std::optional<Value> found;
  if (!name.starts_with('_')) found = input.is_object() ? input.object().attribute(name) : method_of(input, name);
  return found ? *found : Value(Undefined{fmt::format("'{} object' has no attribute '{}'", input.type_name(), name)});
}

/// batch(3): lists of three; the last one is filled up with `fill_with`.
Value batch(Run& run, const Value& input, const Arguments& arguments) {
  const Bound bound("batch", arguments, {"linecount", "fill_with"});
  const std::int64_t count = bound.integer(0);
  if (count < 1) throw EvaluationError("batch: expected a count of 1 or more");
  std::vector<Value> rows, row;
  for (const Value& item : input.iterate()) {
    if (static_cast<std::int64_t>(row.size()) == count) rows.push_back(Value::list(std::exchange(row, {})));
    row.push_back(item);
  }
  if (!row.empty() && !bound.is_none_or_missing(1)) {
    run.charge(static_cast<std::size_t>(count) * sizeof(Value));
    row.resize(static_cast<std::size_t>(count), bound.at(1));
  }
  if (!row.empty()) rows.push_back(Value::list(std::move(row)));
  return iterator(std::move(rows));
}

Arguments rest_of(const Arguments& arguments, std::size_t from) {
  Arguments rest;
  for (std::size_t i = from; i < arguments.positional.size(); ++i) rest.positional.push_back(arguments.positional[i]);
  rest.named = arguments.named;
  return rest;
}

/// map(attribute="a", default=0), or map("lower").
Value map(Run& run, const Value& input, const Arguments& arguments) {
  std::vector<Value> made;
  if (arguments.positional.empty()) {
    const Bound bound("map", arguments, {"attribute", "default"});
    for (const Value& item : input.iterate()) {
      Value found = attribute_by_path(item, bound.at(0));
      if (found.is_undefined() && bound.has(1)) found = bound.at(1);
      made.push_back(std::move(found));
    }
    return iterator(std::move(made));
  }
  const Value& name = arguments.positional.front();
  if (!name.is_text()) throw EvaluationError("map: expected the name of a filter");
  const Filter filter = filter_named(name.text());
  const Arguments rest = rest_of(arguments, 1);
  for (const Value& item : input.iterate()) {
    made.push_back(filter(run, item, rest));
    run.charge(static_cast<std::size_t>(made.back().weight()));
  }
  return iterator(std::move(made));
}

/// What select, reject, selectattr and rejectattr have in common.
Value chosen(Run& run, const Value& input, const Arguments& arguments, bool by_attribute, bool keeps) {
  const std::size_t at = by_attribute ? 1 : 0;
  if (by_attribute && arguments.positional.empty()) throw EvaluationError("selectattr: the attribute is missing");
  Test test = [](Run&, const Value& value, const Arguments&) { return value.truth(); };
  if (arguments.positional.size() > at) {
    if (!arguments.positional[at].is_text()) throw EvaluationError("select: expected the name of a test");
    test = test_named(arguments.positional[at].text());
  }
  const Arguments rest = rest_of(arguments, at + 1);
  std::vector<Value> kept;
  for (const Value& item : input.iterate()) {
    const Value tested = by_attribute ? attribute_by_path(item, arguments.positional.front()) : item;
    if (test(run, tested, rest) == keeps) kept.push_back(item);
  }
  return iterator(std::move(kept));
}

struct ListFilterEntry {
  std::string_view name;
  Filter filter;
};
constexpr auto kListFilters = std::to_array<ListFilterEntry>({
    {"attr", attr},
    {"batch", batch},
    {"count", length},
    {"dictsort", dictsort},
    {"first", first},
    {"items", items},
    {"join", join},
    {"last", last},
    {"length", length},
    {"list", [](Run&, const Value& v, const Arguments&) { return Value::list(v.iterate()); }},
    {"map", map},
    {"max", [](Run&, const Value& v, const Arguments& a) { return extreme("max", v, a, false); }},
    {"min", [](Run&, const Value& v, const Arguments& a) { return extreme("min", v, a, true); }},
    {"reject", [](Run& run, const Value& v, const Arguments& a) { return chosen(run, v, a, false, false); }},
    {"rejectattr", [](Run& run, const Value& v, const Arguments& a) { return chosen(run, v, a, true, false); }},
    {"reverse", reverse},
    {"select", [](Run& run, const Value& v, const Arguments& a) { return chosen(run, v, a, false, true); }},
    {"selectattr", [](Run& run, const Value& v, const Arguments& a) { return chosen(run, v, a, true, true); }},
    {"sort", sort},
    {"sum", sum},
    {"unique", unique},
});

}  // namespace

Filter list_filter(std::string_view name) {
  const auto found = std::ranges::find(kListFilters, name, &ListFilterEntry::name);
  return found == kListFilters.end() ? nullptr : found->filter;
}

std::vector<std::string> list_filter_names() {
  std::vector<std::string> names;
  for (const ListFilterEntry& filter : kListFilters) names.emplace_back(filter.name);
  return names;
}

}  // namespace phalanx::jinja
