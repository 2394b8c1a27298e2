#include "phalanx/launch/supervisor.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>

#include "phalanx/base/error.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/comm/tcp_store.h"
#include "phalanx/launch/child_process.h"
#include "phalanx/launch/output_relay.h"
#include "phalanx/launch/worker_report.h"

namespace phalanx {
namespace {

using SupervisorClock = std::chrono::steady_clock;
constexpr auto kNever = SupervisorClock::time_point::max();

double wall_clock_s() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// The signals that this class reads instead of dying from; the mask is restored with it.
class SignalFd {
 public:
  SignalFd() {
    sigset_t set;
    sigemptyset(&set);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGCHLD}) sigaddset(&set, signal);
    pthread_sigmask(SIG_BLOCK, &set, &before_);
    fd_.reset(signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
    if (!fd_) throw Error(fmt::format("signalfd: {}", std::strerror(errno)));
  }
  ~SignalFd() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalFd(const SignalFd&) = delete;
  SignalFd& operator=(const SignalFd&) = delete;
  int get() const { return fd_.get(); }
  const sigset_t& mask_before() const { return before_; }
  std::optional<int> next() {
    signalfd_siginfo info{};
    if (read(fd_.get(), &info, sizeof info) != sizeof info) return std::nullopt;
    return static_cast<int>(info.ssi_signo);
  }

 private:
  sigset_t before_{};
  UniqueFd fd_;
};

// A port for the programs that make their own rendezvous at MASTER_PORT. Bound and not listened on, it is given to
// nobody else by the system, while a server that sets SO_REUSEADDR, as they do, may still bind it.
class ReservedPort {
 public:
  ReservedPort() : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const int on = 1;
    setsockopt(fd_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (!fd_ || bind(fd_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0)
      throw Error(fmt::format("cannot reserve a port on 127.0.0.1: {}", std::strerror(errno)));
  }
  std::uint16_t port() const { return local_port(fd_.get()); }

 private:
  UniqueFd fd_;
};

struct SupervisedRank {
  int rank = 0;
  pid_t pid = -1;
  bool alive = false;
  bool told_to_end = false;  // by us: its death then says nothing
  int wait_status = 0;
  double ended_at = 0;
  SupervisorClock::time_point kill_at = kNever;
  std::string report_directory;
  std::unique_ptr<OutputRelay> out, err;

  bool failed() const { return !alive && pid > 0 && !(WIFEXITED(wait_status) && WEXITSTATUS(wait_status) == 0); }
};

class Supervisor {
 public:
  explicit Supervisor(const SupervisorOptions& options) : options_(options) {}

  SupervisorResult run() {
    // The guard is forked before there is any thread.
    reports_ = std::make_unique<TempDirectory>("launch");
    guard_ = std::make_unique<ProcessGuard>(reports_->path().string());
    signals_ = std::make_unique<SignalFd>();
    store_ = std::make_unique<TcpStoreServer>();
    try {
      for (int rank = 0; rank < options_.ranks; ++rank) start(rank);
      while (std::any_of(ranks_.begin(), ranks_.end(), [](const auto& rank) { return rank.alive; })) step();
    } catch (...) {
      kill_everything();
      throw;
    }
    return verdict();
  }

 private:
  void start(int rank) {
    auto& entry = ranks_.emplace_back();
    entry.rank = rank;
    entry.report_directory = (reports_->path() / std::to_string(rank)).string();
    std::filesystem::create_directory(entry.report_directory);
    ChildSpec spec;
    spec.command = options_.command;
    spec.environment = environment_of(entry);
    spec.signal_mask = signals_->mask_before();
    const UniqueFd null(open("/dev/null", O_RDONLY | O_CLOEXEC));
    if (rank != 0 || isatty(STDIN_FILENO)) spec.stdin_fd = null.get();
    if (rank != 0 || options_.prefix_rank_0) {
      const std::string prefix = fmt::format("[{}] ", rank);
      entry.out = std::make_unique<OutputRelay>(prefix, STDOUT_FILENO);
      entry.err = std::make_unique<OutputRelay>(prefix, STDERR_FILENO);
      spec.stdout_fd = entry.out->write_end();
      spec.stderr_fd = entry.err->write_end();
    }
    entry.pid = spawn_child(spec);
    entry.alive = true;
    guard_->watch(entry.pid);
    for (auto* relay : {entry.out.get(), entry.err.get()})
      if (relay != nullptr) relay->close_write_end();
  }

  EnvironmentMap environment_of(const SupervisedRank& entry) const {
    EnvironmentMap result = options_.environment;
    prepare_environment(result, options_.ranks);
    const std::string rank = std::to_string(entry.rank), size = std::to_string(options_.ranks);
    const std::vector<std::pair<std::string, std::string>> variables{
        {"RANK", rank},
        {"LOCAL_RANK", rank},
        {"ROLE_RANK", rank},
        {"WORLD_SIZE", size},
        {"LOCAL_WORLD_SIZE", size},
        {"ROLE_WORLD_SIZE", size},
        {"GROUP_RANK", "0"},
        {"GROUP_WORLD_SIZE", "1"},
        {"ROLE_NAME", "default"},
        {"MASTER_ADDR", "127.0.0.1"},
        {"MASTER_PORT", std::to_string(master_port_.port())},
        {"TORCHELASTIC_RESTART_COUNT", "0"},
        {"TORCHELASTIC_MAX_RESTARTS", "0"},
        {"TORCHELASTIC_RUN_ID", "phalanx"},
        {"TORCHELASTIC_USE_AGENT_STORE", "False"},
        {"PHALANX_STORE", store_->address().text()},
        {"PHALANX_REPORT_DIR", entry.report_directory}};
    for (const auto& [name, value] : variables) result[name] = value;
    result.erase("TORCHELASTIC_ERROR_FILE");  // of a launcher around this one
    return result;
  }

  // Waits for something to happen and deals with it.
  void step() {
    std::vector<pollfd> fds{{signals_->get(), POLLIN, 0}};
    std::vector<OutputRelay*> relays;
    auto wake_at = terminate_at_;
    for (auto& rank : ranks_) {
      if (rank.alive) wake_at = std::min(wake_at, rank.kill_at);
      for (auto* relay : {rank.out.get(), rank.err.get()})
        if (relay != nullptr && relay->is_open()) {
          fds.push_back({relay->read_end(), POLLIN, 0});
          relays.push_back(relay);
        }
    }
    int timeout_ms = -1;
    if (wake_at != kNever) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(wake_at - SupervisorClock::now()).count();
      timeout_ms = static_cast<int>(std::clamp<std::int64_t>(left, 0, 3'600'000));
    }
    if (poll(fds.data(), fds.size(), timeout_ms) < 0 && errno != EINTR)
      throw Error(fmt::format("poll: {}", std::strerror(errno)));
    for (std::size_t i = 0; i < relays.size(); ++i)
      if (fds[i + 1].revents != 0) relays[i]->pump();
    while (const auto signal = signals_->next())
      if (*signal != SIGCHLD) stop_requested(*signal);
    reap();
    const auto now = SupervisorClock::now();
    if (now >= terminate_at_) {
      terminate_at_ = kNever;
      for (auto& rank : ranks_)
        if (rank.alive) {
          rank.told_to_end = true;
          kill(-rank.pid, SIGTERM);
          rank.kill_at = std::min(rank.kill_at, now + options_.failure_grace);
        }
    }
    for (auto& rank : ranks_)
      if (rank.alive && now >= rank.kill_at) {
        rank.told_to_end = true;
        kill(-rank.pid, SIGKILL);
        rank.kill_at = kNever;
      }
  }

  void stop_requested(int signal) {
    const auto now = SupervisorClock::now();
    const bool again = stop_signal_ != 0;
    stop_signal_ = signal;
    for (auto& rank : ranks_) {
      if (!rank.alive) continue;
      rank.told_to_end = true;
      kill(-rank.pid, again ? SIGKILL : signal);
      if (again) continue;
      const auto announced = read_graceful_stop(rank.report_directory);
      const auto grace = announced          ? std::chrono::milliseconds(*announced)
                         : signal == SIGINT ? options_.interrupt_grace
                                            : options_.terminate_grace;
      rank.kill_at = std::min(rank.kill_at, now + grace);
    }
  }

  void reap() {
    for (auto& rank : ranks_) {
      if (!rank.alive) continue;
      siginfo_t info{};
      // While the dead leader is not reaped, its group's number is surely its own: what it started ends with it.
      if (waitid(P_PID, static_cast<id_t>(rank.pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0)
        continue;
      kill(-rank.pid, SIGKILL);
      guard_->release(rank.pid);
      waitpid(rank.pid, &rank.wait_status, 0);
      rank.alive = false;
      rank.ended_at = wall_clock_s();
      for (auto* relay : {rank.out.get(), rank.err.get()})
        if (relay != nullptr && relay->is_open()) relay->finish();
      if (rank.failed() && !failing_ && stop_signal_ == 0) {
        failing_ = true;
        const auto report = read_worker_report(rank.report_directory);
        const bool secondary = report && report->kind == "CommError";
        terminate_at_ = SupervisorClock::now() + (secondary ? options_.blame_grace : std::chrono::milliseconds(0));
      }
    }
  }

  void kill_everything() {
    for (auto& rank : ranks_)
      if (rank.alive) {
        kill(-rank.pid, SIGKILL);
        guard_->release(rank.pid);
        waitpid(rank.pid, nullptr, 0);
        rank.alive = false;
      }
  }

  SupervisorResult verdict() const {
    const SupervisedRank* root = nullptr;
    std::optional<WorkerReport> root_report;
    std::pair<int, double> root_order;
    for (const auto& rank : ranks_) {
      if (!rank.failed()) continue;
      const auto report = read_worker_report(rank.report_directory);
      if (!report && rank.told_to_end) continue;
      const std::pair<int, double> order{report && report->kind == "CommError",
                                         report ? report->time_s : rank.ended_at};
      if (root != nullptr && root_order <= order) continue;
      root = &rank;
      root_report = report;
      root_order = order;
    }
    const bool all_good = std::none_of(ranks_.begin(), ranks_.end(), [](const auto& rank) { return rank.failed(); });
    if (all_good) return {};
    // A peer that was told to end may take others' communication with it: after a stop only real errors count.
    if (stop_signal_ != 0 && (root == nullptr || root_order.first == 1)) return {128 + stop_signal_, -1, ""};
    SupervisorResult result;
    result.failed_rank = root->rank;
    const int status = root->wait_status;
    // Told to end, because a peer ended first, while it was still on its way out: what it reported is what counts.
    if (root_report && root->told_to_end) {
      result.exit_status = root_report->exit_status;
      result.error = fmt::format("rank {}: {}", root->rank, root_report->message);
      return result;
    }
    std::string ended;
    if (WIFSIGNALED(status)) {
      const int signal = WTERMSIG(status);
      result.exit_status = 128 + signal;
      const char* name = sigabbrev_np(signal);
      ended = fmt::format("was killed by signal {} (SIG{})", signal, name != nullptr ? name : "?");
      if (signal == SIGKILL) ended += "; if nobody did that, the machine may be short of memory";
    } else {
      result.exit_status = WEXITSTATUS(status) == 2 ? 2 : 1;
      ended = fmt::format("ended with exit status {}", WEXITSTATUS(status));
    }
    result.error = root_report ? fmt::format("rank {}: {}", root->rank, root_report->message)
                               : fmt::format("rank {} {}", root->rank, ended);
    if (root_report && WIFSIGNALED(status)) result.error += fmt::format(" (the rank {})", ended);
    return result;
  }

  const SupervisorOptions& options_;
  ReservedPort master_port_;
  std::unique_ptr<TempDirectory> reports_;
  std::unique_ptr<ProcessGuard> guard_;
  std::unique_ptr<SignalFd> signals_;
  std::unique_ptr<TcpStoreServer> store_;
  std::vector<SupervisedRank> ranks_;
  bool failing_ = false;
  int stop_signal_ = 0;
  SupervisorClock::time_point terminate_at_ = kNever;
};

}  // namespace

SupervisorResult supervise(const SupervisorOptions& options) {
  if (options.command.empty()) throw UsageError("no program to launch");
  if (options.ranks < 1) throw UsageError(fmt::format("cannot launch {} ranks: expected at least 1", options.ranks));
  return Supervisor(options).run();
}

}  // namespace phalanx
