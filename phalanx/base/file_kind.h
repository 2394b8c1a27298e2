// FileKind: the kind of a file by its content, not by its name. It is used for files that were given where another kind
// is expected.
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
  unknown,    // no kind that is known here; it may be raw token ids
  text,       // UTF-8 or similar, at least 16 bytes, without control characters other than white space
  wide_text,  // begins with the mark of UTF-16 or UTF-32
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
  lfs_pointer,  // the text that git leaves in place of a file
};

/// How many bytes from the start of a file are enough to detect its kind.
inline constexpr std::size_t kFileKindProbe = std::size_t{64} << 10;

/// `head`: the first kFileKindProbe bytes of the file, or the whole file if it is shorter. `size`: the size of the
/// file.
FileKind file_kind(std::string_view head, std::uint64_t size);

/// "gzip data", "a Parquet file", ...
const char* name_of(FileKind kind);

/// Throws DataError, which says what to do, unless the file is plain text. `what` says what the text is for, e.g.
/// "prompts, one a line".
void require_plain_text(std::string_view contents, const std::string& path, const std::string& what);

}  // namespace phalanx::data
