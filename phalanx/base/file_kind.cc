#include "phalanx/base/file_kind.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "phalanx/base/byte_order_mark.h"
#include "phalanx/base/error.h"
#include "phalanx/base/hub_name.h"
#include "phalanx/base/utf8.h"

namespace phalanx::data {
namespace {

using std::string_view_literals::operator""sv;  // NOLINT(misc-unused-using-decls): literals use it

struct Magic {
  std::string_view bytes;
  FileKind kind;
};

constexpr std::array kMagics = {
    Magic{"MMIDIDX\0\0"sv, FileKind::megatron_index},
    Magic{"\x93NUMPY"sv, FileKind::npy},
    Magic{"\x1f\x8b\x08"sv, FileKind::gzip},
    Magic{"\x28\xb5\x2f\xfd"sv, FileKind::zstd},
    Magic{"\xfd\x37zXZ\0"sv, FileKind::xz},
    Magic{"\x04\x22\x4d\x18"sv, FileKind::lz4},
    Magic{"PK\x03\x04"sv, FileKind::zip},
    Magic{"PK\x05\x06"sv, FileKind::zip},
    Magic{"7z\xbc\xaf\x27\x1c"sv, FileKind::seven_zip},
    Magic{"Rar!\x1a\x07"sv, FileKind::rar},
    Magic{"PAR1"sv, FileKind::parquet},
    Magic{"PARE"sv, FileKind::parquet},
    Magic{"ARROW1\0\0"sv, FileKind::arrow_file},
    Magic{"GGUF"sv, FileKind::gguf},
    Magic{"\x89HDF\r\n\x1a\n"sv, FileKind::hdf5},
    Magic{"SQLite format 3\0"sv, FileKind::sqlite},
    Magic{"%PDF-"sv, FileKind::pdf},
    Magic{"\x89PNG\r\n\x1a\n"sv, FileKind::picture},
    Magic{"\xff\xd8\xff\xe0"sv, FileKind::picture},
    Magic{"\xff\xd8\xff\xe1"sv, FileKind::picture},
    Magic{"GIF89a"sv, FileKind::picture},
    Magic{"\x7f"
          "ELF"sv,
          FileKind::program},
};

std::uint64_t little_endian(std::string_view bytes) {
  std::uint64_t value = 0;
  for (std::size_t i = bytes.size(); i-- > 0;) value = value << 8 | static_cast<unsigned char>(bytes[i]);
  return value;
}

bool is_bzip2(std::string_view head) {  // "BZh9", then the digits of pi that begin a block
  return head.size() >= 10 && head.starts_with("BZh") && head[3] >= '1' && head[3] <= '9' &&
         head.substr(4, 6) == "\x31\x41\x59\x26\x53\x59"sv;
}

bool is_safetensors(std::string_view head, std::uint64_t size) {  // a length, then JSON of that length
  if (head.size() < 10 || head[8] != '{' || (head[9] != '"' && head[9] != '}' && head[9] != ' ')) return false;
  const std::uint64_t length = little_endian(head.substr(0, 8));
  return length >= 2 && length <= size - 8;
}

bool is_arrow_stream(std::string_view head, std::uint64_t size) {  // a continuation mark, then a message's length
  if (head.size() < 16 || !head.starts_with("\xff\xff\xff\xff")) return false;
  const std::uint64_t length = little_endian(head.substr(4, 4)), root = little_endian(head.substr(8, 4));
  return length >= 16 && length % 8 == 0 && length <= size - 8 && root >= 4 && root < 256 && root % 4 == 0;
}

bool is_zstd_skippable(std::string_view head) {
  return head.size() >= 4 && (little_endian(head.substr(0, 4)) & 0xfffffff0U) == 0x184d2a50U;
}

bool is_pickle(std::string_view head, std::uint64_t size) {  // protocol 2 to 5, then a typical first opcode
  if (head.size() < 16 || head[0] != '\x80' || head[1] < 2 || head[1] > 5) return false;
  const std::string_view next = head.substr(2);
  if (next[0] == '\x95') return little_endian(next.substr(1, 8)) <= size;  // a frame and its length
  const bool names_a_class = next[0] == 'c' && ((next[1] >= 'a' && next[1] <= 'z') || next[1] == '_');
  return names_a_class || next.starts_with("\x8a\x0a") || next.starts_with("}q") || next.starts_with("]q");
}

bool is_text(std::string_view head, std::uint64_t size) {
  if (head.size() < 16) return false;
  std::size_t strange = 0;  // bytes that are not UTF-8; a text in an older encoding has a few
  for (std::size_t at = 0; at < head.size();) {
    const auto byte = static_cast<unsigned char>(head[at]);
    if (byte < 0x20 && byte != '\t' && byte != '\n' && byte != '\r' && byte != '\f' && byte != '\x1b') return false;
    if (byte == 0x7f) return false;
    const int length = first_char(head.substr(at)).length;
    if (length == 0 && head.size() == size) ++strange;
    if (length == 0 && head.size() < size && at + 4 < head.size()) ++strange;  // not at the cut at the end of the probe
    at += static_cast<std::size_t>(std::max(length, 1));
  }
  return strange * 20 <= head.size();
}

}  // namespace

FileKind file_kind(std::string_view head, std::uint64_t size) {
  for (const Magic& magic : kMagics) {
    if (!head.starts_with(magic.bytes)) continue;
    if (magic.kind == FileKind::gzip && (head.size() < 18 || static_cast<unsigned char>(head[3]) > 31)) continue;
    return magic.kind;
  }
  if (is_lfs_pointer(head)) return FileKind::lfs_pointer;
  if (is_bzip2(head)) return FileKind::bzip2;
  if (is_zstd_skippable(head)) return FileKind::zstd;
  if (is_safetensors(head, size)) return FileKind::safetensors;
  if (is_arrow_stream(head, size)) return FileKind::arrow_stream;
  if (head.size() > 262 && head.substr(257, 5) == "ustar") return FileKind::tar;
  if (is_pickle(head, size)) return FileKind::pickle;
  if (const auto encoding = encoding_by_mark(head); encoding && *encoding != "UTF-8" && size >= 16) {
    return FileKind::wide_text;
  }
  return is_text(head, size) ? FileKind::text : FileKind::unknown;
}

const char* name_of(FileKind kind) {
  switch (kind) {
    case FileKind::unknown:
      return "of no known kind";
    case FileKind::text:
      return "text";
    case FileKind::wide_text:
      return "UTF-16 or UTF-32 text";
    case FileKind::gzip:
      return "gzip data";
    case FileKind::zstd:
      return "zstd data";
    case FileKind::xz:
      return "xz data";
    case FileKind::bzip2:
      return "bzip2 data";
    case FileKind::lz4:
      return "lz4 data";
    case FileKind::zip:
      return "a ZIP archive (.zip, .npz, PyTorch's .pt)";
    case FileKind::tar:
      return "a tar archive";
    case FileKind::seven_zip:
      return "a 7z archive";
    case FileKind::rar:
      return "a RAR archive";
    case FileKind::parquet:
      return "a Parquet file";
    case FileKind::arrow_file:
    case FileKind::arrow_stream:
      return "an Arrow file";
    case FileKind::npy:
      return "a NumPy array (.npy)";
    case FileKind::safetensors:
      return "a safetensors file";
    case FileKind::gguf:
      return "a GGUF model";
    case FileKind::pickle:
      return "a Python pickle";
    case FileKind::hdf5:
      return "an HDF5 file";
    case FileKind::sqlite:
      return "an SQLite database";
    case FileKind::pdf:
      return "a PDF";
    case FileKind::picture:
      return "a picture";
    case FileKind::program:
      return "a program";
    case FileKind::megatron_index:
      return "a Megatron index";
    case FileKind::lfs_pointer:
      return "a Git LFS pointer";
  }
  return "";
}

void require_plain_text(std::string_view contents, const std::string& path, const std::string& what) {
  const std::string_view head = contents.substr(0, kFileKindProbe);
  const FileKind kind = file_kind(head, contents.size());
  if (kind == FileKind::text || kind == FileKind::wide_text) return;  // the reader of the text checks the encoding
  if (kind == FileKind::lfs_pointer) throw DataError(fmt::format("{}: {}", path, kLfsHint));
  if (kind == FileKind::gzip || kind == FileKind::zstd) {
    throw DataError(fmt::format("{} is {}: expected {}; unpack it first by {}", path, name_of(kind), what,
                                kind == FileKind::gzip ? "gunzip" : "unzstd"));
  }
  if (kind != FileKind::unknown) throw DataError(fmt::format("{} is {}: expected {}", path, name_of(kind), what));
  if (encoding_fault(head)) return;
  if (head.find('\0') != std::string_view::npos) throw DataError(fmt::format("{} is binary: expected {}", path, what));
}

}  // namespace phalanx::data
