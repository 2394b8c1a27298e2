#include "phalanx/checkpoint/files/verified_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "phalanx/checkpoint/files/block_hash.h"

namespace phalanx {
namespace {

/// Whether every bit of the header is as it was written. Without a hash of the header: whether all its blocks are.
bool header_is_sound(const ManifestFile& entry, std::span<const std::byte> file) {
  std::uint64_t length = 0;
  if (file.size() < sizeof length) return false;
  std::memcpy(&length, file.data(), sizeof length);
  if (length > file.size() - sizeof length) return false;
  const auto header = file.first(sizeof length + length);
  if (entry.header_hash) return hash_block(header) == *entry.header_hash;
  for (std::uint64_t block = 0; block * kHashBlockBytes < header.size(); ++block) {
    if (hash_block(bytes_of_block(file, block)) != entry.block_hashes[block]) return false;
  }
  return true;
}

/// "tensor "a" and tensor "b"", "... and 7 more": the tensors with bytes in [begin, end) of the file.
std::string name_tensors(const safetensors::Header& header, std::uint64_t begin, std::uint64_t end) {
  constexpr std::size_t kShown = 4;
  std::vector<std::string> names;
  std::size_t more = 0;
  for (const auto& tensor : header.tensors) {
    if (header.data_begin + tensor.begin >= end || header.data_begin + tensor.end <= begin || tensor.size() == 0)
      continue;
    if (names.size() < kShown) {
      names.push_back(fmt::format("tensor {}", safetensors::quote_name(tensor.name)));
    } else {
      ++more;
    }
  }
  if (names.empty()) return "the header";
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i)
    text += fmt::format("{}{}", i == 0 ? "" : i + 1 == names.size() && more == 0 ? " and " : ", ", names[i]);
  return more == 0 ? text : fmt::format("{} and {} more", text, more);
}

}  // namespace

VerifiedFile::VerifiedFile(const std::filesystem::path& folder, ManifestFile entry)
    : entry_(std::move(entry)), path_((folder / entry_.name).string()), verified_(entry_.block_hashes.size()) {
  try {
    mapped_ = MappedFile(path_);
  } catch (const Error& error) {
    throw DamagedError(error.what());
  }
  const auto file = mapped_.bytes();
  if (file.size() != entry_.size)
    throw DamagedError(fmt::format("{} has {} bytes; the manifest says {}", path_, file.size(), entry_.size));
  std::uint64_t header_bytes = 0;
  if (file.size() >= sizeof header_bytes) {
    verify(0, sizeof header_bytes);
    std::memcpy(&header_bytes, file.data(), sizeof header_bytes);
    const auto rest = file.size() - sizeof header_bytes;
    verify(0, sizeof header_bytes + std::min<std::uint64_t>(header_bytes, rest));
  }
  header_ = safetensors::parse_header(path_, file, file.size());
}

std::span<const std::byte> VerifiedFile::bytes(const safetensors::TensorInfo& info) {
  const auto begin = header_.data_begin + info.begin;
  verify(begin, begin + info.size());
  return mapped_.bytes().subspan(begin, info.size());
}

std::span<const std::byte> VerifiedFile::bytes_around(const safetensors::TensorInfo& info, const Box& part) {
  const auto begin = header_.data_begin + info.begin;
  const auto size = static_cast<std::int64_t>(safetensors::element_size(info.dtype));
  for (const auto& range : flat_ranges(part, info.shape))
    verify(begin + static_cast<std::uint64_t>(range.begin * size),
           begin + static_cast<std::uint64_t>((range.begin + range.length) * size));
  return mapped_.bytes().subspan(begin, info.size());
}

void VerifiedFile::will_need(const safetensors::TensorInfo& info, const Box& part) const {
  const auto ranges = flat_ranges(part, info.shape);
  if (ranges.size() != 1) return;
  const auto size = static_cast<std::int64_t>(safetensors::element_size(info.dtype));
  mapped_.will_need(
      mapped_.bytes().subspan(header_.data_begin + info.begin + static_cast<std::uint64_t>(ranges[0].begin * size),
                              static_cast<std::uint64_t>(ranges[0].length * size)));
}

void VerifiedFile::verify(std::uint64_t begin, std::uint64_t end) {
  if (begin == end) return;
  for (std::uint64_t block = begin / kHashBlockBytes; block <= (end - 1) / kHashBlockBytes; ++block) {
    if (verified_[block]) continue;
    const auto bytes = bytes_of_block(mapped_.bytes(), block);
    if (hash_block(bytes) != entry_.block_hashes[block])
      throw DamagedError(fmt::format("{} is damaged: {}", path_, describe_damage(entry_, mapped_.bytes(), block)));
    verified_[block] = true;
    verified_bytes_ += bytes.size();
  }
}

std::string describe_damage(const ManifestFile& entry, std::span<const std::byte> file, std::uint64_t block) {
  const auto begin = block * kHashBlockBytes, end = begin + bytes_of_block(file, block).size();
  const auto text = fmt::format("bytes {} to {} do not match their hash; ", begin, end);
  if (header_is_sound(entry, file)) {
    try {
      return text + "they hold " + name_tensors(safetensors::parse_header(entry.name, file, file.size()), begin, end);
    } catch (const CheckpointError&) {  // it was written like that: treated like a damaged file
    }
  }
  return text + (entry.header_hash || begin > 0
                     ? "the header is damaged, so that the tensors in them are not known"
                     : "they hold the header, so that the tensors in them are not known for sure");
}

}  // namespace phalanx
