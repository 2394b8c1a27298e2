// The safetensors file format: a header that says where each tensor is, then the raw bytes. It does not use torch.
//
//   u64 header length, little endian | JSON header, padded by spaces | tensor bytes, little endian, row-major
//   {"__metadata__": {"key": "text"}, "wq": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
//
// Reading is strict, and nothing is allocated before it is checked. The header is at most 100 MB and inside the file,
// valid UTF-8 and JSON without repeated keys. Every tensor's byte range has exactly the size of its shape and dtype.
// The ranges follow each other without overlap or gap and end where the file ends. Anything else is a CheckpointError
// that names the file, the tensor and the reason. A file holds only bytes; nothing in it is ever executed.
//
//   safetensors::File file("model.safetensors");
//   if (const auto* info = file.find("wq")) use(info->shape, file.bytes(*info));
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "phalanx/base/mapped_file.h"

namespace phalanx::safetensors {

inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // the reference implementation's limit
inline constexpr std::size_t kMaxDimensions = 64;
inline constexpr std::uint64_t kDataAlignment = 64;  // in files we write, tensor bytes start at a multiple of this

enum class Dtype : std::uint8_t {
  boolean,
  u8,
  i8,
  f8_e4m3,
  f8_e5m2,
  u16,
  i16,
  f16,
  bf16,
  u32,
  i32,
  f32,
  u64,
  i64,
  f64,
  c64
};

std::size_t element_size(Dtype dtype);
std::string_view name_of(Dtype dtype);  // "F32", "BF16", ... as in the file
std::optional<Dtype> dtype_from_name(std::string_view name);

struct TensorInfo {
  std::string name;
  Dtype dtype = Dtype::f32;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;  // bytes from the end of the header
  std::uint64_t end = 0;

  std::uint64_t size() const { return end - begin; }
};

struct Header {
  std::vector<TensorInfo> tensors;  // in the order of their bytes
  std::map<std::string, std::string> metadata;
  std::uint64_t data_begin = 0;  // offset in the file of byte 0 of TensorInfo::begin
};

/// "[2, 3]", for messages.
std::string format_shape(std::span<const std::int64_t> shape);
/// A tensor name in quotes, escaped and cut to a printable length: names in a damaged file can be anything.
std::string quote_name(std::string_view name);
/// Bytes of a tensor of this shape; nullopt if the product overflows or a dimension is negative.
std::optional<std::uint64_t> byte_size(Dtype dtype, std::span<const std::int64_t> shape);

/// `bytes` are the file's first bytes: all of them, or at least the header. `file` is only for messages.
Header parse_header(const std::string& file, std::span<const std::byte> bytes, std::uint64_t file_size);

/// Orders tensors by decreasing element size, so that each is aligned for its type, and sets begin, end and data_begin.
/// REQUIRES: names are unique, valid UTF-8 and not "__metadata__".
Header make_header(std::vector<TensorInfo> tensors, std::map<std::string, std::string> metadata = {});
/// The header's bytes, including the length field: header.data_begin of them.
std::string format_header(const Header& header);

/// A file opened for reading, mapped into memory; pages are read when touched.
class File {
 public:
  explicit File(const std::string& path);

  const std::string& path() const { return path_; }
  const Header& header() const { return header_; }
  const std::vector<TensorInfo>& tensors() const { return header_.tensors; }
  const TensorInfo* find(const std::string& name) const;  // nullptr if the file has no tensor of that name
  std::span<const std::byte> bytes(const TensorInfo& info) const;
  /// Starts to read these bytes of bytes(info) from the disk, without waiting.
  void will_need(std::span<const std::byte> bytes) const { mapped_.will_need(bytes); }

 private:
  std::string path_;
  MappedFile mapped_;
  Header header_;
  std::unordered_map<std::string, std::size_t> index_;
};

}  // namespace phalanx::safetensors
