// What kind of file this is, seen from its content and not from its name: for files given where another kind belongs.
//
//   const FileKind kind = file_kind(file.text().substr(0, kFileKindProbe), file.size());
//   if (kind == FileKind::gzip) ...
//   fmt::format("{} is {}", path, name_of(kind));  // "train.bin is a NumPy array (.npy)"
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace phalanx::data {

enum class FileKind : std::uint8_t {
  unknown,    // nothing that is known here: raw ids, for all that can be seen
  text,       // UTF-8 or the like, of 16 bytes and more; white space is its only control character
  wide_text,  // with the mark of UTF-16 or UTF-32
  gzip,
  zstd,
  xz,
  bzip2,
  lz4,
  zip,  // .npz, PyTorch's .pt and .docx too
  tar,
  seven_zip,
  rar,
  parquet,
  arrow_file,
  arrow_stream,  // as the datasets package writes it
  npy,
  safetensors,
  gguf,
  pickle,
  hdf5,
  sqlite,
  pdf,
  picture,
  program,
  megatron_index,
  lfs_pointer,  // that git leaves in place of a file
};

/// Bytes from a file's start that are enough to know it.
inline constexpr std::size_t kFileKindProbe = std::size_t{64} << 10;

/// `head`: the file's first kFileKindProbe bytes, or all of them; `size`: of the whole file.
FileKind file_kind(std::string_view head, std::uint64_t size);

/// "gzip data", "a Parquet file", ...
const char* name_of(FileKind kind);

/// Throws DataError, with what to do, unless the file is plain text that may be read as it is: `what` says what for, as
/// "prompts, one a line".
void require_plain_text(std::string_view contents, const std::string& path, const std::string& what);

}  // namespace phalanx::data
