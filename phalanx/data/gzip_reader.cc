#include "phalanx/data/gzip_reader.h"

#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>

#include "phalanx/base/error.h"

namespace phalanx::data {

// Not zlib's gzread(): it silently skips what follows the last member.
struct GzipReader::Stream {
  std::FILE* file = nullptr;
  z_stream zlib{};
  bool is_gzip = false;
  bool is_between_members = false;
  std::uint64_t bytes_out = 0;
  std::vector<Bytef> block = std::vector<Bytef>(std::size_t{1} << 17);

  ~Stream() {
    if (is_gzip) inflateEnd(&zlib);
    if (file != nullptr) std::fclose(file);
  }
  /// Reads the next block of the file, if the last one is used up. Returns false at the end of the file.
  bool fill() {
    if (zlib.avail_in > 0) return true;
    zlib.next_in = block.data();
    zlib.avail_in = static_cast<uInt>(std::fread(block.data(), 1, block.size(), file));
    return zlib.avail_in > 0;
  }
};

namespace {

constexpr Bytef kFirstMagic = 0x1f, kSecondMagic = 0x8b;
constexpr int kGzipWindow = 16 + MAX_WBITS;

}  // namespace

GzipReader::GzipReader(const std::filesystem::path& path) : path_(path), stream_(std::make_unique<Stream>()) {
  stream_->file = std::fopen(path.c_str(), "rbe");
  if (stream_->file == nullptr) throw DataError(fmt::format("cannot open {}: {}", path.string(), std::strerror(errno)));
  stream_->fill();
  const z_stream& zlib = stream_->zlib;
  if (zlib.avail_in < 2 || zlib.next_in[0] != kFirstMagic || zlib.next_in[1] != kSecondMagic) return;
  if (inflateInit2(&stream_->zlib, kGzipWindow) != Z_OK) {
    throw DataError(fmt::format("{}: no memory for unpacking it", path.string()));
  }
  stream_->is_gzip = true;
}

GzipReader::~GzipReader() = default;

void GzipReader::fail(const std::string& what) const {
  if (std::ferror(stream_->file) != 0) {
    throw DataError(fmt::format("cannot read {}: {}", path_.string(), std::strerror(errno)));
  }
  throw DataError(fmt::format("{} is damaged: its gzip data {} after {} bytes: get the file again", path_.string(),
                              what, stream_->bytes_out));
}

std::size_t GzipReader::read_some(std::uint8_t* out, std::size_t count) {
  Stream& stream = *stream_;
  z_stream& zlib = stream.zlib;
  while (true) {
    const bool has_more = stream.fill();
    if (!has_more && std::ferror(stream.file) != 0) fail("");
    if (!stream.is_gzip) {
      const std::size_t taken = std::min(count, static_cast<std::size_t>(zlib.avail_in));
      std::memcpy(out, zlib.next_in, taken);
      zlib.next_in += taken;
      zlib.avail_in -= static_cast<uInt>(taken);
      return taken;
    }
    if (stream.is_between_members) {
      if (!has_more) return 0;
      if (zlib.next_in[0] == 0) {  // data from a tape is padded with zeros
        ++zlib.next_in;
        --zlib.avail_in;
        continue;
      }
      if (zlib.next_in[0] != kFirstMagic) fail("is followed by something else");
      inflateReset(&zlib);
      stream.is_between_members = false;
    }
    zlib.next_out = out;
    zlib.avail_out = static_cast<uInt>(count);
    const int status = inflate(&zlib, Z_NO_FLUSH);
    const std::size_t made = count - zlib.avail_out;
    stream.bytes_out += made;
    if (status != Z_OK && status != Z_STREAM_END && status != Z_BUF_ERROR) fail("is not valid");
    stream.is_between_members = status == Z_STREAM_END;
    if (made > 0) return made;
    if (!has_more && !stream.is_between_members) fail("ends too soon");
  }
}

std::vector<std::uint8_t> GzipReader::read(std::size_t count) {
  constexpr std::size_t kBlock = std::size_t{1} << 20;
  std::vector<std::uint8_t> bytes;
  while (bytes.size() < count) {
    const std::size_t begin = bytes.size(), wanted = std::min(kBlock, count - begin);
    bytes.resize(begin + wanted);
    const std::size_t found = read_some(bytes.data() + begin, wanted);
    bytes.resize(begin + found);
    if (found == 0) break;
  }
  return bytes;
}

}  // namespace phalanx::data
