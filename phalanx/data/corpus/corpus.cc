#include "phalanx/data/corpus/corpus.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <fnmatch.h>
#include <glob.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string_view>
#include <system_error>
#include <unordered_set>
#include <utility>

#include "phalanx/base/byte_order_mark.h"
#include "phalanx/base/content_hash.h"
#include "phalanx/base/error.h"
#include "phalanx/base/file_kind.h"
#include "phalanx/base/hub_name.h"
#include "phalanx/base/mapped_file.h"
#include "phalanx/base/parse_text.h"
#include "phalanx/base/utf8.h"
#include "phalanx/data/corpus/column_texts.h"
#include "phalanx/data/corpus/dataset_folder.h"
#include "phalanx/data/corpus/record_signs.h"

namespace phalanx::data {
namespace {

namespace fs = std::filesystem;

class CorpusLister {
 public:
  explicit CorpusLister(const CorpusOptions& options) : options_(options) {}

  void add_input(const std::string& input) {
    std::error_code error;
    const auto status = fs::status(input, error);
    if (fs::is_directory(status)) return add_directory(input);
    if (fs::exists(status)) return add_file(input, /*is_named=*/true);
    if (input.find_first_of("*?[") == std::string::npos) {
      throw DataError(fmt::format("{}: no such file or directory{}", input, hub_hint(input)));
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
      if (excluded(path)) continue;
      if (fs::is_directory(path)) {
        add_directory(path);
      } else {
        add_file(path, /*is_named=*/false);
      }
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
    if (add_dataset(directory)) return;
    for (const fs::path& entry : entries) {
      if (entry.filename().string().starts_with('.') || excluded(entry)) continue;
      const auto status = fs::symlink_status(entry, error);
      if (fs::is_directory(status)) {
        add_directory(entry);
      } else if (fs::is_regular_file(fs::status(entry, error)) && wanted(entry)) {
        add_file(entry, /*is_named=*/false);
      }
    }
  }

  bool wanted(const fs::path& path) const {
    if (options_.extensions.empty()) return true;
    const std::string extension = lower_case(path.extension().string());
    return std::ranges::any_of(options_.extensions,
                               [&](const std::string& wanted) { return lower_case(wanted) == extension; });
  }

  /// Whether it is a folder of the datasets package, whose files are added then.
  bool add_dataset(const fs::path& directory) {
    const auto files = dataset_files(directory);
    if (!files) return false;
    if (!reads_columns()) {
      throw DataError(fmt::format(
          "{0} is a folder of the datasets package, in Arrow files, and Phalanx was built without Arrow C++ (docs/"
          "prepare_data.md says how to build with it): or write its text as JSON lines by\n    python3 -c \"import "
          "datasets; datasets.load_from_disk('{0}').to_json('data.jsonl')\"\n  and tokenize data.jsonl",
          directory.string()));
    }
    for (const fs::path& file : *files) {
      if (!excluded(file)) add_file(file, /*is_named=*/true);
    }
    return true;
  }

  void add_file(const fs::path& path, bool is_named) {
    std::error_code error;
    const fs::path canonical = fs::weakly_canonical(path, error);
    if (!seen_.insert((error ? path : canonical).string()).second) return;
    if (const auto type = fs::status(path, error).type(); type != fs::file_type::regular) {
      throw DataError(
          fmt::format("{} is {}, which cannot be read twice: give what comes out of it as standard input, -",
                      shown(path), type == fs::file_type::fifo ? "a pipe" : "no regular file"));
    }
    const MappedFile file(path);
    if (file.size() == 0 || file.text() == kUtf8Mark) {
      ++listing_.empty;
      return;
    }
    Document document{.path = path.string(), .end = static_cast<std::int64_t>(file.size()), .field = options_.field};
    document.listed = state_of(document.path);
    document.listed->bytes = document.end;
    if (path == options_.standard_input) document.name = "standard input";
    const std::string_view raw = file.text().substr(0, kFileKindProbe);
    std::string unpacked;
    std::string_view head = raw;
    FileKind kind = file_kind(raw, file.size());
    if (kind == FileKind::gzip || kind == FileKind::zstd) {
      document.compression = kind == FileKind::gzip ? Compression::gzip : Compression::zstd;
      unpacked = TextReader(path, document.compression).read(kFileKindProbe);
      head = unpacked;
      kind = file_kind(head, head.size() < kFileKindProbe ? head.size() : ~std::uint64_t{0} >> 1);
      if (head.empty()) {
        ++listing_.empty;
        return;
      }
    }
    const bool is_packed = document.compression != Compression::none;
    if (kind == FileKind::lfs_pointer) throw DataError(fmt::format("{}: {}", shown(path), kLfsHint));
    const bool is_text =
        kind == FileKind::text || (kind == FileKind::unknown && head.find('\0') == std::string_view::npos);
    if (kind == FileKind::unknown && is_named) {
      if (const auto fault = encoding_fault(head)) throw DataError(fmt::format("{}: {}", shown(path), *fault));
    }
    if (kind == FileKind::parquet && !is_packed) {
      document.format = TextFormat::parquet;
    } else if ((kind == FileKind::arrow_file || kind == FileKind::arrow_stream) && !is_packed) {
      document.format = TextFormat::arrow;
    } else if (path.extension() == ".parquet" || path.extension() == ".arrow") {
      throw DataError(fmt::format("{} is no {} file, whatever its name says: it is {}", shown(path),
                                  path.extension() == ".arrow" ? "Arrow" : "Parquet",
                                  kind == FileKind::unknown ? "of no known kind" : name_of(kind)));
    } else if (is_text) {
      document.format = format_of(path, head, document.compression);
      if (document.format == TextFormat::text && !is_packed && head.starts_with(kUtf8Mark)) {
        document.begin = static_cast<std::int64_t>(kUtf8Mark.size());
      }
    } else if (is_named) {
      throw DataError(fmt::format(
          "{} is {}{}: expected UTF-8 text, JSON lines, a Parquet or an Arrow file, plain or compressed by gzip or "
          "zstd{}",
          shown(path), kind == FileKind::unknown ? "binary" : name_of(kind), is_packed ? " when unpacked" : "",
          kind == FileKind::wide_text ? "; convert it with `iconv -t UTF-8`" : ""));
    } else {
      listing_.skipped.push_back(path.string());
      return;
    }
    listing_.documents.push_back(std::move(document));
  }

  /// The name of a file in messages; text from standard input is in one of our own files.
  std::string shown(const fs::path& path) const {
    return path == options_.standard_input ? "standard input" : path.string();
  }

  /// The format of a text file: text, or records by the file's name. Under another name, records are not guessed.
  TextFormat format_of(const fs::path& path, std::string_view head, Compression compression) const {
    if (options_.format) return *options_.format;
    std::string name = lower_case(path.filename().string());
    for (const char* packed : {".gz", ".zst", ".zstd"}) {
      if (name.ends_with(packed)) name.resize(name.size() - std::string_view(packed).size());
    }
    for (const char* records : {".jsonl", ".ndjson", ".jsonlines"}) {
      if (name.ends_with(records)) return TextFormat::json_lines;
    }
    for (const auto& [table, separator] : {std::pair(".csv", ","), std::pair(".tsv", "\\t")}) {
      if (name.ends_with(table)) refuse_table("is a table", path, separator, name);
    }
    const auto looks = data_in(start_of_records(path, head, compression));
    if (!looks) return TextFormat::text;
    if (path == options_.standard_input && looks->is_json_lines) return TextFormat::json_lines;
    if (looks->separator != '\0') {
      refuse_table("looks like a table", path, looks->separator == ',' ? "," : "\\t",
                   path == options_.standard_input ? "table.csv" : name);
    }
    if (!looks->instead.empty()) {
      throw DataError(
          fmt::format("{} looks like {}: {}, read it as text by --format text, or leave it out by --exclude",
                      shown(path), looks->what, looks->instead));
    }
    std::string as_records;
    if (looks->is_json_lines || !looks->command.empty()) as_records = "read it as records by --format jsonl";
    if (!looks->command.empty()) {
      as_records += fmt::format(" after `{}`", fmt::format(fmt::runtime(looks->command), shown(path)));
    }
    throw DataError(
        fmt::format("{} looks like {}: expected text, or records under a name that ends in .jsonl; {}{}as text by "
                    "--format text, or leave it out by --exclude",
                    shown(path), looks->what, as_records, as_records.empty() ? "read it " : ", "));
  }

  /// The bytes in which records are searched: more than for other kinds, if the file may begin with a record.
  static std::string start_of_records(const fs::path& path, std::string_view head, Compression compression) {
    const std::string_view text = without_utf8_mark(head);
    const std::size_t first = text.find_first_not_of(" \t\r\n");
    if (head.size() < kFileKindProbe || first == text.npos || std::string_view("{[#/").find(text[first]) == text.npos) {
      return std::string(head);
    }
    return TextReader(path, compression).read(kRecordProbe);
  }

  [[noreturn]] void refuse_table(std::string_view is, const fs::path& path, std::string_view separator,
                                 std::string_view name) const {
    throw DataError(fmt::format(
        "{0} {1}, of which text is one column: write its rows as JSON lines by\n    python3 -c \"import csv, "
        "json, sys; [print(json.dumps(row)) for row in csv.DictReader(sys.stdin, delimiter='{2}')]\" < {3} > "
        "data.jsonl\n  and tokenize data.jsonl with --field COLUMN; or read it as text by --format text, or leave it "
        "out by --exclude",
        shown(path), is, separator, name));
  }

  const CorpusOptions& options_;
  CorpusListing listing_;
  std::unordered_set<std::string> seen_;
};

/// Which texts have been seen before, by a hash of 128 bits of each. About 40 bytes a text.
class SeenTexts {
 public:
  bool is_new(std::string_view text) {  // and is seen from now on
    const std::string hash = ContentHash().add(text).hex();
    const auto half = [&](std::size_t begin) { return std::stoull(hash.substr(begin, 16), nullptr, 16); };
    return seen_.insert({half(0), half(16)}).second;
  }

 private:
  struct Hash {
    std::size_t operator()(const std::array<std::uint64_t, 2>& key) const { return key[0]; }
  };
  std::unordered_set<std::array<std::uint64_t, 2>, Hash> seen_;
};

}  // namespace

std::int64_t leave_out_duplicates(std::vector<Document>& documents, const Advance& bytes_read) {
  SeenTexts seen;
  std::int64_t found = 0;
  std::vector<Document> kept;
  for (Document& document : documents) {
    std::vector<std::int64_t> again;
    each_numbered_text(
        document,
        [&](std::int64_t number, std::string_view text) {
          if (!seen.is_new(text)) again.push_back(number);
        },
        bytes_read);
    found += std::ssize(again);
    if (!again.empty() && document.format == TextFormat::text) continue;
    if (!again.empty()) document.left_out = std::make_shared<const std::vector<std::int64_t>>(std::move(again));
    kept.push_back(std::move(document));
  }
  documents = std::move(kept);
  return found;
}

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
    std::vector<std::string> names = inputs;
    if (!options.standard_input.empty()) std::ranges::replace(names, options.standard_input, "standard input");
    throw DataError(fmt::format("no text in {}{}", fmt::join(names, ", "),
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
  const auto is_plain = [](const Document& document) {
    return document.format == TextFormat::text && document.compression == Compression::none;
  };
  if (documents.size() == 1 && is_plain(documents[0])) {
    const Document& whole = documents[0];
    const MappedFile file(whole.path);
    const std::string_view text =
        file.text().substr(0, static_cast<std::size_t>(whole.end)).substr(static_cast<std::size_t>(whole.begin));
    const auto wish = static_cast<std::size_t>(static_cast<double>(text.size()) * (1.0 - fraction));
    const std::size_t line_break = text.substr(0, wish).rfind('\n');
    if (line_break != std::string_view::npos && line_break + 1 < text.size()) {
      const auto cut = whole.begin + static_cast<std::int64_t>(line_break) + 1;
      split.train = split.validation = {whole};
      split.train[0].end = split.validation[0].begin = cut;
    }
  } else {
    HoldOut hold_out(fraction);
    for (Document document : documents) {
      if (document.format == TextFormat::text) {
        (hold_out.takes(document.size()) ? split.validation : split.train).push_back(document);
        continue;
      }
      document.held_out_fraction = fraction;  // among its records
      split.train.push_back(document);
      document.is_held_out = true;
      split.validation.push_back(document);
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
    each_text(
        document, [&](std::string_view text) { trainer.add(text); }, bytes_read);
  }
  return trainer.train(merged);
}

}  // namespace phalanx::data
