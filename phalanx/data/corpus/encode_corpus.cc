// encode_corpus() of corpus.h.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "phalanx/base/content_hash.h"
#include "phalanx/base/error.h"
#include "phalanx/base/mapped_file.h"
#include "phalanx/base/utf8.h"
#include "phalanx/base/version.h"
#include "phalanx/data/corpus/corpus.h"
#include "phalanx/data/corpus/encode_all.h"
#include "phalanx/data/corpus/surrounding_tokens.h"
#include "phalanx/data/corpus/token_statistics.h"
#include "phalanx/data/corpus/unfinished_tokens.h"
#include "phalanx/data/token_file_writer.h"
#include "phalanx/data/tokenizer/added_tokens.h"
#include "phalanx/data/tokenizer/bpe_model.h"
#include "phalanx/data/tokenizer/tokenizer_fingerprint.h"

namespace phalanx::data {
namespace {

constexpr std::size_t kChunkBytes = std::size_t{4} << 20;

/// Of what the ids of these documents are. A file is known by its size and by the time of its last change.
UnfinishedOrigin origin_of(const std::vector<Document>& documents, const BpeTokenizer& tokenizer,
                           const EncodingOptions& options) {
  UnfinishedOrigin origin{.tokenizer = tokenizer_fingerprint(tokenizer), .set_aside = options.set_aside};
  ContentHash hash;
  hash.add(version()).add(origin.tokenizer).add(options.end_of_text ? 1 : 0).add(options.special_tokens ? 1 : 0);
  hash.add(options.set_aside);
  for (const Document& document : documents) {
    const FileState state = document.listed ? *document.listed : state_of(document.path);
    hash.add(document.path).add(state.bytes).add(state.modified).add(document.begin).add(document.end);
    hash.add(static_cast<std::int64_t>(document.format)).add(static_cast<std::int64_t>(document.compression));
    hash.add(document.field).add(fmt::format("{}", document.held_out_fraction)).add(document.is_held_out ? 1 : 0);
    hash.add(document.left_out ? std::ssize(*document.left_out) : -1);
    if (!document.left_out) continue;
    for (const std::int64_t number : *document.left_out) hash.add(number);
  }
  origin.identity = hash.hex();
  return origin;
}

TokenId end_of_text(const BpeTokenizer& tokenizer, const EncodingOptions& options) {
  const std::optional<TokenId> end = tokenizer.end_of_text();
  if (!options.end_of_text) return static_cast<TokenId>(kNoDocumentEnd);
  if (end) return *end;
  throw DataError(
      "the tokenizer has no end-of-text token (<|endoftext|>, <|end_of_text|>, </s> or <eos>), nor do the files "
      "beside it name one: encode without one between documents (--no-end-of-text)");
}

void make_folder_of(const std::string& prefix, FileSystem& file_system) {
  const auto directory = std::filesystem::path(prefix).parent_path();
  if (!directory.empty()) file_system.make_directory(directory);
}

/// Texts go into pieces, pieces are encoded on all threads, a batch of them at a time, and their ids are written.
class CorpusEncoder {
 public:
  CorpusEncoder(const std::vector<Document>& documents, const BpeTokenizer& tokenizer, const std::string& prefix,
                const EncodingOptions& options)
      : documents_(documents),
        tokenizer_(tokenizer),
        prefix_(prefix),
        options_(options),
        type_(stored_type(tokenizer.vocab_size())),
        end_(end_of_text(tokenizer, options)),
        around_(surrounding_tokens(tokenizer, {.special_tokens = options.special_tokens,
                                               .end = options.end_of_text ? std::optional(end_) : std::nullopt})),
        origin_(origin_of(documents, tokenizer, options)),
        unfinished_(prefix, origin_, file_system()),
        counts_(static_cast<std::size_t>(tokenizer.vocab_size()), 0),
        batch_bytes_(2 * kChunkBytes * static_cast<std::size_t>(options.threads)) {
    for (const AddedToken& token : tokenizer.model().added_tokens) {
      if (token.special) specials_.add(token.content, token);
    }
    // What is kept is kept between batches, so they must not be much larger.
    constexpr std::int64_t kMostBytesAToken = 16;
    if (keeps()) {
      batch_bytes_ = std::min(batch_bytes_, static_cast<std::size_t>(kMostBytesAToken * options.tokens_kept_at_once));
    }
  }

  EncodingSummary run() {
    make_folder_of(prefix_, file_system());
    std::vector<std::int32_t> kept;
    if (keeps()) kept = unfinished_.take_over(type_);
    writer_ = std::make_unique<TokenFileWriter>(prefix_, TokenFileWriterOptions{.vocab_size = tokenizer_.vocab_size(),
                                                                                .tokenizer = origin_.tokenizer,
                                                                                .file_system = options_.file_system,
                                                                                .document_end = recorded_end(),
                                                                                .set_aside = options_.set_aside,
                                                                                .special_tokens = special_tokens(),
                                                                                .kept = std::move(kept)});
    summary_.path = writer_->bin_path();
    if (keeps()) unfinished_.begin();
    count_taken_over();
    for (const Document& document : documents_) encode(document);
    write_pieces();
    if (texts_ < summary_.taken_over) {
      throw DataError(
          fmt::format("{}.unfinished: it names {} documents, and the inputs have {}: they have changed; delete it, and "
                      "give the command again",
                      prefix_, summary_.taken_over, texts_));
    }
    if (writer_->document_count() == 0) {
      throw DataError(
          fmt::format("no text for {}.bin: {} records, all without text or set aside; use more text or "
                      "another validation fraction",
                      prefix_, summary_.empty));
    }
    writer_->finish();
    if (keeps()) unfinished_.remove();
    summary_.documents = writer_->document_count();
    summary_.tokens = writer_->size();
    summary_.unigram_entropy = unigram_entropy(counts_);
    return std::move(summary_);
  }

 private:
  struct PieceEnds {
    bool begins_document = false, ends_document = false;
    bool counts = false;  // for the progress
  };

  /// The template may end documents by the token, too.
  std::int64_t recorded_end() const {
    const std::optional<TokenId> end = tokenizer_.end_of_text();
    return end && !around_.after.empty() && around_.after.back() == *end ? *end : end_;
  }
  /// For the sidecar: unset where the tokenizer's template has none.
  std::optional<bool> special_tokens() const {
    const BpeModel& model = tokenizer_.model();
    if (model.prefix.empty() && model.suffix.empty()) return std::nullopt;
    return options_.special_tokens;
  }
  bool keeps() const { return options_.tokens_kept_at_once > 0; }
  FileSystem& file_system() const { return options_.file_system ? *options_.file_system : posix_file_system(); }

  void count_length(std::int64_t tokens) {
    const auto bin = static_cast<std::size_t>(std::bit_width(static_cast<std::uint64_t>(tokens)));
    summary_.lengths.resize(std::max(summary_.lengths.size(), bin));
    if (tokens > 0) ++summary_.lengths[bin - 1];
  }

  void count_taken_over() {
    summary_.taken_over = writer_->document_count();
    kept_documents_ = writer_->lengths().size();
    kept_tokens_ = writer_->size();
    if (kept_documents_ == 0) return;
    const MappedFile ids(writer_->bin_path() + ".tmp", MappedFile::Access::sequential);
    const std::byte* at = ids.bytes().data();
    for (std::int64_t i = 0; i < writer_->size(); ++i, at += bytes_of(type_)) {
      std::uint16_t narrow = 0;
      std::int32_t id = 0;
      type_ == TokenType::u16 ? std::memcpy(&narrow, at, sizeof(narrow)) : std::memcpy(&id, at, sizeof(id));
      ++counts_.at(static_cast<std::size_t>(type_ == TokenType::u16 ? narrow : id));
    }
    for (const std::int32_t length : writer_->lengths()) count_length(length);
  }

  void encode(const Document& document) {
    // Progress counts the encoding of a plain text; for other files it counts reading.
    const bool is_plain = document.format == TextFormat::text && document.compression == Compression::none;
    const TextCount count = each_text(
        document, [&](std::string_view text) { encode(document, text, is_plain && options_.bytes_done); },
        is_plain ? Advance() : options_.bytes_done);
    summary_.empty += count.empty;
  }

  void encode(const Document& document, std::string_view text, bool counts_bytes) {
    const auto bytes = static_cast<std::int64_t>(text.size());
    summary_.bytes += bytes;
    if (document.format == TextFormat::text && !is_utf8(text) && ++summary_.not_utf8 == 1) {
      summary_.first_not_utf8 = document.shown();
    }
    if (const auto special = specials_.next(text, 0); special.length > 0 && ++summary_.with_special == 1) {
      summary_.first_special = fmt::format("'{}' in {}", text.substr(special.begin, special.length), document.shown());
    }
    if (texts_++ < summary_.taken_over) {
      summary_.bytes_taken_over += bytes;
      if (counts_bytes) options_.bytes_done(text.size());
      return;
    }
    for (bool begins = true; begins || !text.empty(); begins = false) {
      std::size_t cut = text.size() > kChunkBytes ? tokenizer_.safe_cut(text, kChunkBytes) : text.size();
      if (cut == 0) cut = text.size();
      pieces_.emplace_back(text.substr(0, cut));
      text.remove_prefix(cut);
      ends_.push_back({.begins_document = begins, .ends_document = text.empty(), .counts = counts_bytes});
      piece_bytes_ += cut;
      if (piece_bytes_ >= batch_bytes_) write_pieces();
    }
  }

  void write_pieces() {
    std::vector<std::vector<TokenId>> ids = encode_all(tokenizer_, pieces_, {.threads = options_.threads});
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (ends_[i].begins_document) ids[i].insert(ids[i].begin(), around_.before.begin(), around_.before.end());
      if (ends_[i].ends_document) ids[i].insert(ids[i].end(), around_.after.begin(), around_.after.end());
      for (const TokenId id : ids[i]) ++counts_[static_cast<std::size_t>(id)];
      writer_->append(ids[i]);
      length_ += std::ssize(ids[i]);
      if (ends_[i].ends_document) {
        writer_->end_document();
        count_length(std::exchange(length_, 0));
      }
      if (ends_[i].counts) options_.bytes_done(pieces_[i].size());
    }
    pieces_.clear();
    ends_.clear();
    piece_bytes_ = 0;
    keep();
  }

  void keep() {
    if (!keeps() || writer_->size() - kept_tokens_ < options_.tokens_kept_at_once) return;
    const auto news = std::span(writer_->lengths()).subspan(kept_documents_);
    if (news.empty()) return;  // it is all one document
    writer_->keep_unfinished();
    unfinished_.add(news, type_);
    kept_documents_ = writer_->lengths().size();
    kept_tokens_ = writer_->size();
  }

  const std::vector<Document>& documents_;
  const BpeTokenizer& tokenizer_;
  const std::string prefix_;
  const EncodingOptions& options_;
  const TokenType type_;
  const TokenId end_;  // of a document
  const SurroundingTokens around_;
  const UnfinishedOrigin origin_;
  UnfinishedTokens unfinished_;
  std::unique_ptr<TokenFileWriter> writer_;
  AddedTokenFinder specials_;
  std::vector<std::int64_t> counts_;  // of each id
  std::vector<std::string> pieces_;   // a text, or a part of a large one
  std::vector<PieceEnds> ends_;
  std::size_t piece_bytes_ = 0, batch_bytes_;
  std::int64_t texts_ = 0, length_ = 0;  // length_: tokens of the document so far
  std::int64_t kept_tokens_ = 0;
  std::size_t kept_documents_ = 0;
  EncodingSummary summary_;
};

}  // namespace

EncodingSummary encode_corpus(const std::vector<Document>& documents, const BpeTokenizer& tokenizer,
                              const std::string& prefix, const EncodingOptions& options) {
  return CorpusEncoder(documents, tokenizer, prefix, options).run();
}

}  // namespace phalanx::data
