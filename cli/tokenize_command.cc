#include "cli/tokenize_command.h"

#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/parse_options.h"
#include "cli/show_tokens.h"
#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/human.h"
#include "phalanx/base/log.h"
#include "phalanx/base/progress.h"
#include "phalanx/data/corpus.h"

namespace phalanx::cli {

const std::string_view kTokenizeHelp =
    R"(usage: phalanx tokenize INPUT... --tokenizer FILE [--vocab-size N] [--output PREFIX] [options]
       phalanx tokenize --show TEXT --tokenizer FILE

Trains a byte-level BPE tokenizer on text files, turns text files into token files for training, or both at once.
INPUT is a file, a directory (all files below it but hidden ones) or a quoted shell pattern. Binary files are skipped.
Each file is one document, ended by the tokenizer's end-of-text token.

  --tokenizer FILE           Hugging Face tokenizer.json: written with --vocab-size, else read (or a directory with one)
  --vocab-size N             train a tokenizer of N ids (at least 257: 256 bytes and <|endoftext|>)
  --output PREFIX            write the ids to PREFIX.bin and PREFIX.idx (Megatron's format)
  --validation-fraction F    set about this part of the text aside, whole files spread over the corpus, and write it to
                             PREFIX-validation.bin and .idx; the tokenizer is not trained on it
  --extensions .md,.cc,...   of the files taken from directories; all where not given
  --exclude PATTERN          leave out files and directories whose name or path matches; may be repeated
  --min-frequency N          merge only pairs seen this often (default 2)
  --no-end-of-text           no end-of-text token after documents
  --show TEXT                print the ids and tokens of this text, and nothing else
  --quiet                    no progress

Train a tokenizer on a source tree and encode it, a tenth of it for validation:

  phalanx tokenize README.md docs src --extensions .md,.cc,.h --vocab-size 4096 --tokenizer data/tokenizer.json \
      --output data/train --validation-fraction 0.1

Encode with a tokenizer that exists:

  phalanx tokenize "corpus/*.txt" --tokenizer gpt2/tokenizer.json --output data/corpus
)";

namespace {

struct TokenizeArguments {
  std::vector<std::string> inputs;
  std::string tokenizer;
  std::optional<std::int64_t> vocab_size;
  std::string output;
  double validation_fraction = 0.0;
  std::vector<std::string> extensions;
  std::vector<std::string> exclude;
  std::int64_t min_frequency = 2;
  bool no_end_of_text = false;
  std::optional<std::string> show;
  bool quiet = false;
};

TokenizeArguments parse_tokenize(const Arguments& arguments) {
  TokenizeArguments parsed;
  CLI::App app;
  app.add_option("inputs", parsed.inputs);
  app.add_option("--tokenizer", parsed.tokenizer);
  app.add_option("--vocab-size", parsed.vocab_size);
  app.add_option("--output,-o", parsed.output);
  app.add_option("--validation-fraction", parsed.validation_fraction);
  // One value each time: a list would swallow the inputs after it.
  app.add_option("--extensions", parsed.extensions)->delimiter(',')->expected(1)->take_all();
  app.add_option("--exclude", parsed.exclude)->expected(1)->take_all();
  app.add_option("--min-frequency", parsed.min_frequency);
  app.add_flag("--no-end-of-text", parsed.no_end_of_text);
  app.add_option("--show", parsed.show);
  app.add_flag("--quiet,-q", parsed.quiet);
  parse_options(app, arguments);
  if (parsed.show) {
    if (parsed.tokenizer.empty()) throw UsageError("--tokenizer FILE is missing: the tokenizer.json to show");
    if (!parsed.inputs.empty() || parsed.vocab_size || !parsed.output.empty()) {
      throw UsageError("--show TEXT takes neither inputs nor --vocab-size nor --output");
    }
    return parsed;
  }
  if (parsed.inputs.empty()) throw UsageError("expected at least one input: a file, a directory or a pattern");
  if (parsed.tokenizer.empty()) {
    throw UsageError("--tokenizer FILE is missing: the tokenizer.json to write (with --vocab-size) or to read");
  }
  if (!parsed.vocab_size && parsed.output.empty()) {
    throw UsageError("nothing to do: give --vocab-size to train a tokenizer, --output to write token files, or both");
  }
  if (!(parsed.validation_fraction >= 0.0 && parsed.validation_fraction < 1.0)) {
    throw UsageError(
        fmt::format("--validation-fraction is {}: expected 0 or more and less than 1", parsed.validation_fraction));
  }
  if (parsed.min_frequency < 1) {
    throw UsageError(fmt::format("--min-frequency is {}: expected 1 or more", parsed.min_frequency));
  }
  for (std::string& extension : parsed.extensions) {
    if (!extension.starts_with('.')) extension.insert(0, ".");
  }
  return parsed;
}

class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

ProgressOptions progress_options(ProgressUnit unit, bool quiet) {
  return {.unit = unit, .style = quiet ? ProgressStyle::silent : ProgressStyle::automatic};
}

data::BpeTokenizer train_and_save(const TokenizeArguments& arguments, const std::vector<data::Document>& documents) {
  const Stopwatch watch;
  const auto bytes = static_cast<std::uint64_t>(data::total_bytes(documents));
  std::optional<ProgressBar> reading(std::in_place, "reading", bytes,
                                     progress_options(ProgressUnit::bytes, arguments.quiet));
  std::optional<ProgressBar> merging;
  const auto tokenizer = data::train_tokenizer(
      documents, {.vocab_size = *arguments.vocab_size, .min_frequency = arguments.min_frequency},
      [&](std::uint64_t amount) { reading->advance(amount); },
      [&](data::TrainingProgress progress) {
        if (!merging) {
          reading->finish();
          merging.emplace("merging", static_cast<std::uint64_t>(progress.total),
                          progress_options(ProgressUnit::items, arguments.quiet));
        }
        merging->set(static_cast<std::uint64_t>(progress.done));
      });
  merging->finish();
  const auto directory = std::filesystem::path(arguments.tokenizer).parent_path();
  if (!directory.empty()) posix_file_system().make_directory(directory);
  tokenizer.save(arguments.tokenizer);
  fmt::print("{}: {} ids, trained on {} in {}\n", arguments.tokenizer, with_commas(tokenizer.vocab_size()),
             human_bytes(bytes), human_duration(watch.seconds()));
  if (tokenizer.vocab_size() < *arguments.vocab_size) {
    log::warn(
        fmt::format("the text has pairs for {} ids only, {} were asked for: use more text, a smaller --vocab-size or "
                    "a smaller --min-frequency",
                    tokenizer.vocab_size(), *arguments.vocab_size));
  }
  return tokenizer;
}

void encode_and_tell(const TokenizeArguments& arguments, const data::BpeTokenizer& tokenizer, const std::string& prefix,
                     const std::vector<data::Document>& documents) {
  const Stopwatch watch;
  ProgressBar bar("tokenizing", static_cast<std::uint64_t>(data::total_bytes(documents)),
                  progress_options(ProgressUnit::bytes, arguments.quiet));
  const data::EncodingSummary summary = data::encode_corpus(
      documents, tokenizer, prefix,
      {.end_of_text = !arguments.no_end_of_text, .bytes_done = [&](std::uint64_t n) { bar.advance(n); }});
  bar.finish();
  const double seconds = watch.seconds();
  fmt::print("{}: {} tokens, {} documents, {:.2f} bytes/token, unigram entropy {:.4f} nats/token, {}\n", summary.path,
             with_commas(summary.tokens), with_commas(summary.documents),
             static_cast<double>(summary.bytes) / static_cast<double>(summary.tokens), summary.unigram_entropy,
             human_bytes_per_second(static_cast<double>(summary.bytes) / seconds));
}

}  // namespace

int tokenize_command(const Arguments& arguments) {
  for (const std::string& argument : arguments) {
    if (argument == "--help" || argument == "-h") {
      fmt::print("{}", kTokenizeHelp);
      return 0;
    }
  }
  const TokenizeArguments parsed = parse_tokenize(arguments);
  if (parsed.show) {
    fmt::print("{}", shown_tokens(data::BpeTokenizer::load(parsed.tokenizer), *parsed.show));
    return 0;
  }
  // Before the corpus is read: a tokenizer that is missing or malformed should not cost a walk over it.
  std::optional<data::BpeTokenizer> tokenizer;
  if (!parsed.vocab_size) tokenizer = data::BpeTokenizer::load(parsed.tokenizer);

  const data::CorpusListing listing =
      data::list_corpus(parsed.inputs, {.extensions = parsed.extensions, .exclude = parsed.exclude});
  fmt::print("{} text files, {}", with_commas(static_cast<std::int64_t>(listing.documents.size())),
             human_bytes(static_cast<std::uint64_t>(data::total_bytes(listing.documents))));
  if (!listing.skipped.empty()) {
    fmt::print("; skipped {} binary, such as {}", with_commas(static_cast<std::int64_t>(listing.skipped.size())),
               listing.skipped[0]);
  }
  fmt::print("\n");
  const data::CorpusSplit split = data::split_corpus(listing.documents, parsed.validation_fraction);
  if (!tokenizer) tokenizer = train_and_save(parsed, split.train);
  if (parsed.output.empty()) return 0;
  encode_and_tell(parsed, *tokenizer, parsed.output, split.train);
  if (!split.validation.empty()) encode_and_tell(parsed, *tokenizer, parsed.output + "-validation", split.validation);
  return 0;
}

}  // namespace phalanx::cli
