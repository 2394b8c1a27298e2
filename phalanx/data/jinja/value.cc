#include "phalanx/data/jinja/value.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "phalanx/data/jinja/python_text.h"

namespace phalanx::jinja {
namespace {

constexpr std::size_t kFewEntries = 8;
// Values are printed, compared and freed recursively.
constexpr int kMaxDepth = 200;
constexpr std::int64_t kMaxWeight = 256 << 20;
constexpr std::int64_t kWeightOfValue = 48;

int checked_depth(int depth) {
  if (depth > kMaxDepth) throw EvaluationError(fmt::format("a value nests deeper than {} levels", kMaxDepth));
  return depth;
}

std::int64_t checked_weight(std::int64_t weight) {
  if (weight > kMaxWeight) throw EvaluationError("a value is larger than 256 MiB");
  return weight;
}

/// Equal for keys that Python takes for the same one: 1, 1.0 and True.
std::string hash_key(const Value& key) {
  if (key.is_text()) return "s" + key.text();
  if (key.is_none()) return "none";
  if (key.is_bool() || key.is_integer()) return fmt::format("n{}", key.integer());
  if (key.is_float()) {
    const double real = key.real();
    const bool is_whole = std::trunc(real) == real && std::abs(real) < 9e15;
    return is_whole ? fmt::format("n{}", static_cast<std::int64_t>(real)) : "f" + float_text(real);
  }
  throw EvaluationError(
      fmt::format("a key of a dict is of type '{}': expected text, a number or none", key.type_name()));
}

bool equal_items(const std::vector<Value>& left, const std::vector<Value>& right) {
  return std::equal(left.begin(), left.end(), right.begin(), right.end(), equal);
}

bool equal_dicts(const Dict& left, const Dict& right) {
  return left.entries().size() == right.entries().size() &&
         std::ranges::all_of(left.entries(), [&](const Dict::Entry& entry) {
           const Value* other = right.find(entry.key);
           return other != nullptr && equal(entry.value, *other);
         });
}

}  // namespace

std::optional<std::size_t> Dict::place_of(const std::string& key) const {
  if (!index_.empty()) {
    const auto found = index_.find(key);
    return found == index_.end() ? std::nullopt : std::optional(found->second);
  }
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    if (hash_key(entries_[i].key) == key) return i;
  }
  return std::nullopt;
}

const Value* Dict::find(const Value& key) const {
  if (key.is_text()) return named(key.text());
  const auto place = place_of(hash_key(key));
  return place ? &entries_[*place].value : nullptr;
}

const Value* Dict::named(std::string_view key) const {
  if (!index_.empty()) {
    const auto place = place_of("s" + std::string(key));
    return place ? &entries_[*place].value : nullptr;
  }
  for (const Entry& entry : entries_) {
    if (entry.key.is_text() && entry.key.text() == key) return &entry.value;
  }
  return nullptr;
}

void Dict::set(Value key, Value value) {
  depth_ = std::max(depth_, checked_depth(1 + value.depth()));
  weight_ = checked_weight(weight_ + key.weight() + value.weight());
  std::string hashed = hash_key(key);
  if (const auto place = place_of(hashed)) {
    entries_[*place].value = std::move(value);
    return;
  }
  entries_.push_back({std::move(key), std::move(value)});
  if (entries_.size() < kFewEntries) return;
  if (index_.empty()) {
    for (std::size_t i = 0; i < entries_.size(); ++i) index_.emplace(hash_key(entries_[i].key), i);
  } else {
    index_.emplace(std::move(hashed), entries_.size() - 1);
  }
}

std::optional<Value> Object::attribute(std::string_view) const { return std::nullopt; }

Value Object::call(Run&, const Arguments&) {
  throw EvaluationError(fmt::format("'{}' object is not callable", type_name()));
}

Value Value::list(std::vector<Value> items, ListKind kind, std::string view_of) {
  auto list = std::make_shared<List>();
  for (const Value& item : items) {
    list->depth = std::max(list->depth, checked_depth(1 + item.depth()));
    list->weight = checked_weight(list->weight + item.weight());
  }
  list->kind = kind;
  list->items = std::move(items);
  list->view_of = std::move(view_of);
  Value value;
  value.content_ = std::move(list);
  return value;
}

Value Value::dict(std::vector<std::pair<Value, Value>> entries) {
  auto dict = std::make_shared<Dict>();
  for (std::pair<Value, Value>& entry : entries) dict->set(std::move(entry.first), std::move(entry.second));
  return Value(std::shared_ptr<const Dict>(std::move(dict)));
}

int Value::depth() const {
  if (is_list()) return list().depth;
  if (is_dict()) return dict().depth();
  return is_object() ? object().depth() : 0;
}

std::int64_t Value::weight() const {
  if (is_text()) return kWeightOfValue + static_cast<std::int64_t>(text().size());
  if (is_list()) return kWeightOfValue + list().weight;
  return kWeightOfValue + (is_dict() ? dict().weight() : 0);
}

bool Value::truth() const {
  if (is_number()) return real() != 0;
  if (is_undefined() || is_none()) return false;
  if (is_list(ListKind::iterator)) return true;
  if (const auto size = length()) return *size > 0;
  return true;
}

std::string Value::type_name() const {
  constexpr const char* kKinds[] = {"list", "tuple", "range", "", "generator"};
  if (is_undefined()) return "Undefined";
  if (is_none()) return "NoneType";
  if (is_bool()) return "bool";
  if (is_integer()) return "int";
  if (is_float()) return "float";
  if (is_text()) return is_markup() ? "Markup" : "str";
  if (is_dict()) return "dict";
  if (is_object()) return object().type_name();
  return list().kind == ListKind::view ? list().view_of : kKinds[static_cast<std::size_t>(list().kind)];
}

bool Value::is_iterable() const { return is_undefined() || is_text() || is_list() || is_dict(); }

std::vector<Value> Value::iterate() const {
  std::vector<Value> items;
  if (is_list(ListKind::iterator)) {
    auto& list = *std::get<std::shared_ptr<List>>(content_);
    items.assign(list.items.begin() + static_cast<std::ptrdiff_t>(list.consumed), list.items.end());
    list.consumed = list.items.size();
  } else if (is_list()) {
    items = list().items;
  } else if (is_dict()) {
    for (const auto& entry : dict().entries()) items.push_back(entry.key);
  } else if (is_text()) {
    for (const std::string_view character : characters_of(text()))
      items.emplace_back(std::string(character), is_markup());
  } else if (!is_undefined()) {
    throw EvaluationError(fmt::format("'{}' object is not iterable", type_name()));
  }
  return items;
}

std::optional<std::int64_t> Value::length() const {
  if (is_undefined()) return 0;
  if (is_text()) return code_points(text());
  if (is_dict()) return static_cast<std::int64_t>(dict().entries().size());
  if (is_list() && list().kind != ListKind::iterator) return static_cast<std::int64_t>(list().items.size());
  return std::nullopt;
}

bool equal(const Value& left, const Value& right) {
  if (left.is_number() && right.is_number()) {
    if (left.is_float() || right.is_float()) return left.real() == right.real();
    return left.integer() == right.integer();
  }
  if (left.is_text() && right.is_text()) return left.text() == right.text();
  if (left.is_list() && right.is_list()) {
    const ListKind kind = left.list().kind;
    if (kind != right.list().kind || kind == ListKind::iterator) return &left.list() == &right.list();
    return equal_items(left.list().items, right.list().items);
  }
  if (left.is_dict() && right.is_dict()) return equal_dicts(left.dict(), right.dict());
  if (left.is_object() && right.is_object()) return &left.object() == &right.object();
  return (left.is_none() && right.is_none()) || (left.is_undefined() && right.is_undefined());
}

}  // namespace phalanx::jinja
