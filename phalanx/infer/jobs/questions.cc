#include "phalanx/infer/jobs/questions.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/json_lines.h"
#include "phalanx/base/json_text.h"

namespace phalanx::infer {

namespace {

Question read_question(std::string_view line, const std::string& where, std::size_t number) {
  const auto fail = [&](const char* reason) { throw DataError(fmt::format("{}: {}", where, reason)); };
  const auto json = parse_json_object<DataError>(line, where);
  Question question{.id = std::to_string(number), .prompt = {}, .choices = {}, .answer = {}, .where = where};
  if (json.contains("id")) question.id = json["id"].dump();
  if (!json.contains("prompt") || !json["prompt"].is_string()) fail("expected \"prompt\", a string");
  question.prompt = json["prompt"].get<std::string>();
  const auto choices = json.find("choices");
  if (choices == json.end() || !choices->is_array() || choices->empty())
    fail("expected \"choices\", a list of strings");
  for (const auto& choice : *choices) {
    if (!choice.is_string() || choice.get_ref<const std::string&>().empty()) {
      fail("\"choices\" must be strings, none of them empty");
    }
    question.choices.push_back(choice.get<std::string>());
  }
  if (const auto answer = json.find("answer"); answer != json.end()) {
    if (!answer->is_number_unsigned() || answer->get<std::size_t>() >= question.choices.size()) {
      fail("\"answer\" must be the number of one of the choices, from 0 on");
    }
    question.answer = answer->get<std::size_t>();
  }
  return question;
}

}  // namespace

std::vector<Question> parse_questions(std::string_view contents, const std::string& name,
                                      std::vector<std::string>* skipped) {
  std::vector<Question> questions;
  std::size_t lines = 0;
  each_line(contents, name, [&](std::string_view line, const std::string& where) {
    const std::size_t number = lines++;  // skipped lines do not change it
    try {
      questions.push_back(read_question(line, where, number));
    } catch (const DataError& error) {
      if (!skipped) throw;
      skipped->emplace_back(error.what());
    }
  });
  if (questions.empty()) {
    throw DataError(no_line_left(name, "questions", skipped ? *skipped : std::vector<std::string>()));
  }
  return questions;
}

}  // namespace phalanx::infer
