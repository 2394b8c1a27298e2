#include "phalanx/data/chat/chat_template.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/json_text.h"
#include "phalanx/data/tokenizer/special_tokens.h"

namespace phalanx::data {
namespace {

using jinja::Value;

constexpr std::uint64_t kMaxTemplateBytes = 4 << 20;
constexpr std::uint64_t kMaxConfigBytes = 64 << 20;
constexpr const char* kDefault = "default";
constexpr const char* kForTools = "tool_use";

/// The templates of one file, by name; one without a name is "default".
struct Source {
  std::string file;
  std::map<std::string, std::string> templates;
};

std::filesystem::path folder_with(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::is_directory(path, error) ? path : path.parent_path();
}

bool exists_as_file(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::is_regular_file(path, error);
}

std::string name_and_text(const nlohmann::json& entry, const std::string& file, std::string& text) {
  const bool is_right = entry.is_object() && entry.contains("name") && entry["name"].is_string() &&
                        entry.contains("template") && entry["template"].is_string();
  if (!is_right)
    throw DataError(fmt::format("{}: \"chat_template\" has an entry without \"name\" and \"template\"", file));
  text = entry["template"];
  return entry["name"];
}

std::optional<Source> source_in_json(const std::filesystem::path& path) {
  if (!exists_as_file(path)) return std::nullopt;
  Source source{.file = path.string(), .templates = {}};
  const auto json = parse_json_object<DataError>(read_file(path, kMaxConfigBytes), source.file);
  const auto found = json.find("chat_template");
  if (found == json.end() || found->is_null()) return std::nullopt;
  if (found->is_string()) {
    source.templates.emplace(kDefault, *found);
  } else if (found->is_array() && !found->empty()) {
    for (const auto& entry : *found) {
      std::string text;
      std::string name = name_and_text(entry, source.file, text);
      if (!source.templates.emplace(name, text).second) {
        throw DataError(fmt::format("{}: two of its chat templates are named '{}'", source.file, name));
      }
    }
  } else {
    throw DataError(fmt::format("{}: \"chat_template\" is of type {}: expected text, or a list of named templates",
                                source.file, found->type_name()));
  }
  return source;
}

std::optional<Source> source_in_jinja(const std::filesystem::path& path) {
  if (!exists_as_file(path)) return std::nullopt;
  return Source{.file = path.string(), .templates = {{kDefault, read_file(path, kMaxTemplateBytes)}}};
}

constexpr std::array<const char*, 3> kPlaces = {"chat_template.jinja", "tokenizer_config.json", "chat_template.json"};

std::optional<Source> source_beside(const std::filesystem::path& path) {
  for (const char* place : kPlaces) {
    const auto file = folder_with(path) / place;
    auto source = file.extension() == ".jinja" ? source_in_jinja(file) : source_in_json(file);
    if (source) return source;
  }
  return std::nullopt;
}

std::vector<std::string> names_of(const Source& source) {
  std::vector<std::string> names;
  for (const auto& [name, text] : source.templates) names.push_back(name);
  return names;
}

/// As transformers gives messages to templates.
Value normal_message(const Value& message) {
  static constexpr std::array<const char*, 3> kReasoning = {"reasoning_content", "thinking", "reasoning"};
  std::vector<std::pair<Value, Value>> entries;
  const Value* reasoning = nullptr;
  for (const char* key : kReasoning) {
    const Value* found = message.dict().named(key);
    if (reasoning == nullptr && found != nullptr && !found->is_none()) reasoning = found;
  }
  if (reasoning != nullptr) entries.emplace_back("thinking", *reasoning);
  for (const auto& [key, value] : message.dict().entries()) {
    if (!value.is_none()) entries.emplace_back(key, value);
  }
  if (reasoning != nullptr) entries.emplace_back("reasoning_content", *reasoning);
  return Value::dict(std::move(entries));
}

}  // namespace

ChatTemplate::ChatTemplate(std::string_view source, const std::string& name,
                           std::map<std::string, std::string> special_tokens)
    : template_(jinja::Template::parse(source, name)), special_tokens_(std::move(special_tokens)) {}

bool ChatTemplate::exists(const std::filesystem::path& path) { return source_beside(path).has_value(); }

ChatTemplate ChatTemplate::load(const std::filesystem::path& path, const std::string& named) {
  const auto source = source_beside(path);
  if (!source) {
    throw DataError(
        fmt::format("{} has no chat template: expected one of {} there, the second with a \"chat_template\"; is "
                    "it a model that was trained for chats?",
                    folder_with(path).string(), fmt::join(kPlaces, ", ")));
  }
  const auto name_of = [&](const std::string& name) {
    return source->templates.size() == 1 ? source->file : fmt::format("{}: the chat template '{}'", source->file, name);
  };
  const bool has_one = source->templates.size() == 1 && named.empty();
  const std::string name = !named.empty() ? named : has_one ? source->templates.begin()->first : kDefault;
  const auto found = source->templates.find(name);
  if (found == source->templates.end()) {
    throw DataError(fmt::format("{} has no chat template named '{}': expected one of {}", source->file, name,
                                fmt::join(names_of(*source), ", ")));
  }
  ChatTemplate made(found->second, name_of(name), special_token_texts(path));
  const auto for_tools = source->templates.find(kForTools);
  if (named.empty() && !has_one && for_tools != source->templates.end()) {
    made.for_tools_ = jinja::Template::parse(for_tools->second, name_of(kForTools));
  }
  return made;
}

const jinja::Template& ChatTemplate::chosen(const Conversation& conversation) const {
  return for_tools_ && !conversation.tools.is_none() ? *for_tools_ : template_;
}

jinja::Rendered ChatTemplate::render(const Conversation& conversation, const ChatRenderOptions& options) const {
  jinja::Context context;
  for (const auto& [key, text] : special_tokens_) context.emplace_back(key, text);
  const auto set = [&](const std::string& name, Value value) {
    const auto known = std::ranges::find(context, name, &std::pair<std::string, Value>::first);
    known == context.end() ? void(context.emplace_back(name, std::move(value)))
                           : void(known->second = std::move(value));
  };
  set("documents", jinja::None{});
  for (const auto& [name, value] : conversation.variables) set(name, value);
  std::vector<Value> messages;
  for (const Value& message : conversation.messages) {
    if (messages.size() < options.messages) messages.push_back(normal_message(message));
  }
  set("messages", Value::list(std::move(messages)));
  set("tools", conversation.tools);
  set("add_generation_prompt", options.add_generation_prompt);
  try {
    return chosen(conversation).render(context, options.render);
  } catch (const DataError& error) {
    throw DataError(fmt::format("{}: {}", conversation.where, error.what()));
  }
}

}  // namespace phalanx::data
