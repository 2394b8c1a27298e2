#include "phalanx/launch/supervisor/child_process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <set>

#include "phalanx/base/error.h"
#include "phalanx/base/start_thread.h"

namespace phalanx {
namespace {

using CpuMask = std::vector<unsigned long>;  // in the kernel's format: one bit per CPU

CpuMask mask_of(const std::vector<int>& cpus) {
  constexpr std::size_t kBits = 8 * sizeof(CpuMask::value_type);
  CpuMask mask;
  for (const int cpu : cpus) {
    const auto bit = static_cast<std::size_t>(cpu);
    if (mask.size() <= bit / kBits) mask.resize(bit / kBits + 1, 0);
    mask[bit / kBits] |= 1UL << (bit % kBits);
  }
  return mask;
}

// Runs in the child, between fork and exec: async-signal-safe calls only. Returns the errno of the call that failed.
int become_program(const ChildSpec& spec, const CpuMask& cpus, char* const* arguments, char* const* environment,
                   pid_t parent) {
  if (setpgid(0, 0) != 0) return errno;
  if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return errno;
  if (getppid() != parent) _exit(127);  // the parent died before PR_SET_PDEATHSIG was set
  const int wanted[3] = {spec.stdin_fd, spec.stdout_fd, spec.stderr_fd};
  for (int fd = 0; fd < 3; ++fd)
    if (wanted[fd] >= 0 && wanted[fd] != fd && dup2(wanted[fd], fd) < 0) return errno;
  if (!cpus.empty() && syscall(SYS_sched_setaffinity, 0, cpus.size() * sizeof(cpus[0]), cpus.data()) < 0) return errno;
  sigprocmask(SIG_SETMASK, &spec.signal_mask, nullptr);
  execvpe(arguments[0], arguments, environment);
  return errno;
}

UniqueFd make_pipe(UniqueFd& read_end) {
  int fds[2];
  if (pipe2(fds, O_CLOEXEC) != 0) throw Error(fmt::format("cannot make a pipe: {}", std::strerror(errno)));
  read_end.reset(fds[0]);
  return UniqueFd(fds[1]);
}

[[noreturn]] void guard_main(int input, const std::string& folder) {
  std::set<pid_t> groups;
  pid_t message = 0;
  for (;;) {
    const ssize_t got = read(input, &message, sizeof message);
    if (got < 0 && errno == EINTR) continue;
    if (got != sizeof message) break;
    if (message > 0)
      groups.insert(message);
    else
      groups.erase(-message);
  }
  for (const pid_t group : groups) kill(-group, SIGKILL);
  std::error_code ignored;
  if (!groups.empty() && !folder.empty()) std::filesystem::remove_all(folder, ignored);
  _exit(0);
}

}  // namespace

pid_t spawn_child(const ChildSpec& spec) {
  std::vector<std::string> assignments;
  for (const auto& [name, value] : spec.environment) assignments.push_back(fmt::format("{}={}", name, value));
  std::vector<char*> arguments, environment;
  for (const auto& argument : spec.command) arguments.push_back(const_cast<char*>(argument.c_str()));
  for (const auto& assignment : assignments) environment.push_back(const_cast<char*>(assignment.c_str()));
  arguments.push_back(nullptr);
  environment.push_back(nullptr);

  // A successful exec closes this pipe; after a failure it carries the errno.
  UniqueFd failure_read;
  UniqueFd failure_write = make_pipe(failure_read);
  const pid_t parent = getpid();
  const CpuMask cpus = mask_of(spec.cpus);
  const pid_t pid = fork();
  if (pid < 0) throw_not_started("a rank", errno);
  if (pid == 0) {
    const int error = become_program(spec, cpus, arguments.data(), environment.data(), parent);
    [[maybe_unused]] const auto written = write(failure_write.get(), &error, sizeof error);
    _exit(127);
  }
  failure_write.reset();
  int error = 0;
  ssize_t got = 0;
  do got = read(failure_read.get(), &error, sizeof error);
  while (got < 0 && errno == EINTR);
  if (got == 0) return pid;
  waitpid(pid, nullptr, 0);
  const auto& program = spec.command.front();
  if (error == ENOENT)
    throw UsageError(
        program.find('/') == std::string::npos
            ? fmt::format("the program '{}' was not found in PATH (for one in this folder write ./{})", program,
                          program)
            : fmt::format("the program '{}' does not exist, or the interpreter it names does not", program));
  if (error == EACCES || error == ENOEXEC) throw UsageError(fmt::format("the program '{}' is not executable", program));
  throw Error(fmt::format("cannot run '{}': {}", program, std::strerror(error)));
}

ProcessGuard::ProcessGuard(const std::string& folder) {
  UniqueFd input;
  pipe_ = make_pipe(input);
  pid_ = fork();
  if (pid_ < 0) throw_not_started("the guard of the ranks", errno);
  if (pid_ == 0) {
    pipe_.reset();
    // It ignores the signals that end its owner, and keeps none of its owner's streams open.
    setsid();
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, nullptr);
    const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    for (int fd = 0; fd < 3; ++fd) dup2(null, fd);
    prctl(PR_SET_NAME, "phalanx-guard");
    guard_main(input.get(), folder);
  }
}

ProcessGuard::~ProcessGuard() {
  pipe_.reset();
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

void ProcessGuard::send(pid_t message) {
  // The guard never ends before its owner, and its pipe never fills up. If it is lost anyway, only a second safety net
  // is lost.
  ssize_t written = 0;
  do written = write(pipe_.get(), &message, sizeof message);
  while (written < 0 && errno == EINTR);
}

void ProcessGuard::watch(pid_t group) { send(group); }
void ProcessGuard::release(pid_t group) { send(-group); }

}  // namespace phalanx
