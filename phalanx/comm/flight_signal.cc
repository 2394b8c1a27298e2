#include "phalanx/comm/flight_signal.h"

#include <pthread.h>
#include <semaphore.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <mutex>
#include <thread>
#include <vector>

#include "phalanx/base/start_thread.h"
#include "phalanx/comm/flight_log.h"

namespace phalanx {
namespace {

// A signal concerns the whole process, so this cannot belong to an object. Its thread may run when the process ends, so
// it is never destroyed.
struct FlightSignal {
  sem_t asked;
  std::mutex mutex;
  std::vector<std::weak_ptr<FlightLogs>> logs;
  pid_t process = 0;  // the process whose thread listens
  std::atomic<bool> ends{false};
};

FlightSignal* flight_signal = nullptr;  // for the handler: set before it is installed
std::once_flag flight_signal_made;

void ask_for_flight_logs(int) {
  const int error = errno;
  sem_post(&flight_signal->asked);
  errno = error;
}

void ask_for_flight_logs_and_end(int number) {
  if (flight_signal->process != getpid()) {  // a forked child has the handler, but no thread that listens
    signal(number, SIG_DFL);
    raise(number);
    return;
  }
  flight_signal->ends.store(true);
  ask_for_flight_logs(number);
}

void install_handler(int number, void (*handler)(int)) {
  struct sigaction now {};
  if (sigaction(number, nullptr, &now) != 0 || (now.sa_flags & SA_SIGINFO) != 0) return;
  // A shell script starts its background processes with SIGQUIT ignored; no program chose that.
  const bool is_free = now.sa_handler == SIG_DFL || (number == SIGQUIT && now.sa_handler == SIG_IGN);
  if (!is_free) return;
  struct sigaction ours {};
  ours.sa_handler = handler;
  ours.sa_flags = SA_RESTART;
  sigaction(number, &ours, nullptr);
}

[[noreturn]] void end_by_sigterm() {
  signal(SIGTERM, SIG_DFL);
  for (;;) {
    kill(getpid(), SIGTERM);
    pause();
  }
}

void answer_signals() {
  pthread_setname_np(pthread_self(), "phalanx-flight");
  for (;;) {
    if (sem_wait(&flight_signal->asked) != 0) continue;        // EINTR
    while (sem_trywait(&flight_signal->asked) == 0) continue;  // several at once are one
    std::vector<std::weak_ptr<FlightLogs>> logs;
    {
      const std::lock_guard lock(flight_signal->mutex);
      logs = flight_signal->logs;
    }
    for (const auto& one : logs)
      if (const auto alive = one.lock()) alive->dump(flight_signal->ends.load() ? "SIGTERM" : "SIGQUIT");
    if (flight_signal->ends.load()) end_by_sigterm();
  }
}

void start_answering() {
  // Leave signals to the other threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  start_thread("the flight recorder", answer_signals).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace

void dump_on_flight_signal(const std::shared_ptr<FlightLogs>& logs) {
  std::call_once(flight_signal_made, [] {
    flight_signal = new FlightSignal;
    sem_init(&flight_signal->asked, 0, 0);
  });
  const std::lock_guard lock(flight_signal->mutex);
  std::erase_if(flight_signal->logs, [](const auto& one) { return one.expired(); });
  flight_signal->logs.push_back(logs);
  if (flight_signal->process == getpid()) return;
  flight_signal->process = getpid();
  start_answering();
  install_handler(SIGQUIT, ask_for_flight_logs);
  install_handler(SIGTERM, ask_for_flight_logs_and_end);
}

}  // namespace phalanx
