#include "phalanx/base/file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <system_error>
#include <utility>

#include "phalanx/base/error.h"

namespace phalanx {
namespace {

namespace stdfs = std::filesystem;

[[noreturn]] void file_failure(std::string_view action, const stdfs::path& path, int code) {
  throw FileError(fmt::format("cannot {} {}: {}", action, path.string(), std::strerror(code)), code);
}

/// Repeats a call that a signal interrupted.
template <typename Call>
auto uninterrupted(Call call) {
  decltype(call()) result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

class Descriptor {
 public:
  explicit Descriptor(int value) : value_(value) {}
  ~Descriptor() {
    if (value_ >= 0) ::close(value_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return value_; }
  int release() { return std::exchange(value_, -1); }

 private:
  int value_;
};

class PosixFile final : public WritableFile {
 public:
  PosixFile(stdfs::path path, int flags) : path_(std::move(path)), descriptor_(open_for_writing(path_, flags)) {}

  using WritableFile::write;
  void write(std::span<const std::byte> bytes) override {
    constexpr std::size_t kLargestWrite = std::size_t{1} << 30;  // Linux writes at most just below 2 GiB per call
    while (!bytes.empty()) {
      const std::size_t wanted = std::min(bytes.size(), kLargestWrite);
      const ssize_t written = uninterrupted([&] { return ::write(descriptor_.get(), bytes.data(), wanted); });
      if (written < 0) file_failure(fmt::format("write {} bytes to", bytes.size()), path_, errno);
      if (written == 0) file_failure(fmt::format("write {} bytes to", bytes.size()), path_, ENOSPC);
      bytes = bytes.subspan(static_cast<std::size_t>(written));
    }
  }
  void sync() override {
    if (uninterrupted([&] { return ::fdatasync(descriptor_.get()); }) != 0) file_failure("sync", path_, errno);
  }
  void close() override {
    const int descriptor = descriptor_.release();
    if (descriptor >= 0 && ::close(descriptor) != 0 && errno != EINTR) file_failure("close", path_, errno);
  }

 private:
  static int open_for_writing(const stdfs::path& path, int flags) {
    const int descriptor =
        uninterrupted([&] { return ::open(path.c_str(), flags | O_WRONLY | O_CREAT | O_CLOEXEC, 0666); });
    if (descriptor < 0) file_failure("open for writing", path, errno);
    return descriptor;
  }

  stdfs::path path_;
  Descriptor descriptor_;
};

class PosixFileSystem final : public FileSystem {
 public:
  std::unique_ptr<WritableFile> create(const stdfs::path& path) override {
    return std::make_unique<PosixFile>(path, O_TRUNC);
  }
  std::unique_ptr<WritableFile> append(const stdfs::path& path) override {
    return std::make_unique<PosixFile>(path, O_APPEND);
  }
  void rename(const stdfs::path& from, const stdfs::path& to) override {
    if (::rename(from.c_str(), to.c_str()) != 0) {
      file_failure("rename", from.string() + " to " + to.string(), errno);
    }
  }
  void make_directory(const stdfs::path& path) override {
    std::error_code status;
    stdfs::create_directories(path, status);
    if (!status && !stdfs::is_directory(path, status)) status = std::make_error_code(std::errc::not_a_directory);
    if (status) file_failure("make directory", path, status.value());
  }
  void remove(const stdfs::path& path) override {
    if (::remove(path.c_str()) != 0) file_failure("remove", path, errno);
  }
  void remove_all(const stdfs::path& path) override {
    std::error_code status;
    stdfs::remove_all(path, status);
    if (status) file_failure("remove", path, status.value());
  }
  void sync_directory(const stdfs::path& path) override {
    const stdfs::path directory = path.empty() ? stdfs::path(".") : path;
    const Descriptor descriptor(
        uninterrupted([&] { return ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); }));
    if (descriptor.get() < 0) file_failure("open directory", directory, errno);
    // Some network file systems do not support this and return EINVAL. Nothing more can be done there.
    if (uninterrupted([&] { return ::fsync(descriptor.get()); }) != 0 && errno != EINVAL) {
      file_failure("sync directory", directory, errno);
    }
  }
};

}  // namespace

FileSystem& posix_file_system() {
  static FileSystem& instance = *new PosixFileSystem;  // never destroyed, like the log
  return instance;
}

std::string read_file(const stdfs::path& path, std::uint64_t max_bytes) {
  const Descriptor descriptor(uninterrupted([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC); }));
  if (descriptor.get() < 0) file_failure("open", path, errno);
  struct stat info {};
  if (::fstat(descriptor.get(), &info) != 0) file_failure("read", path, errno);
  if (S_ISDIR(info.st_mode)) file_failure("read", path, EISDIR);
  const auto too_large = [&](std::uint64_t size) {
    throw FileError(fmt::format("{} holds {}{} bytes: at most {} are expected here", path.string(),
                                size > max_bytes && !S_ISREG(info.st_mode) ? "more than " : "", size, max_bytes),
                    EFBIG);
  };
  const auto size = static_cast<std::uint64_t>(info.st_size);
  if (S_ISREG(info.st_mode) && size > max_bytes) too_large(size);

  // Files under /proc report a size of 0, so read until read() returns 0.
  constexpr std::size_t kBlock = 64 * 1024;
  std::string contents;
  std::size_t used = 0;
  for (;;) {
    contents.resize(std::max(used + kBlock, static_cast<std::size_t>(size) + 1));
    const ssize_t got =
        uninterrupted([&] { return ::read(descriptor.get(), contents.data() + used, contents.size() - used); });
    if (got < 0) file_failure("read", path, errno);
    used += static_cast<std::size_t>(got);
    if (used > max_bytes) too_large(used);
    if (got == 0) break;
  }
  contents.resize(used);
  return contents;
}

void write_file(const stdfs::path& path, std::string_view contents, FileSystem& fs) {
  const std::unique_ptr<WritableFile> file = fs.create(path);
  file->write(contents);
  file->close();
}

void replace_file(const stdfs::path& path, std::string_view contents, FileSystem& fs) {
  // /dev/stdout or a pipe: there is nothing to replace, and a rename would put a file in its place.
  std::error_code error;
  const auto status = stdfs::status(path, error);
  const bool is_special = stdfs::exists(status) && !stdfs::is_regular_file(status) && !stdfs::is_directory(status);
  const stdfs::path folder = path.parent_path();
  if (is_special || folder == "/dev" || folder == "/dev/fd") {
    const std::unique_ptr<WritableFile> file = fs.append(path);
    file->write(contents);
    file->close();
    return;
  }
  const stdfs::path temporary = path.string() + ".tmp";
  try {
    const std::unique_ptr<WritableFile> file = fs.create(temporary);
    file->write(contents);
    file->sync();
    file->close();
    fs.rename(temporary, path);
  } catch (...) {
    try {
      fs.remove(temporary);
    } catch (const Error&) {  // it may not exist; only the first failure is reported
    }
    throw;
  }
  fs.sync_directory(path.parent_path());
}

}  // namespace phalanx
