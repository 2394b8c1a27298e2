#include "phalanx/data/token_file_writer.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>

#include "phalanx/base/error.h"

namespace phalanx::data {

/// A file under a temporary name beside its final one; removed by the destructor unless it was moved into place.
struct TokenFileWriter::File {
  explicit File(const std::string& final_path) : path(final_path), temporary(final_path + ".tmp-XXXXXX") {
    const int fd = ::mkstemp(temporary.data());
    if (fd < 0) fail("cannot create it", errno);
    // mkstemp's 0600 is for secrets: give the file what the umask allows, as open() would.
    const mode_t mask = ::umask(0);
    ::umask(mask);
    ::fchmod(fd, 0666 & ~mask);
    stream = ::fdopen(fd, "wb");
    if (!stream) {
      const int error = errno;
      ::close(fd);
      ::unlink(temporary.c_str());
      fail("cannot open it", error);
    }
  }
  ~File() {
    if (stream) std::fclose(stream);
    if (!moved) ::unlink(temporary.c_str());
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  [[noreturn]] void fail(const char* what, int error) const {
    throw DataError(fmt::format("{}: {}: {}", path, what, std::strerror(error)));
  }
  void write(const void* data, std::size_t bytes) {
    if (bytes && std::fwrite(data, 1, bytes, stream) != bytes) fail("write failed", errno);
  }
  template <typename T>
  void write_value(T value) {
    write(&value, sizeof value);
  }
  void close() {
    if (std::fflush(stream) != 0 || ::fsync(::fileno(stream)) != 0) fail("write failed", errno);
    std::FILE* closing = stream;
    stream = nullptr;
    if (std::fclose(closing) != 0) fail("write failed", errno);
  }
  void move_into_place() {
    if (::rename(temporary.c_str(), path.c_str()) != 0) fail("cannot replace it", errno);
    moved = true;
  }

  std::string path;
  std::string temporary;
  std::FILE* stream = nullptr;
  bool moved = false;
};

TokenFileWriter::TokenFileWriter(const std::string& prefix, TokenFileWriterOptions options)
    : prefix_(prefix), vocab_size_(options.vocab_size) {
  if (vocab_size_ < 1 || vocab_size_ > std::numeric_limits<std::int32_t>::max()) {
    throw ConfigError(fmt::format("{}: vocab_size is {}: expected 1 to 2147483647", prefix, vocab_size_));
  }
  type_ = vocab_size_ <= 65500 ? TokenType::u16 : TokenType::i32;
  bin_ = std::make_unique<File>(bin_path());
}

TokenFileWriter::~TokenFileWriter() = default;

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
    bin_->write(narrow_.data(), narrow_.size() * sizeof(std::uint16_t));
  } else {
    bin_->write(ids.data(), ids.size_bytes());
  }
  open_document_ += count;
  size_ += count;
}

void TokenFileWriter::end_document() {
  lengths_.push_back(static_cast<std::int32_t>(open_document_));
  open_document_ = 0;
}

void TokenFileWriter::finish() {
  if (finished_) throw DataError(fmt::format("{}: finish() called twice", bin_path()));
  if (open_document_ > 0) end_document();
  finished_ = true;

  File index(idx_path());
  index.write("MMIDIDX\0\0", 9);
  index.write_value<std::uint64_t>(1);
  index.write_value<std::uint8_t>(type_ == TokenType::u16 ? 8 : 4);
  index.write_value<std::uint64_t>(lengths_.size());
  index.write_value<std::uint64_t>(lengths_.size() + 1);
  index.write(lengths_.data(), lengths_.size() * sizeof(std::int32_t));
  std::int64_t pointer = 0;
  for (const std::int32_t length : lengths_) {
    index.write_value(pointer);
    pointer += length * data::bytes_of(type_);
  }
  for (std::size_t document = 0; document <= lengths_.size(); ++document) {
    index.write_value(static_cast<std::int64_t>(document));
  }
  index.close();
  bin_->close();
  bin_->move_into_place();
  index.move_into_place();
}

}  // namespace phalanx::data
