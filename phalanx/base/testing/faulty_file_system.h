// FaultyFileSystem: a FileSystem that fails on demand, for tests of code that must not lose data.
//
// Operations are numbered from 0 in order: create, append, write, sync, close, rename, make_directory, remove,
// remove_all, sync_directory. A test first runs the code once to count them. Then it runs the code once for each number
// and checks what is left on the disk:
//
//   FaultyFileSystem fs(posix_file_system(), {.fail_at = n, .kind = Fault::crash});
//   EXPECT_THROW(save(state, directory, fs), SimulatedCrash);
#pragma once

#include <cerrno>
#include <cstdint>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "phalanx/base/file.h"

namespace phalanx {

enum class Fault {
  error,  // this operation throws FileError and has no effect; later ones work
  full,   // like a full disk: from here on create, append, write and sync fail with ENOSPC; writes stop half way
  crash,  // like kill -9: a write stops half way; any other operation, and all later ones, have no effect
  kill    // kill -9 of this process, for a test that forked it: a write stops half way, and nothing comes after it
};

struct FaultPlan {
  std::int64_t fail_at = std::numeric_limits<std::int64_t>::max();
  Fault kind = Fault::error;
  int code = EIO;  // errno of Fault::error
};

/// Every operation throws this from the simulated crash on. It is not an Error, so that no code handles it.
class SimulatedCrash : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// As thread-safe as the FileSystem below it.
/// REQUIRES: it outlives the files that it creates.
class FaultyFileSystem final : public FileSystem {
 public:
  explicit FaultyFileSystem(FileSystem& below, FaultPlan plan = {}) : below_(below), plan_(plan) {}

  std::unique_ptr<WritableFile> create(const std::filesystem::path& path) override;
  std::unique_ptr<WritableFile> append(const std::filesystem::path& path) override;
  void rename(const std::filesystem::path& from, const std::filesystem::path& to) override;
  void make_directory(const std::filesystem::path& path) override;
  void remove(const std::filesystem::path& path) override;
  void remove_all(const std::filesystem::path& path) override;
  void sync_directory(const std::filesystem::path& path) override;

  std::int64_t operations() const;           // number of operations so far, including failed ones
  std::vector<std::string> journal() const;  // "rename step-1.tmp -> step-1", one an operation, in order

 private:
  friend class FaultyFile;
  enum class Outcome { works, stops_half_way };
  Outcome before(const std::string& operation, bool needs_space, bool is_write);

  FileSystem& below_;
  FaultPlan plan_;
  mutable std::mutex mutex_;
  std::vector<std::string> journal_;
};

}  // namespace phalanx
