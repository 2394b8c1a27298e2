#include "phalanx/checkpoint/files/hf_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/json_number.h"
#include "phalanx/base/json_text.h"
#include "phalanx/base/log.h"
#include "phalanx/checkpoint/files/weights_description.h"
#include "phalanx/data/token_sidecar.h"
#include "phalanx/data/tokenizer/bpe_model.h"
#include "phalanx/data/tokenizer/bpe_tokenizer.h"
#include "phalanx/models/config/hf_config.h"

namespace phalanx {
namespace {

using nlohmann::json;

constexpr const char* kConfig = "config.json";
constexpr const char* kGeneration = "generation_config.json";
constexpr const char* kTokenizer = "tokenizer.json";
constexpr const char* kTokenizerConfig = "tokenizer_config.json";
constexpr const char* kRoles[] = {"bos", "eos", "pad"};

std::filesystem::path folder_of_assets(const std::filesystem::path& assets) {
  return assets.filename() == kTokenizer ? assets.parent_path() : assets;
}

bool is_file(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::is_regular_file(path, error);
}

std::optional<data::BpeTokenizer> tokenizer_of(const std::filesystem::path& folder) {
  if (!is_file(folder / kTokenizer)) return std::nullopt;
  try {
    return data::BpeTokenizer::load((folder / kTokenizer).string());
  } catch (const DataError& error) {
    log::warn(
        fmt::format("the tokenizer is copied as it is, but its special tokens are not known here: {}", error.what()));
    return std::nullopt;
  }
}

/// The token of each role ("bos", "eos", "pad"), a list of several, or null.
class RoleTokens {
 public:
  RoleTokens(const json& config, const json& generation, const std::optional<data::BpeTokenizer>& tokenizer,
             std::int64_t vocab_size, const std::filesystem::path& folder) {
    for (const char* role : kRoles) {
      const std::string key = fmt::format("{}_token_id", role);
      json& token = tokens_[role];
      for (const auto& [source, name] : {std::pair{&config, kConfig}, std::pair{&generation, kGeneration}}) {
        const json value = source->value(key, json());
        if (value.is_null()) continue;
        if (!are_tokens(value, vocab_size)) {
          log::warn(fmt::format("{}: \"{}\" is {}, no token of the model's vocabulary of {}: left out",
                                (folder / name).string(), key, value.dump(-1, ' ', true).substr(0, 80), vocab_size));
        } else if (token.is_null()) {
          token = value;
        }
      }
      const auto own = tokenizer ? own_token(role, *tokenizer) : std::nullopt;
      if (token.is_null() && own && *own < vocab_size) token = *own;
    }
  }

  const json& of(const std::string& role) const { return tokens_.at(role); }

  static bool are_tokens(const json& value, std::int64_t vocab_size) {
    const auto is_token = [&](const json& one) {
      return is_whole_number(one) && one.get<std::int64_t>() >= 0 && one.get<std::int64_t>() < vocab_size;
    };
    return value.is_array() ? std::all_of(value.begin(), value.end(), is_token) : is_token(value);
  }

 private:
  static std::optional<data::TokenId> own_token(std::string_view role, const data::BpeTokenizer& tokenizer) {
    const data::BpeModel& model = tokenizer.model();
    if (role == "eos") return tokenizer.end_of_text();
    if (role == "pad") return model.padding;
    if (model.begin_of_text || model.prefix.empty()) return model.begin_of_text;
    return model.prefix.front();
  }

  std::map<std::string, json> tokens_;
};

/// The token's text, for tokenizer_config.json; if there are several, the first one's.
json text_of(const json& token, const data::BpeTokenizer& tokenizer) {
  const json& first = token.is_array() && !token.empty() ? token.front() : token;
  if (!first.is_number_integer()) return nullptr;
  for (const data::AddedToken& added : tokenizer.model().added_tokens) {
    if (added.id == first.get<std::int64_t>()) return added.content;
  }
  return nullptr;  // no token that a text may contain
}

json parsed(const std::string& text, const std::filesystem::path& file) {
  return text.empty() ? json::object() : parse_json_object<CheckpointError>(text, file.string());
}

}  // namespace

std::map<std::string, std::string> hf_assets(const std::filesystem::path& assets) {
  constexpr std::uint64_t kMaxBytes = 256 << 20;
  std::map<std::string, std::string> texts;
  const auto folder = folder_of_assets(assets);
  for (const char* name :
       {kTokenizer, kTokenizerConfig, "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "vocab.json",
        "merges.txt", "chat_template.jinja", "chat_template.json", kGeneration}) {
    if (is_file(folder / name)) texts[name] = read_file(folder / name, kMaxBytes);
  }
  return texts;
}

void compare_end_tokens(const std::map<std::string, std::string>& texts, const std::string& metadata) {
  const auto trained = metadata.empty() ? std::nullopt : document_end_in_metadata(metadata);
  const auto said = texts.find(kGeneration);
  if (!trained || said == texts.end()) return;
  const json ends = json::parse(said->second).value("eos_token_id", json());
  const bool is_among =
      ends == json(*trained) || (ends.is_array() && std::find(ends.begin(), ends.end(), json(*trained)) != ends.end());
  if (is_among || ends.is_null()) return;
  log::warn_once(fmt::format(
      "the model is written with eos_token_id {}, but the documents that it was trained on end {}: it may never end a "
      "text; set eos_token_id in generation_config.json, or train on documents that end so",
      ends.dump(), data::document_end_text(*trained)));
}

std::map<std::string, std::string> hf_files(const models::LlamaConfig& config, const std::string& dtype,
                                            const std::filesystem::path& assets) {
  const auto folder = folder_of_assets(assets);
  auto texts = assets.empty() ? std::map<std::string, std::string>() : hf_assets(assets);
  const bool has_source = !assets.empty() && is_file(folder / kConfig);
  const json source =
      has_source ? parsed(read_file(folder / kConfig, models::kMaxHfConfigBytes), folder / kConfig) : json::object();
  json generation = parsed(texts[kGeneration], folder / kGeneration);
  const auto tokenizer = assets.empty() ? std::nullopt : tokenizer_of(folder);
  const RoleTokens tokens(source, generation, tokenizer, config.vocab_size, folder);

  if (tokens.of("eos").is_null()) {
    const std::string why = assets.empty() ? std::string("no folder of a tokenizer is known")
                            : texts.contains(kTokenizer)
                                ? fmt::format("the tokenizer in {} has none", folder.string())
                                : fmt::format("there is no tokenizer.json in {}", folder.string());
    log::warn_once(fmt::format(
        "the model is written {}without a token that ends a text (eos_token_id is null): {}; whoever continues texts "
        "with it has to name one",
        texts.contains(kTokenizer) || texts.contains("tokenizer.model") ? "" : "without a tokenizer, and ", why));
  }

  json description = json::parse(models::llama_hf_config(config, dtype));
  for (const char* role : kRoles) {
    const std::string key = fmt::format("{}_token_id", role);
    description[key] = tokens.of(role);
    const json own = generation.value(key, json());  // may differ from config.json's
    if (own.is_null() || !RoleTokens::are_tokens(own, config.vocab_size)) generation[key] = tokens.of(role);
  }
  texts[kConfig] = description.dump(2) + "\n";
  texts[kGeneration] = generation.dump(2) + "\n";
  if (tokenizer && !texts.contains(kTokenizerConfig)) {
    json of_tokenizer = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                         {"model_max_length", config.max_seq_len},
                         {"clean_up_tokenization_spaces", false}};
    for (const char* role : kRoles) of_tokenizer[fmt::format("{}_token", role)] = text_of(tokens.of(role), *tokenizer);
    texts[kTokenizerConfig] = of_tokenizer.dump(2) + "\n";
  }
  return texts;
}

}  // namespace phalanx
