// TokenFile: a file of token ids, memory-mapped, read as one stream of int64.
//
// There are three formats. The format is found from the file's content and the files beside it; description() names it.
//   megatron  PREFIX.bin (raw ids) with PREFIX.idx (magic MMIDIDX: dtype, lengths, documents). Name any of PREFIX,
//             PREFIX.bin and PREFIX.idx.
//   llmc      llm.c's .bin: 256 int32 of header (magic 20240520: uint16 ids, 20240801: uint32 ids), then the ids.
//   raw       nanoGPT's: little-endian ids and nothing else. Their type is the stated one (`type`, or the file's
//             PREFIX.json: token_sidecar.h), else uint16, or uint32 if vocab_size is above 65536. If none is stated,
//             content that cannot be such ids is refused, with what it looks like (raw_ids.h).
//
// Every size and offset is checked before it is used. A truncated file, a wrong header, a wrong magic or an empty file
// is a DataError that names the file, what was expected and what was found. If vocab_size is given, ids are checked
// when the file is opened: all of up to 16 Mi ids, else 256 blocks spread over the file. read() also checks what it
// returns. An id outside [0, vocab_size) is a DataError that names the id and its position. A PREFIX.json that
// describes another file, or a tokenizer with more ids than vocab_size, is also a DataError.
//
// A file of any format may have a mask beside it, PREFIX.mask: one byte a token, 0 or 1, whether the token is trained,
// that is, whether predicting it counts (token_sidecar.h). A mask that is missing, too short, or another file's is a
// DataError.
//
// A TokenFile is immutable: any number of threads may read from it. Copies share the mapping.
//
//   TokenFile tokens("data/train.bin", {.vocab_size = 4096});
//   std::vector<std::int64_t> ids(257);
//   tokens.read(0, ids);
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

namespace phalanx {
class MappedFile;
}

namespace phalanx::data {

enum class TokenFormat { megatron, llmc, raw };

const char* to_string(TokenFormat format);

/// How an id is stored.
enum class TokenType : std::uint8_t { u8, i8, i16, i32, i64, u16, u32 };

const char* to_string(TokenType type);
std::optional<TokenType> token_type_named(std::string_view name);  // "uint16": what to_string() gives
std::int64_t bytes_of(TokenType type);

struct TokenFileOptions {
  std::int64_t vocab_size = 0;        // 0: unknown, then ids are not checked and raw files are uint16
  std::optional<TokenFormat> format;  // unset: found from the file
  std::optional<TokenType> type;      // unset: found from the file; refused if the file's index or header differs
};

/// TokenSidecar::document_end of documents that follow each other without a separator.
inline constexpr std::int64_t kNoDocumentEnd = -1;

/// The contents of PREFIX.json, which describes PREFIX.bin. Everything may be missing.
struct TokenSidecar {
  std::optional<TokenType> type;
  std::optional<std::int64_t> tokens;
  std::optional<std::int64_t> documents;
  std::int64_t vocab_size = 0;               // of the tokenizer
  std::string tokenizer;                     // its fingerprint (tokenizer_fingerprint.h)
  std::optional<std::int64_t> document_end;  // the id that ends each document, or kNoDocumentEnd
  std::string content;                       // content_hash() of the file
  std::string set_aside;  // content_hash() of the file with the part of this text that `phalanx tokenize` set aside
  std::string mask = {};  // mask_hash() of the file; empty: every token is trained
  std::optional<bool> special_tokens = {};  // whether documents have those of the tokenizer's template around them
};

/// A half-open range of positions in a token file.
struct TokenRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const { return end - begin; }
  friend bool operator==(const TokenRange&, const TokenRange&) = default;
};

class TokenFile {
 public:
  explicit TokenFile(const std::string& path, TokenFileOptions options = {});

  std::int64_t size() const { return size_; }  // ids in the file
  TokenFormat format() const { return format_; }
  TokenType type() const { return type_; }
  const std::string& path() const { return path_; }  // the file that holds the ids
  std::int64_t vocab_size() const { return vocab_size_; }
  const std::optional<TokenSidecar>& sidecar() const { return sidecar_; }

  /// Documents. Megatron's index lists them; a file of another format is one document.
  std::int64_t document_count() const { return document_count_; }
  bool lists_documents() const { return documents_ != nullptr; }
  TokenRange document(std::int64_t index) const;

  /// Reads ids [begin, begin + out.size()) into `out`. Throws DataError for positions outside the file and ids outside
  /// the vocabulary.
  void read(std::int64_t begin, std::span<std::int64_t> out) const;

  /// By token, 0 if it is not trained. Empty: every token is trained.
  std::span<const std::uint8_t> mask() const;
  /// How many tokens of the range are trained. REQUIRES: the range lies within the file.
  std::int64_t trained_count(TokenRange range) const;

  std::int64_t file_bytes() const;  // of the file that holds the ids
  /// A hash of size, type and ids: of all ids if they have up to 4 MiB, else of 256 blocks spread over them. Cheap for
  /// any file.
  std::string content_hash() const;
  /// A hash of all of Megatron's index; "" if there is none.
  std::string index_hash() const;
  /// As content_hash(), of the mask; "" if there is none.
  std::string mask_hash() const { return mask_hash_; }

  /// For start-up lines: "data/train.bin: Megatron, uint16, 1,234,567 tokens, 89 documents".
  std::string description() const;

 private:
  struct Mapping;
  void open_megatron(const std::string& prefix);
  void check_stated_type() const;
  void check_sidecar() const;
  void open_llmc();
  void open_raw();
  void open_mask();
  void check_vocabulary() const;
  std::int64_t ids_end() const;  // upper limit of ids (exclusive), from the caller and the sidecar; 0: unknown

  std::shared_ptr<const Mapping> mapping_;
  std::shared_ptr<const MappedFile> mask_;  // null: none
  std::string mask_hash_;
  std::string path_;
  std::optional<TokenSidecar> sidecar_;
  std::optional<TokenType> stated_;  // by the caller or the sidecar
  TokenFormat format_ = TokenFormat::raw;
  TokenType type_ = TokenType::u16;
  std::int64_t vocab_size_ = 0;
  std::int64_t size_ = 0;
  std::int64_t document_count_ = 1;
  const std::byte* ids_ = nullptr;  // inside mapping_, like the three below
  const std::byte* lengths_ = nullptr;
  const std::byte* pointers_ = nullptr;
  const std::byte* documents_ = nullptr;
};

/// Splits the last `fraction` of a stream off for validation. Training samples read no token of the validation range,
/// and vice versa. Throws ConfigError for a fraction outside [0, 1), or one that leaves either side without a token.
struct TrainValidationRanges {
  TokenRange train;
  TokenRange validation;
};
TrainValidationRanges split_validation(std::int64_t size, double fraction);

}  // namespace phalanx::data
