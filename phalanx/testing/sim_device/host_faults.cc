#include "phalanx/testing/sim_device/host_faults.h"

#include <fmt/format.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <string>

#include "phalanx/testing/sim_device/runtime.h"

namespace phalanx::sim_device {
namespace {

std::atomic<Runtime*> watched{nullptr};
struct sigaction before;

bool is_write_fault([[maybe_unused]] void* context) {
#if defined(__x86_64__)
  return (static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2) != 0;
#else
  return true;
#endif
}

// The access itself caused the signal, outside of any code that holds a lock of ours or of the C library.
void on_fault(int signal, siginfo_t* info, void* context) {
  Runtime* const runtime = watched.load();
  if (runtime != nullptr && runtime->pinned().owns(info->si_addr)) {
    const bool is_write = is_write_fault(context);
    if (const auto use = runtime->pinned().take_conflict(info->si_addr, is_write)) {
      runtime->report_host_access(*use, is_write);
      return;
    }
  }
  if (runtime != nullptr && runtime->memory().owns(info->si_addr)) {
    const std::string text = fmt::format("the host touched memory of simulated device {} at {}\n",
                                         runtime->memory().device_of(info->si_addr), info->si_addr);
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text.data(), text.size());
  }
  sigaction(signal, &before, nullptr);  // the access is repeated, and meets that
}

}  // namespace

void handle_host_faults(Runtime* runtime) {
  watched.store(runtime);
  static std::atomic<bool> is_installed{false};  // twice, and `before` would be on_fault itself
  if (runtime == nullptr || is_installed.exchange(true)) return;
  struct sigaction action {};
  action.sa_sigaction = &on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, &before);
}

}  // namespace phalanx::sim_device
