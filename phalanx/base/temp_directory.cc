#include "phalanx/base/temp_directory.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <system_error>

#include "phalanx/base/env.h"
#include "phalanx/base/error.h"

namespace phalanx {

TempDirectory::TempDirectory(const std::string& purpose) {
  const std::string parent = env_string("TMPDIR").value_or("/tmp");
  std::string name = fmt::format("{}/phalanx-{}-XXXXXX", parent, purpose);
  if (mkdtemp(name.data()) == nullptr) {
    const int code = errno;
    throw FileError(fmt::format("cannot make a temporary directory in {}: {} (TMPDIR chooses another place)", parent,
                                std::strerror(code)),
                    code);
  }
  path_ = name;
}

TempDirectory::~TempDirectory() {
  std::error_code ignored;  // a destructor cannot report it; the rest stays in the system's temporary folder
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace phalanx
