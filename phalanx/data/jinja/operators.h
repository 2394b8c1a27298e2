// Python's operators, attributes and items. All throw EvaluationError in Python's words. Inside of data/jinja only.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "phalanx/data/jinja/value.h"

namespace phalanx::jinja {

Value arithmetic(Run& run, std::string_view symbol, const Value& left, const Value& right);
Value negative(const Value& value);
/// == != < <= > >= in, not in
bool compare(std::string_view symbol, const Value& left, const Value& right);
bool less(const Value& left, const Value& right);
bool contains(const Value& container, const Value& item);

/// object.name of Jinja: an attribute, else an item, else undefined.
Value attribute_of(const Value& object, const std::string& name);
/// object[key] of Jinja: an item, else an attribute, else undefined.
Value item_of(const Value& object, const Value& key);
/// Bounds that are not given are nullopt.
Value slice_of(const Value& object, std::optional<std::int64_t> start, std::optional<std::int64_t> stop,
               std::int64_t step);

/// A method of text, dict or list, bound to it; nullopt if its type has none of this name.
std::optional<Value> method_of(const Value& receiver, std::string_view name);

/// "%s is %d" % arguments.
std::string format_text(const std::string& format, const Value& arguments);

/// The error of using an undefined value.
[[noreturn]] void fail_undefined(const Value& value);

}  // namespace phalanx::jinja
