#include "phalanx/train/inputs/conversation_data.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <sstream>
#include <system_error>
#include <utility>

#include "phalanx/base/content_hash.h"
#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/folder_lock.h"
#include "phalanx/base/hub_name.h"
#include "phalanx/base/log.h"
#include "phalanx/base/mapped_file.h"
#include "phalanx/base/progress.h"
#include "phalanx/data/chat/chat_corpus.h"
#include "phalanx/data/token_sidecar.h"
#include "phalanx/data/tokenizer/tokenizer_fingerprint.h"
#include "phalanx/models/config/hf_config.h"

namespace phalanx::train {
namespace {

namespace fs = std::filesystem;

// Another way to tokenize the same conversations is another version: files of this one are then made again.
constexpr std::int64_t kVersion = 1;
constexpr const char* kMade = "made.txt";
constexpr const char* kTrain = "train";
constexpr const char* kValidation = "validation";

/// What a run says of its conversations or preferences.
struct ChatSettings {
  std::string section, key, validation_key;
  const std::vector<std::string>&files, &held_out;
  std::string chat_template;
  std::string too_long = "leave_out";
  bool skip_malformed = false;
  bool pairs = false;
};

ChatSettings settings_of(const config::TrainConfig& config) {
  const auto& sft = config.sft;
  const auto& dpo = config.dpo;
  if (dpo.preferences.empty()) {
    return {.section = "sft",
            .key = "conversations",
            .validation_key = "validation_conversations",
            .files = sft.conversations,
            .held_out = sft.validation_conversations,
            .chat_template = sft.chat_template,
            .too_long = sft.too_long,
            .skip_malformed = sft.skip_malformed};
  }
  return {.section = "dpo",
          .key = "preferences",
          .validation_key = "validation_preferences",
          .files = dpo.preferences,
          .held_out = dpo.validation_preferences,
          .chat_template = dpo.chat_template,
          .skip_malformed = dpo.skip_malformed,
          .pairs = true};
}

bool is_file(const fs::path& path) {
  std::error_code error;
  return fs::is_regular_file(path, error);
}

fs::path folder_of(const fs::path& model) { return model.filename() == "tokenizer.json" ? model.parent_path() : model; }

void add_file(ContentHash& hash, const fs::path& path, const std::function<void()>& still_working) {
  constexpr std::size_t kPart = std::size_t{64} << 20;
  const MappedFile file(path, MappedFile::Access::sequential);
  hash.add(static_cast<std::int64_t>(file.size()));
  for (std::size_t at = 0; at < file.size(); at += kPart) {
    hash.add_bytes(file.bytes().subspan(at, std::min(kPart, file.size() - at)));
    if (still_working) still_working();
  }
}

/// A hash of everything that the token files depend on.
std::string key_of(const config::TrainConfig& config, const data::ConversationTokenizer& tokenize,
                   const std::function<void()>& still_working) {
  const ChatSettings chats = settings_of(config);
  ContentHash hash;
  hash.add(kVersion).add(data::tokenizer_fingerprint(tokenize.tokenizer()));
  hash.add(chats.chat_template).add(chats.too_long);
  hash.add(std::int64_t{chats.skip_malformed}).add(config.training.seq_len).add(std::int64_t{config.validation.enable});
  const fs::path model = folder_of(config.model.hf_assets_path);
  for (const char* name :
       {"chat_template.jinja", "chat_template.json", "tokenizer_config.json", "special_tokens_map.json"}) {
    hash.add(is_file(model / name) ? read_file(model / name) : std::string());
  }
  for (const std::int64_t token : tokenize.end_tokens()) hash.add(token);
  const auto add_files = [&](const std::vector<std::string>& paths) {
    hash.add(std::int64_t{std::ssize(paths)});
    for (const std::string& path : paths) add_file(hash, path, still_working);
  };
  add_files(chats.files);
  if (config.validation.enable) {
    hash.add(fmt::format("{}", chats.held_out.empty() ? config.validation.fraction : 0.0));
    add_files(chats.held_out);
  }
  return hash.hex();
}

std::int64_t bytes_of(const std::vector<std::string>& paths) {
  std::int64_t bytes = 0;
  for (const std::string& path : paths) bytes += static_cast<std::int64_t>(fs::file_size(path));
  return bytes;
}

/// Makes one token file, and returns what came of it, for the log.
std::string encode(const char* name, const std::vector<std::string>& paths, const fs::path& folder,
                   const data::ConversationTokenizer& tokenize, data::ChatEncodingOptions encoding,
                   const ConversationDataOptions& options) {
  const char* const noun = encoding.pairs ? "preferences" : "conversations";
  ProgressBar bar(
      fmt::format("tokenizing {} ({})", noun, name), static_cast<std::uint64_t>(bytes_of(paths)),
      {.unit = ProgressUnit::bytes, .style = options.quiet ? ProgressStyle::silent : ProgressStyle::automatic});
  encoding.bytes_done = [&](std::uint64_t amount) {
    bar.advance(amount);
    if (options.still_working) options.still_working();
  };
  const data::ChatSummary made = data::encode_conversations(paths, tokenize, (folder / name).string(), encoding);
  bar.finish();
  return fmt::format("{}, {}: {}", noun, name, made.text());
}

std::vector<std::string> make_files(const config::TrainConfig& config, const data::ConversationTokenizer& tokenize,
                                    const fs::path& folder, const ConversationDataOptions& options) {
  const ChatSettings chats = settings_of(config);
  // A pair's length is that of the places which it takes in a row.
  data::ChatEncodingOptions encoding{
      .longest = config.training.seq_len + (chats.pairs ? 0 : 1),
      .too_long = chats.too_long == "cut" ? data::TooLong::cut : data::TooLong::leave_out,
      .skips_malformed = chats.skip_malformed,
      .pairs = chats.pairs};
  std::vector<std::string> lines;
  if (config.validation.enable) {  // the smaller part first: an error in it comes sooner
    data::ChatEncodingOptions held_out = encoding;
    const bool has_own = !chats.held_out.empty();
    if (!has_own) {
      encoding.held_out_fraction = held_out.held_out_fraction = config.validation.fraction;
      held_out.is_held_out = true;
    }
    lines.push_back(encode(kValidation, has_own ? chats.held_out : chats.files, folder, tokenize, held_out, options));
    if (!has_own) encoding.set_aside = data::read_sidecar((folder / kValidation).string() + ".bin").value().content;
  }
  lines.insert(lines.begin(), encode(kTrain, chats.files, folder, tokenize, encoding, options));
  return lines;
}

}  // namespace

data::ConversationTokenizer load_conversation_tokenizer(const fs::path& model, const std::string& named) {
  auto tokenizer = data::BpeTokenizer::load(model.string());
  std::vector<std::int64_t> ends = models::hf_end_tokens_in(folder_of(model));
  if (const auto own = tokenizer.end_of_text(); ends.empty() && own) ends = {*own};
  return {data::ChatTemplate::load(model, named), std::move(tokenizer), {.end_tokens = std::move(ends)}};
}

void check_conversations(const config::TrainConfig& config) {
  const ChatSettings chats = settings_of(config);
  load_conversation_tokenizer(config.model.hf_assets_path, chats.chat_template);
  const auto check = [&](const std::string& key, const std::vector<std::string>& paths) {
    for (const std::string& path : paths) {
      std::error_code error;
      if (is_file(path)) continue;
      const std::string what = fmt::format("is no file: expected one of {}, as JSON lines", chats.key);
      throw FileError(fmt::format("[{}] {}: '{}' {}{}", chats.section, key, path,
                                  fs::exists(path, error) ? what : "does not exist", hub_hint(path)),
                      ENOENT);
    }
  };
  check(chats.key, chats.files);
  check(chats.validation_key, chats.held_out);
}

ConversationData make_conversation_data(const config::TrainConfig& config, const ConversationDataOptions& options) {
  check_conversations(config);
  const data::ConversationTokenizer tokenize =
      load_conversation_tokenizer(config.model.hf_assets_path, settings_of(config).chat_template);
  const fs::path all = config::in_dump_folder(config, settings_of(config).section);
  ConversationData data{.folder = all / key_of(config, tokenize, options.still_working), .lines = {}};
  const auto read_lines = [&] {
    std::istringstream text(read_file(data.folder / kMade));
    for (std::string line; std::getline(text, line);) data.lines.push_back(line);
  };
  if (is_file(data.folder / kMade)) {
    read_lines();
    data.lines.push_back(
        fmt::format("{}: their token files in {} are up to date", settings_of(config).key, data.folder.string()));
    return data;
  }
  const FolderLock lock(all, {.advice = "choose another [job] dump_folder, or wait for it"});
  if (!lock.unsupported().empty()) log::warn_once(lock.unsupported());
  if (is_file(data.folder / kMade)) {  // by the one that held the lock
    read_lines();
    return data;
  }
  // Its name is taken last, so that files of a process that was killed are not taken for whole ones.
  const fs::path unfinished = all / "unfinished";
  FileSystem& files = posix_file_system();
  files.remove_all(unfinished);
  files.make_directory(unfinished);
  data.lines = make_files(config, tokenize, unfinished, options);
  replace_file(unfinished / kMade, fmt::format("{}\n", fmt::join(data.lines, "\n")));
  files.remove_all(data.folder);
  files.rename(unfinished, data.folder);
  files.sync_directory(all);
  return data;
}

config::TrainConfig with_conversation_data(config::TrainConfig config, const fs::path& folder) {
  config.training.dataset_path = (folder / kTrain).string();
  config.training.dataset_dtype = "auto";
  if (config.validation.enable) config.validation.dataset_path = (folder / kValidation).string();
  return config;
}

namespace {

constexpr std::int64_t kLongestSample = 400;

/// Of a long document as much as reaches into what is trained.
std::string marked_sample(const data::TokenFile& tokens, std::int64_t document, const data::BpeTokenizer& tokenizer,
                          bool color) {
  const data::TokenRange whole = tokens.document(document);
  std::int64_t first_trained = whole.begin;
  while (tokens.trained_count({first_trained, first_trained + 1}) == 0) ++first_trained;
  const data::TokenRange shown{
      std::max(whole.begin, std::min(first_trained - kLongestSample / 2, whole.end - kLongestSample)), whole.end};
  const data::TokenRange range{shown.begin, std::min(shown.end, shown.begin + kLongestSample)};
  return fmt::format("{} of {} tokens [[trained]]:\n{}{}{}", tokens.trained_count(whole), whole.size(),
                     range.begin > whole.begin ? "... " : "", data::marked_text(tokens, range, tokenizer, color),
                     range.end < whole.end ? " ..." : "");
}

}  // namespace

std::string sample_conversation(const data::TokenFile& tokens, const data::BpeTokenizer& tokenizer, bool color) {
  constexpr std::int64_t kLooked = 100;
  std::int64_t chosen = 0;
  while (chosen < std::min(tokens.document_count(), kLooked) && tokens.document(chosen).size() > kLongestSample) {
    ++chosen;
  }
  if (chosen == std::min(tokens.document_count(), kLooked)) chosen = 0;
  return fmt::format("conversation {}, {}", chosen + 1, marked_sample(tokens, chosen, tokenizer, color));
}

std::string sample_preference(const data::TokenFile& tokens, const data::BpeTokenizer& tokenizer, bool color) {
  return fmt::format("pair 1, chosen: {}\npair 1, rejected: {}", marked_sample(tokens, 0, tokenizer, color),
                     marked_sample(tokens, 1, tokenizer, color));
}

}  // namespace phalanx::train
