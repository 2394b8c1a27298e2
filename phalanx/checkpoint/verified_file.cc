#include "phalanx/checkpoint/verified_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "phalanx/checkpoint/block_hash.h"

namespace phalanx {

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
    verify(0, sizeof header_bytes, "the header");
    std::memcpy(&header_bytes, file.data(), sizeof header_bytes);
    const auto rest = file.size() - sizeof header_bytes;
    verify(0, sizeof header_bytes + std::min<std::uint64_t>(header_bytes, rest), "the header");
  }
  header_ = safetensors::parse_header(path_, file, file.size());
}

std::span<const std::byte> VerifiedFile::bytes(const safetensors::TensorInfo& info) {
  const auto begin = header_.data_begin + info.begin;
  verify(begin, begin + info.size(), fmt::format("tensor {}", safetensors::quote_name(info.name)));
  return mapped_.bytes().subspan(begin, info.size());
}

void VerifiedFile::verify(std::uint64_t begin, std::uint64_t end, const std::string& what) {
  if (begin == end) return;
  for (std::uint64_t block = begin / kHashBlockBytes; block <= (end - 1) / kHashBlockBytes; ++block) {
    if (verified_[block]) continue;
    const auto first = block * kHashBlockBytes, size = std::min(kHashBlockBytes, entry_.size - first);
    if (hash_block(mapped_.bytes().subspan(first, size)) != entry_.block_hashes[block])
      throw DamagedError(fmt::format("{} is damaged: bytes {} to {} do not match their hash; they hold {}", path_,
                                     first, first + size, what));
    verified_[block] = true;
  }
}

}  // namespace phalanx
