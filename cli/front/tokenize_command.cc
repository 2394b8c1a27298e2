#include "cli/front/tokenize_command.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "cli/front/show_tokens.h"
#include "cli/front/tokenize_chats.h"
#include "cli/parse_options.h"
#include "phalanx/base/byte_order_mark.h"
#include "phalanx/base/cpu.h"
#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/folder_lock.h"
#include "phalanx/base/human.h"
#include "phalanx/base/log.h"
#include "phalanx/base/progress.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/data/corpus/corpus.h"
#include "phalanx/data/corpus/unfinished_tokens.h"
#include "phalanx/data/token_sidecar.h"
#include "phalanx/data/tokenizer/bpe_model.h"
#include "phalanx/data/tokenizer/bpe_tokenizer.h"
#include "phalanx/data/tokenizer/tokenizer_fingerprint.h"

namespace phalanx::cli {

const std::string_view kTokenizeHelp =
    R"(usage: phalanx tokenize INPUT... --tokenizer FILE [--vocab-size N] [--output PREFIX] [options]
       phalanx tokenize --chat FILE... --tokenizer MODEL --output PREFIX [options]
       phalanx tokenize --show TEXT --tokenizer FILE

Trains a byte-level BPE tokenizer on texts, turns texts into token files for training, or both at once.
INPUT is a file, a directory (all files below it but hidden ones), a quoted shell pattern, or - for standard input.
A file of text (.txt, .md, sources) is one document; JSON lines (.jsonl, .ndjson), Parquet and Arrow hold one a record.
Text and JSON lines may be compressed by gzip or zstd. Binary files in directories are skipped. A document gets the
tokens around it that the tokenizer's template puts there, such as <s>, and is ended by the end-of-text token.

  --tokenizer FILE           Hugging Face tokenizer.json: written with --vocab-size, else read (or a directory with one)
  --vocab-size N             train a tokenizer of N ids (at least 257: 256 bytes and <|endoftext|>)
  --output PREFIX            write the ids to PREFIX.bin and PREFIX.idx (Megatron's format), and to PREFIX.json of which
                             tokenizer they are
  --force                    replace a tokenizer or token files that are there; without it they are an error
  --validation-fraction F    set about this part of the text aside, whole files spread over the corpus, and write it to
                             PREFIX-validation.bin, .idx and .json; the tokenizer is not trained on it
  --field NAME               of a record, that holds its text (default text); a.b of JSON lines: b of the object a
  --format FORMAT            text or jsonl: what the files hold, whatever their names and content say
  --extensions .md,.cc,...   of the files taken from directories; all where not given
  --exclude PATTERN          leave out files and directories whose name or path matches; may be repeated
  --min-frequency N          merge only pairs seen this often (default 2)
  --no-special-tokens        none of those that the tokenizer's template puts around a text, such as <s>
  --no-end-of-text           no end-of-text token after documents
  --deduplicate              leave out texts that have been read before, byte for byte, before any is set aside; reads
                             the inputs once more and takes about 40 bytes of memory a text
  --histogram                print how long the documents are
  --threads N                that encode (default: all cores); the files are the same for every number
  --chat                     the inputs are files of conversations, JSON lines (docs/sft.md): each becomes a document by
                             the chat template in the folder of --tokenizer, and PREFIX.mask says which of its tokens,
                             the assistant's, are trained
  --chat-template NAME       of several chat templates
  --max-tokens N             take a conversation's first N tokens
  --leave-out-longer         with --max-tokens: leave longer ones out
  --skip-malformed           leave out records that are malformed or that the template refuses; else they are an error
  --show TEXT                print the ids and tokens of this text, and nothing else
  --quiet                    no progress

Train a tokenizer on a source tree and encode it, a tenth of it for validation:

  phalanx tokenize README.md docs src --extensions .md,.cc,.h --vocab-size 4096 --tokenizer data/tokenizer.json \
      --output data/train --validation-fraction 0.1

Encode JSON lines with a tokenizer that exists, and what another program writes:

  phalanx tokenize "c4/*.jsonl.gz" --tokenizer gpt2/tokenizer.json --output data/c4
  zstdcat pile.jsonl.zst | phalanx tokenize - --tokenizer gpt2/tokenizer.json --output data/pile

Conversations of a chat model, a twentieth for validation:

  phalanx tokenize --chat chats.jsonl --tokenizer SmolLM2-135M-Instruct --output data/chats --validation-fraction 0.05

Encode text files:

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
  std::optional<data::TextFormat> format;
  std::string field = "text";
  bool is_field_given = false;
  std::int64_t min_frequency = 2;
  bool no_special_tokens = false, no_end_of_text = false;
  bool deduplicate = false;
  bool histogram = false;
  std::int64_t threads = 0;  // 0: all cores
  bool chat = false;
  std::string chat_template;
  std::optional<std::int64_t> max_tokens;
  bool leave_out_longer = false;
  bool skip_malformed = false;
  std::optional<std::string> show;
  bool force = false;
  bool quiet = false;
};

TokenizeArguments parse_tokenize(const Arguments& arguments) {
  TokenizeArguments parsed;
  CLI::App app;
  std::string format;
  app.add_option("inputs", parsed.inputs);
  const auto* const tokenizer = app.add_option("--tokenizer", parsed.tokenizer);
  app.add_option("--vocab-size", parsed.vocab_size);
  app.add_option("--output,-o", parsed.output);
  app.add_option("--validation-fraction", parsed.validation_fraction);
  add_repeated_option(app, "--extensions", parsed.extensions)->delimiter(',');
  add_repeated_option(app, "--exclude", parsed.exclude);
  const auto* const field = app.add_option("--field", parsed.field);
  app.add_option("--format", format);
  const auto* const min_frequency = app.add_option("--min-frequency", parsed.min_frequency);
  app.add_flag("--no-special-tokens", parsed.no_special_tokens);
  app.add_flag("--no-end-of-text", parsed.no_end_of_text);
  app.add_flag("--deduplicate", parsed.deduplicate);
  app.add_flag("--histogram", parsed.histogram);
  const auto* const threads = app.add_option("--threads", parsed.threads);
  const auto* const chat = app.add_flag("--chat", parsed.chat);
  const std::vector<const CLI::Option*> of_chat{app.add_option("--chat-template", parsed.chat_template),
                                                app.add_option("--max-tokens", parsed.max_tokens),
                                                app.add_flag("--leave-out-longer", parsed.leave_out_longer),
                                                app.add_flag("--skip-malformed", parsed.skip_malformed)};
  const auto* const show = app.add_option("--show", parsed.show);
  app.add_flag("--force", parsed.force);
  const auto* const quiet = app.add_flag("--quiet,-q", parsed.quiet);
  parse_options(app, arguments);
  if (parsed.show) {
    parsed.show = std::string(without_utf8_mark(*parsed.show));
    if (parsed.tokenizer.empty()) throw UsageError("--tokenizer FILE is missing: the tokenizer.json to show");
    if (!parsed.inputs.empty()) throw UsageError("--show TEXT takes neither inputs nor other options than --tokenizer");
    for (const CLI::Option* option : app.get_options()) {
      if (option->count() > 0 && option != tokenizer && option != show && option != quiet) {
        throw UsageError(fmt::format("{} has no meaning beside --show TEXT: remove it", option->get_name()));
      }
    }
    return parsed;
  }
  for (const CLI::Option* option : app.get_options()) {
    const bool is_of_text = option->get_name() == "--vocab-size" || option->get_name() == "--field" ||
                            option->get_name() == "--format" || option->get_name() == "--extensions" ||
                            option->get_name() == "--exclude" || option->get_name() == "--min-frequency" ||
                            option->get_name() == "--no-special-tokens" || option->get_name() == "--no-end-of-text" ||
                            option->get_name() == "--deduplicate" || option->get_name() == "--histogram" ||
                            option->get_name() == "--threads";
    if (option->count() == 0) continue;
    if (parsed.chat && is_of_text) {
      throw UsageError(fmt::format("{} is of texts and has no meaning beside --chat: remove it", option->get_name()));
    }
    if (!parsed.chat && std::ranges::find(of_chat, option) != of_chat.end()) {
      throw UsageError(
          fmt::format("{} is of conversations: give {} too, or remove it", option->get_name(), chat->get_name()));
    }
  }
  if (parsed.leave_out_longer && !parsed.max_tokens) {
    throw UsageError("--leave-out-longer needs --max-tokens N: longer than what?");
  }
  if (parsed.max_tokens) require_range("--max-tokens", *parsed.max_tokens, 2);
  if (parsed.chat && parsed.output.empty()) throw UsageError("--output PREFIX is missing: the token files to write");
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
  require_range("--min-frequency", parsed.min_frequency, 1);
  if (threads->count() == 0) parsed.threads = usable_cores();
  require_range("--threads", parsed.threads, 1, 1024);
  for (const auto& [given, name] :
       {std::pair(parsed.deduplicate, "--deduplicate"), {parsed.histogram, "--histogram"}}) {
    if (given && parsed.output.empty()) {
      throw UsageError(fmt::format("{} is of the token files: give --output PREFIX too, or remove it", name));
    }
  }
  parsed.is_field_given = field->count() > 0;
  if (parsed.field.empty()) throw UsageError("--field is empty: expected the name of a field");
  if (min_frequency->count() > 0 && !parsed.vocab_size) {
    throw UsageError("--min-frequency is of training a tokenizer: give --vocab-size too, or remove it");
  }
  if (std::ranges::count(parsed.inputs, "-") > 1)
    throw UsageError("- (standard input) is given twice: it is read once");
  if (parsed.output.ends_with(".bin") || parsed.output.ends_with(".idx")) {
    throw UsageError(
        fmt::format("--output {0} is to be the names' beginning, without the ending: --output {1} writes "
                    "{1}.bin and {1}.idx",
                    parsed.output, parsed.output.substr(0, parsed.output.size() - 4)));
  }
  if (std::error_code error; parsed.output.ends_with('/') || std::filesystem::is_directory(parsed.output, error)) {
    throw UsageError(fmt::format("--output {} is a directory: expected the beginning of the files' names, such as {}",
                                 parsed.output, (std::filesystem::path(parsed.output) / "train").string()));
  }
  if (format == "text") {
    parsed.format = data::TextFormat::text;
  } else if (format == "jsonl") {
    parsed.format = data::TextFormat::json_lines;
  } else if (!format.empty()) {
    throw UsageError(fmt::format("--format is '{}': expected text or jsonl", format));
  }
  for (std::string& extension : parsed.extensions) {
    if (!extension.starts_with('.')) extension.insert(0, ".");
  }
  return parsed;
}

/// Those of a token file; the mask is there only for conversations.
std::vector<std::string> files_of(const std::string& prefix) {
  return {prefix + ".bin", prefix + ".idx", prefix + ".json", prefix + ".mask"};
}

std::vector<std::string> output_prefixes(const TokenizeArguments& arguments) {
  std::vector<std::string> prefixes;
  if (arguments.output.empty()) return prefixes;
  prefixes.push_back(arguments.output);
  if (arguments.validation_fraction > 0) prefixes.push_back(arguments.output + "-validation");
  return prefixes;
}

/// The prefix of the validation files that an earlier command has set aside from the text that is replaced now, if this
/// command sets nothing aside: the new training text would contain them. nullopt if this is not certain.
std::optional<std::string> set_aside_before(const TokenizeArguments& arguments) {
  if (arguments.output.empty() || arguments.validation_fraction > 0) return std::nullopt;
  const std::string prefix = arguments.output + "-validation";
  try {
    const auto text = data::read_sidecar(arguments.output + ".bin"), aside = data::read_sidecar(prefix + ".bin");
    const bool is_its_own = text && aside && !text->set_aside.empty() && text->set_aside == aside->content;
    return is_its_own ? std::optional(prefix) : std::nullopt;
  } catch (const Error&) {
    return std::nullopt;
  }
}

/// Removes what set_aside_before() names.
void drop_set_aside(const TokenizeArguments& arguments) {
  const auto before = set_aside_before(arguments);
  if (!before) return;
  const bool has_mask = data::names_mask(*before + ".bin");
  for (const std::string& path : files_of(*before)) {
    if (has_mask || path != data::mask_path(*before + ".bin")) std::filesystem::remove(path);
  }
  log::warn(
      fmt::format("{0}.bin, .idx{2} and .json are removed: they were set aside of {1}.bin, of which they become a "
                  "part now (--validation-fraction sets text aside)",
                  *before, arguments.output, has_mask ? ", .mask" : ""));
}

/// Whether a file that is there was made by a command that was stopped, which makes it again when it goes on: a
/// tokenizer that it trained, and the text that it set aside.
bool is_of_stopped(const TokenizeArguments& arguments, const std::string& path) {
  const std::string validation = arguments.output + "-validation";
  try {
    auto stopped = data::unfinished_tokens(arguments.output);
    const bool is_validation = path.starts_with(validation + ".");
    if (is_validation) {
      const auto aside = data::read_sidecar(validation + ".bin");
      return stopped && aside && !stopped->set_aside.empty() && aside->content == stopped->set_aside;
    }
    if (!stopped) stopped = data::unfinished_tokens(validation);
    return stopped && path == arguments.tokenizer &&
           data::tokenizer_fingerprint(data::BpeTokenizer::load(path)) == stopped->tokenizer;
  } catch (const Error&) {
    return false;
  }
}

/// Checks the outputs before any work. Hours of encoding must not end with an error about an existing file, or destroy
/// it.
void check_outputs(const TokenizeArguments& arguments) {
  std::vector<std::string> there;
  const auto look = [&](const std::string& path) {
    std::error_code error;
    if (std::filesystem::exists(std::filesystem::symlink_status(path, error))) there.push_back(path);
  };
  if (arguments.vocab_size) {
    std::error_code error;
    if (std::filesystem::is_directory(arguments.tokenizer, error)) {
      throw UsageError(
          fmt::format("--tokenizer {} is a directory: expected the tokenizer.json to write", arguments.tokenizer));
    }
    look(arguments.tokenizer);
  }
  const auto place = [](const std::string& path) {
    std::error_code error;
    return std::filesystem::weakly_canonical(path, error).string();
  };
  for (const std::string& prefix : output_prefixes(arguments)) {
    for (const std::string& path : files_of(prefix)) {
      look(path);
      for (const std::string& input : arguments.inputs) {
        if (place(input) == place(path)) {
          throw UsageError(fmt::format("--output {}: {} is an input too: choose another output", prefix, path));
        }
      }
      if (place(arguments.tokenizer) == place(path)) {
        throw UsageError(fmt::format("--output {}: {} is the tokenizer too: choose another output", prefix, path));
      }
    }
    const std::string beside = data::sidecar_path(prefix + ".bin");
    if (data::is_foreign_sidecar(prefix + ".bin")) {
      throw DataError(
          fmt::format("{} exists and is no description of a token file, which would take its place: choose "
                      "another output",
                      beside));
    }
    if (data::is_foreign_mask(prefix + ".bin")) throw DataError(data::foreign_mask_text(prefix + ".bin"));
  }
  if (const auto before = set_aside_before(arguments)) look(*before + ".bin");
  if (there.empty() || arguments.force) return;
  if (std::ranges::all_of(there, [&](const std::string& path) { return is_of_stopped(arguments, path); })) return;
  throw DataError(fmt::format("{} exist{} already: give --force to replace {}, or choose another name",
                              fmt::join(there, ", "), there.size() == 1 ? "s" : "", there.size() == 1 ? "it" : "them"));
}

/// The locks to hold while the outputs are written. A running job in one of their folders is an error, and no job
/// starts there in the meantime.
OwnerLocks locks_of_outputs(const TokenizeArguments& arguments) {
  std::vector<std::filesystem::path> paths;
  for (const std::string& prefix : output_prefixes(arguments)) paths.emplace_back(prefix);
  if (const auto before = set_aside_before(arguments)) paths.emplace_back(*before);
  if (arguments.vocab_size) paths.emplace_back(arguments.tokenizer);
  OwnerLocks locks(paths, {.advice = "choose another output"});
  for (const std::string& line : locks.warnings()) log::warn(line);
  return locks;
}

/// Saves standard input to a file, because it is read more than once.
std::string keep_standard_input(const TempDirectory& folder) {
  std::string path = (folder.path() / "standard-input").string();
  const auto file = posix_file_system().create(path);
  std::vector<char> block(std::size_t{1} << 20);
  while (true) {
    const std::size_t found = std::fread(block.data(), 1, block.size(), stdin);
    if (found > 0) file->write(std::string_view(block.data(), found));
    if (found < block.size()) break;
  }
  if (std::ferror(stdin) != 0) throw DataError(fmt::format("cannot read standard input: {}", std::strerror(errno)));
  file->close();
  return path;
}

/// With --force an output could overwrite an input that was found below a directory or by a pattern, or that has a
/// second name.
void refuse_output_among(const std::vector<data::Document>& documents, const TokenizeArguments& arguments) {
  for (const std::string& prefix : output_prefixes(arguments)) {
    for (const std::string& path : files_of(prefix)) {
      std::error_code error;
      if (!std::filesystem::exists(path, error)) continue;
      for (const data::Document& document : documents) {
        if (!std::filesystem::equivalent(path, document.path, error)) continue;
        throw UsageError(
            fmt::format("--output {}: {} is an input too ({}): choose another output, or leave it out by "
                        "--exclude",
                        prefix, path, document.path));
      }
    }
  }
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

/// Before text is set aside, so that neither side has a text of the other, and before the tokenizer is trained.
void leave_out_and_tell(const TokenizeArguments& arguments, std::vector<data::Document>& documents) {
  ProgressBar bar("comparing", static_cast<std::uint64_t>(data::total_bytes(documents)),
                  progress_options(ProgressUnit::bytes, arguments.quiet));
  const std::int64_t found = data::leave_out_duplicates(documents, [&](std::uint64_t n) { bar.advance(n); });
  bar.finish();
  fmt::print("{} texts were read before and are left out\n", with_commas(found));
}

data::BpeTokenizer train_and_save(const TokenizeArguments& arguments, const std::vector<data::Document>& documents) {
  const Stopwatch watch;
  const auto bytes = static_cast<std::uint64_t>(data::total_bytes(documents));
  std::optional<ProgressBar> reading(std::in_place, "reading", bytes,
                                     progress_options(ProgressUnit::bytes, arguments.quiet));
  std::optional<ProgressBar> merging;
  auto tokenizer = data::train_tokenizer(
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

/// Documents by their tokens, in ranges that double.
void print_histogram(const std::vector<std::int64_t>& lengths) {
  constexpr std::int64_t kWidth = 40;
  const auto most = lengths.empty() ? 0 : *std::ranges::max_element(lengths);
  fmt::print("{:>23}  {:>14}\n", "tokens", "documents");
  const auto first = std::ranges::find_if(lengths, [](std::int64_t count) { return count > 0; });
  for (auto bin = static_cast<std::size_t>(first - lengths.begin()); bin < lengths.size(); ++bin) {
    const std::int64_t least = std::int64_t{1} << bin;
    const std::int64_t stars = most == 0 ? 0 : (lengths[bin] * kWidth + most - 1) / most;
    fmt::print("{:>10} - {:>10}  {:>14}{}{}\n", with_commas(least), with_commas(2 * least - 1),
               with_commas(lengths[bin]), stars > 0 ? "  " : "", std::string(static_cast<std::size_t>(stars), '#'));
  }
}

/// What the tokenizer's template puts around a document: "<s> before it"; empty: nothing.
std::string template_tokens_text(const data::BpeTokenizer& tokenizer) {
  std::vector<std::string> parts;
  for (const auto& [ids, place] :
       {std::pair(&tokenizer.model().prefix, "before it"), std::pair(&tokenizer.model().suffix, "behind it")}) {
    std::string names;
    for (const data::TokenId id : *ids) names += tokenizer.bytes_of(id);
    if (!names.empty()) parts.push_back(fmt::format("{} {}", names, place));
  }
  return fmt::format("{}", fmt::join(parts, ", "));
}

/// Returns the number of records without text, including those that would have been set aside.
std::int64_t encode_and_tell(const TokenizeArguments& arguments, const data::BpeTokenizer& tokenizer,
                             const std::string& prefix, const std::vector<data::Document>& documents,
                             const std::string& set_aside = {}) {
  const Stopwatch watch;
  // Standard input comes once.
  const bool keeps = std::ranges::all_of(documents, [](const data::Document& one) { return one.name.empty(); });
  ProgressBar bar("tokenizing", static_cast<std::uint64_t>(data::total_bytes(documents)),
                  progress_options(ProgressUnit::bytes, arguments.quiet));
  const data::EncodingSummary summary =
      data::encode_corpus(documents, tokenizer, prefix,
                          {.special_tokens = !arguments.no_special_tokens,
                           .end_of_text = !arguments.no_end_of_text,
                           .bytes_done = [&](std::uint64_t n) { bar.advance(n); },
                           .set_aside = set_aside,
                           .threads = arguments.threads,
                           .tokens_kept_at_once = keeps ? data::EncodingOptions().tokens_kept_at_once : 0});
  bar.finish();
  if (summary.taken_over > 0) {
    fmt::print("{}: {} documents were there from a command that was stopped\n", summary.path,
               with_commas(summary.taken_over));
  }
  if (summary.not_utf8 > 0) {
    log::warn(fmt::format(
        "{}: {} of {} texts are not UTF-8 throughout, such as {}: their bytes are taken as they are; "
        "text of another encoding is converted by iconv, such as `iconv -f LATIN1 -t UTF-8`",
        summary.path, with_commas(summary.not_utf8), with_commas(summary.documents), summary.first_not_utf8));
  }
  if (summary.with_special > 0) {
    log::warn(fmt::format(
        "{}: special tokens of the tokenizer stand in {} of {} texts, such as {}: they are encoded as ordinary text, "
        "not "
        "as these tokens",
        summary.path, with_commas(summary.with_special), with_commas(summary.documents), summary.first_special));
  }
  const double seconds = watch.seconds();
  fmt::print("{}: {} tokens, {} documents, {:.2f} bytes/token, unigram entropy {:.4f} nats/token, {}\n", summary.path,
             with_commas(summary.tokens), with_commas(summary.documents),
             static_cast<double>(summary.bytes) / static_cast<double>(summary.tokens), summary.unigram_entropy,
             human_bytes_per_second(static_cast<double>(summary.bytes - summary.bytes_taken_over) / seconds));
  if (const std::string around = template_tokens_text(tokenizer); !around.empty()) {
    fmt::print("{}: each document {} what the tokenizer's template puts around a text: {}\n", summary.path,
               arguments.no_special_tokens ? "is without" : "has", around);
  }
  if (arguments.histogram) print_histogram(summary.lengths);
  return summary.empty;
}

}  // namespace

int tokenize_command(const Arguments& arguments) {
  for (const std::string& argument : arguments) {
    if (argument == "--help" || argument == "-h") {
      fmt::print("{}", kTokenizeHelp);
      return 0;
    }
  }
  TokenizeArguments parsed = parse_tokenize(arguments);
  if (parsed.show) {
    fmt::print("{}", shown_tokens(data::BpeTokenizer::load(parsed.tokenizer), *parsed.show));
    return 0;
  }
  if (parsed.chat) {
    check_outputs(parsed);
    const OwnerLocks locks = locks_of_outputs(parsed);
    drop_set_aside(parsed);
    return tokenize_chats({.inputs = parsed.inputs,
                           .model = parsed.tokenizer,
                           .chat_template = parsed.chat_template,
                           .output = parsed.output,
                           .validation_fraction = parsed.validation_fraction,
                           .max_tokens = parsed.max_tokens.value_or(0),
                           .leave_out_longer = parsed.leave_out_longer,
                           .skip_malformed = parsed.skip_malformed,
                           .quiet = parsed.quiet});
  }
  // Load it before the corpus is read: a missing or malformed tokenizer should fail without a scan of the corpus.
  check_outputs(parsed);
  const OwnerLocks locks = locks_of_outputs(parsed);
  std::optional<data::BpeTokenizer> tokenizer;
  if (!parsed.vocab_size) tokenizer = data::BpeTokenizer::load(parsed.tokenizer);

  std::optional<TempDirectory> folder;
  std::string standard_input;
  if (const auto dash = std::ranges::find(parsed.inputs, "-"); dash != parsed.inputs.end()) {
    standard_input = *dash = keep_standard_input(folder.emplace("tokenize"));
  }
  data::CorpusListing listing = data::list_corpus(parsed.inputs, {.extensions = parsed.extensions,
                                                                  .exclude = parsed.exclude,
                                                                  .format = parsed.format,
                                                                  .field = parsed.field,
                                                                  .standard_input = standard_input});
  const auto records = std::ranges::count_if(
      listing.documents, [](const data::Document& document) { return document.format != data::TextFormat::text; });
  fmt::print("{} text files, {}", with_commas(static_cast<std::int64_t>(listing.documents.size())),
             human_bytes(static_cast<std::uint64_t>(data::total_bytes(listing.documents))));
  if (records > 0) fmt::print("; {} of them of records (\"{}\")", with_commas(records), parsed.field);
  if (listing.empty > 0) fmt::print("; {} empty", with_commas(listing.empty));
  if (!listing.skipped.empty()) {
    fmt::print("; skipped {} binary, such as {}", with_commas(static_cast<std::int64_t>(listing.skipped.size())),
               listing.skipped[0]);
  }
  fmt::print("\n");
  refuse_output_among(listing.documents, parsed);
  if (parsed.is_field_given && records == 0) {
    throw UsageError(
        fmt::format("--field {}: no input holds records, which have fields; of JSON lines under another "
                    "name than .jsonl say --format jsonl",
                    parsed.field));
  }
  if (parsed.deduplicate) leave_out_and_tell(parsed, listing.documents);
  const data::CorpusSplit split = data::split_corpus(listing.documents, parsed.validation_fraction);
  if (!tokenizer) tokenizer = train_and_save(parsed, split.train);
  if (parsed.output.empty()) return 0;
  drop_set_aside(parsed);
  // Write the smaller part first. If it has no text, nothing has been written yet.
  std::string set_aside;
  if (!split.validation.empty()) {
    const std::string prefix = parsed.output + "-validation";
    encode_and_tell(parsed, *tokenizer, prefix, split.validation);
    set_aside = data::read_sidecar(prefix + ".bin").value().content;
  }
  // A file of records is read for both parts, so the count is the same.
  const std::int64_t empty = encode_and_tell(parsed, *tokenizer, parsed.output, split.train, set_aside);
  if (empty > 0) {
    log::warn(fmt::format("{} {} no text (null or empty) and {} left out", with_commas(empty),
                          empty == 1 ? "record has" : "records have", empty == 1 ? "was" : "were"));
  }
  return 0;
}

}  // namespace phalanx::cli
