#include "phalanx/launch/supervisor/worker_group.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <map>
#include <optional>
#include <utility>

#include "phalanx/base/cpu.h"
#include "phalanx/base/error.h"
#include "phalanx/base/log.h"
#include "phalanx/base/signals.h"
#include "phalanx/launch/supervisor/visible_gpus.h"
#include "phalanx/launch/supervisor/worker_report.h"

namespace phalanx {
namespace {

constexpr std::chrono::milliseconds kHearEvery{500};
// For a rank that is stopped (SIGSTOP) during a stop of the job, so that all ranks end within 5 s.
constexpr std::chrono::milliseconds kStoppedInStop{2'500};

constexpr std::string_view kLocalRankMacro = "${local_rank}";

double now_since_epoch() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::vector<std::string> command_of(std::vector<std::string> command, int local_rank) {
  const std::string value = std::to_string(local_rank);
  for (std::string& word : command)
    for (std::size_t at = word.find(kLocalRankMacro); at != std::string::npos;
         at = word.find(kLocalRankMacro, at + value.size()))
      word.replace(at, kLocalRankMacro.size(), value);
  return command;
}

// The GPU of a rank that must see only one: the local rank's entry of the visible list.
std::string gpu_of(const EnvironmentMap& environment, int local_rank) {
  const auto found = environment.find("CUDA_VISIBLE_DEVICES");
  if (found == environment.end()) return std::to_string(local_rank);
  const std::vector<std::string> gpus = listed_gpus(found->second);
  if (static_cast<std::size_t>(local_rank) >= gpus.size())
    throw UsageError(
        fmt::format("--virtual-local-rank: there is no GPU for local rank {}: CUDA_VISIBLE_DEVICES is '{}', of which "
                    "CUDA sees {}; start fewer ranks, or list a GPU for each",
                    local_rank, found->second, gpus.size()));
  return gpus[static_cast<std::size_t>(local_rank)];
}

}  // namespace

bool WorkerGroup::Rank::failed() const {
  return !alive && pid > 0 && !(WIFEXITED(wait_status) && WEXITSTATUS(wait_status) == 0);
}

WorkerGroup::WorkerGroup(Context context, const Order& start_order, const NodeAssignment& assignment)
    : context_(std::move(context)), host_(assignment.host), cores_(usable_cores()) {
  ranks_.reserve(static_cast<std::size_t>(assignment.local_world_size));
  try {
    for (int local_rank = 0; local_rank < assignment.local_world_size; ++local_rank)
      start(local_rank, start_order, assignment);
    if (start_order.assignments.size() > 1) {
      std::map<int, pid_t> processes;
      for (const Rank& rank : ranks_) processes[rank.rank] = rank.pid;
      stopped_ranks_ = std::make_unique<StoppedRanks>(parse_host_port(start_order.store, "the store of the ranks"),
                                                      context_.secret, std::move(processes));
    }
  } catch (...) {
    kill_all();
    throw;
  }
}

WorkerGroup::~WorkerGroup() { kill_all(); }

void WorkerGroup::kill_all() {
  for (Rank& rank : ranks_) {
    if (!rank.alive) continue;
    kill(-rank.pid, SIGKILL);
    context_.guard->release(rank.pid);
    waitpid(rank.pid, nullptr, 0);
  }
}

void WorkerGroup::start(int local_rank, const Order& order, const NodeAssignment& assignment) {
  Rank& entry = ranks_.emplace_back();
  entry.local_rank = local_rank;
  entry.rank = assignment.first_rank + local_rank;
  entry.report_directory = fmt::format("{}/{}", context_.reports, local_rank);
  std::filesystem::create_directories(entry.report_directory);
  ChildSpec spec;
  for (int stream = 0; stream < 2; ++stream)
    entry.streams[stream] = context_.logs->open({entry.rank, local_rank, assignment.role}, stream);
  entry.error_file = context_.logs->error_file(local_rank);
  if (entry.error_file.empty()) entry.error_file = entry.report_directory + "/torch_error.json";
  spec.command = command_of(context_.options->command, local_rank);
  spec.environment = environment_of(entry, order, assignment);
  spec.signal_mask = context_.signal_mask;
  if (!context_.cpus.empty()) spec.cpus = context_.cpus[static_cast<std::size_t>(local_rank)];
  const UniqueFd null(open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (entry.rank != 0 || isatty(STDIN_FILENO)) spec.stdin_fd = null.get();
  spec.stdout_fd = entry.streams[0].child_fd();
  spec.stderr_fd = entry.streams[1].child_fd();
  entry.pid = spawn_child(spec);
  entry.alive = true;
  context_.guard->watch(entry.pid);
  note_started_process(entry.report_directory, entry.rank, entry.pid);
  for (WorkerStream& stream : entry.streams) {
    if (stream.relay) stream.relay->close_write_end();
    stream.file.reset();
  }
}

EnvironmentMap WorkerGroup::environment_of(const Rank& entry, const Order& order,
                                           const NodeAssignment& assignment) const {
  EnvironmentMap result = context_.options->environment;
  int world_size = 0, role_rank = entry.local_rank, role_size = 0;
  for (const NodeAssignment& other : order.assignments) {
    world_size += other.local_world_size;
    if (other.role != assignment.role) continue;
    role_size += other.local_world_size;
    if (other.node_rank < assignment.node_rank) role_rank += other.local_world_size;
  }
  if (context_.cpus.empty())
    prepare_environment(result, assignment.local_world_size, cores_);
  else
    prepare_environment(result, 1, cores_for_rank(context_.cpus, entry.local_rank));
  const bool is_virtual = context_.options->virtual_local_rank;
  const std::vector<std::pair<std::string, std::string>> variables{
      {"RANK", std::to_string(entry.rank)},
      {"LOCAL_RANK", std::to_string(is_virtual ? 0 : entry.local_rank)},
      {"ROLE_RANK", std::to_string(role_rank)},
      {"WORLD_SIZE", std::to_string(world_size)},
      {"LOCAL_WORLD_SIZE", std::to_string(assignment.local_world_size)},
      {"ROLE_WORLD_SIZE", std::to_string(role_size)},
      {"GROUP_RANK", std::to_string(assignment.node_rank)},
      {"GROUP_WORLD_SIZE", std::to_string(order.assignments.size())},
      {"ROLE_NAME", assignment.role},
      {"MASTER_ADDR", order.master_address},
      {"MASTER_PORT", std::to_string(order.master_port)},
      {"TORCHELASTIC_RESTART_COUNT", std::to_string(order.restarts)},
      {"TORCHELASTIC_MAX_RESTARTS", std::to_string(context_.options->max_restarts)},
      {"TORCHELASTIC_RUN_ID", context_.options->run_id},
      {"TORCHELASTIC_USE_AGENT_STORE", "False"},
      {"TORCHELASTIC_ERROR_FILE", entry.error_file},
      {"PHALANX_STORE", order.store},
      {"PHALANX_REPORT_DIR", entry.report_directory},
      {kTraceFolderVariable, context_.logs->traces().folder()}};
  for (const auto& [name, value] : variables) result[name] = value;
  result.try_emplace("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1");
  if (is_virtual) result["CUDA_VISIBLE_DEVICES"] = gpu_of(context_.options->environment, entry.local_rank);
  if (!context_.secret.empty()) {
    result["PHALANX_JOB_SECRET"] = context_.secret;
    result.erase("PHALANX_JOB_SECRET_FILE");
  }
  return result;
}

void WorkerGroup::add_poll_fds(std::vector<pollfd>& fds) {
  first_polled_ = fds.size();
  polled_.clear();
  for (Rank& rank : ranks_)
    for (WorkerStream& stream : rank.streams)
      if (stream.relay && stream.relay->is_open()) {
        fds.push_back({stream.relay->poll_fd(), POLLIN, 0});
        polled_.push_back(stream.relay.get());
      }
}

void WorkerGroup::pump(const std::vector<pollfd>& fds) {
  for (std::size_t i = 0; i < polled_.size(); ++i)
    if (fds[first_polled_ + i].revents != 0) polled_[i]->pump();
}

WorkerGroup::Clock::time_point WorkerGroup::wake_at() const {
  auto result = failure_certain_at_;
  if (any_alive()) result = std::min(result, stops_looked_for_ + kHearEvery);
  if (stopping_ && any_alive()) result = std::min(result, announcements_heard_ + kHearEvery);
  for (const Rank& rank : ranks_)
    if (rank.alive) result = std::min(result, rank.kill_at);
  return result;
}

void WorkerGroup::step(Clock::time_point now) {
  for (Rank& rank : ranks_)
    if (rank.alive) reap(rank);
  read_announcements(now);
  detect_stopped_ranks(now);
  for (Rank& rank : ranks_) {
    if (!rank.alive || now < rank.kill_at) continue;
    rank.was_terminated = true;
    kill(-rank.pid, SIGKILL);
    rank.kill_at = kNever;
  }
}

void WorkerGroup::reap(Rank& rank) {
  siginfo_t info{};
  // While the dead leader is not reaped, no other process can get its group number. So kill its children now.
  if (waitid(P_PID, static_cast<id_t>(rank.pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0) return;
  kill(-rank.pid, SIGKILL);
  context_.guard->release(rank.pid);
  waitpid(rank.pid, &rank.wait_status, 0);
  rank.alive = false;
  rank.ended_at_s = now_since_epoch();
  for (WorkerStream& stream : rank.streams)
    if (stream.relay && stream.relay->is_open()) stream.relay->finish();
  if (rank.failed() && !failure_taken_) {
    // The cause of a rank's error may be in another rank, or other ranks may have the same error. Give them time to
    // report it.
    const auto report = read_worker_report(rank.report_directory);
    const auto moment = !report                       ? std::chrono::milliseconds(0)
                        : report->kind == "CommError" ? context_.options->blame_grace
                                                      : context_.options->same_grace;
    failure_certain_at_ = std::min(failure_certain_at_, Clock::now() + moment);
  }
}

bool WorkerGroup::take_failure(Clock::time_point now) {
  if (failure_taken_ || failure_certain_at_ == kNever) return false;
  const bool nobody_else = context_.options->nodes.max_nodes == 1 && !any_alive();
  if (now < failure_certain_at_ && !nobody_else) return false;
  failure_taken_ = true;
  failure_certain_at_ = kNever;
  return true;
}

bool WorkerGroup::any_alive() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.alive; });
}

bool WorkerGroup::all_succeeded() const {
  return std::none_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.alive || rank.failed(); });
}

void WorkerGroup::terminate(std::chrono::milliseconds grace) {
  failure_taken_ = true;
  failure_certain_at_ = kNever;
  for (Rank& rank : ranks_) {
    if (!rank.alive) continue;
    rank.was_terminated = true;
    kill(-rank.pid, SIGTERM);
    // A stopped rank cannot receive SIGTERM.
    rank.kill_at = std::min(rank.kill_at, Clock::now() + (is_stopped(rank.pid) ? std::chrono::milliseconds(0) : grace));
  }
}

void WorkerGroup::stop(int signal, bool again) {
  failure_taken_ = true;
  failure_certain_at_ = kNever;
  for (Rank& rank : ranks_) {
    if (!rank.alive) continue;
    rank.was_terminated = true;
    kill(-rank.pid, again ? SIGKILL : signal);
    if (again) continue;
    rank.announced = read_graceful_stop(rank.report_directory);
    const auto grace = rank.announced     ? std::chrono::milliseconds(*rank.announced)
                       : signal == SIGINT ? context_.options->interrupt_grace
                                          : context_.options->terminate_grace;
    rank.kill_at = std::min(rank.kill_at, Clock::now() + grace);
  }
  stopping_ = true;
}

bool WorkerGroup::any_ended() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.pid > 0 && !rank.alive; });
}

// Ranks monitor each other while they wait for each other. Only the launcher waits for a rank that is stopped while it
// ends. This is checked for programs that announce a graceful stop, which are ours. A stopped rank does not receive the
// signal to stop.
void WorkerGroup::detect_stopped_ranks(Clock::time_point now) {
  if (now < stops_looked_for_ + kHearEvery) return;
  // If the launcher itself was suspended, the time of the ranks is unknown: the whole job may have been suspended.
  const bool has_slept = now - stops_looked_for_ > 4 * kHearEvery;
  stops_looked_for_ = now;
  any_ended() || stopping_ ? kill_stopped_ranks(now, has_slept) : report_all_stopped(now, has_slept);
}

// No running rank is left to report it. It is only a warning, since the user may have stopped the ranks on purpose.
void WorkerGroup::report_all_stopped(Clock::time_point now, bool has_slept) {
  const bool all = any_alive() && std::ranges::all_of(ranks_, [](const Rank& rank) { return is_stopped(rank.pid); });
  if (!all || has_slept) {
    all_stopped_since_.reset();
    all_stopped_said_ = false;
  }
  if (!all) return;
  if (!all_stopped_since_) all_stopped_since_ = now;
  if (all_stopped_said_ || now - *all_stopped_since_ < context_.options->stopped_grace) return;
  all_stopped_said_ = true;
  std::vector<pid_t> processes;
  for (const Rank& rank : ranks_) processes.push_back(rank.pid);
  log::warn(fmt::format(
      "{} stopped (SIGSTOP) for {:.1f} s: the job stands still; `kill -CONT {}` lets it go on, and SIGTERM to this "
      "launcher ends it",
      ranks_.size() == 1 ? fmt::format("rank {} has been", ranks_.front().rank)
                         : fmt::format("all {} ranks here have been", ranks_.size()),
      std::chrono::duration<double>(now - *all_stopped_since_).count(), fmt::join(processes, " ")));
}

void WorkerGroup::kill_stopped_ranks(Clock::time_point now, bool has_slept) {
  for (Rank& rank : ranks_) {
    if (!rank.alive || !is_stopped(rank.pid) || !(stopping_ || read_graceful_stop(rank.report_directory))) {
      rank.stopped_since.reset();
      continue;
    }
    if (!rank.stopped_since || has_slept) rank.stopped_since = now;
    const auto grace = context_.options->stopped_grace;
    if (now - *rank.stopped_since < (stopping_ ? std::min(grace, kStoppedInStop) : grace)) continue;
    log::warn(
        fmt::format("rank {} is stopped (SIGSTOP): process {} has stood still for {:.1f} s while {}: it is killed",
                    rank.rank, rank.pid, std::chrono::duration<double>(now - *rank.stopped_since).count(),
                    stopping_ ? "the job is to stop" : "other ranks have ended"));
    kill(-rank.pid, SIGKILL);
  }
}

// A rank that has saved its work needs less time from then on.
void WorkerGroup::read_announcements(Clock::time_point now) {
  if (!stopping_ || now < announcements_heard_ + kHearEvery) return;
  announcements_heard_ = now;
  for (Rank& rank : ranks_) {
    if (!rank.alive || !rank.announced) continue;
    const auto announced = read_graceful_stop(rank.report_directory);
    if (!announced || announced == rank.announced) continue;
    rank.announced = announced;
    rank.kill_at = std::min(rank.kill_at, now + *announced);
  }
}

int WorkerGroup::pass_on(int signal) const {
  int reached = 0;
  for (const Rank& rank : ranks_) {
    if (!rank.alive) continue;
    if (signal != SIGQUIT) {
      if (kill(-rank.pid, signal) == 0) ++reached;
      continue;
    }
    // SIGQUIT is a query here and must not end a process that does not handle it, such as a starting program or a
    // shell.
    for (const pid_t process : processes_of_group(rank.pid))
      if (handles_signal(process, signal) && kill(process, signal) == 0) ++reached;
  }
  return reached;
}

std::vector<WorkerFailure> WorkerGroup::failures() const {
  std::vector<WorkerFailure> result;
  for (const Rank& rank : ranks_) {
    if (!rank.failed()) continue;
    auto report = read_worker_report(rank.report_directory);
    if (!report) report = read_torch_error_file(rank.error_file);
    if (!report && rank.was_terminated) continue;
    WorkerFailure failure;
    failure.rank = rank.rank;
    failure.local_rank = rank.local_rank;
    failure.host = host_;
    failure.pid = rank.pid;
    failure.time_s = rank.ended_at_s;
    if (WIFSIGNALED(rank.wait_status))
      failure.signal = WTERMSIG(rank.wait_status);
    else
      failure.exit_status = WEXITSTATUS(rank.wait_status);
    if (report) {
      failure.kind = report->kind;
      failure.message = report->message;
      if (report->time_s > 0) failure.time_s = report->time_s;
      // The rank was terminated while it was ending, because a peer ended first. So its own report counts.
      if (rank.was_terminated) {
        failure.signal = 0;
        failure.exit_status = report->exit_status;
      }
    }
    failure.log_file = rank.streams[1].path;
    result.push_back(std::move(failure));
  }
  return result;
}

}  // namespace phalanx
