// Signals by name, and what other processes do with them.
//
//   signal_of_name("SIGUSR1")              // also "USR1"; nothing for a name that is none
//   if (!handles_signal(pid, SIGQUIT)) ... // it would end by it
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace phalanx {

/// Of a signal that a process may handle: not SIGKILL, not SIGSTOP.
std::optional<int> signal_of_name(std::string_view name);
/// "SIGUSR1"; "signal 34" for one without a name.
std::string name_of_signal(int signal);

/// Whether a process has a handler for the signal, ignores it, or holds it back to read it. False for one that has
/// ended, and for one that takes it by sigwait().
bool handles_signal(pid_t process, int signal);
/// Whether it would never see the signal.
bool ignores_signal(pid_t process, int signal);
/// Whether it stands still (SIGSTOP, SIGTSTP), so that only SIGKILL and SIGCONT reach it.
bool is_stopped(pid_t process);
/// The processes of a group that there are now.
std::vector<pid_t> processes_of_group(pid_t group);

}  // namespace phalanx
