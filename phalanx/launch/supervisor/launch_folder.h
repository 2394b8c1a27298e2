// LaunchFolder: a launcher's temporary folder, which goes with it. Where the launcher and its guard are killed together
// nobody is left to remove it: the next launcher of the same user does, if the folder's owners are provably dead.
//
// The proof is a lock on the file `owner` in it, which launcher and guard hold as long as either lives. The file names
// the kernel that they run under: folders of another machine, in a temporary folder that machines share, are left
// alone, as are those of other users. Until it is locked the file is called `owner.new`: a folder that is a minute old
// and holds at most that, unlocked, is of a launcher that has died at once, and removed, too.
#pragma once

#include <filesystem>

#include "phalanx/base/temp_directory.h"
#include "phalanx/store/tcp_store_socket.h"

namespace phalanx {

class LaunchFolder {
 public:
  LaunchFolder();  // removes abandoned ones first
  const std::filesystem::path& path() const noexcept { return folder_.path(); }

  /// In the temporary folder of this process ($TMPDIR, else /tmp). What cannot be removed stays.
  static void remove_abandoned() noexcept;

 private:
  TempDirectory folder_;
  UniqueFd lock_;  // forked children hold it too; programs that are started do not
};

}  // namespace phalanx
