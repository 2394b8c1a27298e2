// ChatTemplate: a model's template, which turns a conversation into the text that the model was trained on.
//
//   const ChatTemplate chat = ChatTemplate::load("Qwen3-0.6B");
//   const std::string prompt = chat.render(conversation, {.add_generation_prompt = true}).text;
//
// The text has the model's special tokens: encode it without adding them again. data/jinja renders it, as transformers
// does: keys of messages that are null are left out, and reasoning is found under "reasoning_content" and "thinking",
// whichever of these or "reasoning" a message has.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "phalanx/data/chat/conversation.h"
#include "phalanx/data/jinja/template.h"

namespace phalanx::data {

struct ChatRenderOptions {
  bool add_generation_prompt = false;        // ends with what begins an answer
  std::size_t messages = std::string::npos;  // only the first so many
  jinja::RenderOptions render = {};
};

class ChatTemplate {
 public:
  /// `special_tokens` by key: {"bos_token", "<s>"}. Throws DataError for a template that cannot be parsed.
  ChatTemplate(std::string_view source, const std::string& name,
               std::map<std::string, std::string> special_tokens = {});

  /// `path` is a model's folder, or the tokenizer.json in it. The template is the first of chat_template.jinja,
  /// "chat_template" of tokenizer_config.json, that of chat_template.json. Where a file has several by name, `named`
  /// chooses; else "tool_use" is for conversations with tools, if there is one, and "default" for all others. Throws
  /// DataError that lists the places, or the names.
  static ChatTemplate load(const std::filesystem::path& path, const std::string& named = "");
  /// Whether load() finds one.
  static bool exists(const std::filesystem::path& path);

  /// Throws DataError that names the conversation, the template, the line and the reason.
  jinja::Rendered render(const Conversation& conversation, const ChatRenderOptions& options = {}) const;

  /// Of the template for this conversation.
  bool has_generation_marks(const Conversation& conversation) const {
    return chosen(conversation).has_generation_marks();
  }

 private:
  const jinja::Template& chosen(const Conversation& conversation) const;

  jinja::Template template_;
  std::optional<jinja::Template> for_tools_;
  std::map<std::string, std::string> special_tokens_;
};

}  // namespace phalanx::data
