#include "phalanx/base/signals.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "phalanx/base/testing/matchers.h"

namespace phalanx {
namespace {

TEST(SignalsTest, NamesAreReadWithAndWithoutTheirBeginning) {
  EXPECT_EQ(signal_of_name("SIGUSR1"), SIGUSR1);
  EXPECT_EQ(signal_of_name("TERM"), SIGTERM);
  for (const char* wrong : {"SIGKILL", "STOP", "SIGFOO", "", "SIG", "sigterm", "10"})
    EXPECT_EQ(signal_of_name(wrong), std::nullopt) << wrong;
  EXPECT_EQ(name_of_signal(SIGXCPU), "SIGXCPU");
  EXPECT_EQ(name_of_signal(40), "signal 40");
}

// Starts a process in its own process group. When this returns, the process has run `prepare`.
template <class Prepare>
pid_t start_waiting(Prepare prepare) {
  int ready[2];
  EXPECT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    setpgid(0, 0);
    prepare();
    close(ready[0]);
    close(ready[1]);
    for (;;) pause();
  }
  close(ready[1]);
  char nothing = 0;
  EXPECT_EQ(read(ready[0], &nothing, 1), 0);
  close(ready[0]);
  return child;
}

void end_waiting(pid_t process) {
  kill(process, SIGKILL);
  waitpid(process, nullptr, 0);
}

TEST(SignalsTest, AProcessHandlesWhatItCatchesIgnoresOrHoldsBack) {
  const pid_t process = start_waiting([] {
    for (const int number : {SIGUSR1, SIGUSR2, SIGQUIT, SIGTERM}) signal(number, SIG_DFL);
    signal(SIGUSR1, [](int) {});
    signal(SIGUSR2, SIG_IGN);
    sigset_t held;
    sigemptyset(&held);
    sigaddset(&held, SIGTERM);
    sigprocmask(SIG_SETMASK, &held, nullptr);
  });
  for (const int handled : {SIGUSR1, SIGUSR2, SIGTERM}) EXPECT_TRUE(handles_signal(process, handled)) << handled;
  EXPECT_FALSE(handles_signal(process, SIGQUIT));
  EXPECT_TRUE(ignores_signal(process, SIGUSR2));
  for (const int seen : {SIGUSR1, SIGQUIT, SIGTERM}) EXPECT_FALSE(ignores_signal(process, seen)) << seen;
  EXPECT_THAT(processes_of_group(process), UnorderedElementsAre(process));
  EXPECT_FALSE(is_stopped(process));
  kill(process, SIGSTOP);
  siginfo_t info{};
  waitid(P_PID, static_cast<id_t>(process), &info, WSTOPPED);
  EXPECT_TRUE(is_stopped(process));
  end_waiting(process);
  EXPECT_FALSE(is_stopped(process));
  EXPECT_FALSE(handles_signal(process, SIGUSR1));
  EXPECT_THAT(processes_of_group(process), UnorderedElementsAre());
}

}  // namespace
}  // namespace phalanx
