// Turns a conversation into tokens, and says which of them a model is trained on:
// what the assistant says, with the token that ends its turn.
//
// The conversation is rendered and tokenised whole, once, as the model will see it.
// Which characters are the assistant's comes from
// - the template's {% generation %} marks, where it has them;
// - else renderings of the first messages: with the generation prompt before an answer, and without it behind it. What
//   the generation prompt supplies (a header, an empty thinking block) is not trained, and neither is white space
//   behind the token that ends the turn;
// - else, where the start of a conversation is rendered otherwise than as a part of the whole (templates that leave out
//   earlier reasoning), renderings with a mark in place of the answer.
// Where none of these finds an answer the conversation is refused.
//
//   const ConversationTokenizer tokenize(ChatTemplate::load(folder), BpeTokenizer::load(folder));
//   const TokenizedConversation chat = tokenize(conversation);
//   if (chat.trained_count() == 0) ...
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "phalanx/base/ignored_label.h"
#include "phalanx/data/chat/chat_template.h"
#include "phalanx/data/chat/conversation.h"
#include "phalanx/data/tokenizer/bpe_tokenizer.h"

namespace phalanx::data {

/// A rendered conversation, and what the assistant says in it, in order. In bytes.
struct AnswerSpans {
  std::string text;
  std::vector<jinja::TextSpan> answers;
};

/// Throws DataError that names the conversation: the template refuses it, or an answer is not found.
AnswerSpans find_answers(const ChatTemplate& chat, const Conversation& conversation,
                         const jinja::RenderOptions& options = {});

struct TokenizedConversation {
  std::vector<TokenId> tokens;
  std::vector<std::uint8_t> is_trained;  // by token, 0 or 1: whether predicting it counts
  /// Answers whose last trained token is no special token: a model would not learn to stop there.
  std::int64_t answers_without_end = 0;
  /// Answers whose first token begins before them, as the prompt's last character and theirs are one token: the prompt
  /// alone, with which a model is asked, ends by other tokens.
  std::int64_t answers_inside_token = 0;
  std::int64_t trained_count() const;
  /// `tokens` with `ignored` for those that are not trained: what a loss takes, before it is shifted.
  std::vector<std::int64_t> labels(std::int64_t ignored = kIgnoredLabel) const;
};

struct ConversationTokenizerOptions {
  /// Those that end a text of the model (infer::end_tokens()). Some templates write none behind an answer, and the
  /// token that begins the next message ends it. If that is one of these, it is trained.
  std::vector<std::int64_t> end_tokens = {};
  /// A template may print the date: set the clock where the same conversation must give the same tokens every day.
  jinja::RenderOptions render = {};
};

class ConversationTokenizer {
 public:
  ConversationTokenizer(ChatTemplate chat, BpeTokenizer tokenizer, ConversationTokenizerOptions options = {})
      : chat_(std::move(chat)), tokenizer_(std::move(tokenizer)), options_(std::move(options)) {}

  /// Throws DataError that names the conversation.
  TokenizedConversation operator()(const Conversation& conversation) const;
  /// The tokens that ask for the assistant's next message. Throws DataError that names the conversation, also where it
  /// ends with an answer already.
  std::vector<TokenId> prompt(const Conversation& conversation) const;
  /// The special token that ends an answer in this template; nullopt: it ends by none.
  std::optional<TokenId> end_of_turn() const;
  const BpeTokenizer& tokenizer() const { return tokenizer_; }
  const std::vector<std::int64_t>& end_tokens() const { return options_.end_tokens; }

 private:
  void train(TokenizedConversation& made, std::size_t from, std::size_t to, bool is_marked) const;

  ChatTemplate chat_;
  BpeTokenizer tokenizer_;
  ConversationTokenizerOptions options_;
};

}  // namespace phalanx::data
