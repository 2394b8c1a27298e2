// Filters, tests and functions by name. Inside of data/jinja only.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "phalanx/data/jinja/value.h"

namespace phalanx::jinja {

using Filter = Value (*)(Run& run, const Value& input, const Arguments& arguments);
using Test = bool (*)(Run& run, const Value& input, const Arguments& arguments);

/// Throw EvaluationError with the nearest name if there is none.
Filter filter_named(std::string_view name);
Test test_named(std::string_view name);

std::optional<Value> global_function(std::string_view name);

// The tables behind filter_named().
Filter text_filter(std::string_view name);
Filter list_filter(std::string_view name);
std::vector<std::string> text_filter_names();
std::vector<std::string> list_filter_names();

/// A function of a template, from a lambda.
using Native = Value (*)(Run& run, const Value& bound, const Arguments& arguments);
/// `bound` is given to each call. `name` stands in messages.
Value native_function(std::string name, Native function, Value bound = {});

/// The arguments of a call by the names of its parameters.
class Bound {
 public:
  /// Throws EvaluationError for an argument that none of `parameters` takes, or that is there twice.
  Bound(std::string_view function, const Arguments& arguments, std::initializer_list<const char*> parameters);
  bool has(std::size_t index) const { return values_[index].has_value() && !values_[index]->is_undefined(); }
  /// Throws EvaluationError if it is not given.
  const Value& at(std::size_t index) const;
  Value at_or(std::size_t index, Value otherwise) const {
    if (values_[index]) return *values_[index];
    return otherwise;
  }
  /// These throw EvaluationError for a value of another type.
  std::string text(std::size_t index) const;
  std::int64_t integer(std::size_t index) const;
  std::int64_t integer_or(std::size_t index, std::int64_t otherwise) const;
  bool flag(std::size_t index, bool otherwise = false) const {
    return values_[index] ? values_[index]->truth() : otherwise;
  }
  bool is_none_or_missing(std::size_t index) const { return !values_[index] || values_[index]->is_none(); }

 private:
  [[noreturn]] void fail(std::size_t index, const char* expected) const;
  std::string function_;
  std::vector<std::string> names_;
  std::vector<std::optional<Value>> values_;
};

/// An attribute by a path, as `map(attribute="a.b.0")` has it. The path may be a number.
Value attribute_by_path(const Value& object, const Value& path);

}  // namespace phalanx::jinja
