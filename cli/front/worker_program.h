// Finds `phalanx-worker`, the program that links libtorch, and becomes it.
#pragma once

#include <string>

#include "cli/command.h"

namespace phalanx::cli {

/// The path of phalanx-worker: beside this program, or in ../libexec/phalanx of an installation. Throws Error, which
/// says where it searched.
std::string worker_program();

/// Sets the environment that libtorch needs before it is loaded (threads, waiting, huge pages) and becomes the worker.
/// Returns only by an exception. It is for a single process; the launcher does the same for the ranks that it starts.
[[noreturn]] void become_worker(const std::string& command, const Arguments& arguments);

}  // namespace phalanx::cli
