#include "cli/worker/eval_worker.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cli/eval_arguments.h"
#include "cli/worker/model_ranks.h"
#include "phalanx/base/byte_order_mark.h"
#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/file_kind.h"
#include "phalanx/base/human.h"
#include "phalanx/base/log.h"
#include "phalanx/base/progress.h"
#include "phalanx/base/utf8.h"
#include "phalanx/checkpoint/files/block_hash.h"
#include "phalanx/data/corpus/record_signs.h"
#include "phalanx/data/token_file.h"
#include "phalanx/data/tokenizer/bpe_model.h"
#include "phalanx/data/tokenizer/bpe_tokenizer.h"
#include "phalanx/infer/evaluate.h"
#include "phalanx/infer/jobs/questions.h"
#include "phalanx/infer/model_files.h"
#include "phalanx/models/llama.h"

namespace phalanx::cli {
namespace {

constexpr std::size_t kBatchesAtOnce = 16;  // between two updates of the progress bar

/// Texts by number, created on demand.
using TextOf = std::function<infer::ScoredText(std::size_t number)>;

/// The scores of all texts, on every rank. Each copy of the model scores every members()-th block of texts. Collective.
std::vector<double> score(const EvalArguments& arguments, const ModelRanks& ranks, models::Llama& model,
                          std::size_t count, const TextOf& text_of) {
  infer::Evaluator evaluator(model, {.max_batch = arguments.batch_size, .stages = ranks.stages});
  std::vector<double> scores(count, 0.0);
  const std::size_t block = kBatchesAtOnce * static_cast<std::size_t>(arguments.batch_size);
  std::optional<ProgressBar> bar;
  if (ranks.is_first() && !arguments.quiet) bar.emplace("evaluating", count);
  const auto members = static_cast<std::size_t>(ranks.members());
  const auto each = std::min(block, (count + members - 1) / members);
  for (std::size_t round = 0; round < count; round += each * members) {
    const std::size_t first = std::min(count, round + each * static_cast<std::size_t>(ranks.member()));
    const std::size_t end = std::min(count, first + each);
    std::vector<infer::ScoredText> texts;
    for (std::size_t i = first; i < end; ++i) texts.push_back(text_of(i));
    std::ranges::copy(evaluator.log_likelihoods(texts), scores.begin() + static_cast<std::ptrdiff_t>(first));
    if (bar) bar->set(std::min(count, round + each * members));
  }
  // Only the leader of each copy contributes its scores; each text belongs to one copy.
  if (!ranks.leads()) std::ranges::fill(scores, 0.0);
  std::string own(scores.size() * sizeof(double), '\0');
  std::memcpy(own.data(), scores.data(), own.size());
  std::ranges::fill(scores, 0.0);
  for (const std::string& theirs : ranks.all_gather(own)) {
    for (std::size_t i = 0; i < count; ++i) {
      double value = 0;
      std::memcpy(&value, theirs.data() + i * sizeof value, sizeof value);
      scores[i] += value;
    }
  }
  if (bar) bar->finish();
  return scores;
}

void report(const EvalArguments& arguments, const ModelRanks& ranks, const nlohmann::ordered_json& figures,
            const std::string& line) {
  if (!ranks.is_first()) return;
  fmt::print("{}\n", line);
  if (std::fflush(stdout) != 0) throw Error("cannot write to standard output");
  if (!arguments.json.empty()) replace_file(arguments.json, figures.dump(1) + "\n");
}

/// Checks that all scores are finite, on every rank; otherwise a result computed from them would be meaningless.
void require_finite(const std::vector<double>& scores, const std::string& checkpoint) {
  const auto bad = std::ranges::find_if_not(scores, [](double value) { return std::isfinite(value); });
  if (bad == scores.end()) return;
  throw Error(fmt::format(
      "the log-likelihood of text {} of {} is {}: the weights of {} hold values that are not finite, or too large for "
      "the type that they are computed in; `phalanx checkpoint inspect` shows types, --dtype float32 has the widest "
      "range",
      bad - scores.begin() + 1, scores.size(), *bad, checkpoint));
}

std::string hash_of_ids(const std::vector<std::int64_t>& ids) {
  return format_hash(hash_block(std::as_bytes(std::span(ids))));
}

/// The end token, to be put before a text.
std::int64_t first_token(const infer::ModelFiles& files, const data::BpeTokenizer& tokenizer) {
  if (!tokenizer.model().prefix.empty()) {
    throw ConfigError("--end-token-first: the tokenizer puts a token of its own before a text already");
  }
  const auto ends = infer::end_tokens(files, tokenizer);
  if (ends.empty()) throw ConfigError("--end-token-first: neither model nor tokenizer says which token ends a text");
  return ends.front();
}

void perplexity(const EvalArguments& arguments, const ModelRanks& ranks, models::Llama& model,
                const infer::ModelFiles& files) {
  const std::int64_t longest = model.config().max_seq_len;
  const std::int64_t seq = arguments.seq_len > 0 ? arguments.seq_len : longest;
  if (seq > longest) throw ConfigError(fmt::format("--seq-len is {}: the model's max_seq_len is {}", seq, longest));
  const std::int64_t stride = arguments.stride > 0 ? std::min(arguments.stride, seq) : seq;
  std::vector<std::int64_t> ids;
  std::size_t bytes = 0;
  std::optional<data::TokenFile> file;
  std::int64_t size = 0;
  std::string content;
  const auto open_tokens = [&] {
    file.emplace(arguments.tokens, data::TokenFileOptions{.vocab_size = model.config().vocab_size});
    infer::check_tokens(files, *file, arguments.allow_tokenizer_mismatch);
    if (!file->mask().empty()) {
      log::warn_once(
          fmt::format("{}: all its tokens count here, not only those that its mask says are trained; "
                      "[validation] of `phalanx train` counts those alone",
                      file->path()));
    }
    size = file->size();
    content = file->content_hash();
  };
  const auto read_text = [&] {
    const std::string contents = read_on_each_rank(arguments.text);
    data::require_plain_text(contents, arguments.text, "plain text");
    if (const auto looks = data::records_in(std::string_view(contents).substr(0, data::kRecordProbe))) {
      throw DataError(
          fmt::format("{} looks like {}: expected plain text; take the text out of it first, or make a token "
                      "file of it by `phalanx tokenize` and give that as --tokens",
                      arguments.text, looks->what));
    }
    const std::string_view text = text_after_mark<DataError>(contents, arguments.text);
    if (!is_utf8(text)) {
      log::warn_once(
          fmt::format("{} is not UTF-8 throughout: bytes that are none are encoded as they are", arguments.text));
    }
    bytes = text.size();
    const data::BpeTokenizer tokenizer =
        infer::load_tokenizer(files, arguments.tokenizer, arguments.allow_tokenizer_mismatch);
    const auto encoded = tokenizer.encode(text, {.add_special_tokens = true});
    if (arguments.end_token_first) {
      ids.push_back(first_token(files, tokenizer));
    } else if (tokenizer.model().prefix.empty() && !encoded.empty()) {
      bytes -= std::min(bytes, tokenizer.bytes_of(encoded.front()).size());  // no token predicts the first token
    }
    ids.insert(ids.end(), encoded.begin(), encoded.end());
    size = std::ssize(ids);
    content = hash_of_ids(ids);
  };
  ranks.each([&] { arguments.tokens.empty() ? read_text() : open_tokens(); });
  ranks.require_same("data", {{"tokens", size}, {"content", content}});
  const bool whole = arguments.max_tokens == 0 || arguments.max_tokens >= size;
  if (!whole) size = arguments.max_tokens;
  if (size < 2) {
    throw DataError(fmt::format("{} has {} tokens: expected at least 2, one to be predicted from another",
                                file ? arguments.tokens : arguments.text, size));
  }
  // Of conversations, the answers count, as in training.
  const std::int64_t scored = file ? file->trained_count({1, size}) : size - 1;
  if (scored == 0) {
    throw DataError(fmt::format(
        "{}: none of the {} tokens that are read is trained, so says its mask: expected one or more; give a "
        "larger --max-tokens, or another file",
        arguments.tokens, size - 1));
  }
  const auto windows = infer::windows_of(size, seq, stride);
  const auto scores = score(arguments, ranks, model, windows.size(), [&](std::size_t i) {
    const infer::TextWindow& window = windows[i];
    infer::ScoredText text{.tokens = std::vector<std::int64_t>(static_cast<std::size_t>(window.end - window.begin)),
                           .first = window.first - window.begin};
    if (file) {
      file->read(window.begin, text.tokens);
      if (!file->mask().empty()) {
        const auto mask = file->mask().subspan(static_cast<std::size_t>(window.begin), text.tokens.size());
        text.is_scored.assign(mask.begin(), mask.end());
      }
    } else {
      std::copy_n(ids.begin() + window.begin, text.tokens.size(), text.tokens.begin());
    }
    return text;
  });
  require_finite(scores, arguments.checkpoint);
  double sum = 0;
  for (const double value : scores) sum += value;
  const double loss = -sum / static_cast<double>(scored);
  nlohmann::ordered_json figures = {{"tokens", scored}, {"loss", loss}, {"perplexity", std::exp(loss)}};
  std::string line =
      fmt::format("tokens: {}  loss: {:.5f}  perplexity: {:.4f}", with_commas(scored), loss, std::exp(loss));
  if (file && !file->mask().empty()) {
    figures["tokens_read"] = size - 1;
    line += fmt::format("  ({} of {} tokens are trained, and counted)", with_commas(scored), with_commas(size - 1));
  }
  if (bytes > 0 && whole) {
    const double bits = -sum / std::log(2.0) / static_cast<double>(bytes);
    figures["bits_per_byte"] = bits;
    line += fmt::format("  bits per byte: {:.4f}", bits);
  }
  report(arguments, ranks, figures, line);
}

struct Choice {
  std::size_t question = 0;
  std::size_t bytes = 0;
  infer::ScoredText text;
};

/// A part of the choice would not give its score.
struct TooLongChoice : DataError {
  using DataError::DataError;
};

/// The tokens of the continuation are those that it adds to the tokens of the prompt. White space at the end of the
/// prompt becomes the beginning of the continuation, as tokenizers expect it. If the prompt is too long, its beginning
/// is dropped.
Choice make_choice(const data::BpeTokenizer& tokenizer, const std::vector<std::int64_t>& ends, std::size_t number,
                   const infer::Question& question, std::size_t choice_number, std::int64_t max_seq_len) {
  const std::string& choice = question.choices[choice_number];
  std::string prompt = question.prompt, continuation = choice;
  const std::size_t text_end = prompt.find_last_not_of(" \t\r\n") + 1;  // 0: the prompt is only white space
  continuation.insert(0, prompt.substr(text_end));
  prompt.resize(text_end);
  // Tokens that the tokenizer puts before a text are kept. Tokens that it puts after a text are not: they would end the
  // prompt and count as part of each choice.
  const auto encode = [&](const std::string& text) {
    std::vector<data::TokenId> ids = tokenizer.model().prefix;
    tokenizer.encode_to(text, ids);
    return ids;
  };
  const auto before = encode(prompt), all = encode(prompt + continuation);
  Choice made{.question = number, .bytes = choice.size(), .text = {.tokens = {all.begin(), all.end()}}};
  made.text.first = std::min(std::ssize(before), std::ssize(all) - 1);
  if (made.text.first == 0) {  // no token is before it
    if (ends.empty()) {
      throw DataError(
          fmt::format("question {}: nothing comes before the choices, and the tokenizer has no token that begins "
                      "a text: expected a prompt",
                      number + 1));
    }
    made.text.tokens.insert(made.text.tokens.begin(), ends.front());
    made.text.first = 1;
  }
  if (const std::int64_t own = std::ssize(made.text.tokens) - made.text.first; own > max_seq_len) {
    throw TooLongChoice(fmt::format("{}: choice {} has {} tokens: expected at most the model's max_seq_len of {}",
                                    question.where, choice_number, own, max_seq_len));
  }
  if (const std::int64_t more = std::ssize(made.text.tokens) - max_seq_len - 1; more > 0) {
    made.text.tokens.erase(made.text.tokens.begin(), made.text.tokens.begin() + more);
    made.text.first -= more;
  }
  return made;
}

/// Returns the number of skipped questions. Collective.
std::size_t multiple_choice(const EvalArguments& arguments, const ModelRanks& ranks, models::Llama& model,
                            const infer::ModelFiles& files) {
  std::vector<std::string> skipped;
  std::vector<infer::Question> questions;
  std::vector<Choice> choices;
  std::vector<std::int64_t> all_ids;
  ranks.each([&] {
    const std::string contents = read_on_each_rank(arguments.choices);
    data::require_plain_text(contents, arguments.choices, "questions as JSON lines");
    questions = infer::parse_questions(contents, arguments.choices, arguments.strict ? nullptr : &skipped);
    const data::BpeTokenizer tokenizer =
        infer::load_tokenizer(files, arguments.tokenizer, arguments.allow_tokenizer_mismatch);
    const auto ends = infer::end_tokens(files, tokenizer);
    std::vector<infer::Question> kept;
    for (infer::Question& question : questions) {
      try {
        std::vector<Choice> of_question;
        for (std::size_t c = 0; c < question.choices.size(); ++c) {
          of_question.push_back(make_choice(tokenizer, ends, kept.size(), question, c, model.config().max_seq_len));
        }
        std::ranges::move(of_question, std::back_inserter(choices));
        kept.push_back(std::move(question));
      } catch (const TooLongChoice& error) {
        if (arguments.strict) throw;
        skipped.emplace_back(error.what());
      }
    }
    questions = std::move(kept);
    for (const auto& line : skipped) {
      if (ranks.is_first()) fmt::print(stderr, "skipped: {}\n", line);
    }
    if (questions.empty()) throw DataError(fmt::format("{}: no question is left", arguments.choices));
    for (const Choice& choice : choices) {
      all_ids.insert(all_ids.end(), choice.text.tokens.begin(), choice.text.tokens.end());
    }
  });
  ranks.require_same("questions",
                     {{"questions", questions.size()}, {"choices", choices.size()}, {"content", hash_of_ids(all_ids)}});
  const auto scores = score(arguments, ranks, model, choices.size(), [&](std::size_t i) { return choices[i].text; });
  require_finite(scores, arguments.checkpoint);

  std::size_t answered = 0, right = 0, right_by_byte = 0, next = 0;
  std::string lines;
  for (const infer::Question& question : questions) {
    std::vector<double> sums, by_byte;
    for (std::size_t c = 0; c < question.choices.size(); ++c, ++next) {
      sums.push_back(scores[next]);
      by_byte.push_back(scores[next] / static_cast<double>(choices[next].bytes));
    }
    const auto likeliest = [](const std::vector<double>& values) {
      return static_cast<std::size_t>(std::ranges::max_element(values) - values.begin());
    };
    if (question.answer) {
      ++answered;
      right += likeliest(sums) == *question.answer;
      right_by_byte += likeliest(by_byte) == *question.answer;
    }
    const nlohmann::ordered_json line = {{"id", nlohmann::ordered_json::parse(question.id)},
                                         {"log_likelihoods", sums},
                                         {"choice", likeliest(sums)},
                                         {"choice_by_byte", likeliest(by_byte)}};
    lines += line.dump() + "\n";
  }
  if (ranks.is_first() && !arguments.output.empty()) replace_file(arguments.output, lines);
  nlohmann::ordered_json figures = {{"questions", questions.size()}, {"answered", answered}};
  std::string text = fmt::format("questions: {}", with_commas(static_cast<std::int64_t>(questions.size())));
  if (answered > 0) {
    const auto share = [&](std::size_t count) { return static_cast<double>(count) / static_cast<double>(answered); };
    figures["accuracy"] = share(right);
    figures["accuracy_by_byte"] = share(right_by_byte);
    text += fmt::format("  accuracy: {:.4f}  accuracy by byte: {:.4f}", share(right), share(right_by_byte));
  }
  if (!skipped.empty()) {
    figures["skipped"] = skipped.size();
    text += fmt::format("  skipped: {}", skipped.size());
  }
  report(arguments, ranks, figures, text);
  return skipped.size();
}

}  // namespace

int eval_worker(const Arguments& arguments) {
  const EvalArguments parsed = parse_eval_arguments(arguments);
  infer::ModelFiles files = find_model(parsed);
  const ModelRanks ranks = start_model_ranks(parsed, arguments);
  std::size_t skipped = 0;
  ranks.run([&] {
    const auto model = load_model(files, ranks, parsed.dtype);
    if (parsed.choices.empty()) {
      perplexity(parsed, ranks, *model, files);
    } else {
      skipped = multiple_choice(parsed, ranks, *model, files);
    }
  });
  if (skipped > 0 && !parsed.allow_skipped && ranks.is_first()) {
    throw DataError(
        fmt::format("{}: {} question{} skipped, as told above; the figures are those of the others. Where "
                    "that is meant, --allow-skipped makes it status 0",
                    parsed.choices, skipped, skipped == 1 ? " was" : "s were"));
  }
  return 0;
}

}  // namespace phalanx::cli
