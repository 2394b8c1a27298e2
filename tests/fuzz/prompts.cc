// Prompts and questions, as JSON lines.
#include "phalanx/infer/jobs/prompts.h"
#include "phalanx/infer/jobs/questions.h"
#include "tests/fuzz/fuzz.h"

using namespace phalanx;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text = fuzz::text_of(data, size);
  fuzz::parse([&] {
    const auto read = infer::parse_prompts(text, fuzz::kFile, {.skips_malformed = true});
    for (const auto& prompt : read.all) {
      fuzz::require(!prompt.id.empty(), "a prompt has an id");
      fuzz::require(!prompt.text || prompt.ids.empty(), "a prompt is text or tokens");
    }
  });
  return fuzz::parse([&] {
    for (const auto& question : infer::parse_questions(text, fuzz::kFile)) {
      fuzz::require(!question.choices.empty(), "a question has choices");
      fuzz::require(!question.answer || *question.answer < question.choices.size(), "the answer is a choice");
    }
  });
}
