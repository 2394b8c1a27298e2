// Conversations as JSON lines, and what is found of their answers.
#include "phalanx/data/chat/conversation.h"
#include "phalanx/data/chat/tokenized_conversation.h"
#include "tests/fuzz/fuzz.h"

using namespace phalanx;

namespace {

constexpr const char* kTemplate =
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content | trim }}{% endif %}{{ m.tool_calls "
    "}}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}";

void find(const data::ChatTemplate& chat, const data::Conversation& conversation) {
  const auto found = data::find_answers(chat, conversation);
  std::size_t end = 0;
  for (const auto& answer : found.answers) {
    fuzz::require(end <= answer.begin && answer.begin < answer.end, "answers follow each other");
    end = answer.end;
  }
  fuzz::require(end <= found.text.size(), "answers lie in the text");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const data::ChatTemplate kChat(kTemplate, "template");
  return fuzz::parse([&] {
    const auto read = data::parse_conversations(fuzz::text_of(data, size), fuzz::kFile, {.skips_malformed = true});
    for (const auto& conversation : read.all) {
      fuzz::require(!conversation.messages.empty(), "a conversation has messages");
      fuzz::require(conversation.first_trained < conversation.messages.size(), "a message may be trained");
      if (conversation.messages.size() < 20) fuzz::parse([&] { find(kChat, conversation); });
    }
  });
}
