// Reads a file from front to back, plain or compressed by gzip. Its first bytes decide which.
//
//   GzipReader in("train-labels-idx1-ubyte.gz");
//   std::vector<std::uint8_t> header = in.read(8);       // fewer bytes at the end of the file
//
// Throws DataError that names the file if compressed data is truncated, damaged (its checksum is compared at the end)
// or followed by something else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace phalanx::data {

class GzipReader {
 public:
  explicit GzipReader(const std::filesystem::path& path);
  ~GzipReader();
  GzipReader(const GzipReader&) = delete;
  GzipReader& operator=(const GzipReader&) = delete;

  /// Returns the next `count` bytes, or what is left. Memory grows with the bytes present, not with `count`.
  std::vector<std::uint8_t> read(std::size_t count);

 private:
  struct Stream;
  [[noreturn]] void fail(const std::string& what) const;
  /// At least one byte, or 0 at the end.
  std::size_t read_some(std::uint8_t* out, std::size_t count);
  std::filesystem::path path_;
  std::unique_ptr<Stream> stream_;
};

}  // namespace phalanx::data
