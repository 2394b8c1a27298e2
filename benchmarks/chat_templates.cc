// Renders chat templates, for scripts/chat_templates.py, which compares the texts with those of transformers.
//
//   chat_templates CASES RESULTS      CASES: a line for each case, {"template": FILE, "context": {...}}
//                                     RESULTS: {"text", "generated": [[begin, end], ...]} or {"error"}; a last line has
//                                     the seconds that rendering took
//
// A case {"template": FILE, "record": {...}, "tokenizer": FILE} is a conversation as files have it (docs/chat.md). Its
// result is {"text", "answers": [[begin, end], ...], "ids", "mask"}.
#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/data/chat/tokenized_conversation.h"
#include "phalanx/data/jinja/json_value.h"
#include "phalanx/data/jinja/python_text.h"
#include "phalanx/data/jinja/template.h"
#include "phalanx/data/jinja/testing/fixed_clock.h"

namespace {

using phalanx::data::BpeTokenizer;
using phalanx::data::ChatTemplate;
using phalanx::jinja::Context;
using phalanx::jinja::Dict;
using phalanx::jinja::fixed_clock;
using phalanx::jinja::Template;
using phalanx::jinja::Value;

Context context_of(const Value& dict) {
  Context context;
  for (const auto& [key, value] : dict.dict().entries()) context.emplace_back(key.text(), value);
  return context;
}

class Renderer {
 public:
  nlohmann::ordered_json result_of(const std::string& line) {
    const Value parsed = phalanx::jinja::read_json(line, "case");
    try {
      return parsed.dict().named("record") != nullptr ? tokenize(parsed.dict()) : render(parsed.dict());
    } catch (const phalanx::Error& error) {
      return {{"error", error.what()}};
    }
  }
  double seconds() const { return seconds_; }

 private:
  nlohmann::ordered_json render(const Dict& fields) {
    const Template& chat = template_of(fields.named("template")->text());
    const Context context = context_of(*fields.named("context"));
    const auto start = std::chrono::steady_clock::now();
    const auto rendered = chat.render(context, {.clock = fixed_clock});
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return {{"text", rendered.text}, {"generated", as_json(rendered.generated)}};
  }

  nlohmann::ordered_json tokenize(const Dict& fields) {
    const std::string file = fields.named("template")->text(), tokenizer = fields.named("tokenizer")->text();
    auto known = tokenizers_.find(tokenizer);
    if (known == tokenizers_.end()) known = tokenizers_.emplace(tokenizer, BpeTokenizer::load(tokenizer)).first;
    const ChatTemplate chat(phalanx::read_file(file), file, {{"bos_token", "<s>"}, {"eos_token", "</s>"}});
    const auto conversation =
        phalanx::data::parse_conversation(phalanx::jinja::to_json(*fields.named("record"), {}), "case");
    const auto spans = phalanx::data::find_answers(chat, conversation, {.clock = fixed_clock});
    const auto tokens =
        phalanx::data::ConversationTokenizer(chat, known->second, {.render = {.clock = fixed_clock}})(conversation);
    return {
        {"text", spans.text}, {"answers", as_json(spans.answers)}, {"ids", tokens.tokens}, {"mask", tokens.is_trained}};
  }

  static nlohmann::ordered_json as_json(const std::vector<phalanx::jinja::TextSpan>& spans) {
    nlohmann::ordered_json made = nlohmann::json::array();
    for (const auto& span : spans) made.push_back({span.begin, span.end});
    return made;
  }

  const Template& template_of(const std::string& file) {
    const auto known = templates_.find(file);
    if (known != templates_.end()) return known->second;
    return templates_.emplace(file, Template::parse(phalanx::read_file(file), file)).first->second;
  }

  std::map<std::string, Template> templates_;
  std::map<std::string, BpeTokenizer> tokenizers_;
  double seconds_ = 0;
};

void run(const std::string& cases, const std::string& results) {
  Renderer renderer;
  std::string out;
  const std::string text = phalanx::read_file(cases);
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    out += renderer.result_of(text.substr(at, end - at)).dump() + "\n";
    at = end + 1;
  }
  phalanx::write_file(results, out + fmt::format("{{\"seconds\": {}}}\n", renderer.seconds()));
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) {
    fmt::print(stderr, "usage: chat_templates CASES RESULTS\n");
    return 2;
  }
  try {
    run(arguments[1], arguments[2]);
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "chat_templates: {}\n", error.what());
    return 1;
  }
}
