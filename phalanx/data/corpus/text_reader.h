// Reads a file of text from front to back, plain or compressed by gzip or zstd.
//
//   TextReader in("corpus.jsonl.zst", Compression::zstd);
//   for (std::string part = in.read(1 << 20); !part.empty(); part = in.read(1 << 20)) use(part);
//
// Throws DataError that names the file if compressed data is truncated or damaged. For zstd data it also throws if
// Phalanx was built without libzstd; the error says what to install.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

namespace phalanx::data {

enum class Compression : std::uint8_t { none, gzip, zstd };

/// Whether this build can decompress zstd.
bool reads_zstd();

class TextReader {
 public:
  TextReader(const std::filesystem::path& path, Compression compression);
  ~TextReader();
  TextReader(const TextReader&) = delete;
  TextReader& operator=(const TextReader&) = delete;

  /// Returns the next `count` bytes; fewer only at the end of the file.
  std::string read(std::size_t count);

 private:
  class Source;
  class GzipSource;
  class ZstdSource;
  std::unique_ptr<Source> source_;
};

}  // namespace phalanx::data
