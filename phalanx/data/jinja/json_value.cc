#include "phalanx/data/jinja/json_value.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "phalanx/base/byte_order_mark.h"
#include "phalanx/base/error.h"
#include "phalanx/base/json_depth.h"
#include "phalanx/base/json_text.h"

namespace phalanx::jinja {
namespace {

/// Builds a Value from the parser's events.
class Builder : public nlohmann::json_sax<nlohmann::json> {
 public:
  bool null() override { return add(None{}); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(std::int64_t{value}); }
  bool number_unsigned(number_unsigned_t value) override {
    if (!std::in_range<std::int64_t>(value)) return refuse_number(fmt::format("{}", value));
    return add(static_cast<std::int64_t>(value));
  }
  bool number_float(number_float_t value, const string_t& text) override {
    if (text.find_first_of(".eE") == std::string::npos) return refuse_number(text);
    return add(value);
  }
  bool string(string_t& value) override { return add(std::move(value)); }
  bool binary(binary_t&) override { return false; }
  bool start_object(std::size_t) override { return open(true); }
  bool start_array(std::size_t) override { return open(false); }
  bool end_array() override { return close(); }
  bool end_object() override { return close(); }
  bool key(string_t& name) override {
    auto& level = levels_.back();
    if (level.dict->named(name) != nullptr) {
      fault_ = fmt::format("its key \"{}\" is there twice in one object: expected it once", printable(name));
      return false;
    }
    level.key = std::move(name);
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception&) override { return false; }

  const std::string& fault() const { return fault_; }
  Value result() { return std::move(result_); }

 private:
  struct Level {
    std::shared_ptr<Dict> dict;  // null: a list
    std::vector<Value> items;
    std::string key;
  };

  static std::string printable(const std::string& name) {
    const std::string quoted = nlohmann::json(name).dump(-1, ' ', /*ensure_ascii=*/true);
    return quoted.substr(1, std::min<std::size_t>(quoted.size() - 2, 60));
  }
  bool refuse_number(const std::string& text) {
    fault_ = fmt::format("the number {} does not fit into 64 bits", text.substr(0, 40));
    return false;
  }
  bool open(bool is_dict) {
    levels_.push_back({is_dict ? std::make_shared<Dict>() : nullptr, {}, {}});
    return true;
  }
  bool close() {
    Level level = std::move(levels_.back());
    levels_.pop_back();
    if (level.dict) return add(Value(std::shared_ptr<const Dict>(std::move(level.dict))));
    return add(Value::list(std::move(level.items)));
  }
  bool add(Value value) {
    if (levels_.empty()) {
      result_ = std::move(value);
    } else if (auto& level = levels_.back(); level.dict) {
      level.dict->set(Value(std::move(level.key)), std::move(value));
    } else {
      level.items.push_back(std::move(value));
    }
    return true;
  }

  std::vector<Level> levels_;
  Value result_;
  std::string fault_;
};

std::string fault_in(std::string_view text, const Builder& builder) {
  nlohmann::json ignored;
  if (!builder.fault().empty()) return builder.fault();
  return json_object_fault(text, ignored).value_or("not valid JSON");
}

}  // namespace

Value read_json(std::string_view text, const std::string& where) {
  Builder builder;
  const auto fail = [&](const std::string& fault) -> Value { throw DataError(fmt::format("{}: {}", where, fault)); };
  if (const auto fault = encoding_fault(text)) return fail(*fault);
  if (is_json_too_deep(text)) return fail(kJsonTooDeep);
  try {
    if (!nlohmann::json::sax_parse(without_utf8_mark(text), &builder)) return fail(fault_in(text, builder));
  } catch (const EvaluationError& error) {
    return fail(error.what());
  } catch (const nlohmann::json::exception&) {
    return fail(fault_in(text, builder));
  }
  Value value = builder.result();
  if (!value.is_dict() && !value.is_list()) return fail("expected a JSON object or a list");
  return value;
}

}  // namespace phalanx::jinja
