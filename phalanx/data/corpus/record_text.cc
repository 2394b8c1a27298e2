#include "phalanx/data/corpus/record_text.h"

#include <simdjson.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "phalanx/base/byte_order_mark.h"
#include "phalanx/base/json_depth.h"

namespace phalanx::data {
namespace {

constexpr std::size_t kSmallestCapacity = 4096;  // bytes of a line

namespace dom = simdjson::dom;

bool repeats_a_key(const dom::object& record, std::vector<std::string_view>& keys) {
  keys.clear();
  for (const auto& [key, value] : record) keys.push_back(key);
  std::ranges::sort(keys);
  return std::ranges::adjacent_find(keys) != keys.end();
}

/// Whether some object in `value` has a key twice.
bool has_repeated_key(const dom::element& value, std::vector<std::string_view>& keys) {
  if (value.is_object()) {
    const dom::object members = value.get_object().value_unsafe();
    if (repeats_a_key(members, keys)) return true;
    return std::any_of(members.begin(), members.end(),
                       [&](const auto& member) { return has_repeated_key(member.value, keys); });
  }
  if (!value.is_array()) return false;
  const dom::array members = value.get_array().value_unsafe();
  return std::any_of(members.begin(), members.end(),
                     [&](const dom::element& one) { return has_repeated_key(one, keys); });
}

/// The value of "a.b" in {"a": {"b": value}}.
std::optional<dom::element> element_at(dom::element at, std::string_view field) {
  while (!field.empty()) {
    const std::size_t dot = std::min(field.find('.'), field.size());
    dom::object members;
    if (at.get(members) != simdjson::SUCCESS) return std::nullopt;
    if (members.at_key(field.substr(0, dot)).get(at) != simdjson::SUCCESS) return std::nullopt;
    field.remove_prefix(std::min(dot + 1, field.size()));
  }
  return at;
}

/// Halves of surrogate pairs, of which this parser takes more than the other. Whole pairs are rare enough to leave them
/// to that one.
bool may_have_surrogates(std::string_view line) {
  for (std::size_t at = line.find("\\u"); at != std::string_view::npos; at = line.find("\\u", at + 2)) {
    if (at + 2 < line.size() && (line[at + 2] == 'd' || line[at + 2] == 'D')) return true;
  }
  return false;
}

}  // namespace

struct RecordText::Parser {
  dom::parser json;
  std::vector<std::string_view> keys;
};

RecordText::RecordText(std::string field) : field_(std::move(field)), parser_(std::make_unique<Parser>()) {}
RecordText::~RecordText() = default;

std::optional<std::string_view> RecordText::find(std::string& line) {
  if (may_have_surrogates(line) || encoding_by_mark(line)) return std::nullopt;
  line.reserve(line.size() + simdjson::SIMDJSON_PADDING);
  dom::parser& json = parser_->json;
  if (json.capacity() < line.size()) {
    const std::size_t capacity = std::max({line.size(), 2 * json.capacity(), kSmallestCapacity});
    if (json.allocate(capacity, kMaxJsonDepth) != simdjson::SUCCESS) return std::nullopt;
  }
  dom::element record;
  if (json.parse(line.data(), line.size(), /*realloc_if_needed=*/false).get(record) != simdjson::SUCCESS) return {};
  if (!record.is_object() || has_repeated_key(record, parser_->keys)) return {};
  dom::element found;
  if (record.get_object().value_unsafe().at_key(field_).get(found) != simdjson::SUCCESS) {
    const auto nested = element_at(record, field_);
    if (!nested) return std::nullopt;
    found = *nested;
  }
  std::string_view text;
  if (found.get(text) != simdjson::SUCCESS) return std::nullopt;
  return text;
}

}  // namespace phalanx::data
