// Starting threads where the system may refuse: an Error then says which limit it was and how to raise it, where
// std::thread says "Resource temporarily unavailable" alone.
//
//   std::thread thread = start_thread("the progress of communicators", [] { run(); });
//   const pid_t child = fork();
//   if (child < 0) throw_not_started("a rank", errno);
//   check_threads(16);                     // before a library that cannot say so needs as many
#pragma once

#include <filesystem>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

namespace phalanx {

/// Throws Error: a thread or process, `what`, could not be started for the reason of this errno.
[[noreturn]] void throw_not_started(const std::string& what, int error);

/// Calls what starts threads by itself; a refusal by the system is the Error above.
template <class F>
decltype(auto) starting(const char* what, F&& body) {
  try {
    return std::forward<F>(body)();
  } catch (const std::system_error& error) {
    throw_not_started(what, error.code().value());
  }
}

template <class F>
std::thread start_thread(const char* for_what, F&& body) {
  return starting(for_what, [&] { return std::thread(std::forward<F>(body)); });
}

/// What limits the number of threads and processes here, each limit with what is in use. `root` stands for "/".
std::string thread_limits_text(const std::filesystem::path& root = "/");

/// What limits this process's memory beside the machine: RLIMIT_AS and RLIMIT_DATA, each with what is in use. Empty:
/// they do not.
std::string memory_limits_text();

/// Throws Error unless so many threads can run at once beside those there are. Starts and ends them.
void check_threads(int count);

/// Throws Error where the stack (RLIMIT_STACK) is too small for the program and its threads.
void check_stack();

}  // namespace phalanx
