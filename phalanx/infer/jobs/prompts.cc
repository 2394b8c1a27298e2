#include "phalanx/infer/jobs/prompts.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <unordered_map>

#include "phalanx/base/error.h"
#include "phalanx/base/json_lines.h"
#include "phalanx/base/json_number.h"
#include "phalanx/base/json_text.h"
#include "phalanx/base/utf8.h"

namespace phalanx::infer {
namespace {

std::vector<std::int64_t> read_ids(const nlohmann::json& list, const std::string& where) {
  std::vector<std::int64_t> ids;
  bool right = list.is_array();
  for (std::size_t i = 0; right && i < list.size(); ++i) {
    right = is_whole_number(list[i]);
    if (right) ids.push_back(list[i].get<std::int64_t>());
  }
  if (!right) throw DataError(where + ": \"ids\" must be a list of integers");
  return ids;
}

Prompt read_line(std::string_view line, const std::string& where, const PromptFormat& format) {
  const auto json = parse_json_object<DataError>(line, where);
  const auto text = json.find(format.prompt_field), ids = json.find("ids");
  if (text == json.end() && ids == json.end()) {
    throw DataError(fmt::format("{}: neither \"{}\" (text) nor \"ids\" (token ids)", where, format.prompt_field));
  }
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

std::vector<std::string> repeated_ids(const std::vector<Prompt>& prompts) {
  std::vector<std::string> repeated;
  std::unordered_map<std::string, const Prompt*> first;  // by id
  for (const Prompt& prompt : prompts) {
    if (const auto [found, is_new] = first.emplace(prompt.id, &prompt); !is_new) {
      repeated.push_back(
          fmt::format("{}: the id {} is also that of {}", prompt.where, prompt.id, found->second->where));
    }
  }
  return repeated;
}

Prompts parse_prompts(std::string_view contents, const std::string& name, const PromptFormat& format) {
  Prompts read;
  std::size_t lines = 0;
  each_line(contents, name, [&](std::string_view line, const std::string& where) {
    const std::size_t number = lines++;
    Prompt prompt;
    try {
      if (!format.json_lines && !is_utf8(line)) throw DataError(where + ": it is not valid UTF-8");
      prompt =
          format.json_lines ? read_line(line, where, format) : Prompt{.id = {}, .text = std::string(line), .ids = {}};
    } catch (const DataError& error) {
      if (!format.skips_malformed) throw;
      read.skipped.emplace_back(error.what());
      return;
    }
    prompt.where = where;
    prompt.number = number;
    if (prompt.id.empty()) prompt.id = std::to_string(number);
    read.all.push_back(std::move(prompt));
  });
  if (read.all.empty()) throw DataError(no_line_left(name, "prompts", read.skipped));
  read.repeated = repeated_ids(read.all);
  return read;
}

}  // namespace phalanx::infer
