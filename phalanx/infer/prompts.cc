#include "phalanx/infer/prompts.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "phalanx/base/error.h"

namespace phalanx::infer {
namespace {

std::vector<std::int64_t> read_ids(const nlohmann::json& list, const std::string& where) {
  std::vector<std::int64_t> ids;
  bool right = list.is_array();
  for (std::size_t i = 0; right && i < list.size(); ++i) {
    right = list[i].is_number_integer();
    if (right) ids.push_back(list[i].get<std::int64_t>());
  }
  if (!right) throw DataError(where + ": \"ids\" must be a list of integers");
  return ids;
}

/// Nothing: the line has no prompt.
std::optional<Prompt> read_line(std::string_view line, const std::string& where, const PromptFormat& format) {
  const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) throw DataError(where + ": expected a JSON object");
  const auto text = json.find(format.prompt_field), ids = json.find("ids");
  if (text == json.end() && ids == json.end()) return std::nullopt;
  if (text != json.end() && ids != json.end()) {
    throw DataError(fmt::format("{}: expected either \"{}\" (text) or \"ids\" (token ids), found both", where,
                                format.prompt_field));
  }
  Prompt prompt;
  if (const auto id = json.find(format.id_field); id != json.end()) prompt.id = id->dump();
  if (ids != json.end()) {
    prompt.ids = read_ids(*ids, where);
  } else if (text->is_string()) {
    prompt.text = text->get<std::string>();
  } else {
    throw DataError(fmt::format("{}: \"{}\" must be a string", where, format.prompt_field));
  }
  return prompt;
}

}  // namespace

Prompts parse_prompts(std::string_view contents, const std::string& name, const PromptFormat& format) {
  Prompts read;
  std::size_t number = 0;
  while (!contents.empty()) {
    const std::size_t end = std::min(contents.find('\n'), contents.size());
    std::string_view line = contents.substr(0, end);
    contents.remove_prefix(std::min(end + 1, contents.size()));
    ++number;
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty()) continue;
    const std::string where = fmt::format("{}, line {}", name, number);
    std::optional<Prompt> prompt =
        format.json_lines ? read_line(line, where, format) : Prompt{.id = {}, .text = std::string(line), .ids = {}};
    if (!prompt) {
      const auto missing = fmt::format("{}: neither \"{}\" (text) nor \"ids\" (token ids)", where, format.prompt_field);
      if (!format.skips_incomplete) throw DataError(missing);
      read.skipped.push_back(missing);
      continue;
    }
    if (prompt->id.empty()) prompt->id = std::to_string(read.all.size());
    read.all.push_back(std::move(*prompt));
  }
  if (read.all.empty()) throw DataError(fmt::format("{} holds no prompts", name));
  return read;
}

}  // namespace phalanx::infer
