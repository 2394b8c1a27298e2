// Files: whole reads and writes, atomic replacement, and the operations for durable saving.
//
// Everything that must survive a crash or a full disk goes through FileSystem, so that a test can make any single
// operation fail (testing/faulty_file_system.h). Each failure is a FileError with the path, the system's reason and its
// errno. A short write is continued. A write that cannot be completed is an error; it never silently leaves a shorter
// file.
//
//   std::string text = read_file("config.toml");
//   replace_file("tokenizer.json", json);          // readers see the old file or the new one, also after a crash
//
//   auto file = fs.create(directory / "weights.safetensors");
//   file->write(header);
//   file->sync();
//   file->close();
//   fs.rename(temporary, final);
//   fs.sync_directory(final.parent_path());        // the rename itself is durable only after this
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace phalanx {

/// A file being written from front to back. Not thread-safe.
class WritableFile {
 public:
  virtual ~WritableFile() = default;  // closes the file, but errors are lost: call close() first
  virtual void write(std::span<const std::byte> bytes) = 0;
  virtual void sync() = 0;   // returns when contents and length are on the disk
  virtual void close() = 0;  // some file systems report a full disk only here
  void write(std::string_view text) { write(std::as_bytes(std::span(text.data(), text.size()))); }
};

class FileSystem {
 public:
  virtual ~FileSystem() = default;
  virtual std::unique_ptr<WritableFile> create(const std::filesystem::path& path) = 0;  // empties an existing file
  virtual std::unique_ptr<WritableFile> append(const std::filesystem::path& path) = 0;  // makes a missing file
  virtual void rename(const std::filesystem::path& from, const std::filesystem::path& to) = 0;  // replaces a file
  virtual void make_directory(const std::filesystem::path& path) = 0;  // with its parents; an existing one is fine
  virtual void remove(const std::filesystem::path& path) = 0;      // one file or empty directory; missing: FileError
  virtual void remove_all(const std::filesystem::path& path) = 0;  // with contents; a missing path is fine
  virtual void sync_directory(const std::filesystem::path& path) = 0;  // makes new, renamed and removed entries durable
};

/// The real file system. It is stateless, so one object serves all threads.
FileSystem& posix_file_system();

/// Reads the whole file. A file of more than `max_bytes` is an error before anything is read.
std::string read_file(const std::filesystem::path& path,
                      std::uint64_t max_bytes = std::numeric_limits<std::uint64_t>::max());

/// Creates the file or overwrites it in place, without sync: for files that can be generated again.
void write_file(const std::filesystem::path& path, std::string_view contents, FileSystem& fs = posix_file_system());

/// Writes `<name>.tmp` beside the file, syncs it, renames it over the file, and syncs the directory. A failure removes
/// the temporary file and leaves the old contents unchanged. A pipe or a device, such as /dev/stdout, is written to
/// directly.
void replace_file(const std::filesystem::path& path, std::string_view contents, FileSystem& fs = posix_file_system());

}  // namespace phalanx
