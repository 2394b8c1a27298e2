#include "phalanx/data/token_file_writer.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <filesystem>
#include <limits>
#include <string>
#include <system_error>
#include <utility>

#include "phalanx/base/assert.h"
#include "phalanx/base/error.h"
#include "phalanx/base/mapped_file.h"
#include "phalanx/data/token_sidecar.h"

namespace phalanx::data {

namespace {

constexpr std::size_t kBufferBytes = std::size_t{1} << 20;

template <typename T>
void put(std::string& out, const T* values, std::size_t count) {
  out.append(reinterpret_cast<const char*>(values), count * sizeof(T));
}

template <typename T>
void put(std::string& out, T value) {
  put(out, &value, 1);
}

}  // namespace

TokenType stored_type(std::int64_t vocab_size) { return vocab_size <= 65500 ? TokenType::u16 : TokenType::i32; }

TokenFileWriter::TokenFileWriter(const std::string& prefix, TokenFileWriterOptions options)
    : prefix_(prefix),
      tokenizer_(std::move(options.tokenizer)),
      vocab_size_(options.vocab_size),
      document_end_(options.document_end),
      special_tokens_(options.special_tokens),
      set_aside_(std::move(options.set_aside)),
      file_system_(options.file_system ? *options.file_system : posix_file_system()),
      has_mask_(options.has_mask) {
  if (vocab_size_ < 1 || vocab_size_ > std::numeric_limits<std::int32_t>::max()) {
    throw ConfigError(fmt::format("{}: vocab_size is {}: expected 1 to 2147483647", prefix, vocab_size_));
  }
  const std::string beside = sidecar_path(bin_path());
  if (is_foreign_sidecar(bin_path())) {
    throw DataError(
        fmt::format("{}: exists and is no description of a token file, which would take its place: choose another "
                    "output",
                    beside));
  }
  if (is_foreign_mask(bin_path())) throw DataError(foreign_mask_text(bin_path()));
  type_ = stored_type(vocab_size_);
  buffer_.reserve(kBufferBytes);
  lengths_ = std::move(options.kept);
  if (lengths_.empty()) {
    bin_ = file_system_.create(bin_path() + ".tmp");
    return;
  }
  PHALANX_ASSERT(!has_mask_, "a stopped writer has no mask");
  for (const std::int32_t length : lengths_) size_ += length;
  stays_ = true;
  std::error_code error;
  std::filesystem::resize_file(bin_path() + ".tmp", static_cast<std::uintmax_t>(size_ * bytes_of(type_)), error);
  if (error) throw FileError(fmt::format("cannot cut {}.tmp: {}", bin_path(), error.message()), error.value());
  bin_ = file_system_.append(bin_path() + ".tmp");
}

TokenFileWriter::~TokenFileWriter() {
  if (!bin_) return;
  bin_.reset();
  mask_.reset();
  for (const std::string& path :
       {bin_path() + ".tmp", idx_path() + ".tmp", sidecar_path(bin_path()) + ".tmp", mask_path(bin_path()) + ".tmp"}) {
    if (stays_ && path == bin_path() + ".tmp") continue;
    try {
      file_system_.remove_all(path);
    } catch (const std::exception&) {
      // The first error, such as a full disk, is the one to report.
    }
  }
}

void TokenFileWriter::store(std::span<const std::byte> bytes) {
  if (buffer_.size() + bytes.size() > kBufferBytes) flush();
  if (bytes.size() > kBufferBytes) {
    bin_->write(bytes);
  } else {
    buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
  }
}

void TokenFileWriter::flush() {
  if (!buffer_.empty()) bin_->write(std::span<const std::byte>(buffer_));
  buffer_.clear();
}

void TokenFileWriter::append(std::span<const std::int32_t> ids) {
  if (finished_) throw DataError(fmt::format("{}: written to after finish()", bin_path()));
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= vocab_size_) {
      throw DataError(fmt::format("{}: token {} at position {} is outside the vocabulary: expected 0 to {}", bin_path(),
                                  ids[i], size_ + static_cast<std::int64_t>(i), vocab_size_ - 1));
    }
  }
  const auto count = static_cast<std::int64_t>(ids.size());
  if (count > std::numeric_limits<std::int32_t>::max() - open_document_) {
    throw DataError(fmt::format("{}: document {} has more than 2147483647 tokens, the format's limit", bin_path(),
                                lengths_.size()));
  }
  if (type_ == TokenType::u16) {
    narrow_.assign(ids.begin(), ids.end());
    store(std::as_bytes(std::span(narrow_)));
  } else {
    store(std::as_bytes(ids));
  }
  open_document_ += count;
  size_ += count;
}

void TokenFileWriter::add_document(std::span<const std::int32_t> ids, std::span<const std::uint8_t> is_trained) {
  if (!has_mask_ || ids.size() != is_trained.size()) {
    throw DataError(fmt::format("{}: {} tokens with a mask of {}: expected a writer with a mask, and one value a token",
                                bin_path(), ids.size(), is_trained.size()));
  }
  append(ids);
  if (!mask_) mask_ = file_system_.create(mask_path(bin_path()) + ".tmp");
  mask_->write(std::as_bytes(is_trained));
  end_document();
}

void TokenFileWriter::keep_unfinished() {
  flush();
  bin_->sync();
  stays_ = true;
}

void TokenFileWriter::end_document() {
  lengths_.push_back(static_cast<std::int32_t>(open_document_));
  open_document_ = 0;
}

std::string TokenFileWriter::index_text() const {
  std::string index("MMIDIDX\0\0", 9);
  put<std::uint64_t>(index, 1);
  put<std::uint8_t>(index, type_ == TokenType::u16 ? 8 : 4);
  put<std::uint64_t>(index, lengths_.size());
  put<std::uint64_t>(index, lengths_.size() + 1);
  put(index, lengths_.data(), lengths_.size());
  std::int64_t pointer = 0;
  for (const std::int32_t length : lengths_) {
    put(index, pointer);
    pointer += length * data::bytes_of(type_);
  }
  for (std::size_t document = 0; document <= lengths_.size(); ++document) {
    put(index, static_cast<std::int64_t>(document));
  }
  return index;
}

void TokenFileWriter::finish() {
  if (finished_) throw DataError(fmt::format("{}: finish() called twice", bin_path()));
  if (open_document_ > 0) end_document();
  finished_ = true;
  const auto write = [&](const std::string& path, const std::string& text) {
    const std::unique_ptr<WritableFile> file = file_system_.create(path);
    file->write(text);
    file->sync();
    file->close();
  };
  write(idx_path() + ".tmp", index_text());
  flush();
  bin_->sync();
  bin_->close();
  const std::string mask = mask_path(bin_path());
  if (has_mask_) {
    if (!mask_) mask_ = file_system_.create(mask + ".tmp");
    mask_->sync();
    mask_->close();
  }
  const std::string beside = sidecar_path(bin_path());
  write(beside + ".tmp",
        sidecar_text({.type = type_,
                      .tokens = size_,
                      .documents = std::max<std::int64_t>(document_count(), 1),
                      .vocab_size = vocab_size_,
                      .tokenizer = tokenizer_,
                      .document_end = document_end_,
                      .content = hash_of_ids(type_, MappedFile(bin_path() + ".tmp").bytes()),
                      .set_aside = set_aside_,
                      .mask = mask_ ? hash_of_ids(TokenType::u8, MappedFile(mask + ".tmp").bytes()) : std::string(),
                      .special_tokens = special_tokens_}));
  // A crash in between leaves a description that names a mask without one, never a mask that nothing names.
  const bool had_mask = !mask_ && names_mask(bin_path());
  file_system_.rename(bin_path() + ".tmp", bin_path());
  file_system_.rename(idx_path() + ".tmp", idx_path());
  if (std::error_code error; had_mask && std::filesystem::exists(mask, error)) file_system_.remove_all(mask);
  file_system_.rename(beside + ".tmp", beside);
  if (mask_) file_system_.rename(mask + ".tmp", mask);
  bin_.reset();
  mask_.reset();
  const auto directory = std::filesystem::path(bin_path()).parent_path();
  file_system_.sync_directory(directory.empty() ? "." : directory);
}

}  // namespace phalanx::data
