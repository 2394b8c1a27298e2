#include "phalanx/config/given_value.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>
#include <utility>

#include "phalanx/base/dtype_names.h"
#include "phalanx/base/error.h"
#include "phalanx/base/nearest.h"
#include "phalanx/base/parse_text.h"
#include "phalanx/config/dataset_reader.h"
#include "phalanx/config/optimizer_groups_reader.h"
#include "phalanx/config/slot_text.h"
#include "phalanx/config/torchtitan_keys.h"

namespace phalanx::config {
namespace {

[[noreturn]] void refuse_value(const Key& key, Slot slot, const GivenValue& given, std::string hint = "") {
  if (!key.choices.empty()) {
    hint = did_you_mean(given.shown, std::vector<std::string>(key.choices.begin(), key.choices.end()));
  }
  if (key.section == "model" && (key.name == "name" || key.name == "flavor")) {
    hint +=
        "; for a model of another family or size: flavor = \"hf\", with hf_assets_path the folder of its config.json";
  }
  throw ConfigError(fmt::format("{}: {} is {}: expected {}{}", given.where, key_label(key.section, key.name),
                                given.shown, expectation(key, slot), hint));
}

/// "a,b" as a list; it may be enclosed in brackets and quotes, as in a file.
std::vector<std::string> list_in_flag(std::string_view text) {
  const auto strip = [](std::string_view part, std::string_view first, std::string_view last) {
    while (part.starts_with(' ')) part.remove_prefix(1);
    while (part.ends_with(' ')) part.remove_suffix(1);
    const bool is_wrapped = part.size() >= 2 && first.find(part.front()) != first.npos &&
                            last.find(part.back()) == first.find(part.front());
    return is_wrapped ? part.substr(1, part.size() - 2) : part;
  };
  text = strip(text, "[", "]");
  std::vector<std::string> parts;
  while (!text.empty()) {
    const std::size_t comma = std::min(text.find(','), text.size());
    if (const auto part = strip(text.substr(0, comma), "\"'", "\"'"); !part.empty()) parts.emplace_back(part);
    text.remove_prefix(std::min(comma + 1, text.size()));
  }
  return parts;
}

// Converts a flag's text to the type of its key.
void give_type(GivenValue& given, std::string_view type) {
  const std::string text = std::get<std::string>(given.value);
  if (type == "boolean") {
    if (text == "true" || text == "false") given.value = text == "true";
  } else if (type == "integer") {
    if (auto value = parse_whole<std::int64_t>(text)) given.value = *value;
  } else if (type == "number") {
    if (auto value = parse_whole<double>(text)) given.value = *value;
  } else if (type == "list of strings") {
    given.value = list_in_flag(text);
  }
}

void check_range(const Key& key, Slot slot, double value, const GivenValue& given) {
  if (std::isinf(value)) refuse_value(key, slot, given, ", and not infinite");
  if (std::abs(value) > std::numeric_limits<float>::max() && type_name(slot) == "number") {
    refuse_value(key, slot, given, ", and not above 3.4e38, where float32 ends");
  }
  if (!(value >= key.least && value <= key.most)) refuse_value(key, slot, given);  // NaN is refused too
}

/// The value for what was written, which may be another name of a type, or torchtitan's name.
std::string known_value(const Key& key, const std::string& text) {
  const auto is_choice = [&](std::string_view value) {
    return std::find(key.choices.begin(), key.choices.end(), value) != key.choices.end();
  };
  if (is_choice(text)) return text;
  if (std::string meant = meant_value(key.section, key.name, text); is_choice(meant)) return meant;
  const std::string dtype = canonical_dtype(text);
  return is_choice(dtype) ? dtype : text;
}

/// Of a file's list, or of a flag's "1, 2.5". Unset: something else.
std::optional<std::vector<double>> numbers_in(const GivenValue& given) {
  std::vector<double> numbers;
  if (const auto* list = std::get_if<const toml::array*>(&given.value)) {
    for (const toml::node& node : **list) {
      const auto number = node.is_number() ? node.value<double>() : std::nullopt;
      if (!number || !std::isfinite(*number)) return std::nullopt;
      numbers.push_back(*number);
    }
    return numbers;
  }
  const auto* text = std::get_if<std::string>(&given.value);
  if (!text || !given.from_flag) return std::nullopt;
  for (const std::string& part : list_in_flag(*text)) {
    const auto number = parse_whole<double>(part);
    if (!number || !std::isfinite(*number)) return std::nullopt;
    numbers.push_back(*number);
  }
  return numbers;
}

}  // namespace

GivenValue given_from(const toml::node& node, const std::string& source) {
  GivenValue given;
  given.where = fmt::format("{}:{}", source, node.source().begin.line);
  given.file = source;
  if (const auto* v = node.as_boolean()) {
    given.value = v->get();
    given.shown = v->get() ? "true" : "false";
  } else if (const auto* v = node.as_integer()) {
    given.value = v->get();
    given.shown = fmt::format("{}", v->get());
  } else if (const auto* v = node.as_floating_point()) {
    given.value = v->get();
    given.shown = fmt::format("{}", v->get());
  } else if (const auto* v = node.as_string()) {
    given.value = v->get();
    given.shown = fmt::format("\"{}\"", v->get());
  } else if (const auto* v = node.as_array()) {
    std::vector<std::string> strings;
    for (const toml::node& one : *v) {
      if (const auto* text = one.as_string()) strings.push_back(text->get());
    }
    const bool is_of_strings = strings.size() == v->size();
    given.shown = is_of_strings ? toml_value(&strings) : "a list";
    if (is_of_strings) {
      given.value = std::move(strings);
    } else {
      given.value = v;
    }
  } else {
    given.shown = node.is_table() ? "a table" : "a date or time";
  }
  return given;
}

std::optional<std::int64_t> count_in(const GivenValue& given) {
  std::optional<std::int64_t> count;
  if (const auto* integer = std::get_if<std::int64_t>(&given.value)) count = *integer;
  if (const auto* text = std::get_if<std::string>(&given.value)) count = parse_whole<std::int64_t>(*text);
  return count && *count >= 1 ? count : std::nullopt;
}

void assign(TrainConfig& config, const Key& key, GivenValue given) {
  Slot slot = key.slot(config);
  if (given.from_flag) give_type(given, type_name(slot));
  const auto* boolean = std::get_if<bool>(&given.value);
  const auto* integer = std::get_if<std::int64_t>(&given.value);
  const auto* number = std::get_if<double>(&given.value);
  const auto* text = std::get_if<std::string>(&given.value);
  const auto* list = std::get_if<std::vector<std::string>>(&given.value);
  const auto* tables = std::get_if<const toml::array*>(&given.value);
  const auto numbers = std::holds_alternative<std::vector<double>*>(slot) ? numbers_in(given) : std::nullopt;
  const bool is_number = number || integer;
  const double as_number = number ? *number : integer ? static_cast<double>(*integer) : 0.0;

  if (auto** p = std::get_if<bool*>(&slot); p && boolean) {
    **p = *boolean;
  } else if (auto** p = std::get_if<std::string*>(&slot); p && !key.or_count.empty() && count_in(given)) {
    **p = fmt::format("{}", *count_in(given));
  } else if (auto** p = std::get_if<std::optional<bool>*>(&slot); p && boolean) {
    **p = *boolean;
  } else if (auto** p = std::get_if<std::int64_t*>(&slot); p && integer) {
    check_range(key, slot, static_cast<double>(*integer), given);
    **p = *integer;
  } else if (auto** p = std::get_if<double*>(&slot); p && is_number) {
    check_range(key, slot, as_number, given);
    **p = as_number;
  } else if (auto** p = std::get_if<std::optional<double>*>(&slot); p && is_number) {
    check_range(key, slot, as_number, given);
    **p = as_number;
  } else if (auto** p = std::get_if<std::string*>(&slot); p && text) {
    const std::string value = key.choices.empty() ? *text : known_value(key, *text);
    if (!key.choices.empty() && std::find(key.choices.begin(), key.choices.end(), value) == key.choices.end()) {
      refuse_value(key, slot, given);
    }
    **p = value;
  } else if (auto** p = std::get_if<std::vector<std::string>*>(&slot); p && list) {
    **p = *list;
  } else if (auto** p = std::get_if<Datasets*>(&slot); p && given.from_flag) {
    **p = read_datasets(*text, key_label(key.section, key.name), given.where);
  } else if (auto** p = std::get_if<Datasets*>(&slot); p && tables) {
    **p = read_datasets(**tables, key_label(key.section, key.name), given.file, /*is_file=*/true);
  } else if (auto** p = std::get_if<Datasets*>(&slot); p && list && list->empty()) {
    (*p)->clear();
  } else if (auto** p = std::get_if<std::vector<double>*>(&slot); p && numbers) {
    **p = *numbers;
  } else if (auto** p = std::get_if<OptimizerGroups*>(&slot); p && given.from_flag) {
    **p = read_optimizer_groups(*text, key_label(key.section, key.name), given.where);
  } else if (auto** p = std::get_if<OptimizerGroups*>(&slot); p && tables) {
    **p = read_optimizer_groups(**tables, key_label(key.section, key.name), given.file, /*is_file=*/true);
  } else if (auto** p = std::get_if<OptimizerGroups*>(&slot); p && list && list->empty()) {
    (*p)->clear();
  } else {
    refuse_value(key, slot, given);
  }
}

}  // namespace phalanx::config
