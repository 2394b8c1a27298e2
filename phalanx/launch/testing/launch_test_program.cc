// A torch-free program that the launcher's tests run, as launcher and as ranks. See main() for what it can do.
#include <fcntl.h>
#include <fmt/format.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "phalanx/base/cpu_list.h"
#include "phalanx/base/error.h"
#include "phalanx/launch/rendezvous/worker_environment.h"
#include "phalanx/launch/supervisor/supervisor.h"
#include "phalanx/launch/supervisor/worker_report.h"
#include "phalanx/store/job_secret.h"
#include "phalanx/store/tcp_store.h"

namespace {

[[noreturn]] void sleep_for_ever() {
  for (;;) pause();
}

// Tells the test that this process has reached this point. The file appears complete.
template <class T>
void note(const std::string& directory, const std::string& name, const T& value) {
  const std::string path = directory + "/" + name;
  std::ofstream(path + ".new") << value;
  std::rename((path + ".new").c_str(), path.c_str());
}

// A child that ends only by a signal to its process group or to its pid.
void start_child(const std::string& directory, int rank) {
  const pid_t child = fork();
  if (child == 0) {
    for (const int number : {SIGINT, SIGTERM, SIGUSR2}) signal(number, SIG_IGN);
    note(directory, fmt::format("child.{}", rank), getpid());
    sleep_for_ever();
  }
}

phalanx::SupervisorOptions supervisor_options(const std::vector<std::string>& arguments) {
  using std::chrono::milliseconds;
  phalanx::SupervisorOptions options;
  options.blame_grace = std::chrono::seconds(30);  // wait until the cause is reported, however long it takes
  options.ranks = std::stoi(arguments.at(1));
  std::size_t i = 2;
  for (; i < arguments.size() && arguments[i].starts_with("--"); ++i) {
    const std::size_t equals = arguments[i].find('=');
    const std::string name = arguments[i].substr(2, equals - 2), value = arguments[i].substr(equals + 1);
    const auto time = [&] { return milliseconds(std::stoi(value)); };
    if (name == "max-restarts") options.max_restarts = std::stoi(value);
    if (name == "min-nodes") options.nodes.min_nodes = std::stoi(value);
    if (name == "max-nodes") options.nodes.max_nodes = std::stoi(value);
    if (name == "node-rank") {
      options.nodes.fixed_node_ranks = true;
      options.nodes.node_rank = std::stoi(value);
    }
    if (name == "endpoint") options.nodes.endpoint = phalanx::parse_host_port(value, "--endpoint");
    if (name == "join-ms") options.nodes.join_timeout = time();
    if (name == "last-call-ms") options.nodes.last_call = time();
    if (name == "keep-alive-ms") options.nodes.keep_alive = time();
    if (name == "local-addr") options.nodes.local_address = value;
    if (name == "terminate-ms") options.terminate_grace = time();
    if (name == "stopped-ms") options.stopped_grace = time();
    if (name == "blame-ms") options.blame_grace = time();
    if (name == "id") options.run_id = value;
    if (name == "role") options.role = value;
    if (name == "log-dir") options.logs.directory = value;
    if (name == "redirects") options.logs.redirects = phalanx::StreamChoice::parse("--redirects", value);
    if (name == "tee") options.logs.tee = phalanx::StreamChoice::parse("--tee", value);
    if (name == "show") options.logs.shown.insert(std::stoi(value));
    if (name == "filter") options.logs.filters[0].push_back(value);
    if (name == "master-port") options.master_port = std::stoi(value);
    if (name == "virtual-local-rank") options.virtual_local_rank = true;
    if (name == "cpus") options.binding.lists.push_back(phalanx::parse_cpu_list("--cpus", value));
    if (name == "signal") options.stop_signals.push_back(std::stoi(value));
  }
  options.command.assign(arguments.begin() + static_cast<std::ptrdiff_t>(i), arguments.end());
  return options;
}

// Waits until every rank of the round is here.
void meet(const phalanx::WorkerEnvironment& environment) {
  phalanx::TcpStore store(environment.store, {.secret = phalanx::job_secret_from_environment().value});
  if (store.add("ranks", 1) == environment.world_size) store.set("all", "");
  store.wait({"all"}, std::chrono::seconds(30));
}

int run(const std::vector<std::string>& arguments) {
  using namespace phalanx;
  const std::string& mode = arguments.at(0);
  if (mode == "supervise") {  // RANKS [--option=value...] PROGRAM ARGUMENTS...: act as launcher
    const auto result = supervise(supervisor_options(arguments));
    if (!result.error.empty()) fmt::print(stderr, "launcher: {}\n", result.error);
    return result.exit_status;
  }
  const auto environment = read_worker_environment();
  const int rank = environment.rank;
  if (mode == "print") {  // every rank: one line to each stream
    fmt::print("out {} of {}, local {} of {}, OMP_NUM_THREADS {}\nunfinished", rank, environment.world_size,
               environment.local_rank, environment.local_world_size, std::getenv("OMP_NUM_THREADS"));
    fmt::print(stderr, "err {}\n", rank);
    meet(environment);
    return 0;
  }
  const int chosen = arguments.size() > 1 ? std::atoi(arguments[1].c_str()) : -1;  // 0 if the argument is a folder
  const auto in_this_attempt = [&](const std::string& key) {
    return fmt::format("{}/{}", key, environment.restart_count);
  };
  const auto wait_for_failure = [&] {
    // Kept until the process ends, so that the store reports the end.
    static TcpStore store(environment.store, {.secret = job_secret_from_environment().value});
    store.set_when_lost(in_this_attempt(fmt::format("ended/{}", rank)), "");
    store.get(in_this_attempt("failed"));
  };
  if (mode == "exit") {  // RANK STATUS: that rank exits with STATUS; the others hang
    if (rank == chosen) return std::stoi(arguments.at(2));
    sleep_for_ever();
  }
  if (mode == "signal") {  // RANK SIGNAL: that rank dies by SIGNAL; the others hang
    if (rank == chosen) raise(std::stoi(arguments.at(2)));
    sleep_for_ever();
  }
  if (mode == "linger") {  // RANK: it reports first but ends slowly; the others report later and end first
    if (rank == chosen) {
      report_error_to_launcher(ConfigError("[training] steps is -1"));
      TcpStore store(environment.store, {.secret = job_secret_from_environment().value});
      store.set(in_this_attempt("failed"), "");
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
    TcpStore store(environment.store, {.secret = job_secret_from_environment().value});
    store.set(in_this_attempt("failed"), "");
    // The other ranks' reports come first, as they do when an exception unwinds slowly.
    for (int other = 0; other < environment.world_size; ++other)
      if (other != rank) store.wait({in_this_attempt(fmt::format("ended/{}", other))}, std::chrono::seconds(30));
    throw ConfigError("[training] steps is -1");
  }
  const std::string& directory = arguments.at(1);
  if (mode == "environment") {  // DIRECTORY NAMES...: writes the rank's variables, arguments and allowed CPUs
    std::string text;
    for (std::size_t i = 2; i < arguments.size(); ++i) {
      const char* value = std::getenv(arguments[i].c_str());
      text += fmt::format("{}={}\n", arguments[i], value != nullptr ? value : "(not set)");
    }
    cpu_set_t mask;
    sched_getaffinity(0, sizeof mask, &mask);
    std::vector<int> cpus;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
      if (CPU_ISSET(cpu, &mask)) cpus.push_back(cpu);
    text += fmt::format("cpus={}\n", phalanx::cpu_list_text(cpus));
    meet(environment);
    note(directory, fmt::format("environment.{}", rank), text);
    return 0;
  }
  if (mode == "fail-once") {  // DIRECTORY RANK STATUS: that rank fails once, when all are there; then all succeed
    note(directory, fmt::format("attempt.{}.{}", environment.restart_count, rank), getpid());
    meet(environment);
    if (environment.restart_count > 0) return 0;
    if (rank == std::stoi(arguments.at(2))) return std::stoi(arguments.at(3));
    sleep_for_ever();
  }
  if (mode == "hold") {  // DIRECTORY: waits for DIRECTORY/go; writes its world
    meet(environment);
    note(directory, fmt::format("hold.{}.of.{}", rank, environment.world_size), getpid());
    while (access((directory + "/go").c_str(), F_OK) != 0) usleep(5000);
    return 0;
  }
  if (mode == "depart") {  // DIRECTORY: ends with 0 at SIGTERM, or when DIRECTORY/go exists. When DIRECTORY/lost exists
                           // it fails as if it had lost a peer, unless it is the only rank
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigprocmask(SIG_BLOCK, &set, nullptr);
    meet(environment);
    note(directory, fmt::format("depart.{}.of.{}", rank, environment.world_size), getpid());
    const timespec slice{0, 5'000'000};
    while (sigtimedwait(&set, nullptr, &slice) != SIGTERM) {
      if (environment.world_size > 1 && access((directory + "/lost").c_str(), F_OK) == 0) return 1;
      if (access((directory + "/go").c_str(), F_OK) == 0) return 0;
    }
    return 0;
  }
  if (mode == "usr1") {  // DIRECTORY: ends with 0 at SIGUSR1
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    sigprocmask(SIG_BLOCK, &set, nullptr);
    note(directory, fmt::format("pid.{}", rank), getpid());
    int signal = 0;
    sigwait(&set, &signal);
    return signal == SIGUSR1 ? 0 : 1;
  }
  if (mode == "stubborn") {  // DIRECTORY: ignores all signals that it can, and so does its child
    for (const int number : {SIGINT, SIGTERM, SIGUSR2}) signal(number, SIG_IGN);
    start_child(directory, rank);
    note(directory, fmt::format("pid.{}", rank), getpid());
    sleep_for_ever();
  }
  if (mode == "leave-child") {  // DIRECTORY: ends with 0 but leaves a child behind
    start_child(directory, rank);
    while (access(fmt::format("{}/child.{}", directory, rank).c_str(), F_OK) != 0) usleep(1000);
    return 0;
  }
  if (mode == "nearly-done") {  // DIRECTORY: announces a long time, at SIGTERM no time, and never ends
    announce_graceful_stop(std::chrono::seconds(3'600));
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigprocmask(SIG_BLOCK, &set, nullptr);
    note(directory, fmt::format("pid.{}", rank), getpid());
    int got = 0;
    sigwait(&set, &got);
    announce_graceful_stop(std::chrono::seconds(0));
    sleep_for_ever();
  }
  if (mode == "stopped-at-end") {  // a program that announces its stop; rank 1 is stopped when the other ends
    announce_graceful_stop(std::chrono::seconds(3));
    if (rank == 1) raise(SIGSTOP);
    return 0;
  }
  if (mode == "quit") {  // DIRECTORY: rank 1 reports SIGQUIT, the others do not handle it
    static volatile sig_atomic_t quit = 0;
    signal(SIGQUIT, SIG_DFL);
    if (rank == 1) signal(SIGQUIT, [](int number) { quit = number; });
    note(directory, fmt::format("pid.{}", rank), getpid());
    while (quit == 0) usleep(5000);
    note(directory, "quit.1", static_cast<int>(quit));
    sleep_for_ever();
  }
  if (mode == "graceful") {  // DIRECTORY: takes 2 s to end after a signal, longer than a rank gets that announces
                             // nothing; notes each signal and its number
    announce_graceful_stop(std::chrono::seconds(30));
    sigset_t awaited;
    sigemptyset(&awaited);
    for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGXCPU}) sigaddset(&awaited, number);
    sigprocmask(SIG_BLOCK, &awaited, nullptr);
    note(directory, fmt::format("pid.{}", rank), getpid());
    int got = 0;
    sigwait(&awaited, &got);
    note(directory, fmt::format("asked.{}", rank), got);
    std::string others;
    // In slices, so that a pause of the machine takes almost nothing of the 2 s.
    const timespec slice{0, 50'000'000};
    for (int slices = 0; slices < 40; ++slices)
      if (const int number = sigtimedwait(&awaited, nullptr, &slice); number > 0) {
        others += fmt::format("{} ", number);
        slices = 0;
      }
    note(directory, fmt::format("saved.{}", rank), others);
    return 0;
  }
  throw UsageError("launch_test_program: unknown mode " + mode);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run({argv + 1, argv + argc});
  } catch (const phalanx::Error& error) {
    if (!phalanx::report_error_to_launcher(error)) fmt::print(stderr, "{}\n", error.what());
    return error.exit_status();
  }
}
