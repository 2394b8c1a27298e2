// MappedFile: a file mapped read-only into memory. Pages are read when they are accessed, and are shared between
// processes.
//
// The bytes live as long as the object. If another process truncates the file while it is mapped, an access raises
// SIGBUS. So map only files that are complete. Many threads may read at once.
//
//   const MappedFile tokens("train.bin");
//   std::span<const std::byte> bytes = tokens.bytes();
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string_view>

namespace phalanx {

class MappedFile {
 public:
  enum class Access { normal, sequential, random };

  MappedFile() = default;
  /// Throws FileError for a missing file, a directory, a device. An empty file gives an empty span.
  explicit MappedFile(const std::filesystem::path& path, Access access = Access::normal);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  const std::byte* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }
  std::span<const std::byte> bytes() const noexcept { return {data_, size_}; }
  std::string_view text() const noexcept { return {reinterpret_cast<const char*>(data_), size_}; }
  const std::filesystem::path& path() const noexcept { return path_; }

  /// Starts reading these bytes of the file from the disk, without waiting, because they are needed soon. Without this
  /// call they are read in small pieces while the thread that accesses them waits.
  void will_need(std::span<const std::byte> bytes) const noexcept;

 private:
  std::filesystem::path path_;
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace phalanx
