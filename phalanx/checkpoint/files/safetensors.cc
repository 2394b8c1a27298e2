#include "phalanx/checkpoint/files/safetensors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <unordered_set>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/hub_name.h"

namespace phalanx::safetensors {

static_assert(std::endian::native == std::endian::little, "tensor bytes are little endian in the file and in memory");

namespace {

struct DtypeName {
  Dtype dtype;
  std::string_view name;
  std::size_t size;
};
constexpr std::array<DtypeName, 16> kDtypes{{{Dtype::boolean, "BOOL", 1},
                                             {Dtype::u8, "U8", 1},
                                             {Dtype::i8, "I8", 1},
                                             {Dtype::f8_e4m3, "F8_E4M3", 1},
                                             {Dtype::f8_e5m2, "F8_E5M2", 1},
                                             {Dtype::u16, "U16", 2},
                                             {Dtype::i16, "I16", 2},
                                             {Dtype::f16, "F16", 2},
                                             {Dtype::bf16, "BF16", 2},
                                             {Dtype::u32, "U32", 4},
                                             {Dtype::i32, "I32", 4},
                                             {Dtype::f32, "F32", 4},
                                             {Dtype::u64, "U64", 8},
                                             {Dtype::i64, "I64", 8},
                                             {Dtype::f64, "F64", 8},
                                             {Dtype::c64, "C64", 8}}};
constexpr std::uint64_t kLengthBytes = 8;
constexpr std::string_view kMetadataKey = "__metadata__";

/// Receives the header's JSON token by token and accepts only its two-level form. It never recurses, and its memory is
/// at most a constant times the header's own length.
class HeaderHandler {
 public:
  explicit HeaderHandler(const std::string& file) : file_(file) {}

  std::vector<TensorInfo> tensors;
  std::map<std::string, std::string> metadata;

  bool null() { return refuse("null"); }
  bool boolean(bool) { return refuse("a boolean"); }
  bool number_integer(std::int64_t value) { return refuse(fmt::format("the number {}", value)); }
  bool number_float(double, const std::string& text) {
    return refuse(fmt::format("the number {}", text.substr(0, 40)));
  }
  template <class Bytes>
  bool binary(Bytes&) {
    return refuse("bytes");
  }

  bool number_unsigned(std::uint64_t value) {
    if (place_ == Place::shape) {
      if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
        fail_tensor(fmt::format("dimension {} is too large", value));
      if (tensor_.shape.size() == kMaxDimensions) fail_tensor(fmt::format("more than {} dimensions", kMaxDimensions));
      tensor_.shape.push_back(static_cast<std::int64_t>(value));
    } else if (place_ == Place::offsets) {
      if (offsets_ == 2) fail_tensor("data_offsets has more than two numbers");
      (offsets_++ == 0 ? tensor_.begin : tensor_.end) = value;
    } else {
      return refuse(fmt::format("the number {}", value));
    }
    return true;
  }

  bool string(std::string& text) {
    if (place_ == Place::metadata_value) {
      metadata.insert_or_assign(key_, std::move(text));
      place_ = Place::metadata;
    } else if (place_ == Place::dtype) {
      const auto dtype = dtype_from_name(text);
      if (!dtype) fail_tensor(fmt::format("unknown dtype {}", quote_name(text)));
      tensor_.dtype = *dtype;
      place_ = Place::tensor;
    } else {
      return refuse("a string");
    }
    return true;
  }

  bool start_object(std::size_t) {
    if (place_ == Place::start) {
      place_ = Place::top;
    } else if (place_ == Place::top_value) {
      place_ = key_ == kMetadataKey ? Place::metadata : Place::tensor;
      tensor_ = TensorInfo{.name = key_};
      offsets_ = 0;
      has_dtype_ = has_shape_ = has_offsets_ = false;
    } else {
      return refuse("an object");
    }
    return true;
  }

  bool key(std::string& text) {
    if (place_ == Place::top) {
      if (!names_.insert(text).second) fail(fmt::format("{} appears twice", quote_name(text)));
      key_ = std::move(text);
      place_ = Place::top_value;
    } else if (place_ == Place::metadata) {
      if (metadata.contains(text)) fail(fmt::format("__metadata__ key {} appears twice", quote_name(text)));
      key_ = std::move(text);
      place_ = Place::metadata_value;
    } else if (text == "dtype") {
      enter_field(has_dtype_, Place::dtype, "dtype");
    } else if (text == "shape") {
      enter_field(has_shape_, Place::shape_begin, "shape");
    } else if (text == "data_offsets") {
      enter_field(has_offsets_, Place::offsets_begin, "data_offsets");
    } else {
      fail_tensor(fmt::format("unknown field {}", quote_name(text)));
    }
    return true;
  }

  bool start_array(std::size_t) {
    if (place_ == Place::shape_begin) {
      place_ = Place::shape;
    } else if (place_ == Place::offsets_begin) {
      place_ = Place::offsets;
    } else {
      return refuse("an array");
    }
    return true;
  }

  bool end_array() {
    if (place_ == Place::offsets && offsets_ != 2) fail_tensor("data_offsets needs two numbers");
    place_ = Place::tensor;
    return true;
  }

  bool end_object() {
    if (place_ == Place::tensor) {
      if (!has_dtype_) fail_tensor("no dtype");
      if (!has_shape_) fail_tensor("no shape");
      if (!has_offsets_) fail_tensor("no data_offsets");
      tensors.push_back(std::move(tensor_));
      place_ = Place::top;
    } else {
      place_ = place_ == Place::metadata ? Place::top : Place::end;
    }
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::json::exception& error) {
    // The library's message begins with a tag for its own users: "[json.exception.parse_error.101] parse error ...".
    std::string_view reason = error.what();
    if (const auto tag = reason.find("] "); tag != std::string_view::npos) reason.remove_prefix(tag + 2);
    fail(fmt::format("the header is not valid JSON (byte {}): {}", position, reason.substr(0, 300)));
    return false;
  }

 private:
  enum class Place {
    start,
    top,
    top_value,
    metadata,
    metadata_value,
    tensor,
    dtype,
    shape_begin,
    shape,
    offsets_begin,
    offsets,
    end
  };

  [[noreturn]] void fail(const std::string& reason) const {
    throw CheckpointError(fmt::format("{}: malformed safetensors file: {}", file_, reason));
  }
  [[noreturn]] void fail_tensor(const std::string& reason) const {
    fail(fmt::format("tensor {}: {}", quote_name(tensor_.name), reason));
  }
  bool refuse(const std::string& found) const {
    switch (place_) {
      case Place::start:
      case Place::end:
        fail(fmt::format("the header is {}, not an object", found));
      case Place::top:
      case Place::top_value:
        fail(fmt::format("{} is {}, not an object", quote_name(key_), found));
      case Place::metadata:
      case Place::metadata_value:
        fail(fmt::format("__metadata__ key {} is {}, not a string", quote_name(key_), found));
      case Place::tensor:
      case Place::dtype:
        fail_tensor(fmt::format("dtype is {}, not a string", found));
      case Place::shape_begin:
      case Place::shape:
        fail_tensor(fmt::format("shape contains {}, not a list of natural numbers", found));
      case Place::offsets_begin:
      case Place::offsets:
        fail_tensor(fmt::format("data_offsets contains {}, not two natural numbers", found));
    }
    return false;
  }
  void enter_field(bool& seen, Place place, const char* field) {
    if (seen) fail_tensor(fmt::format("{} appears twice", field));
    seen = true;
    place_ = place;
  }

  const std::string& file_;
  Place place_ = Place::start;
  std::string key_;
  TensorInfo tensor_;
  int offsets_ = 0;
  bool has_dtype_ = false, has_shape_ = false, has_offsets_ = false;
  std::unordered_set<std::string> names_;
};

void check_ranges(const std::string& file, std::vector<TensorInfo>& tensors, std::uint64_t data_size) {
  const auto fail = [&](const TensorInfo& tensor, const std::string& reason) {
    throw CheckpointError(
        fmt::format("{}: malformed safetensors file: tensor {}: {}", file, quote_name(tensor.name), reason));
  };
  for (const auto& tensor : tensors) {
    const auto range = fmt::format("data_offsets [{}, {}]", tensor.begin, tensor.end);
    if (tensor.begin > tensor.end) fail(tensor, fmt::format("{} run backwards", range));
    if (tensor.end > data_size) fail(tensor, fmt::format("{} pass the end of the data ({} bytes)", range, data_size));
    const auto needed = byte_size(tensor.dtype, tensor.shape);
    if (!needed) fail(tensor, fmt::format("shape {} overflows 64 bits", format_shape(tensor.shape)));
    if (*needed != tensor.size())
      fail(tensor, fmt::format("{} hold {} bytes, but shape {} of {} needs {}", range, tensor.size(),
                               format_shape(tensor.shape), name_of(tensor.dtype), *needed));
  }
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const auto& a, const auto& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
  std::uint64_t position = 0;
  for (const auto& tensor : tensors) {
    if (tensor.begin < position)
      fail(tensor,
           fmt::format("begins at byte {}, inside the tensor before it, which ends at {}", tensor.begin, position));
    if (tensor.begin > position)
      fail(tensor, fmt::format("begins at byte {}, leaving a hole after byte {}", tensor.begin, position));
    position = tensor.end;
  }
  if (position != data_size)
    throw CheckpointError(fmt::format("{}: malformed safetensors file: the tensors end at byte {}, the data at {}",
                                      file, position, data_size));
}

/// A hint for a file whose header length consists of letters, such as a web page saved instead of the file.
std::string text_hint(std::span<const std::byte> begin) {
  const std::string_view text(reinterpret_cast<const char*>(begin.data()), begin.size());
  if (!std::ranges::all_of(text, [](char c) { return (c >= ' ' && c <= '~') || c == '\n' || c == '\r'; }) ||
      text.find_first_of("\r\n") == 0)
    return {};
  return fmt::format(": the file begins with the text '{}', so it does not hold weights: fetch it again",
                     text.substr(0, text.find_first_of("\r\n")));
}

}  // namespace

std::size_t element_size(Dtype dtype) { return kDtypes[static_cast<std::size_t>(dtype)].size; }
std::string_view name_of(Dtype dtype) { return kDtypes[static_cast<std::size_t>(dtype)].name; }

std::optional<Dtype> dtype_from_name(std::string_view name) {
  for (const auto& entry : kDtypes)
    if (entry.name == name) return entry.dtype;
  return std::nullopt;
}

std::string format_shape(std::span<const std::int64_t> shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

std::string quote_name(std::string_view name) {
  constexpr std::size_t kLongest = 120;
  using nlohmann::json;
  const bool cut = name.size() > kLongest;
  auto text = json(std::string(name.substr(0, kLongest))).dump(-1, ' ', false, json::error_handler_t::replace);
  if (cut) text.insert(text.size() - 1, "...");
  return text;
}

std::optional<std::uint64_t> byte_size(Dtype dtype, std::span<const std::int64_t> shape) {
  // A zero dimension makes an empty tensor, but the other dimensions must not overflow either.
  std::uint64_t bytes = element_size(dtype);
  bool empty = false;
  for (const std::int64_t dimension : shape) {
    if (dimension < 0) return std::nullopt;
    empty = empty || dimension == 0;
    if (__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(dimension == 0 ? 1 : dimension), &bytes))
      return std::nullopt;
  }
  if (bytes > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) return std::nullopt;
  return empty ? 0 : bytes;
}

Header parse_header(const std::string& file, std::span<const std::byte> bytes, std::uint64_t file_size) {
  const auto fail = [&](const std::string& reason) {
    throw CheckpointError(fmt::format("{}: malformed safetensors file: {}", file, reason));
  };
  if (is_lfs_pointer({reinterpret_cast<const char*>(bytes.data()), bytes.size()})) {
    throw CheckpointError(fmt::format("{}: {}", file, kLfsHint));
  }
  if (file_size < kLengthBytes || bytes.size() < kLengthBytes)
    fail(fmt::format("{} bytes are too few for the header's length", file_size));
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), kLengthBytes);
  if (length > kMaxHeaderBytes)
    fail(fmt::format("the header's length is given as {} bytes, more than the {} allowed{}", length, kMaxHeaderBytes,
                     text_hint(bytes.first(kLengthBytes))));
  if (length > file_size - kLengthBytes || length > bytes.size() - kLengthBytes)
    fail(fmt::format("the header's length is given as {} bytes, but the file has {} in all", length, file_size));

  std::string_view text(reinterpret_cast<const char*>(bytes.data()) + kLengthBytes, length);
  if (text.empty() || text.front() != '{') fail("the header does not begin with '{'");
  // The JSON library takes a zero byte for the end of its input and would not read what follows.
  if (text.find('\0') != std::string_view::npos) fail("the header contains a zero byte");
  HeaderHandler handler(file);
  if (!nlohmann::json::sax_parse(text.begin(), text.end(), &handler)) fail("the header is not valid JSON");

  Header header{std::move(handler.tensors), std::move(handler.metadata), kLengthBytes + length};
  check_ranges(file, header.tensors, file_size - header.data_begin);
  return header;
}

Header make_header(std::vector<TensorInfo> tensors, std::map<std::string, std::string> metadata) {
  std::unordered_set<std::string_view> names;
  for (const auto& tensor : tensors) {
    if (tensor.name == kMetadataKey || !names.insert(tensor.name).second)
      throw CheckpointError(fmt::format("safetensors: the tensor name {} is {}", quote_name(tensor.name),
                                        tensor.name == kMetadataKey ? "reserved" : "used twice"));
  }
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const auto& a, const auto& b) { return element_size(a.dtype) > element_size(b.dtype); });
  std::uint64_t position = 0;
  for (auto& tensor : tensors) {
    const auto size = byte_size(tensor.dtype, tensor.shape);
    tensor.begin = position;
    if (!size || tensor.shape.size() > kMaxDimensions || __builtin_add_overflow(position, *size, &position))
      throw CheckpointError(fmt::format("safetensors: the shape {} of tensor {} cannot be stored",
                                        format_shape(tensor.shape), quote_name(tensor.name)));
    tensor.end = position;
  }
  Header header{std::move(tensors), std::move(metadata), 0};
  header.data_begin = format_header(header).size();
  return header;
}

std::string format_header(const Header& header) {
  // Written by hand rather than through a JSON value so that order is kept and a header of a million tensors is cheap;
  // strings go through the library, which checks their UTF-8.
  std::string text(kLengthBytes, '\0');
  try {
    text += '{';
    const char* comma = "";
    if (!header.metadata.empty()) {
      text += fmt::format("\"{}\":{}", kMetadataKey, nlohmann::json(header.metadata).dump());
      comma = ",";
    }
    for (const auto& tensor : header.tensors) {
      text += fmt::format("{}{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}", comma,
                          nlohmann::json(tensor.name).dump(), name_of(tensor.dtype), fmt::join(tensor.shape, ","),
                          tensor.begin, tensor.end);
      comma = ",";
    }
    text += '}';
  } catch (const nlohmann::json::exception&) {
    throw CheckpointError("safetensors: a tensor name or metadata text is not valid UTF-8");
  }
  text.append((kDataAlignment - text.size() % kDataAlignment) % kDataAlignment, ' ');
  const std::uint64_t length = text.size() - kLengthBytes;
  if (length > kMaxHeaderBytes)
    throw CheckpointError(
        fmt::format("safetensors: the header would have {} bytes, more than the {} allowed", length, kMaxHeaderBytes));
  std::memcpy(text.data(), &length, kLengthBytes);
  return text;
}

File::File(const std::string& path) : path_(path), mapped_(path) {
  header_ = parse_header(path_, mapped_.bytes(), mapped_.size());
  for (std::size_t i = 0; i < header_.tensors.size(); ++i) index_.emplace(header_.tensors[i].name, i);
}

const TensorInfo* File::find(const std::string& name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &header_.tensors[found->second];
}

std::span<const std::byte> File::bytes(const TensorInfo& info) const {
  return mapped_.bytes().subspan(header_.data_begin + info.begin, info.size());
}

}  // namespace phalanx::safetensors
