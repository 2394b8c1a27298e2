#include "phalanx/data/chat/chat_corpus.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <filesystem>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>

#include "phalanx/base/cpu.h"
#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/human.h"
#include "phalanx/base/json_lines.h"
#include "phalanx/base/mapped_file.h"
#include "phalanx/base/start_thread.h"
#include "phalanx/base/utf8.h"
#include "phalanx/data/token_file_writer.h"
#include "phalanx/data/tokenizer/tokenizer_fingerprint.h"

namespace phalanx::data {
namespace {

constexpr std::size_t kBatchLines = 512, kBatchBytes = std::size_t{4} << 20;

/// One record, and what came of it.
struct Record {
  std::string_view line;
  std::string where;
  std::vector<TokenizedConversation> made = {};  // one, or a pair
  std::string refusal = {};                      // why it could not be tokenized
  std::exception_ptr failure = {};
};

double percent(std::int64_t part, std::int64_t whole) {
  return whole == 0 ? 0.0 : 100 * static_cast<double>(part) / static_cast<double>(whole);
}

class ChatEncoder {
 public:
  ChatEncoder(const ConversationTokenizer& tokenize, const std::string& prefix, const ChatEncodingOptions& options)
      : tokenize_(tokenize), options_(options), hold_out_(options.held_out_fraction) {
    const std::optional<TokenId> end = tokenize.end_of_turn();
    writer_.emplace(prefix,
                    TokenFileWriterOptions{.vocab_size = tokenize.tokenizer().vocab_size(),
                                           .tokenizer = tokenizer_fingerprint(tokenize.tokenizer()),
                                           .document_end = end ? std::optional<std::int64_t>(*end) : std::nullopt,
                                           .set_aside = options.set_aside,
                                           .has_mask = true});
    summary_.path = writer_->bin_path();
    summary_.of_pairs = options.pairs;
  }

  void read(const std::string& path) {
    files_.push_back(path);
    const MappedFile file(path, MappedFile::Access::sequential);
    std::int64_t lines = 0;
    each_line(file.text(), path, [&](std::string_view line, const std::string& where) {
      ++lines;
      const bool held = options_.held_out_fraction > 0 && hold_out_.takes(static_cast<std::int64_t>(line.size()));
      if (held == options_.is_held_out) {
        batch_.push_back({.line = line, .where = where});
        batch_bytes_ += line.size();
      }
      if (batch_.size() == kBatchLines || batch_bytes_ >= kBatchBytes) encode_batch();
      if (options_.bytes_done) options_.bytes_done(line.size() + 1);
    });
    encode_batch();
    if (lines == 0) throw DataError(no_line_left(path, noun(), {}));
  }

  ChatSummary finish() {
    if (summary_.conversations == 0) throw DataError(nothing_left());
    writer_->finish();
    summary_.tokens = writer_->size();
    return summary_;
  }

 private:
  void encode_batch() {
    std::atomic<std::size_t> next = 0;
    const auto work = [&] {
      for (std::size_t i = next++; i < batch_.size(); i = next++) encode(batch_[i]);
    };
    const int wished = options_.threads > 0 ? options_.threads : usable_cores();
    std::vector<std::thread> threads;
    try {
      for (int i = 1; i < std::min(wished, static_cast<int>(batch_.size())); ++i) {
        threads.push_back(start_thread("tokenizing conversations", work));
      }
    } catch (const Error&) {  // no more threads than these: it takes longer
    }
    work();
    for (std::thread& thread : threads) thread.join();
    for (Record& record : batch_) take(record);
    batch_.clear();
    batch_bytes_ = 0;
  }

  void encode(Record& record) const noexcept {
    try {
      if (options_.pairs) {
        const Preference preference = parse_preference(record.line, record.where);
        record.made = {tokenize_(preference.chosen), tokenize_(preference.rejected)};
      } else {
        record.made = {tokenize_(parse_conversation(record.line, record.where))};
      }
    } catch (const DataError& error) {
      record.refusal = error.what();
    } catch (...) {
      record.failure = std::current_exception();
    }
  }

  void take(Record& record) {
    if (record.failure) std::rethrow_exception(record.failure);
    if (!record.refusal.empty()) {
      if (!options_.skips_malformed) throw DataError(record.refusal);
      if (++summary_.skipped == 1) summary_.first_skipped = record.refusal;
      return;
    }
    const bool is_too_long = options_.longest > 0 && length_of(record.made) > options_.longest;
    if (is_too_long && (options_.pairs || options_.too_long == TooLong::leave_out)) {
      ++summary_.too_long;
      return;
    }
    bool are_trained = true;
    for (TokenizedConversation& made : record.made) {
      if (is_too_long) {
        made.tokens.resize(static_cast<std::size_t>(options_.longest));
        made.is_trained.resize(static_cast<std::size_t>(options_.longest));
      }
      // Nothing precedes the first token, so it is no label.
      if (!made.is_trained.empty()) made.is_trained.front() = 0;
      are_trained = are_trained && made.trained_count() > 0;
    }
    if (!are_trained) {
      if (++summary_.untrained == 1) summary_.first_untrained = record.where;
      return;
    }
    if (is_too_long) ++summary_.cut;
    ++summary_.conversations;
    for (const TokenizedConversation& made : record.made) {
      writer_->add_document(made.tokens, made.is_trained);
      summary_.trained += made.trained_count();
      summary_.answers_without_end += made.answers_without_end;
      summary_.answers_inside_token += made.answers_inside_token;
    }
  }

  /// Of a conversation the number of its tokens, of a pair that of the places that it takes in a row.
  std::int64_t length_of(const std::vector<TokenizedConversation>& made) const {
    std::int64_t length = 0;
    for (const TokenizedConversation& one : made) length += std::ssize(one.tokens) - (options_.pairs ? 1 : 0);
    return length;
  }

  const char* noun() const { return options_.pairs ? "preferences" : "conversations"; }

  std::string nothing_left() const {
    std::vector<std::string> causes;
    const auto add = [&](std::int64_t count, const std::string& what) {
      if (count > 0) causes.push_back(fmt::format("{} {}", with_commas(count), what));
    };
    add(summary_.untrained, fmt::format("without a trained token, such as {} (has it an assistant's message that the "
                                        "chat template shows{}?)",
                                        summary_.first_untrained,
                                        options_.longest > 0 && options_.too_long == TooLong::cut && !options_.pairs
                                            ? fmt::format(", within its first {} tokens", options_.longest)
                                            : ""));
    add(summary_.too_long, fmt::format("longer than {} tokens", options_.longest));
    add(summary_.skipped, fmt::format("refused, the first because of {}", summary_.first_skipped));
    const std::string files = fmt::format("{}", fmt::join(files_, ", "));
    if (causes.empty()) {
      return fmt::format(
          "{0}: none of its {3} is {1} by the validation fraction of {2}; use another fraction, or more {3}", files,
          options_.is_held_out ? "held out" : "trained", options_.held_out_fraction, noun());
    }
    return fmt::format("{}: 0 % of the tokens are trained: {}; expected {} with answers to learn from", files,
                       fmt::join(causes, "; "), noun());
  }

  const ConversationTokenizer& tokenize_;
  const ChatEncodingOptions& options_;
  HoldOut hold_out_;
  std::optional<TokenFileWriter> writer_;
  std::vector<std::string> files_;
  std::vector<Record> batch_;
  std::size_t batch_bytes_ = 0;
  ChatSummary summary_;
};

void append_printable(std::string_view bytes, std::string& out) {
  while (!bytes.empty()) {
    const Utf8Char c = first_char(bytes);
    const auto first = static_cast<unsigned char>(bytes[0]);
    const bool is_control =
        (first < 0x20 && first != '\n') || first == 0x7F || (c.code_point >= 0x80 && c.code_point < 0xA0);
    const auto length = static_cast<std::size_t>(std::max(1, c.length));
    if (c.length == 0 || is_control) {
      for (const char byte : bytes.substr(0, length)) {
        out += fmt::format("\\x{:02X}", static_cast<unsigned char>(byte));
      }
    } else {
      out += bytes.substr(0, length);
    }
    bytes.remove_prefix(length);
  }
}

}  // namespace

std::string ChatSummary::text() const {
  std::string made = fmt::format("{} {}{}, {} tokens, of which {} ({:.1f} %) are trained", with_commas(conversations),
                                 of_pairs ? "pair" : "conversation", conversations == 1 ? "" : "s", with_commas(tokens),
                                 with_commas(trained), percent(trained, tokens));
  const auto add = [&](std::int64_t count, std::string_view one, std::string_view many) {
    if (count > 0) made += fmt::format("; {} {}", with_commas(count), count == 1 ? one : many);
  };
  add(cut, "that was too long is cut", "that were too long are cut");
  add(too_long, "that was too long is left out", "that were too long are left out");
  const std::string_view lacking = of_pairs ? "of which an answer has no trained token" : "without a trained token";
  add(untrained, fmt::format("{} is left out", lacking), fmt::format("{} are left out", lacking));
  add(answers_without_end, "answer ends by no special token: the model does not learn to stop there",
      "answers end by no special token: the model does not learn to stop there");
  add(answers_inside_token, "answer begins inside a token", "answers begin inside a token");
  if (answers_inside_token > 0) {
    made +=
        " of the prompt: asked by the prompt alone, the model sees other tokens (does the template's generation prompt "
        "end by "
        "a space?)";
  }
  if (skipped > 0) made += fmt::format("; {} skipped, the first because of {}", with_commas(skipped), first_skipped);
  return made;
}

ChatSummary encode_conversations(const std::vector<std::string>& files, const ConversationTokenizer& tokenize,
                                 const std::string& prefix, const ChatEncodingOptions& options) {
  const std::filesystem::path folder = std::filesystem::path(prefix).parent_path();
  if (!folder.empty()) posix_file_system().make_directory(folder);
  ChatEncoder encoder(tokenize, prefix, options);
  for (const std::string& file : files) encoder.read(file);
  return encoder.finish();
}

std::string marked_text(const TokenFile& tokens, TokenRange range, const BpeTokenizer& tokenizer, bool color) {
  std::vector<std::int64_t> ids(static_cast<std::size_t>(range.size()));
  tokens.read(range.begin, ids);
  std::string text, run;  // run: bytes of tokens that are all trained, or all not; a character may be of several
  bool is_trained = false;
  const auto end_run = [&] {
    if (is_trained) text += color ? "\x1b[32m[[" : "[[";
    append_printable(run, text);
    if (is_trained) text += color ? "]]\x1b[0m" : "]]";
    run.clear();
  };
  for (std::int64_t i = 0; i < range.size(); ++i) {
    const bool is = tokens.trained_count({range.begin + i, range.begin + i + 1}) > 0;
    if (is != is_trained) end_run();
    is_trained = is;
    run += tokenizer.bytes_of(static_cast<TokenId>(ids[static_cast<std::size_t>(i)]));
  }
  end_run();
  return text;
}

}  // namespace phalanx::data
