// Reads conversations from JSON lines. Three forms are known, the second of which is ShareGPT's. A file may mix them:
//
//   {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}], "tools": [...]}
//   {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
//   {"prompt": "Hi", "completion": "Hello"}                                both text, or both lists of messages
//
// A content is text, null, or a list of parts such as {"type": "text", "text": "Hi"}. A message may have other
// keys, which templates read: tool_calls, reasoning_content, name. A record may have "tools" (a list of JSON
// schemas, or that list as text), "chat_template_kwargs" (an object of further variables for the template), and
// "system" (text: the first message). Its other keys are ignored. The "weight" of an answer that is trained must be 1.
//
//   for (const Conversation& chat : parse_conversations(read_file(path), path).all) ...
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "phalanx/data/jinja/value.h"

namespace phalanx::data {

struct Conversation {
  std::vector<jinja::Value> messages;                                // dicts with a "role"
  jinja::Value tools = jinja::None{};                                // a list, or none
  std::vector<std::pair<std::string, jinja::Value>> variables = {};  // chat_template_kwargs
  std::size_t first_trained = 0;           // messages before it are a prompt, whose answers are not trained
  std::string id = {};                     // the record's "id", as JSON text; empty: it has none
  std::string where = "the conversation";  // "chat.jsonl, line 3"
  std::size_t number = 0;                  // among the file's non-blank lines, from 0; skipped lines do not change it
};

/// "user", "assistant", ...
const std::string& role_of(const jinja::Value& message);
/// A message with this role and content.
jinja::Value make_message(const std::string& role, const std::string& content);

struct ConversationFormat {
  /// Whether a malformed record is left out and reported in `skipped`; else it is an error.
  bool skips_malformed = false;
  /// Whether answers are trained. If not, their weights mean nothing, and any is read.
  bool trains = true;
};

struct Conversations {
  std::vector<Conversation> all;
  std::vector<std::string> skipped;  // "chat.jsonl, line 3: message 2 has no "role""
};

/// `name` replaces the file's name in messages. Throws DataError that names the line and what is wrong with it, and for
/// a file without any conversation.
Conversations parse_conversations(std::string_view text, const std::string& name,
                                  const ConversationFormat& format = {});

/// One record. Throws DataError whose message begins with `where`.
Conversation parse_conversation(std::string_view json, const std::string& where);

/// A prompt and two answers to it, as conversations of which the answers alone are trained.
struct Preference {
  Conversation chosen, rejected;
};

/// One record of preferences, in TRL's forms:
///
///   {"prompt": "Hi", "chosen": "Hello", "rejected": "What?"}        all texts, or all lists of messages
///   {"chosen": [...], "rejected": [...]}                             lists of messages;
///                                                                    what both begin with is the prompt
///
/// Beside the lists of the second form a "prompt" that is text is ignored. Other keys are those of a conversation.
/// Throws DataError whose message begins with `where`.
Preference parse_preference(std::string_view json, const std::string& where);

}  // namespace phalanx::data
