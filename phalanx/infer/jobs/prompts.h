// Reads prompts from a file: one per line, or JSON lines. It does not use torch.
//
//   {"id": "q-17", "prompt": "Once upon"}           text, by the field named in the format
//   {"id": 4, "ids": [31, 7, 200]}                  tokens
//   Once upon a time                                if the file is not JSON lines
//
//   Prompts read = parse_prompts(read_file(path), path, {.json_lines = path.ends_with(".jsonl")});
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace phalanx::infer {

struct PromptFormat {
  bool json_lines = true;
  std::string prompt_field = "prompt";
  std::string id_field = "id";
  /// Whether a line that holds no prompt (text that is not a JSON object, a field that is missing or of a wrong type)
  /// is left out and reported in `skipped`; else it is an error.
  bool skips_malformed = false;
};

struct Prompt {
  std::string id;                   // as JSON text: the line's own, else its number
  std::optional<std::string> text;  // unset: ids are given
  std::vector<std::int64_t> ids;
  std::string where = {};  // "prompts.jsonl, line 3"
  std::size_t number = 0;  // among the file's non-blank lines, from 0; skipped lines do not change it
};

struct Prompts {
  std::vector<Prompt> all;
  std::vector<std::string> skipped;  // "prompts.jsonl, line 3: "prompt" must be a string"
  /// Prompts with the id of an earlier one: "prompts.jsonl, line 7: the id 4 is also that of prompts.jsonl, line 2".
  std::vector<std::string> repeated;
};

/// What `repeated` lists.
std::vector<std::string> repeated_ids(const std::vector<Prompt>& prompts);

/// `name` replaces the file's name in messages. Empty and blank lines are skipped. Throws DataError that names the line
/// and what is wrong with it, and for a file without any prompt.
Prompts parse_prompts(std::string_view contents, const std::string& name, const PromptFormat& format = {});

}  // namespace phalanx::infer
