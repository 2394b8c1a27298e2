#include "phalanx/checkpoint/files/block_writer.h"

#include <algorithm>
#include <utility>

#include "phalanx/checkpoint/files/block_hash.h"

namespace phalanx {

BlockWriter::BlockWriter(FileSystem& fs, const std::filesystem::path& path) : file_(fs.create(path)) {
  entry_.name = path.filename().string();
  pending_.reserve(kHashBlockBytes);
}

void BlockWriter::append_header(std::string_view header) {
  const auto bytes = std::as_bytes(std::span(header));
  entry_.header_hash = hash_block(bytes);
  append(bytes);
}

void BlockWriter::append(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    if (pending_.empty() && bytes.size() >= kHashBlockBytes) {
      write_block(bytes.first(kHashBlockBytes));
      bytes = bytes.subspan(kHashBlockBytes);
      continue;
    }
    const auto taken = bytes.first(std::min(bytes.size(), kHashBlockBytes - pending_.size()));
    pending_.insert(pending_.end(), taken.begin(), taken.end());
    bytes = bytes.subspan(taken.size());
    if (pending_.size() == kHashBlockBytes) {
      write_block(pending_);
      pending_.clear();
    }
  }
}

ManifestFile BlockWriter::finish() {
  if (!pending_.empty()) write_block(pending_);
  pending_.clear();
  file_->sync();
  file_->close();
  return std::move(entry_);
}

void BlockWriter::write_block(std::span<const std::byte> block) {
  entry_.block_hashes.push_back(hash_block(block));
  file_->write(block);
  entry_.size += block.size();
}

}  // namespace phalanx
