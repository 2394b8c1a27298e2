// Multiple-choice questions from JSON lines. Knows no tensor.
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
  std::string id;                    // as JSON text: the line's own, else its number among all that are not blank
  std::string prompt;                // may be empty
  std::vector<std::string> choices;  // one or more, none of them empty: what follows the prompt to the letter
  std::optional<std::size_t> answer;
  std::string where = {};  // "questions.jsonl, line 3"
};

/// `name` stands for the file in messages. Empty and blank lines are passed over. DataError names the line and what is
/// wrong with it; with `skipped` such a line is left out and told there instead. A file without any question is an
/// error.
std::vector<Question> parse_questions(std::string_view contents, const std::string& name,
                                      std::vector<std::string>* skipped = nullptr);

}  // namespace phalanx::infer
