// Value: what a template computes with. It behaves as Python's values do, because templates are written for Python.
//
// Values are cheap to copy: text, lists and objects are shared and never change after they were made (a namespace is
// the exception). Text is UTF-8; lengths, indices and slices count code points, as in Python.
//
//   const Value messages = Value::list({Value::dict({{"role", "user"}, {"content", "Hi"}})});
//   messages.truth();                                  // true
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

namespace phalanx::jinja {

class Run;
class Value;
struct Arguments;

/// Thrown by operators, filters and functions; Template::render() adds the template's name and the line.
class EvaluationError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Undefined {
  std::string reason;  // "'tools' is undefined"
};
struct None {};

struct Text {
  std::shared_ptr<const std::string> bytes;
  bool is_markup = false;  // made by `safe` or `escape`: text added to it is escaped
};

enum class ListKind { list, tuple, range, view, iterator };

struct List {
  ListKind kind = ListKind::list;
  std::vector<Value> items;
  std::string view_of;       // "dict_items", for printing
  std::size_t consumed = 0;  // an iterator gives each item once
  int depth = 1;             // nested so deep
  std::int64_t weight = 0;   // about the bytes that it prints as
};

class Dict {
 public:
  struct Entry;
  const std::vector<Entry>& entries() const { return entries_; }
  /// Null if there is none. Throws EvaluationError for a key that Python cannot hash.
  const Value* find(const Value& key) const;
  const Value* named(std::string_view key) const;
  /// The last value of a key counts, in the place of the first.
  void set(Value key, Value value);
  int depth() const { return depth_; }
  std::int64_t weight() const { return weight_; }

 private:
  std::optional<std::size_t> place_of(const std::string& key) const;

  std::vector<Entry> entries_;
  std::unordered_map<std::string, std::size_t> index_;  // only where there are many
  int depth_ = 1;
  std::int64_t weight_ = 0;
};

/// Namespaces, functions, macros, bound methods, the `loop` of a for.
class Object {
 public:
  Object() = default;
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;
  virtual ~Object() = default;
  virtual std::string type_name() const = 0;
  virtual std::optional<Value> attribute(std::string_view name) const;
  virtual bool is_callable() const { return false; }
  /// Throws EvaluationError if it cannot be called.
  virtual Value call(Run& run, const Arguments& arguments);
  virtual int depth() const { return 1; }
};

class Value {
 public:
  Value() : content_(Undefined{}) {}
  Value(None) : content_(None{}) {}
  Value(Undefined undefined) : content_(std::move(undefined)) {}
  Value(bool value) : content_(value) {}
  Value(std::int64_t value) : content_(value) {}
  Value(int value) : content_(std::int64_t{value}) {}
  Value(double value) : content_(value) {}
  Value(std::string text, bool is_markup = false)
      : content_(Text{std::make_shared<const std::string>(std::move(text)), is_markup}) {}
  Value(std::string_view text) : Value(std::string(text)) {}
  Value(const char* text) : Value(std::string(text)) {}
  Value(Text text) : content_(std::move(text)) {}
  Value(std::shared_ptr<const Dict> dict) : content_(std::move(dict)) {}
  Value(std::shared_ptr<Object> object) : content_(std::move(object)) {}
  /// Throws EvaluationError if they nest too deep or print as too much.
  static Value list(std::vector<Value> items, ListKind kind = ListKind::list, std::string view_of = {});
  static Value dict(std::vector<std::pair<Value, Value>> entries);

  bool is_undefined() const { return std::holds_alternative<Undefined>(content_); }
  bool is_none() const { return std::holds_alternative<None>(content_); }
  bool is_bool() const { return std::holds_alternative<bool>(content_); }
  bool is_integer() const { return std::holds_alternative<std::int64_t>(content_); }
  bool is_float() const { return std::holds_alternative<double>(content_); }
  bool is_number() const { return is_bool() || is_integer() || is_float(); }
  bool is_text() const { return std::holds_alternative<Text>(content_); }
  bool is_list() const { return std::holds_alternative<std::shared_ptr<List>>(content_); }
  bool is_list(ListKind kind) const { return is_list() && list().kind == kind; }
  bool is_dict() const { return std::holds_alternative<std::shared_ptr<const Dict>>(content_); }
  bool is_object() const { return std::holds_alternative<std::shared_ptr<Object>>(content_); }

  // REQUIRES: the value is of this kind.
  const std::string& reason() const { return std::get<Undefined>(content_).reason; }
  const std::string& text() const { return *std::get<Text>(content_).bytes; }
  bool is_markup() const { return is_text() && std::get<Text>(content_).is_markup; }
  const List& list() const { return *std::get<std::shared_ptr<List>>(content_); }
  const Dict& dict() const { return *std::get<std::shared_ptr<const Dict>>(content_); }
  Object& object() const { return *std::get<std::shared_ptr<Object>>(content_); }
  const std::shared_ptr<Object>& shared_object() const { return std::get<std::shared_ptr<Object>>(content_); }
  /// A bool counts as 0 or 1.
  std::int64_t integer() const { return is_bool() ? std::get<bool>(content_) : std::get<std::int64_t>(content_); }
  double real() const { return is_float() ? std::get<double>(content_) : static_cast<double>(integer()); }

  bool truth() const;
  /// As in messages: "str", "NoneType", "dict".
  std::string type_name() const;
  /// The items of a list, the keys of a dict, the characters of a text, nothing of an undefined value. An iterator is
  /// empty afterwards. Throws EvaluationError for anything else.
  std::vector<Value> iterate() const;
  bool is_iterable() const;
  /// The number of items or characters; nullopt where Python has no len().
  std::optional<std::int64_t> length() const;
  int depth() const;
  /// About the bytes that it prints as. What is shared counts each time, so that printing and comparing are bounded.
  std::int64_t weight() const;

 private:
  std::variant<Undefined, None, bool, std::int64_t, double, Text, std::shared_ptr<List>, std::shared_ptr<const Dict>,
               std::shared_ptr<Object>>
      content_;
};

struct Dict::Entry {
  Value key, value;
};

struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named;
};

/// ==, of Python.
bool equal(const Value& left, const Value& right);

}  // namespace phalanx::jinja
