#include "phalanx/data/corpus/text_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/mapped_file.h"
#include "phalanx/data/gzip_reader.h"

#ifdef PHALANX_WITH_ZSTD
#include <zstd.h>
#endif

namespace phalanx::data {

class TextReader::Source {
 public:
  virtual ~Source() = default;
  virtual std::string read(std::size_t count) = 0;
};

class TextReader::GzipSource : public TextReader::Source {  // plain files too
 public:
  explicit GzipSource(const std::filesystem::path& path) : reader_(path) {}
  std::string read(std::size_t count) override {
    const std::vector<std::uint8_t> bytes = reader_.read(count);
    return {bytes.begin(), bytes.end()};
  }

 private:
  GzipReader reader_;
};

#ifdef PHALANX_WITH_ZSTD

bool reads_zstd() { return true; }

class TextReader::ZstdSource : public TextReader::Source {
 public:
  explicit ZstdSource(const std::filesystem::path& path)
      : file_(path, MappedFile::Access::sequential), stream_(ZSTD_createDStream(), &ZSTD_freeDStream) {
    if (!stream_) throw DataError(fmt::format("{}: no memory for unpacking it", path.string()));
  }

  std::string read(std::size_t count) override {
    std::string text(count, '\0');
    ZSTD_outBuffer out{text.data(), text.size(), 0};
    while (out.pos < out.size && !(is_between_frames_ && at_ == file_.size())) {
      ZSTD_inBuffer in{file_.data(), file_.size(), at_};
      const std::size_t before = out.pos;
      const std::size_t left = ZSTD_decompressStream(stream_.get(), &out, &in);
      if (ZSTD_isError(left) != 0) fail(fmt::format("is not valid ({})", ZSTD_getErrorName(left)));
      const bool moved = in.pos > at_ || out.pos > before;
      at_ = in.pos;
      is_between_frames_ = left == 0;
      if (!moved) fail("ends too soon");
    }
    text.resize(out.pos);
    return text;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw DataError(fmt::format("{} is damaged: its zstd data {} after {} bytes: get the file again",
                                file_.path().string(), what, at_));
  }

  MappedFile file_;
  std::unique_ptr<ZSTD_DStream, decltype(&ZSTD_freeDStream)> stream_;
  std::size_t at_ = 0;
  bool is_between_frames_ = true;
};

#else

bool reads_zstd() { return false; }

class TextReader::ZstdSource : public TextReader::Source {
 public:
  explicit ZstdSource(const std::filesystem::path& path) {
    throw DataError(
        fmt::format("{0} is compressed by zstd, and Phalanx was built without libzstd: install libzstd-dev and build "
                    "again, or unpack the file: zstd -d {0}",
                    path.string()));
  }
  std::string read(std::size_t /*count*/) override { return {}; }
};

#endif

TextReader::TextReader(const std::filesystem::path& path, Compression compression) {
  if (compression == Compression::zstd) {
    source_ = std::make_unique<ZstdSource>(path);
  } else {
    source_ = std::make_unique<GzipSource>(path);
  }
}

TextReader::~TextReader() = default;

std::string TextReader::read(std::size_t count) { return source_->read(count); }

}  // namespace phalanx::data
