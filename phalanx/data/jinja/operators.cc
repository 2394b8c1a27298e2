#include "phalanx/data/jinja/operators.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "phalanx/data/jinja/functions.h"
#include "phalanx/data/jinja/python_text.h"
#include "phalanx/data/jinja/run.h"

namespace phalanx::jinja {
namespace {

[[noreturn]] void fail_operands(std::string_view symbol, const Value& left, const Value& right) {
  throw EvaluationError(
      fmt::format("unsupported operand type(s) for {}: '{}' and '{}'", symbol, left.type_name(), right.type_name()));
}

std::int64_t whole_result(std::string_view symbol, std::int64_t left, std::int64_t right) {
  std::int64_t result = 0;
  bool overflows = false;
  if (symbol == "+") overflows = __builtin_add_overflow(left, right, &result);
  if (symbol == "-") overflows = __builtin_sub_overflow(left, right, &result);
  if (symbol == "*") overflows = __builtin_mul_overflow(left, right, &result);
  if (overflows) throw EvaluationError(fmt::format("{} {} {} is outside of 64 bits", left, symbol, right));
  return result;
}

std::int64_t floor_quotient(std::int64_t left, std::int64_t right) {
  if (left == std::numeric_limits<std::int64_t>::min() && right == -1) return whole_result("-", 0, left);
  const std::int64_t quotient = left / right;
  return quotient - ((left % right != 0 && (left < 0) != (right < 0)) ? 1 : 0);
}

double floor_remainder(double left, double right) {
  const double remainder = std::fmod(left, right);
  return remainder != 0 && (remainder < 0) != (right < 0) ? remainder + right : remainder;
}

Value whole_power(std::int64_t base, std::int64_t exponent) {
  if (exponent < 0) return std::pow(static_cast<double>(base), static_cast<double>(exponent));
  std::int64_t result = 1;
  if (base == 0 || base == 1) return exponent == 0 ? 1 : base;
  if (base == -1) return exponent % 2 == 0 ? 1 : -1;
  for (std::int64_t i = 0; i < exponent; ++i) result = whole_result("*", result, base);
  return result;
}

Value whole_arithmetic(std::string_view symbol, std::int64_t left, std::int64_t right) {
  if (symbol == "+" || symbol == "-" || symbol == "*") return whole_result(symbol, left, right);
  if (symbol == "**") return whole_power(left, right);
  if (right == 0) throw EvaluationError("division by zero");
  if (symbol == "/") return static_cast<double>(left) / static_cast<double>(right);
  if (symbol == "//") return floor_quotient(left, right);
  return right == -1 ? 0 : left - floor_quotient(left, right) * right;
}

Value real_arithmetic(std::string_view symbol, double left, double right) {
  if (symbol == "+") return left + right;
  if (symbol == "-") return left - right;
  if (symbol == "*") return left * right;
  if (symbol == "**") return std::pow(left, right);
  if (right == 0) throw EvaluationError("division by zero");
  if (symbol == "/") return left / right;
  if (symbol == "//") return std::floor(left / right);
  return floor_remainder(left, right);
}

Value repeated(Run& run, const Value& value, std::int64_t times) {
  const auto count = static_cast<std::size_t>(std::max<std::int64_t>(times, 0));
  const auto weight = static_cast<std::size_t>(value.weight());
  run.charge(count > (std::size_t{1} << 40) / weight ? std::size_t{1} << 40 : count * weight);
  if (value.is_text()) {
    std::string text;
    for (std::size_t i = 0; i < count; ++i) text += value.text();
    return {std::move(text), value.is_markup()};
  }
  std::vector<Value> items;
  for (std::size_t i = 0; i < count; ++i) {
    items.insert(items.end(), value.list().items.begin(), value.list().items.end());
  }
  return Value::list(std::move(items), value.list().kind);
}

bool is_sequence_to_add(const Value& value) { return value.is_list(ListKind::list) || value.is_list(ListKind::tuple); }

Value joined_texts(const Value& left, const Value& right) {
  if (!left.is_markup() && !right.is_markup()) return left.text() + right.text();
  const auto safe = [](const Value& value) { return value.is_markup() ? value.text() : escape_html(value.text()); };
  return {safe(left) + safe(right), true};
}

Value joined_lists(const Value& left, const Value& right) {
  std::vector<Value> items = left.list().items;
  items.insert(items.end(), right.list().items.begin(), right.list().items.end());
  return Value::list(std::move(items), left.list().kind);
}

bool less_lists(const std::vector<Value>& left, const std::vector<Value>& right) {
  for (std::size_t i = 0; i < std::min(left.size(), right.size()); ++i) {
    if (!equal(left[i], right[i])) return less(left[i], right[i]);
  }
  return left.size() < right.size();
}

/// The item at `index`, from the end if it is negative; nullopt if there is none.
std::optional<Value> item_at(const Value& object, std::int64_t index) {
  const std::int64_t size = object.length().value_or(0);
  const std::int64_t place = index < 0 ? index + size : index;
  if (place < 0 || place >= size) return std::nullopt;
  if (object.is_list()) return object.list().items[static_cast<std::size_t>(place)];
  return Value(std::string(characters_of(object.text())[static_cast<std::size_t>(place)]), object.is_markup());
}

bool has_items_by_index(const Value& object) {
  return object.is_text() ||
         (object.is_list() && object.list().kind != ListKind::view && object.list().kind != ListKind::iterator);
}

std::optional<Value> subscript(const Value& object, const Value& key) {
  if (object.is_dict()) {
    if (key.is_list() || key.is_dict() || key.is_object() || key.is_undefined()) return std::nullopt;
    const Value* found = object.dict().find(key);
    return found != nullptr ? std::optional(*found) : std::nullopt;
  }
  if (has_items_by_index(object) && (key.is_integer() || key.is_bool())) return item_at(object, key.integer());
  return std::nullopt;
}

std::optional<Value> attribute(const Value& object, const std::string& name) {
  if (object.is_object()) return object.object().attribute(name);
  return method_of(object, name);
}

Value missing(const Value& object, const std::string& what) {
  return Undefined{object.is_none() ? fmt::format("'None' has no attribute {}", what)
                                    : fmt::format("'{} object' has no attribute {}", object.type_name(), what)};
}

/// The places that [start:stop:step] chooses.
std::vector<std::size_t> places(std::size_t count, std::optional<std::int64_t> start, std::optional<std::int64_t> stop,
                                std::int64_t step) {
  const auto size = static_cast<std::int64_t>(count);
  const std::int64_t lowest = step > 0 ? 0 : -1, highest = step > 0 ? size : size - 1;
  const auto clamped = [&](std::optional<std::int64_t> bound, std::int64_t otherwise) {
    return bound ? std::clamp(*bound < 0 ? *bound + size : *bound, lowest, highest) : otherwise;
  };
  const std::int64_t first = clamped(start, step > 0 ? lowest : highest);
  const std::int64_t last = clamped(stop, step > 0 ? highest : lowest);
  std::vector<std::size_t> chosen;
  for (std::int64_t i = first; step > 0 ? i < last : i > last; i += step) {
    chosen.push_back(static_cast<std::size_t>(i));
    if (step > size || step < -size) break;
  }
  return chosen;
}

bool is_private(const std::string& name) { return name.starts_with("_"); }

}  // namespace

void fail_undefined(const Value& value) { throw EvaluationError(value.reason()); }

Value arithmetic(Run& run, std::string_view symbol, const Value& left, const Value& right) {
  if (left.is_undefined()) fail_undefined(left);
  if (symbol == "%" && left.is_text()) return {format_text(left.text(), right), left.is_markup()};
  if (right.is_undefined()) fail_undefined(right);
  if (left.is_number() && right.is_number()) {
    if (left.is_float() || right.is_float()) return real_arithmetic(symbol, left.real(), right.real());
    return whole_arithmetic(symbol, left.integer(), right.integer());
  }
  if (symbol == "+" && left.is_text() && right.is_text()) return joined_texts(left, right);
  if (symbol == "+" && is_sequence_to_add(left) && right.is_list(left.list().kind)) return joined_lists(left, right);
  const auto is_repeatable = [](const Value& value) { return value.is_text() || is_sequence_to_add(value); };
  const auto is_count = [](const Value& value) { return value.is_integer() || value.is_bool(); };
  if (symbol == "*" && is_repeatable(left) && is_count(right)) return repeated(run, left, right.integer());
  if (symbol == "*" && is_repeatable(right) && is_count(left)) return repeated(run, right, left.integer());
  if (symbol == "+" && left.is_text()) {
    throw EvaluationError(fmt::format("can only concatenate str (not \"{}\") to str", right.type_name()));
  }
  fail_operands(symbol, left, right);
}

Value negative(const Value& value) {
  if (value.is_undefined()) fail_undefined(value);
  if (value.is_float()) return -value.real();
  if (value.is_number()) return whole_result("-", 0, value.integer());
  throw EvaluationError(fmt::format("bad operand type for unary -: '{}'", value.type_name()));
}

bool less(const Value& left, const Value& right) {
  if (left.is_undefined()) fail_undefined(left);
  if (right.is_undefined()) fail_undefined(right);
  if (left.is_number() && right.is_number()) {
    if (left.is_float() || right.is_float()) return left.real() < right.real();
    return left.integer() < right.integer();
  }
  if (left.is_text() && right.is_text()) return left.text() < right.text();
  if (is_sequence_to_add(left) && right.is_list(left.list().kind))
    return less_lists(left.list().items, right.list().items);
  throw EvaluationError(
      fmt::format("'<' not supported between instances of '{}' and '{}'", left.type_name(), right.type_name()));
}

bool contains(const Value& container, const Value& item) {
  if (container.is_text()) {
    if (!item.is_text()) {
      throw EvaluationError(fmt::format("'in <string>' requires string as left operand, not {}", item.type_name()));
    }
    return find(container.text(), item.text()) != std::string_view::npos;
  }
  if (container.is_dict()) return container.dict().find(item) != nullptr;
  if (!container.is_iterable()) {
    throw EvaluationError(fmt::format("argument of type '{}' is not iterable", container.type_name()));
  }
  return std::ranges::any_of(container.iterate(), [&](const Value& other) { return equal(item, other); });
}

bool compare(std::string_view symbol, const Value& left, const Value& right) {
  if (symbol == "==") return equal(left, right);
  if (symbol == "!=") return !equal(left, right);
  if (symbol == "<") return less(left, right);
  if (symbol == ">") return less(right, left);
  if (symbol == "in") return contains(right, left);
  if (symbol == "not in") return !contains(right, left);
  // Not the opposite of >: NaN is neither.
  return (symbol == "<=" ? less(left, right) : less(right, left)) || equal(left, right);
}

Value attribute_of(const Value& object, const std::string& name) {
  if (object.is_undefined()) fail_undefined(object);
  if (!is_private(name)) {
    if (auto found = attribute(object, name)) return *found;
  }
  if (auto found = subscript(object, Value(name))) return *found;
  return missing(object, fmt::format("'{}'", name));
}

Value item_of(const Value& object, const Value& key) {
  if (object.is_undefined()) fail_undefined(object);
  if (auto found = subscript(object, key)) return *found;
  if (key.is_text() && !is_private(key.text())) {
    if (auto found = attribute(object, key.text())) return *found;
  }
  if (key.is_integer()) return missing(object, fmt::format("{}", key.integer()));
  return missing(object, key.is_text() ? fmt::format("'{}'", key.text()) : "of type " + key.type_name());
}

Value slice_of(const Value& object, std::optional<std::int64_t> start, std::optional<std::int64_t> stop,
               std::int64_t step) {
  if (object.is_undefined()) fail_undefined(object);
  if (object.is_dict()) throw EvaluationError("a dict has no slices");
  if (!has_items_by_index(object)) return missing(object, "of slices");
  if (step == 0) throw EvaluationError("slice step cannot be zero");
  if (object.is_text()) {
    const auto characters = characters_of(object.text());
    std::string text;
    for (const std::size_t i : places(characters.size(), start, stop, step)) text += characters[i];
    return {std::move(text), object.is_markup()};
  }
  const auto& items = object.list().items;
  std::vector<Value> chosen;
  for (const std::size_t i : places(items.size(), start, stop, step)) chosen.push_back(items[i]);
  return Value::list(std::move(chosen), object.list().kind);
}

}  // namespace phalanx::jinja
