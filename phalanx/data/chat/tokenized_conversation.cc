#include "phalanx/data/chat/tokenized_conversation.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/data/chat/token_places.h"
#include "phalanx/data/jinja/python_text.h"

namespace phalanx::data {
namespace {

using jinja::TextSpan;
using jinja::Value;

std::size_t common_prefix(std::string_view left, std::string_view right) {
  return static_cast<std::size_t>(std::ranges::mismatch(left, right).in1 - left.begin());
}

bool is_answer(const Conversation& conversation, std::size_t message) {
  return message >= conversation.first_trained && role_of(conversation.messages[message]) == "assistant";
}

/// A copy of a dict with another value for `key`.
Value with_value(const Value& dict, const char* key, Value value) {
  std::vector<std::pair<Value, Value>> entries;
  for (const auto& [name, old] : dict.dict().entries()) entries.emplace_back(name, old);
  entries.emplace_back(key, std::move(value));  // the last one counts
  return Value::dict(std::move(entries));
}

/// The text of a content: of parts, the text of all.
std::string content_text(const Value& message) {
  const Value* content = message.dict().named("content");
  if (content == nullptr || content->is_none()) return "";
  if (content->is_text()) return content->text();
  std::string text;
  for (const Value& part : content->list().items) {
    if (const Value* found = part.dict().named("text"); found != nullptr && found->is_text()) text += found->text();
  }
  return text;
}

/// A message with a mark in place of a text of it.
struct MarkedMessage {
  Value message;
  std::string replaced;
};

/// The mark takes the place of the content. Where that is empty, templates may leave out what is around it: then of the
/// name of the first function that the message calls.
MarkedMessage marked_message(const Value& message, const std::string& mark) {
  const std::string content = content_text(message);
  const Value* calls = message.dict().named("tool_calls");
  const Value* first =
      calls != nullptr && calls->is_list() && !calls->list().items.empty() ? &calls->list().items.front() : nullptr;
  const Value* function = first != nullptr ? first->dict().named("function") : nullptr;
  if (!content.empty() || function == nullptr || !function->is_dict())
    return {with_value(message, "content", mark), content};
  std::vector<Value> marked = calls->list().items;
  marked.front() = with_value(*first, "function", with_value(*function, "name", mark));
  return {with_value(message, "tool_calls", Value::list(std::move(marked))), function->dict().named("name")->text()};
}

/// Finds the answers of one conversation by rendering it in several ways.
class AnswerFinder {
 public:
  AnswerFinder(const ChatTemplate& chat, const Conversation& conversation, const jinja::RenderOptions& options)
      : chat_(chat), conversation_(conversation), options_(options) {}

  AnswerSpans find() {
    const jinja::Rendered whole = chat_.render(conversation_, {.render = options_});
    text_ = whole.text;
    return {.text = text_, .answers = chat_.has_generation_marks(conversation_) ? marked(whole) : unmarked()};
  }

 private:
  [[noreturn]] void fail(const std::string& reason) const {
    throw DataError(fmt::format("{}: {}", conversation_.where, reason));
  }

  std::string first_messages(std::size_t count, bool with_prompt) const {
    return chat_.render(conversation_, {.add_generation_prompt = with_prompt, .messages = count, .render = options_})
        .text;
  }
  /// Some templates refuse conversations that end as the first messages do.
  std::optional<std::string> first_messages_if_possible(std::size_t count, bool with_prompt) const {
    try {
      return first_messages(count, with_prompt);
    } catch (const DataError&) {
      return std::nullopt;
    }
  }

  std::vector<TextSpan> marked(const jinja::Rendered& whole) const {
    if (whole.lost_marks) {
      fail(
          "its chat template has {% generation %} marks in a macro or another block whose text is a value: where that "
          "text goes is not known");
    }
    std::vector<TextSpan> answers = whole.generated;
    if (conversation_.first_trained == 0) return answers;
    const auto prompt = first_messages_if_possible(conversation_.first_trained, true);
    if (!prompt || !text_.starts_with(*prompt))
      fail("its prompt is not rendered as the start of the whole: which marks are the completion's is not known");
    // A mark may also hold what the generation prompt supplies, such as an open thinking block.
    std::erase_if(answers, [&](const TextSpan& span) { return span.end <= prompt->size(); });
    for (TextSpan& span : answers) span.begin = std::max(span.begin, prompt->size());
    return answers;
  }

  std::vector<TextSpan> unmarked() const {
    std::vector<TextSpan> answers;
    for (std::size_t i = 0; i < conversation_.messages.size(); ++i) {
      if (!is_answer(conversation_, i)) continue;
      auto span = by_prefixes(i);
      if (!span) span = by_mark(i);
      if (!span) {
        fail(fmt::format(
            "where message {} stands in the rendered text is not known: its chat template renders the "
            "conversation up to it otherwise than as a part of the whole; a template with {{% generation %}} "
            "marks says it",
            i + 1));
      }
      if (!answers.empty() && span->begin < answers.back().end) span->begin = answers.back().end;
      if (span->begin < span->end) answers.push_back(*span);
    }
    return answers;
  }

  std::optional<TextSpan> by_prefixes(std::size_t message) const {
    const auto before = first_messages_if_possible(message, false), prompt = first_messages_if_possible(message, true);
    const auto behind = first_messages_if_possible(message + 1, false);
    if (!prompt || !behind || !text_.starts_with(*behind)) return std::nullopt;
    if (behind->starts_with(*prompt)) return TextSpan{prompt->size(), behind->size()};
    // The prompt supplies what this answer does not begin with, such as an open thinking block:
    // from there on it is its own.
    if (!before) return std::nullopt;
    const std::size_t same = part_end(*prompt, common_prefix(*prompt, *behind));
    if (same <= header_begin(*before, *prompt)) return std::nullopt;
    return TextSpan{same, behind->size()};
  }

  /// Where a generation prompt begins that follows `before`, which may end by what ends a whole conversation.
  static std::size_t header_begin(std::string_view before, std::string_view prompt) {
    return prompt.starts_with(before) ? before.size() : part_end(prompt, common_prefix(prompt, before));
  }

  /// The end of the last whole part of a text, a line or a <tag>, at or before `limit`:
  /// texts may begin alike by chance.
  static std::size_t part_end(std::string_view text, std::size_t limit) {
    const auto ends_part = [&](std::size_t at) {
      return at == text.size() || text[at] == '<' || text[at] == '[' || text[at - 1] == '\n';
    };
    while (limit > 0 && !ends_part(limit)) --limit;
    return limit;
  }

  /// Renders the whole with a mark in place of the message's content.
  std::optional<TextSpan> by_mark(std::size_t message) const {
    const std::string mark = unused_mark();
    Conversation changed = conversation_;
    const MarkedMessage marked = marked_message(changed.messages[message], mark);
    changed.messages[message] = marked.message;
    const auto rendered = render_if_possible(changed, std::string::npos),
               alone = render_if_possible(changed, message + 1);
    const auto before = first_messages_if_possible(message, false), prompt = first_messages_if_possible(message, true);
    if (!rendered || !alone || !before || !prompt) return std::nullopt;
    const auto content = content_place(*rendered, mark, marked.replaced);
    if (!content) return std::nullopt;
    const std::string header = prompt->substr(header_begin(*before, *prompt));
    const std::size_t begin = answer_begin(header, content->begin);
    const std::size_t in_alone = alone->rfind(mark);
    if (begin == std::string::npos || in_alone == std::string::npos) return std::nullopt;
    const std::size_t end = turn_end(std::string_view(*alone).substr(in_alone + mark.size()), content->end);
    if (end == content->end) return std::nullopt;
    return TextSpan{begin, end};
  }

  /// What ends the turn behind the content at `from`: as far as the answer alone, which goes on with `tail`, and the
  /// whole agree; or, where the last answer of a conversation ends by another <tag> than the ones before it, that tag.
  std::size_t turn_end(std::string_view tail, std::size_t from) const {
    const std::string_view rest = std::string_view(text_).substr(from);
    if (const std::size_t same = part_end(tail, common_prefix(tail, rest)); same > 0) return from + same;
    const bool is_tag = tail.starts_with('<') && rest.starts_with('<') && rest.find('>') != std::string_view::npos;
    return is_tag ? from + rest.find('>') + 1 : from;
  }

  std::optional<std::string> render_if_possible(const Conversation& conversation, std::size_t messages) const {
    try {
      return chat_.render(conversation, {.messages = messages, .render = options_}).text;
    } catch (const DataError&) {
      return std::nullopt;
    }
  }

  /// Where `text_` has what `rendered` has the mark for, if nothing else differs and it is the content.
  std::optional<TextSpan> content_place(const std::string& rendered, const std::string& mark,
                                        const std::string& content) const {
    const std::size_t at = rendered.find(mark);
    if (at == std::string::npos || rendered.find(mark, at + 1) != std::string::npos) return std::nullopt;
    const std::string_view head = std::string_view(rendered).substr(0, at),
                           tail = std::string_view(rendered).substr(at + mark.size());
    if (!text_.starts_with(head) || !text_.ends_with(tail) || head.size() + tail.size() > text_.size())
      return std::nullopt;
    const TextSpan place{at, text_.size() - tail.size()};
    const auto found = jinja::strip(std::string_view(text_).substr(place.begin, place.end - place.begin));
    if (content.find(found) == std::string::npos) return std::nullopt;
    return place;
  }

  /// Behind the last header before the content: what the generation prompt begins an answer with. A prompt may go on
  /// with a thinking block that the answer lacks; then its first line counts.
  std::size_t answer_begin(const std::string& header, std::size_t content) const {
    const std::string_view before = std::string_view(text_).substr(0, content);
    const std::string first_line = header.substr(0, header.find('\n') + 1);
    for (const std::string& start : {header, first_line}) {
      const std::size_t found = start.empty() ? std::string::npos : before.rfind(start);
      if (found != std::string::npos) return found + start.size();
    }
    return std::string::npos;
  }

  std::string unused_mark() const {
    for (int i = 0;; ++i) {
      std::string mark = fmt::format("PHALANXMARK{}X", i);
      if (text_.find(mark) == std::string::npos) return mark;
    }
  }

  const ChatTemplate& chat_;
  const Conversation& conversation_;
  const jinja::RenderOptions& options_;
  std::string text_;
};

bool is_white_space(const BpeTokenizer& tokenizer, TokenId id) {
  return !tokenizer.is_special(id) && jinja::strip(tokenizer.bytes_of(id)).empty();
}

/// The end of an answer's tokens without the white space behind the special token that ends
/// its turn: nobody waits for it.
std::size_t end_without_blanks(const BpeTokenizer& tokenizer, const std::vector<TokenId>& tokens, std::size_t from,
                               std::size_t to) {
  std::size_t last = to;
  while (last > from && is_white_space(tokenizer, tokens[last - 1])) --last;
  return last > from && tokenizer.is_special(tokens[last - 1]) ? last : to;
}

}  // namespace

AnswerSpans find_answers(const ChatTemplate& chat, const Conversation& conversation,
                         const jinja::RenderOptions& options) {
  return AnswerFinder(chat, conversation, options).find();
}

std::int64_t TokenizedConversation::trained_count() const { return std::ranges::count(is_trained, std::uint8_t{1}); }

std::vector<std::int64_t> TokenizedConversation::labels(std::int64_t ignored) const {
  std::vector<std::int64_t> made;
  for (std::size_t i = 0; i < tokens.size(); ++i) made.push_back(is_trained[i] != 0 ? tokens[i] : ignored);
  return made;
}

void ConversationTokenizer::train(TokenizedConversation& made, std::size_t from, std::size_t to, bool is_marked) const {
  const auto is_end = [&](std::size_t at) {
    return at < made.tokens.size() &&
           std::ranges::find(options_.end_tokens, std::int64_t{made.tokens[at]}) != options_.end_tokens.end();
  };
  if (!is_marked) {
    to = end_without_blanks(tokenizer_, made.tokens, from, to);
    if (!is_end(to - 1) && is_end(to)) ++to;
  }
  std::size_t last = to;
  while (last > from && is_white_space(tokenizer_, made.tokens[last - 1])) --last;
  if (last == from || !tokenizer_.is_special(made.tokens[last - 1])) ++made.answers_without_end;
  std::fill(made.is_trained.begin() + static_cast<std::ptrdiff_t>(from),
            made.is_trained.begin() + static_cast<std::ptrdiff_t>(to), std::uint8_t{1});
}

TokenizedConversation ConversationTokenizer::operator()(const Conversation& conversation) const {
  const AnswerSpans found = find_answers(chat_, conversation, options_.render);
  TokenizedConversation made{.tokens = tokenizer_.encode(found.text), .is_trained = {}};
  made.is_trained.resize(made.tokens.size(), 0);
  std::vector<TextSpan> places;
  try {
    places = token_places(tokenizer_, found.text, made.tokens);
  } catch (const DataError& error) {
    throw DataError(fmt::format("{}: {}", conversation.where, error.what()));
  }
  const bool has_marks = chat_.has_generation_marks(conversation);
  for (const TextSpan& answer : found.answers) {
    // A token counts if a part of it is the answer's, and so does the space that a tokenizer puts before an answer.
    const auto first = std::ranges::find_if(
        places, [&](const TextSpan& place) { return place.end > answer.begin || place.begin == answer.begin; });
    const auto end =
        std::find_if(first, places.end(), [&](const TextSpan& place) { return place.begin >= answer.end; });
    const auto from = static_cast<std::size_t>(first - places.begin()),
               to = static_cast<std::size_t>(end - places.begin());
    if (answer.begin == answer.end || from >= to) continue;
    if (places[from].begin < answer.begin) ++made.answers_inside_token;
    train(made, from, to, has_marks);
  }
  return made;
}

std::vector<TokenId> ConversationTokenizer::prompt(const Conversation& conversation) const {
  if (!conversation.messages.empty() && role_of(conversation.messages.back()) == "assistant") {
    throw DataError(fmt::format("{}: its last message is the assistant's: expected one that asks for an answer",
                                conversation.where));
  }
  return tokenizer_.encode(chat_.render(conversation, {.add_generation_prompt = true, .render = options_.render}).text);
}

std::optional<TokenId> ConversationTokenizer::end_of_turn() const {
  const Conversation probe{.messages = {make_message("user", "a"), make_message("assistant", "b")}};
  try {
    const TokenizedConversation made = (*this)(probe);
    for (std::size_t i = made.tokens.size(); i-- > 0;) {
      if (made.is_trained[i] == 0) continue;
      return tokenizer_.is_special(made.tokens[i]) ? std::optional(made.tokens[i]) : std::nullopt;
    }
  } catch (const DataError&) {  // a template that refuses such a conversation
  }
  return std::nullopt;
}

}  // namespace phalanx::data
