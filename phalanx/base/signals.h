// The names of signals, and how other processes handle them.
//
//   signal_of_name("SIGUSR1")              // also "USR1"; nullopt for an unknown name
//   if (!handles_signal(pid, SIGQUIT)) ... // the signal would end it
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace phalanx {

/// The number of a signal that a process may handle: not SIGKILL, not SIGSTOP.
std::optional<int> signal_of_name(std::string_view name);
/// "SIGUSR1"; "signal 34" for one without a name.
std::string name_of_signal(int signal);

/// True if the process has a handler for the signal, ignores it, or blocks it (to read it). False for a process that
/// has ended, and for one that receives it by sigwait().
bool handles_signal(pid_t process, int signal);
/// True if the process ignores the signal.
bool ignores_signal(pid_t process, int signal);
/// True if the process is stopped (SIGSTOP, SIGTSTP). Then only SIGKILL and SIGCONT reach it.
bool is_stopped(pid_t process);
/// The current processes of a process group.
std::vector<pid_t> processes_of_group(pid_t group);

}  // namespace phalanx
