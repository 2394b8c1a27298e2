// LaunchFolder: the temporary folder of a launcher; it is removed with the launcher. If the launcher and its guard are
// killed together, the folder stays. The next launcher of the same user removes it, if its owners are provably dead.
//
// The proof is a lock on the file `owner` in the folder. The launcher and its guard hold the lock as long as either
// lives. The file names the kernel that they run under: in a temporary folder that several machines share, the folders
// of other machines are left alone, and so are those of other users. Until it is locked, the file is called
// `owner.new`. A folder that is at least a minute old and holds at most that file, unlocked, belongs to a launcher that
// died at once; it is removed too.
#pragma once

#include <filesystem>

#include "phalanx/base/temp_directory.h"
#include "phalanx/base/unique_fd.h"

namespace phalanx {

class LaunchFolder {
 public:
  LaunchFolder();  // removes abandoned folders first
  const std::filesystem::path& path() const noexcept { return folder_.path(); }

  /// Searches the temporary folder of this process ($TMPDIR, else /tmp). What cannot be removed stays.
  static void remove_abandoned() noexcept;

 private:
  TempDirectory folder_;
  UniqueFd lock_;  // forked children hold it too, but not the programs that they execute
};

}  // namespace phalanx
