#include "phalanx/data/jinja/functions.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <ctime>

#include "phalanx/base/nearest.h"
#include "phalanx/data/jinja/operators.h"
#include "phalanx/data/jinja/python_text.h"
#include "phalanx/data/jinja/run.h"

namespace phalanx::jinja {
namespace {

constexpr std::int64_t kLongestRange = 100'000;  // as in Jinja's sandbox

class NativeFunction : public Object {
 public:
  NativeFunction(std::string name, Native function, Value bound)
      : name_(std::move(name)), function_(function), bound_(std::move(bound)) {}
  std::string type_name() const override { return "function"; }
  bool is_callable() const override { return true; }
  int depth() const override { return 1 + bound_.depth(); }
  Value call(Run& run, const Arguments& arguments) override {
    try {
      return function_(run, bound_, arguments);
    } catch (const EvaluationError& error) {
      const std::string reason = error.what();
      if (name_ == kRaiseException || reason.starts_with(name_)) throw;
      throw EvaluationError(fmt::format("{}(): {}", name_, reason));
    }
  }
  static constexpr const char* kRaiseException = "raise_exception";

 private:
  std::string name_;
  Native function_;
  Value bound_;
};

Value make_range(Run& run, const Value&, const Arguments& arguments) {
  const Bound bound("range", arguments, {"start", "stop", "step"});
  const bool has_start = bound.has(1);
  const std::int64_t start = has_start ? bound.integer(0) : 0, stop = bound.integer(has_start ? 1 : 0);
  const std::int64_t step = bound.integer_or(2, 1);
  if (step == 0) throw EvaluationError("range() arg 3 must not be zero");
  const double count = (static_cast<double>(stop) - static_cast<double>(start)) / static_cast<double>(step);
  if (count > static_cast<double>(kLongestRange)) {
    throw EvaluationError(
        fmt::format("Range too big. The sandbox blocks ranges larger than MAX_RANGE ({}).", kLongestRange));
  }
  std::vector<Value> items;
  for (std::int64_t i = start; step > 0 ? i < stop : i > stop;) {
    items.emplace_back(i);
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  run.charge(items.size() * sizeof(Value));
  return Value::list(std::move(items), ListKind::range);
}

/// The entries of dict(x, a=1) and namespace(x, a=1).
Value make_dict(Run&, const Value&, const Arguments& arguments) {
  if (arguments.positional.size() > 1) throw EvaluationError("dict expected at most 1 argument");
  std::vector<std::pair<Value, Value>> entries;
  if (!arguments.positional.empty()) {
    const Value& from = arguments.positional.front();
    for (const Value& item : from.iterate()) {
      if (from.is_dict()) {
        entries.emplace_back(item, *from.dict().find(item));
        continue;
      }
      const auto pair = item.iterate();
      if (pair.size() != 2) throw EvaluationError("dict() expects pairs");
      entries.emplace_back(pair[0], pair[1]);
    }
  }
  for (const auto& [name, value] : arguments.named) entries.emplace_back(name, value);
  return Value::dict(std::move(entries));
}

Value make_namespace(Run& run, const Value& bound, const Arguments& arguments) {
  const Value values = make_dict(run, bound, arguments);
  const auto space = run.make_namespace();
  for (const auto& [name, value] : values.dict().entries()) {
    if (!name.is_text()) throw EvaluationError("namespace() expects names");
    space->set(name.text(), value);
  }
  return Value(std::static_pointer_cast<Object>(space));
}

Value raise_exception(Run&, const Value&, const Arguments& arguments) {
  const Bound bound("raise_exception", arguments, {"message"});
  throw EvaluationError(fmt::format("the template refuses this: {}", str(bound.at(0))));
}

Value strftime_now(Run& run, const Value&, const Arguments& arguments) {
  const std::string format = Bound("strftime_now", arguments, {"format"}).text(0);
  if (format.empty()) return Value("");
  const std::tm now = run.now();
  std::array<char, 1024> text{};
  const std::size_t size = std::strftime(text.data(), text.size(), format.c_str(), &now);
  if (size == 0)
    throw EvaluationError(fmt::format("the date in the format '{}' is longer than {} bytes", format, text.size()));
  return Value(std::string(text.data(), size));
}

Value unsupported(Run&, const Value&, const Arguments&) { throw EvaluationError("this function is not supported"); }

struct NamedFunction {
  std::string_view name;
  Native function;
};
constexpr std::array<NamedFunction, 8> kGlobals = {{{"range", make_range},
                                                    {"dict", make_dict},
                                                    {"namespace", make_namespace},
                                                    {"raise_exception", raise_exception},
                                                    {"strftime_now", strftime_now},
                                                    {"cycler", unsupported},
                                                    {"joiner", unsupported},
                                                    {"lipsum", unsupported}}};

bool is_sequence(const Value& value) {
  return value.is_undefined() || value.is_text() || value.is_dict() ||
         (value.is_list() && value.list().kind != ListKind::view && value.list().kind != ListKind::iterator);
}

const Value& only_argument(const char* name, const Arguments& arguments) {
  if (arguments.positional.size() != 1 || !arguments.named.empty()) {
    throw EvaluationError(fmt::format("the test '{}' takes one argument", name));
  }
  return arguments.positional.front();
}

std::int64_t whole(const Value& value) {
  if (value.is_undefined()) fail_undefined(value);
  if (!value.is_integer() && !value.is_bool()) throw EvaluationError("expected a whole number");
  return value.integer();
}

bool is_same_object(const Value& left, const Value& right) {
  const bool are_constants = left.is_none() || left.is_bool();
  if (are_constants || right.is_none() || right.is_bool()) {
    return left.type_name() == right.type_name() && equal(left, right);
  }
  if (left.is_object() && right.is_object()) return &left.object() == &right.object();
  throw EvaluationError("the test 'sameas' is supported for none, true, false and functions");
}

bool has_case(const Value& value, std::string (*change)(std::string_view)) {
  const std::string text = str(value);
  return change(text) == text && lower(text) != upper(text);
}

struct NamedTest {
  std::string_view name;
  Test test;
};
constexpr auto kTests = std::to_array<NamedTest>({
    {"defined", [](Run&, const Value& v, const Arguments&) { return !v.is_undefined(); }},
    {"undefined", [](Run&, const Value& v, const Arguments&) { return v.is_undefined(); }},
    {"none", [](Run&, const Value& v, const Arguments&) { return v.is_none(); }},
    {"boolean", [](Run&, const Value& v, const Arguments&) { return v.is_bool(); }},
    {"true", [](Run&, const Value& v, const Arguments&) { return v.is_bool() && v.truth(); }},
    {"false", [](Run&, const Value& v, const Arguments&) { return v.is_bool() && !v.truth(); }},
    {"integer", [](Run&, const Value& v, const Arguments&) { return v.is_integer(); }},
    {"float", [](Run&, const Value& v, const Arguments&) { return v.is_float(); }},
    {"number", [](Run&, const Value& v, const Arguments&) { return v.is_number(); }},
    {"string", [](Run&, const Value& v, const Arguments&) { return v.is_text(); }},
    {"mapping", [](Run&, const Value& v, const Arguments&) { return v.is_dict(); }},
    {"sequence", [](Run&, const Value& v, const Arguments&) { return is_sequence(v); }},
    {"iterable", [](Run&, const Value& v, const Arguments&) { return v.is_iterable(); }},
    {"callable", [](Run&, const Value& v, const Arguments&) { return v.is_object() && v.object().is_callable(); }},
    {"escaped", [](Run&, const Value& v, const Arguments&) { return v.is_markup(); }},
    {"lower", [](Run&, const Value& v, const Arguments&) { return has_case(v, lower); }},
    {"upper", [](Run&, const Value& v, const Arguments&) { return has_case(v, upper); }},
    {"even", [](Run&, const Value& v, const Arguments&) { return whole(v) % 2 == 0; }},
    {"odd", [](Run&, const Value& v, const Arguments&) { return whole(v) % 2 != 0; }},
    {"divisibleby",
     [](Run&, const Value& v, const Arguments& a) {
       const std::int64_t by = whole(only_argument("divisibleby", a));
       if (by == 0) throw EvaluationError("division by zero");
       return by == -1 || whole(v) % by == 0;
     }},
    {"sameas", [](Run&, const Value& v, const Arguments& a) { return is_same_object(v, only_argument("sameas", a)); }},
    {"in", [](Run&, const Value& v, const Arguments& a) { return contains(only_argument("in", a), v); }},
    {"eq", [](Run&, const Value& v, const Arguments& a) { return equal(v, only_argument("eq", a)); }},
    {"equalto", [](Run&, const Value& v, const Arguments& a) { return equal(v, only_argument("equalto", a)); }},
    {"==", [](Run&, const Value& v, const Arguments& a) { return equal(v, only_argument("==", a)); }},
    {"ne", [](Run&, const Value& v, const Arguments& a) { return !equal(v, only_argument("ne", a)); }},
    {"!=", [](Run&, const Value& v, const Arguments& a) { return !equal(v, only_argument("!=", a)); }},
    {"lt", [](Run&, const Value& v, const Arguments& a) { return compare("<", v, only_argument("lt", a)); }},
    {"lessthan",
     [](Run&, const Value& v, const Arguments& a) { return compare("<", v, only_argument("lessthan", a)); }},
    {"<", [](Run&, const Value& v, const Arguments& a) { return compare("<", v, only_argument("<", a)); }},
    {"le", [](Run&, const Value& v, const Arguments& a) { return compare("<=", v, only_argument("le", a)); }},
    {"<=", [](Run&, const Value& v, const Arguments& a) { return compare("<=", v, only_argument("<=", a)); }},
    {"gt", [](Run&, const Value& v, const Arguments& a) { return compare(">", v, only_argument("gt", a)); }},
    {"greaterthan",
     [](Run&, const Value& v, const Arguments& a) { return compare(">", v, only_argument("greaterthan", a)); }},
    {">", [](Run&, const Value& v, const Arguments& a) { return compare(">", v, only_argument(">", a)); }},
    {"ge", [](Run&, const Value& v, const Arguments& a) { return compare(">=", v, only_argument("ge", a)); }},
    {">=", [](Run&, const Value& v, const Arguments& a) { return compare(">=", v, only_argument(">=", a)); }},
});

}  // namespace

Value native_function(std::string name, Native function, Value bound) {
  return Value(
      std::static_pointer_cast<Object>(std::make_shared<NativeFunction>(std::move(name), function, std::move(bound))));
}

std::optional<Value> global_function(std::string_view name) {
  const auto found = std::ranges::find(kGlobals, name, &NamedFunction::name);
  if (found == kGlobals.end()) return std::nullopt;
  return native_function(std::string(name), found->function);
}

Filter filter_named(std::string_view name) {
  if (const Filter found = text_filter(name)) return found;
  if (const Filter found = list_filter(name)) return found;
  auto known = text_filter_names();
  std::ranges::copy(list_filter_names(), std::back_inserter(known));
  throw EvaluationError(fmt::format("no filter is named '{}'{}", name, did_you_mean(name, known)));
}

Test test_named(std::string_view name) {
  const auto found = std::ranges::find(kTests, name, &NamedTest::name);
  if (found != kTests.end()) return found->test;
  std::vector<std::string> known;
  for (const NamedTest& test : kTests) known.emplace_back(test.name);
  throw EvaluationError(fmt::format("no test is named '{}'{}", name, did_you_mean(name, known)));
}

Bound::Bound(std::string_view function, const Arguments& arguments, std::initializer_list<const char*> parameters)
    : function_(function), names_(parameters.begin(), parameters.end()), values_(names_.size()) {
  if (arguments.positional.size() > names_.size()) {
    throw EvaluationError(
        fmt::format("{}: {} arguments, expected at most {}", function, arguments.positional.size(), names_.size()));
  }
  std::ranges::copy(arguments.positional, values_.begin());
  for (const auto& [name, value] : arguments.named) {
    const auto found = std::ranges::find(names_, name);
    if (found == names_.end())
      throw EvaluationError(
          fmt::format("{}: no parameter is named '{}'{}", function, name, did_you_mean(name, names_)));
    auto& place = values_[static_cast<std::size_t>(found - names_.begin())];
    if (place) throw EvaluationError(fmt::format("{}: two values for '{}'", function, name));
    place = value;
  }
}

const Value& Bound::at(std::size_t index) const {
  if (!values_[index]) throw EvaluationError(fmt::format("{}: the argument '{}' is missing", function_, names_[index]));
  return *values_[index];
}

void Bound::fail(std::size_t index, const char* expected) const {
  if (at(index).is_undefined()) fail_undefined(at(index));
  throw EvaluationError(
      fmt::format("{}: '{}' is of type '{}': expected {}", function_, names_[index], at(index).type_name(), expected));
}

std::string Bound::text(std::size_t index) const {
  if (!at(index).is_text()) fail(index, "text");
  return at(index).text();
}

std::int64_t Bound::integer(std::size_t index) const {
  if (!at(index).is_integer() && !at(index).is_bool()) fail(index, "a whole number");
  return at(index).integer();
}

std::int64_t Bound::integer_or(std::size_t index, std::int64_t otherwise) const {
  return is_none_or_missing(index) ? otherwise : integer(index);
}

Value attribute_by_path(const Value& object, const Value& path) {
  if (!path.is_text()) return item_of(object, path);
  Value value = object;
  for (const std::string& part : split_at(path.text(), ".", -1, false)) {
    std::int64_t index = 0;
    const char* const end = part.data() + part.size();
    const auto read = std::from_chars(part.data(), end, index);
    const bool is_index = !part.empty() && part.front() != '-' && read.ec == std::errc() && read.ptr == end;
    value = item_of(value, is_index ? Value(index) : Value(part));
  }
  return value;
}

}  // namespace phalanx::jinja
