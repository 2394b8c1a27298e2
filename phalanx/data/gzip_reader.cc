#include "phalanx/data/gzip_reader.h"

#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "phalanx/base/error.h"

namespace phalanx::data {

struct GzipReader::Stream {
  gzFile file = nullptr;
  ~Stream() {
    if (file != nullptr) gzclose_r(file);
  }
};

GzipReader::GzipReader(const std::filesystem::path& path) : path_(path), stream_(std::make_unique<Stream>()) {
  stream_->file = gzopen(path.c_str(), "rb");
  if (stream_->file == nullptr) throw DataError(fmt::format("cannot open {}: {}", path.string(), std::strerror(errno)));
  gzbuffer(stream_->file, 1U << 17);
}

GzipReader::~GzipReader() = default;

std::vector<std::uint8_t> GzipReader::read(std::size_t count) {
  constexpr std::size_t kBlock = std::size_t{1} << 20;
  std::vector<std::uint8_t> bytes;
  while (bytes.size() < count) {
    const std::size_t begin = bytes.size(), wanted = std::min(kBlock, count - begin);
    bytes.resize(begin + wanted);
    const int found = gzread(stream_->file, bytes.data() + begin, static_cast<unsigned>(wanted));
    int status = Z_OK;
    const std::string reason = gzerror(stream_->file, &status);
    if (found < 0 || (status != Z_OK && status != Z_STREAM_END)) {
      throw DataError(status == Z_ERRNO
                          ? fmt::format("cannot read {}: {}", path_.string(), std::strerror(errno))
                          : fmt::format("{} is damaged: its gzip data {} after {} bytes: get the file again",
                                        path_.string(), status == Z_BUF_ERROR ? "ends too soon" : "is not valid",
                                        begin + static_cast<std::size_t>(std::max(found, 0))));
    }
    bytes.resize(begin + static_cast<std::size_t>(found));
    if (found < static_cast<int>(wanted)) break;
  }
  return bytes;
}

}  // namespace phalanx::data
