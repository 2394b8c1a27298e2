// TempDirectory: a new private directory (mode 0700) under $TMPDIR or /tmp. The destructor removes it with its
// contents.
//
//   TempDirectory scratch("tokenize");
//   write_file(scratch.path() / "part.bin", bytes);
#pragma once

#include <filesystem>
#include <string>

namespace phalanx {

class TempDirectory {
 public:
  explicit TempDirectory(const std::string& purpose = "tmp");  // part of the name: phalanx-<purpose>-XXXXXX
  ~TempDirectory();
  TempDirectory(const TempDirectory&) = delete;
  TempDirectory& operator=(const TempDirectory&) = delete;

  const std::filesystem::path& path() const noexcept { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace phalanx
