#include "phalanx/data/raw_ids.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string_view>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/file_kind.h"

namespace phalanx::data {
namespace {

constexpr std::size_t kSampleBytes = 4096;
constexpr std::size_t kSamples = 64;
constexpr std::size_t kMinGroups = 16;  // below this, zeros may be chance

/// Blocks spread over the file, including the first and the last. Each begins at a multiple of 8.
std::vector<std::span<const std::byte>> samples_of(std::span<const std::byte> file) {
  if (file.size() <= kSampleBytes * kSamples) return {file};
  std::vector<std::span<const std::byte>> samples;
  for (std::size_t i = 0; i < kSamples; ++i) {
    const std::size_t begin = (file.size() - kSampleBytes) / (kSamples - 1) * i / 8 * 8;
    samples.push_back(file.subspan(begin, kSampleBytes));
  }
  return samples;
}

std::uint64_t word_at(const std::byte* at, std::size_t width, bool big_endian = false) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < width; ++i) {
    const std::size_t byte = big_endian ? width - 1 - i : i;
    value |= std::to_integer<std::uint64_t>(at[i]) << (8 * byte);
  }
  return value;
}

/// The words at one position of every group of `group` words.
struct Column {
  std::uint64_t largest = 0;
  std::size_t not_zero = 0;
};
struct Columns {
  std::vector<Column> of;
  std::size_t groups = 0;
  std::vector<std::size_t> zero() const {  // positions that are 0 in all groups
    std::vector<std::size_t> places;
    for (std::size_t i = 0; i < of.size(); ++i) {
      if (of[i].not_zero == 0) places.push_back(i);
    }
    return places;
  }
};

Columns columns_of(std::span<const std::byte> file, std::size_t width, std::size_t group) {
  Columns columns{.of = std::vector<Column>(group)};
  for (const auto sample : samples_of(file)) {
    for (std::size_t at = 0; at + width * group <= sample.size(); at += width * group, ++columns.groups) {
      for (std::size_t i = 0; i < group; ++i) {
        const std::uint64_t word = word_at(sample.data() + at + i * width, width);
        columns.of[i].largest = std::max(columns.of[i].largest, word);
        columns.of[i].not_zero += word != 0;
      }
    }
  }
  return columns;
}

std::string array_command(std::string_view head, const std::string& path) {
  std::string type = "?";
  if (const std::size_t at = head.find("'descr': '"); at != std::string_view::npos) {
    const std::string_view rest = head.substr(at + 10, 16);
    type = std::string(rest.substr(0, rest.find('\'')));
  }
  return fmt::format(
      "a NumPy array (.npy) of elements '{0}', with a header before its values: expected the ids alone; write them by\n"
      "    python3 -c \"import numpy as n; n.load('{1}').ravel().astype('<u2').tofile('{1}.bin')\"\n"
      "  ('<u4' for a vocabulary above 65536)",
      type, path);
}

std::string what_to_do(FileKind kind, std::string_view head, const std::string& path) {
  const std::string tokenize = fmt::format(
      "turn it into token ids by\n    phalanx tokenize {} --tokenizer TOKENIZER.json --output PREFIX", path);
  switch (kind) {
    case FileKind::npy:
      return array_command(head, path);
    case FileKind::gzip:
      return fmt::format(
          "gzip data: if it is text, {}\n  if it is token ids, unpack them first: gunzip -c {} > ids.bin", tokenize,
          path);
    case FileKind::zstd:
      return fmt::format("zstd data: if it is text, {}\n  if it is token ids, unpack them first: zstd -d {} -o ids.bin",
                         tokenize, path);
    case FileKind::text:
    case FileKind::parquet:
    case FileKind::arrow_file:
    case FileKind::arrow_stream:
      return fmt::format("{}: {}", name_of(kind), tokenize);
    case FileKind::wide_text:
      return fmt::format("{}: convert it with `iconv -t UTF-8`, then {}", name_of(kind), tokenize);
    case FileKind::xz:
    case FileKind::bzip2:
    case FileKind::lz4:
    case FileKind::zip:
    case FileKind::tar:
    case FileKind::seven_zip:
    case FileKind::rar:
      return fmt::format("{}: unpack it; text then goes through `phalanx tokenize`", name_of(kind));
    case FileKind::lfs_pointer:
      return fmt::format("{}: fetch the file itself by `git lfs pull` in its folder", name_of(kind));
    case FileKind::safetensors:
    case FileKind::gguf:
      return fmt::format(
          "{}, as weights are kept: expected token ids; weights to start from are named by [checkpoint] "
          "initial_load_path or [model] hf_assets_path",
          name_of(kind));
    default:
      return fmt::format("{}: expected token ids; `phalanx tokenize` makes them of text", name_of(kind));
  }
}

}  // namespace

void refuse_other_kinds(std::span<const std::byte> file, const std::string& path) {
  const std::string_view head(reinterpret_cast<const char*>(file.data()), std::min(file.size(), kFileKindProbe));
  const FileKind kind = file_kind(head, file.size());
  // A Megatron index alone is recognised by the reader of Megatron's pairs.
  if (kind == FileKind::unknown || kind == FileKind::megatron_index) return;
  throw DataError(fmt::format(
      "{}: this is {}\n  (if these bytes are token ids all the same: state their type by [training] dataset_dtype)",
      path, what_to_do(kind, head, path)));
}

bool was_never_written(std::span<const std::byte> file) {
  const auto samples = samples_of(file);
  return file.size() >= 8 * kMinGroups && std::ranges::all_of(samples, [](std::span<const std::byte> sample) {
           return std::ranges::all_of(sample, [](std::byte byte) { return byte == std::byte{0}; });
         });
}

std::optional<std::string> doubt_about_type(std::span<const std::byte> file, TokenType type) {
  const auto width = static_cast<std::size_t>(bytes_of(type));
  for (const std::size_t group : {std::size_t{4}, std::size_t{2}}) {
    if (width * group > 8 || file.size() / (width * group) < kMinGroups) continue;
    const Columns columns = columns_of(file, width, group);
    const std::vector<std::size_t> zero = columns.zero();
    const auto is_full = [&](std::size_t place) { return columns.of[place].not_zero * 2 >= columns.groups; };
    const std::string wide = fmt::format("{} bytes each", width * group);
    if (zero.size() == group - 1 && zero.front() == 1 && is_full(0)) {
      return fmt::format("{} of {} tokens are 0 throughout, as in ids of {}: {}", group - 1, group, wide,
                         width * group == 8 ? "int64" : "uint32");
    }
    if (zero.size() == group - 1 && zero.front() == 0 && is_full(group - 1)) {
      return fmt::format("{} of {} tokens are 0 throughout, as in big-endian or floating-point numbers of {}",
                         group - 1, group, wide);
    }
    // Ids above 65535, whose upper halves are small numbers.
    const bool small_above = columns.of[1].largest < 16 && columns.of[0].largest >= 4096;
    if (group == 2 && width == 2 && small_above && columns.groups >= 64) {
      return fmt::format("every second token is below {}, the others reach {}, as in ids of {}: uint32",
                         columns.of[1].largest + 1, columns.of[0].largest, wide);
    }
  }
  return std::nullopt;
}

std::string types_that_fit(std::span<const std::byte> file, std::int64_t vocab_size, TokenType besides) {
  struct Type {
    const char* name;
    std::size_t width;
    bool big_endian = false;
  };
  constexpr std::array types = {Type{"uint8", 1},
                                Type{"uint16", 2},
                                Type{"uint32", 4},
                                Type{"int64", 8},
                                Type{"big-endian uint16 (not read: swap the bytes)", 2, true},
                                Type{"big-endian uint32 (not read: swap the bytes)", 4, true}};
  std::vector<std::string> fitting;
  for (const Type& type : types) {
    if (file.size() % type.width != 0 || std::string_view(type.name) == to_string(besides)) continue;
    if (type.width == 1 && vocab_size > 256) continue;  // any bytes fit such a type
    const auto samples = samples_of(file);
    const bool fits = std::ranges::all_of(samples, [&](std::span<const std::byte> sample) {
      for (std::size_t at = 0; at + type.width <= sample.size(); at += type.width) {
        if (word_at(sample.data() + at, type.width, type.big_endian) >= static_cast<std::uint64_t>(vocab_size)) {
          return false;
        }
      }
      return true;
    });
    if (fits) fitting.emplace_back(type.name);
  }
  return fmt::format("{}", fmt::join(fitting, " or "));
}

}  // namespace phalanx::data
