#include "phalanx/data/corpus.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <fnmatch.h>
#include <glob.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <string_view>
#include <system_error>
#include <unordered_set>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/mapped_file.h"
#include "phalanx/data/token_file_writer.h"
#include "phalanx/data/token_statistics.h"

namespace phalanx::data {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kChunkBytes = std::size_t{4} << 20;
constexpr std::size_t kBinaryProbe = std::size_t{64} << 10;

class CorpusLister {
 public:
  explicit CorpusLister(const CorpusOptions& options) : options_(options) {}

  void add_input(const std::string& input) {
    std::error_code error;
    const auto status = fs::status(input, error);
    if (fs::is_directory(status)) return add_directory(input);
    if (fs::exists(status)) return add_file(input);
    if (input.find_first_of("*?[") == std::string::npos) {
      throw DataError(fmt::format("{}: no such file or directory", input));
    }
    add_matches(input);
  }

  CorpusListing take() { return std::move(listing_); }

 private:
  bool excluded(const fs::path& path) const {
    const std::string whole = path.string(), name = path.filename().string();
    return std::any_of(options_.exclude.begin(), options_.exclude.end(), [&](const std::string& pattern) {
      return fnmatch(pattern.c_str(), whole.c_str(), 0) == 0 || fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
    });
  }

  void add_matches(const std::string& pattern) {
    glob_t found{};
    const int status = ::glob(pattern.c_str(), 0, nullptr, &found);
    std::vector<std::string> paths;
    if (status == 0) paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
    ::globfree(&found);
    if (paths.empty()) throw DataError(fmt::format("{}: matches no file", pattern));
    for (const std::string& path : paths) {
      if (!excluded(path)) add_input(path);
    }
  }

  void add_directory(const fs::path& directory) {
    std::error_code error;
    std::vector<fs::path> entries;
    for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
      entries.push_back(it->path());
    }
    if (error) throw DataError(fmt::format("{}: cannot list the directory: {}", directory.string(), error.message()));
    std::sort(entries.begin(), entries.end());
    for (const fs::path& entry : entries) {
      if (entry.filename().string().starts_with('.') || excluded(entry)) continue;
      const auto status = fs::symlink_status(entry, error);
      if (fs::is_directory(status)) {
        add_directory(entry);
      } else if (fs::is_regular_file(fs::status(entry, error)) && wanted(entry)) {
        add_file(entry);
      }
    }
  }

  bool wanted(const fs::path& path) const {
    if (options_.extensions.empty()) return true;
    const std::string extension = path.extension().string();
    return std::find(options_.extensions.begin(), options_.extensions.end(), extension) != options_.extensions.end();
  }

  void add_file(const fs::path& path) {
    std::error_code error;
    const fs::path canonical = fs::weakly_canonical(path, error);
    if (!seen_.insert((error ? path : canonical).string()).second) return;
    const MappedFile file(path);
    if (file.size() == 0) {
      ++listing_.empty;
    } else if (file.text().substr(0, kBinaryProbe).find('\0') != std::string_view::npos) {
      listing_.skipped.push_back(path.string());
    } else {
      listing_.documents.push_back({path.string(), 0, static_cast<std::int64_t>(file.size())});
    }
  }

  const CorpusOptions& options_;
  CorpusListing listing_;
  std::unordered_set<std::string> seen_;
};

/// The document's text, from a file that must still be as long as it was when it was listed.
std::string_view text_of(const MappedFile& file, const Document& document) {
  if (static_cast<std::int64_t>(file.size()) < document.end) {
    throw DataError(fmt::format("{}: became shorter while it was read: expected {} bytes, found {}", document.path,
                                document.end, file.size()));
  }
  return file.text().substr(static_cast<std::size_t>(document.begin), static_cast<std::size_t>(document.size()));
}

}  // namespace

std::int64_t total_bytes(const std::vector<Document>& documents) {
  std::int64_t bytes = 0;
  for (const Document& document : documents) bytes += document.size();
  return bytes;
}

CorpusListing list_corpus(const std::vector<std::string>& inputs, const CorpusOptions& options) {
  CorpusLister lister(options);
  for (const std::string& input : inputs) lister.add_input(input);
  CorpusListing listing = lister.take();
  if (listing.documents.empty()) {
    std::string found;
    if (!listing.skipped.empty()) found += fmt::format("; {} binary", listing.skipped.size());
    if (listing.empty > 0) found += fmt::format("; {} empty", listing.empty);
    throw DataError(fmt::format("no text in {}{}", fmt::join(inputs, ", "),
                                found.empty() ? ": no file fits the extensions and exclusions" : found));
  }
  return listing;
}

CorpusSplit split_corpus(const std::vector<Document>& documents, double fraction) {
  if (!(fraction >= 0.0 && fraction < 1.0)) {
    throw ConfigError(fmt::format("the validation fraction is {}: expected 0 or more and less than 1", fraction));
  }
  CorpusSplit split;
  if (fraction == 0.0) {
    split.train = documents;
    return split;
  }
  if (documents.size() == 1) {
    const Document& whole = documents[0];
    const MappedFile file(whole.path);
    const std::string_view text = text_of(file, whole);
    const auto wish = static_cast<std::size_t>(static_cast<double>(text.size()) * (1.0 - fraction));
    const std::size_t line_break = text.substr(0, wish).rfind('\n');
    if (line_break != std::string_view::npos && line_break + 1 < text.size()) {
      const auto cut = whole.begin + static_cast<std::int64_t>(line_break) + 1;
      split.train.push_back({whole.path, whole.begin, cut});
      split.validation.push_back({whole.path, cut, whole.end});
    }
  } else {
    // A document goes where it brings the share of validation nearest to what it should be by now.
    double all = 0.0, aside = 0.0;
    for (const Document& document : documents) {
      const auto size = static_cast<double>(document.size());
      all += size;
      const bool take = aside + size / 2 <= fraction * all;
      (take ? split.validation : split.train).push_back(document);
      if (take) aside += size;
    }
  }
  if (split.train.empty() || split.validation.empty()) {
    throw ConfigError(fmt::format(
        "a validation fraction of {} leaves no document for {}: the corpus has {} ({} bytes); "
        "use another fraction, or more and smaller files",
        fraction, split.train.empty() ? "training" : "validation", documents.size(), total_bytes(documents)));
  }
  return split;
}

BpeTokenizer train_tokenizer(const std::vector<Document>& documents, BpeTrainerOptions options,
                             const Advance& bytes_read, const std::function<void(TrainingProgress)>& merged) {
  BpeTrainer trainer(std::move(options));
  for (const Document& document : documents) {
    const MappedFile file(document.path, MappedFile::Access::sequential);
    trainer.add(text_of(file, document));
    if (bytes_read) bytes_read(static_cast<std::uint64_t>(document.size()));
  }
  return trainer.train(merged);
}

EncodingSummary encode_corpus(const std::vector<Document>& documents, const BpeTokenizer& tokenizer,
                              const std::string& prefix, const EncodingOptions& options) {
  const std::optional<TokenId> end = tokenizer.end_of_text();
  if (options.end_of_text && !end) {
    throw DataError(
        "the tokenizer has no end-of-text token (<|endoftext|>, <|end_of_text|>, </s> or <eos>): encode "
        "without one between documents (--no-end-of-text)");
  }
  const fs::path directory = fs::path(prefix).parent_path();
  if (!directory.empty()) posix_file_system().make_directory(directory);
  TokenFileWriter writer(prefix, {.vocab_size = tokenizer.vocab_size()});
  EncodingSummary summary{.path = writer.bin_path()};
  std::vector<std::int64_t> counts(static_cast<std::size_t>(tokenizer.vocab_size()), 0);
  std::vector<TokenId> ids;
  const auto write_ids = [&] {
    for (const TokenId id : ids) ++counts[static_cast<std::size_t>(id)];
    writer.append(ids);
    ids.clear();
  };
  for (const Document& document : documents) {
    const MappedFile file(document.path, MappedFile::Access::sequential);
    std::string_view text = text_of(file, document);
    while (!text.empty()) {
      std::size_t cut = text.size() > kChunkBytes ? tokenizer.safe_cut(text, kChunkBytes) : text.size();
      if (cut == 0) cut = text.size();
      tokenizer.encode_to(text.substr(0, cut), ids, {.added_tokens = false});
      write_ids();
      if (options.bytes_done) options.bytes_done(cut);
      text.remove_prefix(cut);
    }
    if (options.end_of_text) {
      ids.push_back(*end);
      write_ids();
    }
    writer.end_document();
    summary.bytes += document.size();
  }
  writer.finish();
  summary.documents = writer.document_count();
  summary.tokens = writer.size();
  summary.unigram_entropy = unigram_entropy(counts);
  return summary;
}

}  // namespace phalanx::data
