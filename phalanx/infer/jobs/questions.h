// Reads multiple-choice questions from JSON lines. It does not use torch.
//
//   {"prompt": "The capital of France is", "choices": [" Rome", " Paris"], "answer": 1}
//
//   std::vector<Question> questions = parse_questions(read_file(path), path);
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace phalanx::infer {

struct Question {
  std::string id;                    // as JSON text: the line's own, else its number among all non-blank lines
  std::string prompt;                // may be empty
  std::vector<std::string> choices;  // one or more, none empty: the exact text that follows the prompt
  std::optional<std::size_t> answer;
  std::string where = {};  // "questions.jsonl, line 3"
};

/// `name` replaces the file's name in messages. Empty and blank lines are skipped. Throws DataError that names the line
/// and what is wrong with it. If `skipped` is given, such a line is left out and reported there instead. A file without
/// any question is an error.
std::vector<Question> parse_questions(std::string_view contents, const std::string& name,
                                      std::vector<std::string>* skipped = nullptr);

}  // namespace phalanx::infer
