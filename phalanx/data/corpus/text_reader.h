// Reads a file of text from front to back, plain or compressed by gzip or zstd.
//
//   TextReader in("corpus.jsonl.zst", Compression::zstd);
//   while (true) { const std::string part = in.read(1 << 20); if (part.empty()) break; ... }
//
// Compressed data that is cut off or damaged is a DataError that names the file; so is zstd where Phalanx was built
// without libzstd, with what to install.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

namespace phalanx::data {

enum class Compression : std::uint8_t { none, gzip, zstd };

/// Whether this build unpacks zstd.
bool reads_zstd();

class TextReader {
 public:
  TextReader(const std::filesystem::path& path, Compression compression);
  ~TextReader();
  TextReader(const TextReader&) = delete;
  TextReader& operator=(const TextReader&) = delete;

  /// The next `count` bytes; fewer at the end of the file only.
  std::string read(std::size_t count);

 private:
  class Source;
  class GzipSource;
  class ZstdSource;
  std::unique_ptr<Source> source_;
};

}  // namespace phalanx::data
