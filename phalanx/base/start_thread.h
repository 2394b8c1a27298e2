// Starts threads. If the system refuses, the Error says which limit was reached and how to raise it; std::thread only
// says "Resource temporarily unavailable".
//
//   std::thread thread = start_thread("the progress of communicators", [] { run(); });
//   const pid_t child = fork();
//   if (child < 0) throw_not_started("a rank", errno);
//   check_threads(16);  // before a library that needs 16 threads and has no error for it
#pragma once

#include <filesystem>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

namespace phalanx {

/// Throws Error: the thread or process `what` could not be started; `error` is the errno.
[[noreturn]] void throw_not_started(const std::string& what, int error);

/// Calls `body`, which starts threads itself. If the system refuses one, throws the Error above.
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

/// The limits on the number of threads and processes, each with the number in use. Tests replace "/" by `root`.
std::string thread_limits_text(const std::filesystem::path& root = "/");

/// The limits on this process's memory other than the machine's: RLIMIT_AS and RLIMIT_DATA, each with the amount in
/// use. Empty if neither is set.
std::string memory_limits_text();

/// Throws Error unless `count` more threads can run at once. It starts and ends them.
void check_threads(int count);

/// Throws Error if the stack (RLIMIT_STACK) is too small for the program and its threads.
void check_stack();

}  // namespace phalanx
