#include "phalanx/config/slot_text.h"

#include <fmt/format.h>

#include <cmath>
#include <type_traits>

namespace phalanx::config {

std::string key_label(std::string_view section, std::string_view name) { return fmt::format("[{}] {}", section, name); }

std::string_view type_name(const Slot& slot) {
  switch (slot.index()) {
    case 0:
    case 4:
      return "boolean";
    case 1:
      return "integer";
    case 2:
    case 5:
      return "number";
    case 6:
      return "list of strings";
    case 7:
    case 8:
      return "list of tables";
    case 9:
      return "list of numbers";
    default:
      return "string";
  }
}

namespace {

std::string number_text(double value) {
  std::string text = fmt::format("{}", value);  // the shortest text that reads back as the same number
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

std::string quoted(const std::string& value) {
  std::string text = "\"";
  for (const char c : value) {
    if (c == '"' || c == '\\') {
      text += '\\';
      text += c;
    } else if (c == '\n') {
      text += "\\n";
    } else if (c == '\t') {
      text += "\\t";
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      text += fmt::format("\\u{:04X}", static_cast<unsigned>(static_cast<unsigned char>(c)));
    } else {
      text += c;
    }
  }
  return text + '"';
}

struct ToToml {
  std::string operator()(const bool* v) const { return *v ? "true" : "false"; }
  std::string operator()(const std::int64_t* v) const { return fmt::format("{}", *v); }
  std::string operator()(const double* v) const { return number_text(*v); }
  std::string operator()(const std::string* v) const { return quoted(*v); }
  std::string operator()(const std::optional<bool>* v) const { return *v ? (**v ? "true" : "false") : ""; }
  std::string operator()(const std::optional<double>* v) const { return *v ? number_text(**v) : ""; }
  std::string operator()(const std::vector<std::string>* v) const {
    std::string text = "[";
    for (const std::string& one : *v) text += (text.size() > 1 ? ", " : "") + quoted(one);
    return text + "]";
  }
  std::string operator()(const Datasets* v) const { return datasets_toml(*v); }
  std::string operator()(const OptimizerGroups* v) const { return optimizer_groups_toml(*v); }
  std::string operator()(const std::vector<double>* v) const {
    std::string text = "[";
    for (const double one : *v) text += (text.size() > 1 ? ", " : "") + number_text(one);
    return text + "]";
  }
};

}  // namespace

std::string toml_value(const Slot& slot) { return std::visit(ToToml{}, slot); }

std::string expectation(const Key& key, Slot slot) {
  if (!key.choices.empty()) {
    std::string text = key.choices.size() == 1 ? "" : "one of ";
    for (std::size_t i = 0; i < key.choices.size(); ++i) text += fmt::format("{}\"{}\"", i ? ", " : "", key.choices[i]);
    return key.or_count.empty() ? text : fmt::format("{}, or {}", text, key.or_count);
  }
  const std::string_view type = type_name(slot);
  if (type == "boolean") return "true or false";
  if (type == "string") return "a string";
  if (type == "list of strings") return "a list of strings";
  if (type == "list of numbers") return "a list of numbers";
  if (std::holds_alternative<OptimizerGroups*>(slot)) return "a list of tables, each with params";
  if (type == "list of tables") return "a list of tables, each with a path";
  std::string text = type == "integer" ? "an integer" : "a number";
  const bool has_least = std::isfinite(key.least);
  const bool has_most = std::isfinite(key.most);
  if (has_least && key.most == kLargestCount) return text + fmt::format(", {} or more{}", key.least, kAtMostCount);
  if (has_least && has_most) return text + fmt::format(" from {} to {}", key.least, key.most);
  if (has_least) return text + fmt::format(", {} or more", key.least);
  return text;
}

}  // namespace phalanx::config
