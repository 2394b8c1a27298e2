#include "phalanx/launch/supervisor/supervisor.h"

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/log.h"
#include "phalanx/launch/supervisor/launch_folder.h"
#include "phalanx/launch/supervisor/node_membership.h"
#include "phalanx/launch/supervisor/rendezvous_host.h"
#include "phalanx/launch/supervisor/stop_signals.h"
#include "phalanx/launch/supervisor/worker_group.h"
#include "phalanx/store/job_secret.h"

namespace phalanx {
namespace {

using Clock = std::chrono::steady_clock;

double sent_now_s() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// These signals may come more than once without a second request. A closed terminal causes SIGHUP from the shell and
// from the kernel. The end of a login session also sends SIGTERM. A limit of processor time sends SIGXCPU every second.
bool comes_again_by_itself(int signal) { return signal == SIGHUP || signal == SIGXCPU; }

std::string own_host_name() {
  char name[256] = {};
  return gethostname(name, sizeof name - 1) == 0 ? name : "unknown";
}

// The agent of one node. It waits for orders, signals and its ranks, and handles each event.
class Agent {
 public:
  explicit Agent(const SupervisorOptions& options)
      : options_(options), many_nodes_(options.nodes.max_nodes > 1), secret_(secret_of(options)) {}

  SupervisorResult run() {
    // The guard is forked before any thread exists.
    reports_ = std::make_unique<LaunchFolder>();
    guard_ = std::make_unique<ProcessGuard>(reports_->path().string());
    signals_ = std::make_unique<SignalFd>(stop_signals());
    logs_ = std::make_unique<WorkerLogs>(options_.logs, options_.run_id);
    if (options_.logs.directory.empty() && options_.logs.need_directory())
      log::info_all_ranks(fmt::format("the ranks' output goes into {}", logs_->run_directory().string()));
    if (options_.binding.is_set()) cpus_ = bind_ranks(options_.binding, options_.ranks, options_.environment);
    membership_ = make_membership();
    while (!result_) step();
    if (group_ && group_->any_alive()) group_.reset();
    flush_output();
    report_stop();
    if (result_->error.empty())
      logs_->traces().remove_stop_dumps();
    else
      result_->error += logs_->traces().hint();
    return *result_;
  }

 private:
  const std::vector<int>& stop_signals() const {
    return options_.stop_signals.empty() ? default_stop_signals() : options_.stop_signals;
  }

  bool is_to_stop(int signal) const {
    return std::find(stop_signals().begin(), stop_signals().end(), signal) != stop_signals().end();
  }

  // Logs why the job was stopped; otherwise the log of a batch system would not say it. A user who pressed Ctrl-C knows
  // it, and jobs whose ranks all ended with 0 have reported it themselves.
  void report_stop() const {
    if (stop_signal_ == 0 || stop_signal_ == SIGINT) return;
    if (!result_->error.empty() || result_->exit_status != 128 + stop_signal_) return;
    pollfd console{STDERR_FILENO, POLLOUT, 0};
    if (poll(&console, 1, 0) != 1 || (console.revents & POLLOUT) == 0) return;  // nobody reads the console: do not wait
    const auto failures = group_ ? group_->failures() : std::vector<WorkerFailure>();
    log::warn(fmt::format("stopped by {}, and not all ranks have ended well{}", signal_text(stop_signal_),
                          failures.empty() ? "" : ": " + describe(failures.front())));
  }

  std::string secret_of(const SupervisorOptions& options) const {
    const auto& environment = options.environment;
    const JobSecret given = job_secret_from_environment([&](const std::string& name) -> std::optional<std::string> {
      const auto found = environment.find(name);
      return found == environment.end() ? std::nullopt : std::optional(found->second);
    });
    if (!given.value.empty()) return given.value;
    return many_nodes_ ? "" : generate_job_secret();
  }

  std::unique_ptr<Membership> make_membership() {
    NodeJoin join;
    join.host = own_host_name();
    join.pid = getpid();
    join.local_world_size = options_.ranks;
    join.node_rank = options_.nodes.fixed_node_ranks ? options_.nodes.node_rank : -1;
    join.role = options_.role;
    join.run_id = options_.run_id;
    join.min_nodes = options_.nodes.min_nodes;
    join.max_nodes = options_.nodes.max_nodes;
    join.max_restarts = options_.max_restarts;
    if (many_nodes_) return std::make_unique<NodeMembership>(options_.nodes, std::move(join), secret_);
    join.node_rank = -1;
    join.is_host = true;
    join.address = "127.0.0.1";
    return make_local_membership(
        {.max_restarts = options_.max_restarts, .run_id = options_.run_id, .address = "this node"}, std::move(join));
  }

  // Waits for the next event and handles it.
  void step() {
    std::vector<pollfd> fds{{signals_->get(), POLLIN, 0}, {membership_->fd(), POLLIN, 0}};
    int timeout_ms = -1;
    if (group_) {
      group_->add_poll_fds(fds);
      if (const auto wake_at = group_->wake_at(); wake_at != WorkerGroup::kNever) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(wake_at - Clock::now()).count();
        timeout_ms = static_cast<int>(std::clamp<std::int64_t>(left, 0, 3'600'000));
      }
    }
    if (poll(fds.data(), fds.size(), timeout_ms) < 0 && errno != EINTR)
      throw Error(fmt::format("poll: {}", std::strerror(errno)));
    if (group_) group_->pump(fds);
    while (const auto signal = signals_->next())
      if (*signal != SIGCHLD) signalled(*signal);
    if (group_) watch_ranks();
    while (!result_) {
      auto event = membership_->next();
      if (!event) break;
      if (last_result_) continue;
      if (event->order)
        execute(*event->order);
      else
        cut_off(*event);
    }
  }

  void send(NodeMessage::Kind kind, std::vector<WorkerFailure> failures = {}) {
    NodeMessage message{.kind = kind, .round = round_, .signal = stop_signal_, .sent_at_s = sent_now_s()};
    message.failures = std::move(failures);
    membership_->send(std::move(message));
  }

  void signalled(int signal) {
    if (!is_to_stop(signal)) {
      const int reached = group_ ? group_->pass_on(signal) : 0;
      if (signal == SIGQUIT && reached == 0)
        log::warn(
            "SIGQUIT: no rank here handles it, so none writes a flight recorder: none has finished its rendezvous yet, "
            "or all "
            "have ended");
      return;
    }
    const bool told = stop_signal_ != 0;
    if (told && comes_again_by_itself(signal)) return;
    const bool again = told_here_ && !comes_again_by_itself(stop_signal_);
    // Batch systems send a signal to all nodes at once. Then the host's order may arrive first. It is the same request,
    // and the ranks already have the signal.
    const bool known_by_order = told && !told_here_ && !comes_again_by_itself(stop_signal_);
    stop_signal_ = signal;
    told_here_ = true;
    if (known_by_order) return;
    if (group_ && group_->any_alive()) group_->stop(signal, again);
    if (!told) {
      send(NodeMessage::Kind::leaving);
      // Before this node has joined, no coordinator answers, and there may never be one. A node that is just joining
      // still sends the message.
      if (membership_->number() < 0 && !membership_->is_host()) finish(128 + signal);
    } else if (again && (!group_ || !group_->any_alive())) {
      finish(128 + signal);  // do not wait for answers from other nodes
    }
  }

  void watch_ranks() {
    const auto now = Clock::now();
    const bool were_alive = group_->any_alive();
    group_->step(now);
    if (last_result_) {
      if (!group_->any_alive()) result_ = last_result_;
      return;
    }
    if (group_->take_failure(now)) send(NodeMessage::Kind::failed, group_->failures());
    if (!were_alive || group_->any_alive()) return;
    if (group_->all_succeeded()) {
      send(NodeMessage::Kind::succeeded);
    } else if (stopping_ || stop_signal_ != 0) {
      send(NodeMessage::Kind::stopped, group_->failures());
    }
  }

  void execute(const Order& order) {
    using Kind = Order::Kind;
    if (membership_->is_host() && !order.text.empty() && (order.kind == Kind::stop || order.kind == Kind::signal))
      log::warn(order.text);
    switch (order.kind) {
      case Kind::prepare:
        if (order.member == membership_->number()) prepare(order.round);
        break;
      case Kind::start:
        start(order);
        break;
      case Kind::stop:
        if (group_ && order.round == round_) end_ranks([&] { group_->terminate(options_.failure_grace); });
        break;
      case Kind::signal:
        // If the user has signalled this node directly, the signal was passed on already.
        if (group_ && order.round == round_ && stop_signal_ == 0) {
          stop_signal_ = order.signal;
          end_ranks([&] { group_->stop(order.signal, /*again=*/false); });
        }
        break;
      case Kind::refuse:
        if (order.member == membership_->number()) refused(order);
        break;
      case Kind::end:
        ended(order);
        break;
    }
  }

  // On node rank 0: creates the store for the rendezvous of this round's ranks, and closes that of the last round.
  void prepare(int round) {
    round_ = round;
    group_.reset();
    NodeMessage message{.kind = NodeMessage::Kind::rendezvous, .round = round, .sent_at_s = sent_now_s()};
    try {
      rendezvous_host_.reset();
      rendezvous_host_ = std::make_unique<RendezvousHost>(membership_->own_address(), options_.master_port, secret_);
      message.store = rendezvous_host_->store().text();
      message.master_address = rendezvous_host_->master_address();
      message.master_port = rendezvous_host_->master_port();
    } catch (const CommError& error) {
      message.kind = NodeMessage::Kind::failed;
      WorkerFailure failure;
      failure.host = own_host_name();
      failure.exit_status = 1;
      failure.time_s = sent_now_s();
      failure.message = fmt::format("host {}: {}", failure.host, error.what());
      message.failures.push_back(std::move(failure));
    }
    membership_->send(std::move(message));
  }

  void start(const Order& order) {
    const auto assignment = std::find_if(order.assignments.begin(), order.assignments.end(),
                                         [&](const NodeAssignment& s) { return s.member == membership_->number(); });
    group_.reset();
    stopping_ = false;
    if (assignment == order.assignments.end()) {
      if (!waiting_told_)
        log::info_all_ranks(fmt::format("this node waits: the job has its {} nodes", order.assignments.size()));
      waiting_told_ = true;
      return;
    }
    round_ = order.round;
    if (stop_signal_ != 0) {  // signalled while the round was prepared: do not start its ranks
      send(NodeMessage::Kind::stopped);
      return;
    }
    logs_->begin_attempt(attempt_++);
    WorkerGroup::Context context{.options = &options_,
                                 .guard = guard_.get(),
                                 .logs = logs_.get(),
                                 .signal_mask = signals_->mask_before(),
                                 .reports = (reports_->path() / std::to_string(round_)).string(),
                                 .secret = secret_,
                                 .cpus = cpus_};
    try {
      group_ = std::make_unique<WorkerGroup>(std::move(context), order, *assignment);
    } catch (const Error& error) {
      if (!many_nodes_) throw;
      // Tell the other nodes before this one ends.
      WorkerFailure failure;
      failure.host = own_host_name();
      failure.exit_status = error.exit_status();
      failure.time_s = sent_now_s();
      failure.message = fmt::format("host {}: {}", failure.host, error.what());
      send(NodeMessage::Kind::failed, {failure});
      send(NodeMessage::Kind::stopped, {failure});
    }
  }

  template <class How>
  void end_ranks(How how) {
    const bool were_alive = group_->any_alive();
    stopping_ = true;
    if (were_alive)
      how();
    else
      send(NodeMessage::Kind::stopped, group_->failures());
  }

  void refused(const Order& order) {
    if (stop_signal_ == 0) {
      group_.reset();
      result_ = SupervisorResult{1, -1, order.text};
      return;
    }
    const bool good = group_ && group_->all_succeeded();
    finish(good ? 0 : 128 + stop_signal_);
  }

  void ended(const Order& order) {
    SupervisorResult result{order.exit_status, -1, ""};
    // The last signal to this node is the one that its user meant.
    if (order.failures.empty() && order.exit_status != 0 && stop_signal_ != 0) result.exit_status = 128 + stop_signal_;
    if (!order.failures.empty()) {
      result.failed_rank = order.failures.front().rank;
      result.error = membership_->is_host() ? failure_report(order.failures) : describe(order.failures.front());
    } else if (many_nodes_ && stop_signal_ == 0 && order.exit_status != 0) {
      result.error = order.text;
    }
    end_with(std::move(result));
  }

  // The connection to the other nodes is lost, so the ranks here cannot continue.
  void cut_off(const Membership::Event& event) {
    end_with(stop_signal_ != 0 ? SupervisorResult{128 + stop_signal_, -1, ""}
                               : SupervisorResult{event.exit_status, -1, event.broken});
  }

  // Ends at once, or after the ranks that still run have ended; no order can reach them any more.
  void end_with(SupervisorResult result) {
    if (group_ && group_->any_alive()) {
      group_->terminate(options_.failure_grace);
      last_result_ = std::move(result);
    } else {
      result_ = std::move(result);
    }
  }

  // Waits until all output of the ranks is shown, however slowly it is read, unless a stop signal comes.
  void flush_output() {
    constexpr std::chrono::seconds kPatience(1);
    const auto until = Clock::now() + kPatience;
    for (;;) {
      std::vector<pollfd> fds{{signals_->get(), POLLIN, 0}};
      for (const BackgroundWriter* console : logs_->consoles()) {
        console->acknowledge();
        if (!console->is_idle()) fds.push_back({console->fd(), POLLIN, 0});
      }
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
      if (fds.size() == 1) return;
      if (stop_signal_ != 0 && left <= 0) return discard_output(stop_signal_);
      if (poll(fds.data(), fds.size(), stop_signal_ != 0 ? static_cast<int>(left) : -1) < 0 && errno != EINTR) return;
      while (const auto signal = signals_->next()) {
        if (is_to_stop(*signal)) return discard_output(*signal);
      }
    }
  }

  void discard_output(int signal) {
    if (result_->exit_status == 0) result_->exit_status = 128 + signal;
  }

  void finish(int exit_status) { result_ = SupervisorResult{exit_status, -1, ""}; }

  const SupervisorOptions& options_;
  const bool many_nodes_;
  const std::string secret_;
  std::unique_ptr<LaunchFolder> reports_;
  std::unique_ptr<ProcessGuard> guard_;
  std::unique_ptr<SignalFd> signals_;
  std::unique_ptr<WorkerLogs> logs_;
  std::vector<std::vector<int>> cpus_;
  std::unique_ptr<RendezvousHost> rendezvous_host_;
  std::unique_ptr<Membership> membership_;
  std::unique_ptr<WorkerGroup> group_;
  int round_ = 0;
  int attempt_ = 0;
  int stop_signal_ = 0;     // received here or by an order
  bool told_here_ = false;  // this launcher itself has received a stop signal
  bool stopping_ = false;   // the round's ranks are being ended
  bool waiting_told_ = false;
  std::optional<SupervisorResult> last_result_;  // the result to return when no rank runs any more
  std::optional<SupervisorResult> result_;
};

}  // namespace

SupervisorResult supervise(const SupervisorOptions& options) {
  if (options.command.empty()) throw UsageError("no program to launch");
  if (options.ranks < 1) throw UsageError(fmt::format("cannot launch {} ranks: expected at least 1", options.ranks));
  return Agent(options).run();
}

}  // namespace phalanx
