#include <fmt/format.h>

#include <algorithm>

#include "phalanx/data/jinja/functions.h"
#include "phalanx/data/jinja/operators.h"
#include "phalanx/data/jinja/python_text.h"
#include "phalanx/data/jinja/run.h"

namespace phalanx::jinja {
namespace {

/// Takes what a call or an operator made out of the budget.
Value charged(Run& run, Value value) {
  run.charge(static_cast<std::size_t>(value.is_object() ? 0 : value.weight()));
  return value;
}

std::optional<std::int64_t> bound_of(Run& run, const ExpressionPtr& expression) {
  if (!expression) return std::nullopt;
  const Value value = run.evaluate(*expression);
  if (value.is_none()) return std::nullopt;
  if (value.is_undefined()) fail_undefined(value);
  if (!value.is_integer() && !value.is_bool()) {
    throw EvaluationError("slice indices must be integers or None or have an __index__ method");
  }
  return value.integer();
}

}  // namespace

Value call_value(Run& run, const Value& function, const Arguments& arguments) {
  if (function.is_undefined()) fail_undefined(function);
  if (!function.is_object()) {
    throw EvaluationError(fmt::format("'{}' object is not callable", function.type_name()));
  }
  auto keeps_alive = std::shared_ptr(function.shared_object());
  return charged(run, keeps_alive->call(run, arguments));
}

Value Constant::evaluate(Run&) const { return value; }

Value Name::evaluate(Run& run) const { return run.look_up(name); }

Value ListDisplay::evaluate(Run& run) const {
  std::vector<Value> values;
  for (const auto& item : items) values.push_back(run.evaluate(*item));
  return Value::list(std::move(values), kind);
}

Value DictDisplay::evaluate(Run& run) const {
  std::vector<std::pair<Value, Value>> values;
  for (const auto& [key, value] : entries) {
    Value evaluated = run.evaluate(*key);
    values.emplace_back(std::move(evaluated), run.evaluate(*value));
  }
  return Value::dict(std::move(values));
}

Value GetAttribute::evaluate(Run& run) const { return attribute_of(run.evaluate(*object), name); }

Value GetItem::evaluate(Run& run) const {
  const Value container = run.evaluate(*object);
  const Value index = run.evaluate(*key);
  if (container.is_text()) run.charge(container.text().size());
  return item_of(container, index);
}

Value GetSlice::evaluate(Run& run) const {
  const Value container = run.evaluate(*object);
  const auto first = bound_of(run, start), last = bound_of(run, stop), stride = bound_of(run, step);
  run.charge(static_cast<std::size_t>(container.weight()));
  return slice_of(container, first, last, stride.value_or(1));
}

Value Call::evaluate(Run& run) const {
  const Value callee = run.evaluate(*function);
  const Arguments values = run.evaluate(arguments);
  return call_value(run, callee, values);
}

Value FilterCall::evaluate(Run& run) const {
  const Filter filter = filter_named(name);
  const Value value = input ? run.evaluate(*input) : run.look_up(kBlockText);
  const Arguments values = run.evaluate(arguments);
  run.charge(static_cast<std::size_t>(value.weight()));
  return charged(run, filter(run, value, values));
}

Value TestCall::evaluate(Run& run) const {
  const Test test = test_named(name);
  const Value value = run.evaluate(*input);
  return Value(test(run, value, run.evaluate(arguments)));
}

Value Negation::evaluate(Run& run) const { return Value(!run.evaluate(*operand).truth()); }

Value Sign::evaluate(Run& run) const {
  const Value value = run.evaluate(*operand);
  return is_minus ? negative(value) : arithmetic(run, "+", Value(0), value);
}

Value Arithmetic::evaluate(Run& run) const {
  Value value = run.evaluate(*first);
  for (const auto& [symbol, operand] : rest) {
    const Value right = run.evaluate(*operand);
    value = charged(run, arithmetic(run, symbol, value, right));
  }
  return value;
}

Value Concatenation::evaluate(Run& run) const {
  std::string text;
  for (const auto& part : parts) {
    const Value value = run.evaluate(*part);
    run.charge(static_cast<std::size_t>(value.weight()));
    text += str(value);
  }
  return charged(run, Value(std::move(text)));
}

Value Comparison::evaluate(Run& run) const {
  Value left = run.evaluate(*first);
  for (const auto& [symbol, operand] : rest) {
    Value right = run.evaluate(*operand);
    run.charge(static_cast<std::size_t>(std::min(left.weight(), right.weight())));
    if (symbol.ends_with("in")) run.charge(static_cast<std::size_t>(right.is_dict() ? 0 : right.weight()));
    if (!compare(symbol, left, right)) return Value(false);
    left = std::move(right);
  }
  return Value(true);
}

Value Junction::evaluate(Run& run) const {
  Value value;
  for (const auto& part : parts) {
    value = run.evaluate(*part);
    if (value.truth() != is_and) return value;
  }
  return value;
}

Value Choice::evaluate(Run& run) const {
  if (run.evaluate(*condition).truth()) return run.evaluate(*then);
  if (otherwise) return run.evaluate(*otherwise);
  return Undefined{"the inline if-expression evaluated to false and no else section was defined."};
}

}  // namespace phalanx::jinja
