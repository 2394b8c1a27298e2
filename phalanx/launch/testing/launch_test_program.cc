// A torch-free program that the launcher's tests run, as launcher and as ranks. See main() for what it can do.
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/comm/tcp_store.h"
#include "phalanx/launch/supervisor.h"
#include "phalanx/launch/worker_environment.h"
#include "phalanx/launch/worker_report.h"

namespace {

volatile sig_atomic_t asked_to_stop = 0;

[[noreturn]] void sleep_for_ever() {
  for (;;) pause();
}

// Tells the test, through a file that appears whole, that this process has got so far.
void note(const std::string& directory, const std::string& name, long value) {
  const std::string path = directory + "/" + name;
  std::ofstream(path + ".new") << value;
  std::rename((path + ".new").c_str(), path.c_str());
}

// A child that only a signal to its process group, or its own number, can end.
void start_child(const std::string& directory, int rank) {
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGINT, SIG_IGN);
    signal(SIGTERM, SIG_IGN);
    note(directory, fmt::format("child.{}", rank), getpid());
    sleep_for_ever();
  }
}

int run(const std::vector<std::string>& arguments) {
  using namespace phalanx;
  const std::string& mode = arguments.at(0);
  if (mode == "supervise") {  // RANKS PROGRAM ARGUMENTS...: be the launcher
    const auto result =
        supervise({.command = {arguments.begin() + 2, arguments.end()}, .ranks = std::stoi(arguments.at(1))});
    if (!result.error.empty()) fmt::print(stderr, "launcher: {}\n", result.error);
    return result.exit_status;
  }
  const auto environment = read_worker_environment();
  const int rank = environment.rank;
  if (mode == "print") {  // every rank: one line to each stream
    fmt::print("out {} of {}, local {} of {}, OMP_NUM_THREADS {}\nunfinished", rank, environment.world_size,
               environment.local_rank, environment.local_world_size, std::getenv("OMP_NUM_THREADS"));
    fmt::print(stderr, "err {}\n", rank);
    TcpStore store(environment.store);
    if (store.add("ranks", 1) == environment.world_size) store.set("all", "");
    store.wait({"all"}, std::chrono::seconds(30));
    return 0;
  }
  const int chosen = arguments.size() > 1 ? std::atoi(arguments[1].c_str()) : -1;  // 0 where it is a folder
  const auto wait_for_failure = [&] {
    TcpStore store(environment.store);
    store.get("failed");
  };
  if (mode == "exit") {  // RANK STATUS: that rank exits so, the others hang
    if (rank == chosen) return std::stoi(arguments.at(2));
    sleep_for_ever();
  }
  if (mode == "signal") {  // RANK SIGNAL: that rank dies so, the others hang
    if (rank == chosen) raise(std::stoi(arguments.at(2)));
    sleep_for_ever();
  }
  if (mode == "linger") {  // RANK: reports first but is slow to end; the others report after it, and end first
    if (rank == chosen) {
      report_error_to_launcher(ConfigError("[training] steps is -1"));
      TcpStore store(environment.store);
      store.set("failed", "");
      sleep_for_ever();
    }
    wait_for_failure();
    throw ConfigError("[training] steps is -2");
  }
  if (mode == "throw") {  // RANK: its ConfigError is the cause; the others' CommErrors are reported before it
    if (rank != chosen) {
      try {
        wait_for_failure();
      } catch (const CommError&) {
      }
      throw CommError(fmt::format("rank {} lost its peer", rank));
    }
    TcpStore store(environment.store);
    store.set("failed", "");
    // The other ranks' reports come first, as they do when an exception unwinds slowly.
    store.get("never", std::chrono::milliseconds(200));
  }
  const std::string& directory = arguments.at(1);
  if (mode == "stubborn") {  // DIRECTORY: ignores what can be ignored, and has a child that does too
    signal(SIGINT, SIG_IGN);
    signal(SIGTERM, SIG_IGN);
    start_child(directory, rank);
    note(directory, fmt::format("pid.{}", rank), getpid());
    sleep_for_ever();
  }
  if (mode == "leave-child") {  // DIRECTORY: ends well, but leaves a child behind
    start_child(directory, rank);
    while (access(fmt::format("{}/child.{}", directory, rank).c_str(), F_OK) != 0) usleep(1000);
    return 0;
  }
  if (mode == "graceful") {  // DIRECTORY: takes 2.5 s to end after a signal, longer than a silent rank is given
    announce_graceful_stop(std::chrono::seconds(30));
    struct sigaction action {};
    action.sa_handler = [](int) { asked_to_stop = 1; };
    sigset_t blocked, open;
    sigemptyset(&open);
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGINT);
    sigprocmask(SIG_BLOCK, &blocked, nullptr);
    sigaction(SIGINT, &action, nullptr);
    note(directory, fmt::format("pid.{}", rank), getpid());
    while (asked_to_stop == 0) sigsuspend(&open);
    usleep(2'500'000);
    note(directory, fmt::format("saved.{}", rank), 1);
    return 0;
  }
  throw UsageError("launch_test_program: unknown mode " + mode);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run({argv + 1, argv + argc});
  } catch (const phalanx::CommError& error) {
    // The cause of `throw` is a ConfigError that follows a CommError of the store.
    const bool cause = argc > 2 && std::strcmp(argv[1], "throw") == 0 && std::getenv("RANK") != nullptr &&
                       std::strcmp(argv[2], std::getenv("RANK")) == 0;
    const phalanx::ConfigError config("[training] steps is -1");
    const phalanx::Error& shown = cause ? static_cast<const phalanx::Error&>(config) : error;
    if (!phalanx::report_error_to_launcher(shown)) fmt::print(stderr, "{}\n", shown.what());
    return shown.exit_status();
  } catch (const phalanx::Error& error) {
    if (!phalanx::report_error_to_launcher(error)) fmt::print(stderr, "{}\n", error.what());
    return error.exit_status();
  }
}
