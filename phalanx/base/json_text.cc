#include "phalanx/base/json_text.h"

#include <fmt/format.h>

#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "phalanx/base/byte_order_mark.h"
#include "phalanx/base/hub_name.h"
#include "phalanx/base/json_depth.h"

namespace phalanx {
namespace {

constexpr std::size_t kLongestReason = 200;

/// The position in `text`: "line 3, column 14", counted from 1, or "column 14" if there is only one line.
std::string place_of(std::string_view text, std::size_t byte) {
  const std::string_view before = text.substr(0, byte > 0 ? byte - 1 : 0);  // the parser counts from 1
  const std::size_t last_break = before.rfind('\n');
  const std::size_t column = last_break == std::string_view::npos ? before.size() : before.size() - last_break - 1;
  if (text.substr(0, text.find_last_not_of("\r\n") + 1).find('\n') == std::string_view::npos) {
    return fmt::format("column {}", column + 1);
  }
  std::size_t line = 1;
  for (const char c : before) line += c == '\n' ? 1 : 0;
  return fmt::format("line {}, column {}", line, column + 1);
}

std::string printable(std::string_view text) {
  std::string shown(text.substr(0, kLongestReason));
  for (char& c : shown) {
    if (c < ' ' || c > '~') c = '?';
  }
  return shown;
}

/// The parser's reason, without its own name and position, which are in "[json.exception...] parse error at line 1,
/// column 2: REASON".
std::string reason_in(std::string_view message) {
  const auto cut_after = [&](std::string_view end) {
    if (const std::size_t found = message.find(end); found != std::string_view::npos)
      message.remove_prefix(found + end.size());
  };
  cut_after("] ");
  if (message.starts_with("parse error")) cut_after(": ");
  if (message.starts_with("syntax error while parsing ")) cut_after(" - ");
  if (message.starts_with("unexpected end of input")) return "it ends too soon; a file that was cut short?";
  return printable(message);
}

/// Finds an object with a duplicate key. The parser would keep only the last value.
class RepeatedKey {
 public:
  void see(int depth, nlohmann::json::parse_event_t event, const nlohmann::json& part) {
    using Event = nlohmann::json::parse_event_t;
    const auto level = static_cast<std::size_t>(depth);
    if (event == Event::object_start) {
      if (keys_.size() <= level + 1) keys_.resize(level + 2);
      keys_[level + 1].clear();
    } else if (event == Event::key && level < keys_.size() && name_.empty()) {
      const auto& key = part.get_ref<const std::string&>();
      if (!keys_[level].insert(key).second) name_ = key.empty() ? "\"\"" : key;
    }
  }
  const std::string& name() const { return name_; }

 private:
  std::vector<std::unordered_set<std::string>> keys_;  // by depth: the keys of the object that is open there
  std::string name_;
};

}  // namespace

std::optional<std::string> json_object_fault(std::string_view text, nlohmann::json& json) {
  if (auto fault = encoding_fault(text)) return fault;
  text = without_utf8_mark(text);
  if (is_lfs_pointer(text)) return std::string(kLfsHint);
  if (is_json_too_deep(text)) return kJsonTooDeep;
  nlohmann::json value;
  RepeatedKey repeated;
  try {
    value = nlohmann::json::parse(text, [&](int depth, nlohmann::json::parse_event_t event, nlohmann::json& part) {
      repeated.see(depth, event, part);
      return true;
    });
  } catch (const nlohmann::json::parse_error& error) {
    return fmt::format("not valid JSON at {}: {}", place_of(text, error.byte), reason_in(error.what()));
  } catch (const nlohmann::json::exception& error) {  // a number that does not fit in a double
    return fmt::format("not valid JSON: {}", reason_in(error.what()));
  }
  if (!repeated.name().empty()) {
    return fmt::format("its key \"{}\" is there twice in one object: expected it once", printable(repeated.name()));
  }
  if (!value.is_object()) return fmt::format("expected a JSON object, found {}", value.type_name());
  json = std::move(value);
  return std::nullopt;
}

std::string json_value_fault(const nlohmann::json::exception& error) {
  constexpr int kWrongType = 302, kNoSuchKey = 403;
  std::string reason = reason_in(error.what());
  if (error.id == kNoSuchKey && reason.starts_with("key ") && reason.ends_with(" not found")) {
    return fmt::format("its {} is missing", reason.substr(0, reason.size() - std::string_view(" not found").size()));
  }
  constexpr std::string_view kExpected = "type must be ", kFound = ", but is ";
  const auto found = reason.find(kFound);
  if (error.id == kWrongType && reason.starts_with(kExpected) && found != std::string::npos) {
    return fmt::format("expected {}, found {}", reason.substr(kExpected.size(), found - kExpected.size()),
                       reason.substr(found + kFound.size()));
  }
  return fmt::format("a value is of another type than it should be ({})", reason);
}

}  // namespace phalanx
