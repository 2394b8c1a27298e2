// TokenFileWriter writes a Megatron token file, PREFIX.bin and PREFIX.idx, as a stream of documents. It also writes
// PREFIX.json, which says how they were made (token_sidecar.h).
//
// Ids are stored as uint16 if vocab_size is at most 65,500 (Megatron's own limit), else as int32. All three files are
// written as PREFIX.bin.tmp and so on, and renamed by finish(), .bin first. So a run that fails never leaves a partial
// file under a final name. A writer destroyed before finish() removes them, but for what keep_unfinished() has kept. A
// crash between the renames leaves files that do not match, which TokenFile refuses. A PREFIX.json that no
// TokenFileWriter made is not replaced: DataError.
// With `has_mask` it also writes PREFIX.mask, which says of each token whether it is trained. Without, it removes one
// that the old PREFIX.json names. A PREFIX.mask that no PREFIX.json names is not touched: DataError.
// An empty document is stored (Megatron allows it). A full disk, a missing permission and ids outside the vocabulary
// are DataErrors.
//
//   TokenFileWriter writer("data/train", {.vocab_size = 4096});
//   for (const std::string& text : texts) writer.add_document(tokenizer.encode(text));
//   writer.finish();
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "phalanx/base/file.h"
#include "phalanx/data/token_file.h"

namespace phalanx::data {

/// The type in which ids of a vocabulary are stored.
TokenType stored_type(std::int64_t vocab_size);

struct TokenFileWriterOptions {
  std::int64_t vocab_size = 0;                    // required
  std::string tokenizer;                          // fingerprint of the one that made the ids; empty: unknown
  FileSystem* file_system = nullptr;              // null: the real file system
  std::optional<std::int64_t> document_end = {};  // the id that ends each document, or kNoDocumentEnd; unset: unknown
  std::string set_aside = {};                     // TokenSidecar::set_aside
  bool has_mask = false;                          // documents come with which of their tokens are trained
  std::optional<bool> special_tokens = {};        // TokenSidecar::special_tokens
  /// Tokens of each document that PREFIX.bin.tmp begins with, of a writer that was stopped: the new ones come behind
  /// them. Whatever else is there is dropped. Empty: it begins anew. REQUIRES: no mask.
  std::vector<std::int32_t> kept = {};
};

class TokenFileWriter {
 public:
  TokenFileWriter(const std::string& prefix, TokenFileWriterOptions options);
  ~TokenFileWriter();
  TokenFileWriter(const TokenFileWriter&) = delete;
  TokenFileWriter& operator=(const TokenFileWriter&) = delete;

  /// Appends ids to the current document. A document may be appended in any number of pieces.
  void append(std::span<const std::int32_t> ids);
  void end_document();
  void add_document(std::span<const std::int32_t> ids) {
    append(ids);
    end_document();
  }

  /// `is_trained`: one value a token, 0 if it is not trained. REQUIRES: has_mask, and no other function appends.
  void add_document(std::span<const std::int32_t> ids, std::span<const std::uint8_t> is_trained);

  /// Whatever was appended is on the disk when it returns, in PREFIX.bin.tmp. That file stays from now on, even if this
  /// writer is destroyed before finish().
  void keep_unfinished();

  /// Ends the current document if it has tokens, writes the rest and moves the files into place.
  void finish();

  std::int64_t size() const { return size_; }
  std::int64_t document_count() const { return static_cast<std::int64_t>(lengths_.size()); }
  const std::vector<std::int32_t>& lengths() const { return lengths_; }  // of the documents, in tokens
  TokenType type() const { return type_; }
  std::string bin_path() const { return prefix_ + ".bin"; }
  std::string idx_path() const { return prefix_ + ".idx"; }

 private:
  void store(std::span<const std::byte> bytes);
  void flush();
  std::string index_text() const;
  std::string prefix_;
  std::string tokenizer_;
  std::int64_t vocab_size_;
  std::optional<std::int64_t> document_end_;
  std::optional<bool> special_tokens_;
  std::string set_aside_;
  TokenType type_;
  FileSystem& file_system_;
  bool has_mask_;
  std::unique_ptr<WritableFile> bin_, mask_;  // mask_: from the first document on
  std::vector<std::byte> buffer_;             // waiting to be written
  std::vector<std::uint16_t> narrow_;         // scratch of append()
  std::vector<std::int32_t> lengths_;         // one entry for each document
  std::int64_t open_document_ = 0;
  std::int64_t size_ = 0;
  bool finished_ = false, stays_ = false;
};

}  // namespace phalanx::data
