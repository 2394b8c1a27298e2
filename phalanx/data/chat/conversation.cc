#include "phalanx/data/chat/conversation.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/json_lines.h"
#include "phalanx/base/nearest.h"
#include "phalanx/data/jinja/json_value.h"
#include "phalanx/data/jinja/python_text.h"

namespace phalanx::data {
namespace {

constexpr const char* kSameAnswers = "\"chosen\" and \"rejected\" are the same messages: expected two answers";

using jinja::Dict;
using jinja::Value;

/// A value as it stands in a message: as JSON, its start.
std::string shown(const Value& value) {
  constexpr std::size_t kLongest = 60;
  std::string text = jinja::to_json(value, {.ensure_ascii = true});
  return text.size() <= kLongest ? text : text.substr(0, kLongest) + "...";
}

/// Reads one record; knows where it stands.
class RecordReader {
 public:
  /// `trains`: answers are trained, so that a weight is refused that training does not follow.
  explicit RecordReader(std::string where, bool trains = true) : where_(std::move(where)), trains_(trains) {}

  Conversation read(const Value& record) {
    if (!record.is_dict()) fail("expected a JSON object, found " + shown(record));
    const Dict& fields = record.dict();
    const Value *messages = fields.named("messages"), *conversations = fields.named("conversations"),
                *prompt = fields.named("prompt");
    require_one_form(fields, {"messages", "conversations", "prompt"});
    Conversation made;
    made.where = where_;
    if (const Value* id = fields.named("id")) made.id = jinja::to_json(*id, {});
    if (messages != nullptr) add_messages(made, *messages, "messages");
    if (conversations != nullptr) read_sharegpt(made, *conversations);
    if (prompt != nullptr) {
      const Value* completion = fields.named("completion");
      if (completion == nullptr) fail("it has a \"prompt\" but no \"completion\"");
      read_prompt(made, *prompt, *completion, "completion");
    }
    finish(made, fields);
    return made;
  }

  Preference read_preference(const Value& record) {
    if (!record.is_dict()) fail("expected a JSON object, found " + shown(record));
    const Dict& fields = record.dict();
    const Value *chosen = fields.named("chosen"), *rejected = fields.named("rejected"),
                *prompt = fields.named("prompt");
    for (const auto& [key, value] : {std::pair("chosen", chosen), std::pair("rejected", rejected)}) {
      if (value == nullptr) fail(fmt::format("it has no \"{}\"", key));
    }
    Preference made;
    for (Conversation* one : {&made.chosen, &made.rejected}) {
      one->where = where_;
      if (const Value* id = fields.named("id")) one->id = jinja::to_json(*id, {});
    }
    const bool are_lists = chosen->is_list() && rejected->is_list();
    if (prompt != nullptr && !(prompt->is_text() && are_lists)) {
      read_prompt(made.chosen, *prompt, *chosen, "chosen");
      read_prompt(made.rejected, *prompt, *rejected, "rejected");
    } else {
      if (!are_lists) fail("\"chosen\" and \"rejected\" without a \"prompt\": expected two lists of messages");
      add_messages(made.chosen, *chosen, "chosen");
      add_messages(made.rejected, *rejected, "rejected");
      take_common_prompt(made);
    }
    finish(made.chosen, fields);
    finish(made.rejected, fields);
    const auto &better = made.chosen.messages, &worse = made.rejected.messages;
    if (std::ranges::equal(better, worse, jinja::equal)) fail(kSameAnswers);
    return made;
  }

 private:
  [[noreturn]] void fail(const std::string& reason) const { throw DataError(fmt::format("{}: {}", where_, reason)); }

  void finish(Conversation& made, const Dict& fields) const {
    if (made.messages.empty()) fail("it has no messages");
    check_weights(made);
    add_system(made, fields.named("system"));
    read_tools(made, fields.named("tools"));
    read_variables(made, fields.named("chat_template_kwargs"));
  }

  void take_common_prompt(Preference& made) const {
    const auto &chosen = made.chosen.messages, &rejected = made.rejected.messages;
    std::size_t same = 0;
    while (same < std::min(chosen.size(), rejected.size()) && jinja::equal(chosen[same], rejected[same])) {
      ++same;
    }
    if (same == 0) fail("\"chosen\" and \"rejected\" begin with different messages: expected the same prompt");
    if (same == chosen.size() || same == rejected.size()) {
      fail(same == chosen.size() && same == rejected.size()
               ? std::string(kSameAnswers)
               : fmt::format("\"{}\" has no answer of its own: all its messages begin the other one, too",
                             same == chosen.size() ? "chosen" : "rejected"));
    }
    made.chosen.first_trained = made.rejected.first_trained = same;
  }

  void require_one_form(const Dict& fields, std::initializer_list<const char*> forms) const {
    std::vector<std::string> found, known(forms.begin(), forms.end());
    for (const char* form : forms) {
      if (fields.named(form) != nullptr) found.emplace_back(form);
    }
    if (found.size() > 1)
      fail(fmt::format("expected one of \"{}\", found \"{}\"", fmt::join(known, "\", \""),
                       fmt::join(found, "\" and \"")));
    if (!found.empty()) return;
    std::string hint;
    for (const auto& [key, value] : fields.entries()) {
      if (hint.empty()) hint = did_you_mean(key.text(), {"messages", "conversations", "prompt"});
    }
    fail(fmt::format("it has none of \"{}\"{}", fmt::join(known, "\", \""), hint));
  }

  void add_messages(Conversation& made, const Value& messages, const char* key) const {
    if (!messages.is_list()) fail(fmt::format("\"{}\" is {}: expected a list of messages", key, shown(messages)));
    for (const Value& message : messages.list().items) {
      check_message(message, fmt::format("message {}", made.messages.size() + 1));
      made.messages.push_back(message);
    }
  }

  void check_message(const Value& message, const std::string& which) const {
    if (!message.is_dict()) fail(fmt::format("{} is {}: expected an object", which, shown(message)));
    const Dict& fields = message.dict();
    const Value* role = fields.named("role");
    if (role == nullptr) fail(fmt::format("{} has no \"role\"", which));
    if (!role->is_text() || role->text().empty())
      fail(fmt::format("the role of {} is {}: expected text", which, shown(*role)));
    const Value* calls = fields.named("tool_calls");
    const bool has_calls = calls != nullptr && !calls->is_none();
    const Value* content = fields.named("content");
    if (content == nullptr && !has_calls) fail(fmt::format("{} has no \"content\"", which));
    if (content != nullptr) check_content(*content, which);
    if (has_calls) check_calls(*calls, which);
  }

  void check_weights(const Conversation& made) const {
    for (std::size_t i = made.first_trained; i < made.messages.size(); ++i) {
      if (role_of(made.messages[i]) == "assistant")
        check_weight(made.messages[i].dict(), fmt::format("message {}", i + 1));
    }
  }

  void check_weight(const Dict& answer, const std::string& which) const {
    const Value* weight = answer.named("weight");
    if (!trains_ || weight == nullptr || weight->is_none() || jinja::equal(*weight, Value(1))) return;
    fail(
        fmt::format("{} has the weight {}: every answer is trained, so expected 1, or no weight; messages that are not "
                    "trained go into a \"prompt\" that is a list",
                    which, shown(*weight)));
  }

  void check_content(const Value& content, const std::string& which) const {
    if (content.is_text() || content.is_none()) return;
    if (!content.is_list())
      fail(fmt::format("the content of {} is {}: expected text or a list of parts", which, shown(content)));
    for (const Value& part : content.list().items) {
      const Value* type = part.is_dict() ? part.dict().named("type") : nullptr;
      if (type == nullptr || !type->is_text()) {
        fail(fmt::format("{} has the part {}: expected an object with a \"type\"", which, shown(part)));
      }
      const Value* text = part.dict().named("text");
      if (type->text() == "text" && (text == nullptr || !text->is_text())) {
        fail(fmt::format("{} has the part {}: expected a \"text\" of text", which, shown(part)));
      }
    }
  }

  void check_calls(const Value& calls, const std::string& which) const {
    if (!calls.is_list()) fail(fmt::format("the tool_calls of {} are {}: expected a list", which, shown(calls)));
    for (const Value& call : calls.list().items) {
      const Value* function = call.is_dict() ? call.dict().named("function") : nullptr;
      const Dict* fields = function != nullptr && function->is_dict() ? &function->dict()
                           : call.is_dict()                           ? &call.dict()
                                                                      : nullptr;
      const Value* name = fields != nullptr ? fields->named("name") : nullptr;
      if (name == nullptr || !name->is_text()) {
        fail(fmt::format("{} has the tool call {}: expected an object whose \"function\" has a \"name\"", which,
                         shown(call)));
      }
      const Value* arguments = fields->named("arguments");
      if (arguments != nullptr && !arguments->is_dict() && !arguments->is_text() && !arguments->is_none()) {
        fail(fmt::format("{} calls {} with the arguments {}: expected an object, or one as text", which, name->text(),
                         shown(*arguments)));
      }
    }
  }

  void read_sharegpt(Conversation& made, const Value& turns) const {
    if (!turns.is_list()) fail(fmt::format("\"conversations\" is {}: expected a list", shown(turns)));
    for (const Value& turn : turns.list().items) {
      const std::string which = fmt::format("turn {}", &turn - turns.list().items.data() + 1);
      if (!turn.is_dict()) fail(fmt::format("{} is {}: expected an object", which, shown(turn)));
      const Value *from = turn.dict().named("from"), *value = turn.dict().named("value");
      if (from == nullptr || !from->is_text()) fail(fmt::format("{} has no \"from\" of text", which));
      if (value == nullptr || !value->is_text()) fail(fmt::format("{} has no \"value\" of text", which));
      const std::string role = role_from(from->text(), which);
      if (role == "assistant") check_weight(turn.dict(), which);
      made.messages.push_back(make_message(role, value->text()));
    }
  }

  /// The text of a content that has nothing else.
  static std::optional<std::string> text_of(const Value* content) {
    if (content == nullptr) return std::nullopt;
    if (content->is_text()) return content->text();
    if (!content->is_list()) return std::nullopt;
    std::string text;
    for (const Value& part : content->list().items) {
      if (part.dict().named("type")->text() != "text") return std::nullopt;
      text += part.dict().named("text")->text();
    }
    return text;
  }

  /// The record's "system" is its first message, unless the messages have it, too.
  void add_system(Conversation& made, const Value* system) const {
    if (system == nullptr || system->is_none()) return;
    if (!system->is_text()) fail(fmt::format("\"system\" is {}: expected text", shown(*system)));
    if (system->text().empty()) return;
    // Templates know these two roles as the same one, and read one message of them.
    const std::string& first = role_of(made.messages.front());
    if (first == "system" || first == "developer") {
      if (text_of(made.messages.front().dict().named("content")) == system->text()) return;
      fail(fmt::format("it has a \"system\" and another message from \"{}\": expected one of them", first));
    }
    made.messages.insert(made.messages.begin(), make_message("system", system->text()));
    if (made.first_trained > 0) ++made.first_trained;
  }

  std::string role_from(const std::string& from, const std::string& which) const {
    static constexpr std::array<std::pair<std::string_view, std::string_view>, 10> kRoles = {
        {{"human", "user"},
         {"user", "user"},
         {"gpt", "assistant"},
         {"assistant", "assistant"},
         {"chatgpt", "assistant"},
         {"model", "assistant"},
         {"system", "system"},
         {"tool", "tool"},
         {"observation", "tool"},
         {"developer", "developer"}}};
    const auto found = std::ranges::find(kRoles, from, &std::pair<std::string_view, std::string_view>::first);
    if (found != kRoles.end()) return std::string(found->second);
    std::vector<std::string> known;
    for (const auto& [name, role] : kRoles) known.emplace_back(name);
    fail(fmt::format("{} is from \"{}\": expected one of {}{}", which, from, fmt::join(known, ", "),
                     did_you_mean(from, known)));
  }

  void read_prompt(Conversation& made, const Value& prompt, const Value& completion, const char* key) const {
    if (prompt.is_text() && completion.is_text()) {
      made.messages = {make_message("user", prompt.text()), make_message("assistant", completion.text())};
    } else if (prompt.is_list() && completion.is_list()) {
      add_messages(made, prompt, "prompt");
      made.first_trained = made.messages.size();
      add_messages(made, completion, key);
      if (made.first_trained == made.messages.size()) fail(fmt::format("its \"{}\" has no messages", key));
    } else {
      fail(fmt::format("\"prompt\" and \"{}\": expected two texts, or two lists of messages", key));
    }
  }

  void read_tools(Conversation& made, const Value* tools) const {
    if (tools == nullptr || tools->is_none()) return;
    made.tools = tools->is_text() ? jinja::read_json(tools->text(), where_ + ": \"tools\"") : *tools;
    if (!made.tools.is_list() || !std::ranges::all_of(made.tools.list().items, &Value::is_dict)) {
      fail(fmt::format("\"tools\" is {}: expected a list of objects", shown(*tools)));
    }
    if (made.tools.list().items.empty()) made.tools = jinja::None{};
  }

  void read_variables(Conversation& made, const Value* variables) const {
    if (variables == nullptr || variables->is_none()) return;
    if (!variables->is_dict())
      fail(fmt::format("\"chat_template_kwargs\" is {}: expected an object", shown(*variables)));
    for (const auto& [key, value] : variables->dict().entries()) made.variables.emplace_back(key.text(), value);
  }

  std::string where_;
  bool trains_;
};

}  // namespace

const std::string& role_of(const Value& message) { return message.dict().named("role")->text(); }

Value make_message(const std::string& role, const std::string& content) {
  return Value::dict({{"role", role}, {"content", content}});
}

Conversation parse_conversation(std::string_view json, const std::string& where) {
  return RecordReader(where).read(jinja::read_json(json, where));
}

Preference parse_preference(std::string_view json, const std::string& where) {
  return RecordReader(where).read_preference(jinja::read_json(json, where));
}

Conversations parse_conversations(std::string_view text, const std::string& name, const ConversationFormat& format) {
  Conversations read;
  std::size_t lines = 0;
  each_line(text, name, [&](std::string_view line, const std::string& where) {
    const std::size_t number = lines++;
    try {
      read.all.push_back(RecordReader(where, format.trains).read(jinja::read_json(line, where)));
      read.all.back().number = number;
    } catch (const DataError& error) {
      if (!format.skips_malformed) throw;
      read.skipped.emplace_back(error.what());
    }
  });
  if (read.all.empty()) throw DataError(no_line_left(name, "conversations", read.skipped));
  return read;
}

}  // namespace phalanx::data
