// Finding and becoming `phalanx-worker`, the program that links libtorch.
#pragma once

#include <string>

#include "cli/command.h"

namespace phalanx::cli {

/// phalanx-worker beside this program, or in ../libexec/phalanx where it is installed. An Error says where it looked.
std::string worker_program();

/// Sets what must be in place before libtorch is loaded (threads, waiting, huge pages) and becomes the worker; returns
/// only by throwing. For one process; the launcher does the same for the ranks that it starts.
[[noreturn]] void become_worker(const std::string& command, const Arguments& arguments);

}  // namespace phalanx::cli
