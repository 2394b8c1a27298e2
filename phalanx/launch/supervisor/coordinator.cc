#include "phalanx/launch/supervisor/coordinator.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace phalanx {
namespace {

constexpr auto kNoDeadline = Coordinator::Clock::time_point::max();

double epoch_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string seconds_text(std::chrono::duration<double> duration) { return fmt::format("{:g} s", duration.count()); }

std::string node_range(int min_nodes, int max_nodes) {
  return min_nodes == max_nodes ? std::to_string(max_nodes) : fmt::format("{}:{}", min_nodes, max_nodes);
}

}  // namespace

Coordinator::Coordinator(CoordinatorOptions options, Clock::time_point now)
    : options_(std::move(options)), gather_since_(now) {}

std::string Coordinator::name_of(const Member& member) const {
  return fmt::format("{} (process {})", member.join.host, member.join.pid);
}

std::vector<int> Coordinator::present() const {
  std::vector<int> result;
  for (const auto& [number, member] : members_) result.push_back(number);
  return result;
}

// The members that can take part in the next round.
std::vector<int> Coordinator::available() const {
  std::vector<int> result;
  for (const auto& [number, member] : members_)
    if (!member.leaving) result.push_back(number);
  return result;
}

std::vector<WorkerFailure> Coordinator::all_failures() const {
  std::vector<WorkerFailure> result = node_failures_;
  for (const auto& [number, member] : members_)
    result.insert(result.end(), member.failures.begin(), member.failures.end());
  std::sort(result.begin(), result.end(), precedes);
  return result;
}

std::vector<Order> Coordinator::take_orders() { return std::exchange(orders_, {}); }

bool Coordinator::has_assignment(int member) const {
  return std::any_of(assignments_.begin(), assignments_.end(),
                     [&](const NodeAssignment& assignment) { return assignment.member == member; });
}

void Coordinator::send_refusal(int member, std::string text) {
  Order order{.kind = Order::Kind::refuse, .round = round_, .member = member};
  order.text = std::move(text);
  orders_.push_back(std::move(order));
}

// The host name of a node of this round that is leaving or has left; empty if there is none.
std::string Coordinator::who_leaves() const {
  if (drain_ends_) return drained_host_;
  for (const auto& [number, member] : members_)
    if (member.leaving) return member.join.host;
  return "";
}

// Removes a node that is leaving.
void Coordinator::dismiss(int member, Clock::time_point now) {
  send_refusal(member, "this node has left the job");
  gone(member, now);
}

void Coordinator::end(int exit_status, std::vector<WorkerFailure> failures, std::string text) {
  state_ = State::ended;
  Order order{.kind = Order::Kind::end, .round = round_, .restarts = restarts_, .signal = stop_signal_};
  order.exit_status = exit_status;
  order.failures = std::move(failures);
  order.text = std::move(text);
  orders_.push_back(std::move(order));
}

void Coordinator::give_up(const std::string& reason) {
  if (state_ == State::ended) return;
  WorkerFailure failure;
  failure.exit_status = 1;
  failure.message = reason;
  end(1, {failure});
}

// The reason why this node cannot join; empty if it can.
std::string Coordinator::objection(const NodeJoin& join) const {
  if (state_ == State::ended) return fmt::format("the job at {} has ended", options_.address);
  if (join.run_id != options_.run_id)
    return fmt::format("this node was started with --rdzv-id {} and the host of {} with {}", join.run_id,
                       options_.address, options_.run_id);
  if (join.min_nodes != options_.min_nodes || join.max_nodes != options_.max_nodes)
    return fmt::format("this node was started with --nnodes {} and the host of {} with {}",
                       node_range(join.min_nodes, join.max_nodes), options_.address,
                       node_range(options_.min_nodes, options_.max_nodes));
  if (join.max_restarts != options_.max_restarts)
    return fmt::format("this node was started with --max-restarts {} and the host of {} with {}", join.max_restarts,
                       options_.address, options_.max_restarts);
  if ((join.node_rank >= 0) != options_.fixed_node_ranks)
    return fmt::format("this node was started with the rendezvous backend {} and the host of {} with {}",
                       join.node_rank >= 0 ? "static" : "c10d", options_.address,
                       options_.fixed_node_ranks ? "static" : "c10d");
  if (options_.fixed_node_ranks)
    for (const auto& [number, member] : members_)
      if (member.join.node_rank == join.node_rank)
        return fmt::format("--node-rank {} was given twice: {} has it already (rendezvous at {})", join.node_rank,
                           name_of(member), options_.address);
  return "";
}

void Coordinator::joined(int member, const NodeJoin& join, Clock::time_point now) {
  if (std::string text = objection(join); !text.empty()) {
    send_refusal(member, std::move(text));
    return;
  }
  members_[member].join = join;
  if (state_ == State::gathering) consider(now);
  if (state_ == State::running && static_cast<int>(assignments_.size()) < options_.max_nodes)
    begin_stop(StopReason::membership, fmt::format("the node {} has come", join.host));
}

void Coordinator::handle(int number, const NodeMessage& message, Clock::time_point now) {
  using Kind = NodeMessage::Kind;
  if (message.kind == Kind::join) {
    joined(number, message.join, now);
    return;
  }
  const auto found = members_.find(number);
  if (found == members_.end() || state_ == State::ended) {
    if (message.kind == Kind::bye) members_.erase(number);
    return;
  }
  Member& member = found->second;
  if (message.kind == Kind::bye) {
    gone(number, now);
    return;
  }
  if (message.kind == Kind::leaving) {
    leaving(number, message.signal, now);
    return;
  }
  if (message.round != round_ || (!member.assigned && state_ != State::preparing)) return;
  switch (message.kind) {
    case Kind::rendezvous: {
      if (state_ != State::preparing || assignments_.front().member != number) return;
      // Another node may have joined while the rendezvous was prepared.
      if (static_cast<int>(assignments_.size()) < options_.max_nodes && available().size() > assignments_.size()) {
        consider(now);
        return;
      }
      state_ = State::running;
      for (const NodeAssignment& assignment : assignments_) {
        Member& assigned = members_.at(assignment.member);
        assigned.assigned = true;
        assigned.last_node_rank = assignment.node_rank;
      }
      Order order{.kind = Order::Kind::start, .round = round_, .restarts = restarts_};
      order.assignments = assignments_;
      order.store = message.store;
      order.master_address = message.master_address;
      order.master_port = message.master_port;
      orders_.push_back(std::move(order));
      break;
    }
    case Kind::failed:
      member.failures = message.failures;
      if (state_ == State::preparing) {
        end(1, all_failures());
      } else if (state_ == State::running) {
        const auto failures = all_failures();
        const std::string what =
            failures.empty() ? fmt::format("a rank on {} failed", member.join.host) : describe(failures.front());
        const std::string leaver = who_leaves();
        if (leaver.empty())
          begin_stop(StopReason::failure, what);
        else
          begin_stop(StopReason::membership, fmt::format("the node {} leaves, and {}", leaver, what));
      }
      break;
    case Kind::succeeded:
      member.done = true;
      if (member.leaving && state_ == State::running && !drain_ends_) {
        drain_ends_ = now + options_.drain_timeout;
        drained_host_ = member.join.host;
      }
      if (member.leaving) dismiss(number, now);
      settle(now);
      break;
    case Kind::stopped:
      member.stopped = true;
      member.failures = message.failures;
      if (member.leaving) dismiss(number, now);
      settle(now);
      break;
    default:
      break;
  }
}

void Coordinator::leaving(int number, int signal, Clock::time_point now) {
  Member& member = members_.at(number);
  const auto others = available().size() - (member.leaving ? 0 : 1);
  const bool can_go =
      options_.min_nodes < options_.max_nodes && !member.join.is_host && static_cast<int>(others) >= options_.min_nodes;
  // The job does not depend on a node that waits for an assignment, or for more nodes to join.
  if (!member.join.is_host && !has_assignment(number)) {
    dismiss(number, now);
    return;
  }
  if (state_ == State::gathering || state_ == State::preparing) {
    if (can_go) {
      dismiss(number, now);
    } else {
      stop_signal_ = signal;
      end(128 + signal, {}, fmt::format("{} was stopped by {}", name_of(member), signal_text(signal)));
    }
    return;
  }
  if (can_go) {
    member.leaving = true;
    if (member.done || member.stopped) dismiss(number, now);  // it does not send this message again
    return;
  }
  begin_stop(StopReason::signal, fmt::format("{} was stopped by {}", name_of(member), signal_text(signal)), signal);
}

// The node has left; its ranks, if it had any, have ended.
void Coordinator::gone(int number, Clock::time_point now) {
  const auto found = members_.find(number);
  if (found == members_.end()) return;
  const bool was_assigned = has_assignment(number);
  const bool was_done = found->second.done;
  const std::string host = found->second.join.host;
  members_.erase(found);
  if (state_ == State::ended) return;
  if (state_ == State::stopping && stop_reason_ == StopReason::signal && was_assigned && !was_done) cut_short_ = true;
  if (state_ == State::gathering)
    consider(now);
  else if (state_ == State::preparing && was_assigned)
    gather(now);
  else if (state_ == State::running && was_assigned && !was_done)
    begin_stop(StopReason::membership, fmt::format("the node {} has left", host));
  settle(now);
}

void Coordinator::lost(int number, const std::string& how, std::chrono::duration<double> silent,
                       Clock::time_point now) {
  const auto found = members_.find(number);
  if (found == members_.end()) return;
  const Member member = found->second;
  if (state_ == State::ended) {
    members_.erase(found);
    return;
  }
  WorkerFailure failure;
  failure.host = member.join.host;
  failure.exit_status = 1;
  failure.time_s = epoch_seconds() - silent.count();
  std::string ranks;
  for (const NodeAssignment& assignment : assignments_)
    if (assignment.member == number)
      ranks = assignment.local_world_size == 1 ? fmt::format(" with rank {}", assignment.first_rank)
                                               : fmt::format(" with ranks {} to {}", assignment.first_rank,
                                                             assignment.first_rank + assignment.local_world_size - 1);
  failure.message = fmt::format("the node {}{} was lost: {}", name_of(member), ranks, how);
  send_refusal(number, fmt::format("the host of {} took this node for lost: {}", options_.address, how));
  if (member.assigned && !member.done && !member.leaving) {
    members_.erase(found);
    node_failures_.push_back(failure);
    if (state_ == State::running) begin_stop(StopReason::failure, failure.message);
    settle(now);
  } else {
    gone(number, now);
  }
}

void Coordinator::begin_stop(StopReason why, std::string text, int signal) {
  const bool already = state_ == State::stopping;
  if (already && (why != StopReason::signal || stop_reason_ == StopReason::signal)) return;
  state_ = State::stopping;
  drain_ends_.reset();
  stop_reason_ = why;
  stop_signal_ = signal;
  stop_text_ = text;
  Order order{.kind = why == StopReason::signal ? Order::Kind::signal : Order::Kind::stop, .round = round_};
  order.signal = signal;
  // The final report gives the cause of the failure. The text here only explains why ranks restart.
  if (why == StopReason::failure && restarts_ < options_.max_restarts)
    order.text = fmt::format("{}\nall ranks restart (restart {} of {})", text, restarts_ + 1, options_.max_restarts);
  else if (why == StopReason::membership)
    order.text = fmt::format("{}: all ranks restart", text);
  orders_.push_back(std::move(order));
}

// Continues when no rank of the round runs any more.
void Coordinator::settle(Clock::time_point now) {
  if (state_ != State::running && state_ != State::stopping) return;
  bool all_done = true, all_stopped = true;
  for (const auto& [number, member] : members_) {
    if (!member.assigned) continue;
    all_done = all_done && member.done;
    all_stopped = all_stopped && (member.done || member.stopped);
  }
  if (state_ == State::running) {
    if (all_done) end(0, {});
    return;
  }
  if (!all_stopped) return;
  const auto failures = all_failures();
  if (stop_reason_ == StopReason::signal) {
    // A rank that ends because of the signal may break the communication of other ranks, so after a stop CommErrors do
    // not count.
    if (all_done && failures.empty() && !cut_short_)
      end(0, {});
    else if (failures.empty() || failures.front().is_secondary())
      end(128 + stop_signal_, {}, stop_text_);
    else
      end(launcher_exit_status(failures.front()), failures);
  } else if (stop_reason_ == StopReason::failure && restarts_ == options_.max_restarts) {
    end(failures.empty() ? 1 : launcher_exit_status(failures.front()), failures, stop_text_);
  } else {
    if (stop_reason_ == StopReason::failure) ++restarts_;
    last_failures_ = failures;
    gather(now);
  }
}

void Coordinator::gather(Clock::time_point now) {
  state_ = State::gathering;
  gather_since_ = now;
  last_call_ends_.reset();
  drain_ends_.reset();
  assignments_.clear();
  node_failures_.clear();
  for (auto& [number, member] : members_) {
    member.assigned = member.done = member.stopped = false;
    member.failures.clear();
  }
  consider(now);
}

void Coordinator::consider(Clock::time_point now) {
  const int count = static_cast<int>(available().size());
  if (count >= options_.max_nodes) {
    prepare();
    return;
  }
  if (count < options_.min_nodes) {
    last_call_ends_.reset();
    if (now >= gather_since_ + options_.join_timeout) {
      std::vector<WorkerFailure> failures{missing_nodes()};
      failures.insert(failures.end(), last_failures_.begin(), last_failures_.end());
      end(1, std::move(failures));
    }
    return;
  }
  if (!last_call_ends_) last_call_ends_ = now + options_.last_call;
  if (now >= *last_call_ends_) prepare();
}

void Coordinator::prepare() {
  std::vector<int> order = available();
  const auto place = [&](int number) {
    const Member& member = members_.at(number);
    if (options_.fixed_node_ranks) return std::make_pair(member.join.node_rank, number);
    const int late = 1 << 30;
    return std::make_pair(member.join.is_host ? -1 : (member.last_node_rank >= 0 ? member.last_node_rank : late),
                          number);
  };
  std::sort(order.begin(), order.end(), [&](int a, int b) { return place(a) < place(b); });
  if (static_cast<int>(order.size()) > options_.max_nodes) order.resize(static_cast<std::size_t>(options_.max_nodes));
  assignments_.clear();
  int first_rank = 0;
  for (const int number : order) {
    const NodeJoin& join = members_.at(number).join;
    assignments_.push_back({.member = number,
                            .node_rank = static_cast<int>(assignments_.size()),
                            .first_rank = first_rank,
                            .local_world_size = join.local_world_size,
                            .host = join.host,
                            .role = join.role});
    first_rank += join.local_world_size;
  }
  state_ = State::preparing;
  ++round_;
  orders_.push_back({.kind = Order::Kind::prepare, .round = round_, .member = assignments_.front().member});
}

WorkerFailure Coordinator::missing_nodes() const {
  WorkerFailure failure;
  failure.exit_status = 1;
  failure.time_s = 0;  // before all other failures of the report
  std::string came, missing;
  std::vector<std::pair<int, std::string>> names;  // sorted by node rank, or by arrival
  for (const auto& [number, member] : members_)
    names.emplace_back(options_.fixed_node_ranks ? member.join.node_rank : number, member.join.host);
  std::sort(names.begin(), names.end());
  for (const auto& [rank, host] : names)
    came += fmt::format("{}{}", came.empty() ? "" : ", ",
                        options_.fixed_node_ranks ? fmt::format("{} on {}", rank, host) : host);
  const std::string where =
      fmt::format("rendezvous at {}: within {} ", options_.address, seconds_text(options_.join_timeout));
  if (options_.fixed_node_ranks) {
    for (int rank = 0; rank < options_.max_nodes; ++rank) {
      const bool is_here = std::any_of(members_.begin(), members_.end(),
                                       [&](const auto& entry) { return entry.second.join.node_rank == rank; });
      if (!is_here) missing += fmt::format("{}{}", missing.empty() ? "" : ", ", rank);
    }
    failure.message = fmt::format("{}of {} nodes these have not come: node ranks {} (those that came: {})", where,
                                  options_.max_nodes, missing, came);
  } else {
    failure.message =
        fmt::format("{}{} of at least {} nodes have come: {}", where, members_.size(), options_.min_nodes, came);
  }
  return failure;
}

void Coordinator::tick(Clock::time_point now) {
  if (state_ == State::gathering) consider(now);
  if (state_ == State::running && drain_ends_ && now >= *drain_ends_)
    begin_stop(StopReason::membership, fmt::format("the node {} has left", drained_host_));
}

Coordinator::Clock::time_point Coordinator::next_deadline() const {
  if (state_ == State::running && drain_ends_) return *drain_ends_;
  if (state_ != State::gathering) return kNoDeadline;
  if (last_call_ends_) return *last_call_ends_;
  return gather_since_ + options_.join_timeout;
}

}  // namespace phalanx
