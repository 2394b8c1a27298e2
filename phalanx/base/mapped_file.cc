#include "phalanx/base/mapped_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "phalanx/base/error.h"

namespace phalanx {
namespace {

[[noreturn]] void mapping_failure(const std::filesystem::path& path, int code) {
  throw FileError(fmt::format("cannot map {}: {}", path.string(), std::strerror(code)), code);
}

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path, Access access) : path_(path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a FIFO must not wait for a writer
  if (descriptor < 0) mapping_failure(path, errno);
  struct stat info {};
  int code = ::fstat(descriptor, &info) != 0 ? errno : 0;
  if (code == 0 && S_ISDIR(info.st_mode)) code = EISDIR;
  if (code == 0 && !S_ISREG(info.st_mode)) code = ENODEV;
  if (code == 0 && info.st_size > 0) {
    void* const address = ::mmap(nullptr, static_cast<std::size_t>(info.st_size), PROT_READ, MAP_SHARED, descriptor, 0);
    if (address == MAP_FAILED) {
      code = errno;
    } else {
      data_ = static_cast<const std::byte*>(address);
      size_ = static_cast<std::size_t>(info.st_size);
      if (access != Access::normal) {  // a hint: a failure costs only speed
        ::madvise(address, size_, access == Access::sequential ? MADV_SEQUENTIAL : MADV_RANDOM);
      }
    }
  }
  ::close(descriptor);
  if (code != 0) mapping_failure(path, code);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

void MappedFile::will_need(std::span<const std::byte> bytes) const noexcept {
  if (bytes.empty()) return;
  // The kernel reads at most the device's read-ahead per request, by default 128 KiB.
  constexpr std::size_t kRequest = 128 << 10;
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const auto end = static_cast<std::size_t>(bytes.data() + bytes.size() - data_);
  for (std::size_t at = static_cast<std::size_t>(bytes.data() - data_) / page * page; at < end; at += kRequest) {
    ::madvise(const_cast<std::byte*>(data_) + at, std::min(kRequest, end - at), MADV_WILLNEED);  // a hint
  }
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

}  // namespace phalanx
