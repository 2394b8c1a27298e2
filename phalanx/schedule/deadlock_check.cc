#include "phalanx/schedule/deadlock_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "phalanx/schedule/actions.h"
#include "phalanx/schedule/schedule_text.h"

namespace phalanx::schedule {
namespace {

class DeadlockCheck {
 public:
  DeadlockCheck(const Schedule& schedule, const std::vector<Program>& programs, const BackendModel& backend_model)
      : schedule_(schedule), programs_(programs), backend_model_(backend_model), ranks_(programs.size()) {}

  std::vector<Fault> run() {
    find_groups();
    check_shapes();
    if (backend_model_.in_order) check_order();
    if (!faults_.empty()) return std::move(faults_);
    for (bool progress = true; progress;) {
      progress = false;
      for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
        progress = run_program(rank) || progress;
        progress = run_groups(rank) || progress;
      }
    }
    name_cycle();
    return std::move(faults_);
  }

 private:
  struct Place {
    std::size_t rank = 0, group = 0;
  };
  struct Group {
    const Step* step = nullptr;
    bool has_started = false, has_ended = false;
  };
  struct Rank {
    std::vector<Group> groups;  // in the order of posting
    std::size_t next = 0;       // step
    std::size_t posted = 0;     // groups
    std::size_t first = 0;      // group that has not ended
  };
  // Something that waits: a posted group, or a rank's program.
  struct Waiter {
    std::size_t rank = 0;
    std::optional<std::size_t> group;
    bool operator<(const Waiter& other) const { return std::tie(rank, group) < std::tie(other.rank, other.group); }
  };

  std::size_t number(const Action& transfer) const {
    const std::size_t cell =
        static_cast<std::size_t>(transfer.stage) * static_cast<std::size_t>(schedule_.micro_batches) +
        static_cast<std::size_t>(transfer.micro_batch);
    return 4 * cell + (static_cast<std::size_t>(transfer.kind) - static_cast<std::size_t>(ActionKind::send_forward));
  }
  const std::optional<Place>& place_of(const Action& transfer) const { return places_[number(transfer)]; }
  bool is_posted(const Place& place) const { return place.group < ranks_[place.rank].posted; }
  const Group& group_at(const Place& place) const { return ranks_[place.rank].groups[place.group]; }

  void fault(std::size_t rank, const Action& action, std::string what) {
    const auto& row = schedule_.actions[rank];
    const auto found = std::find_if(row.begin(), row.end(), [&](const Action& one) {
      bool here = false;
      for_each_sub_action(one, [&](const Action& part) { here = here || part == action; });
      return here;
    });
    faults_.push_back({static_cast<int>(rank), found == row.end() ? -1 : static_cast<int>(found - row.begin()),
                       to_text(action), std::move(what)});
  }

  void find_groups() {
    places_.resize(4 * static_cast<std::size_t>(schedule_.stages()) *
                   static_cast<std::size_t>(schedule_.micro_batches));
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      for (const Step& step : programs_[rank]) {
        if (step.transfers.empty()) continue;
        for (const Action& transfer : step.transfers) {
          places_[number(transfer)] = Place{rank, ranks_[rank].groups.size()};
        }
        ranks_[rank].groups.push_back({.step = &step});
      }
    }
  }

  // A gradient has the shape of the output, which its stage must have sent before.
  void check_shapes() {
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      std::set<int> sent;
      for (const Group& group : ranks_[rank].groups) {
        for (const Action& transfer : group.step->transfers) {
          if (transfer.kind == ActionKind::send_forward) sent.insert(transfer.stage);
          if (transfer.kind != ActionKind::recv_backward || sent.contains(transfer.stage)) continue;
          fault(
              rank, transfer,
              fmt::format("stage {} has sent no output before it, whose shape it has: place it later", transfer.stage));
          sent.insert(transfer.stage);
        }
      }
    }
  }

  // Without tags the n-th send of one rank to another matches the n-th receive there.
  void check_order() {
    using Link = std::tuple<int, int, int>;  // from, to, communicator
    std::map<Link, std::vector<Action>> sent;
    const auto each = [&](const auto& visit) {
      for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
        for (const Group& group : ranks_[rank].groups) {
          for (const Action& transfer : group.step->transfers) {
            visit(rank, transfer, rank_of(schedule_, other_end(transfer).stage), group.step->communicator);
          }
        }
      }
    };
    each([&](std::size_t rank, const Action& transfer, int other, int communicator) {
      if (is_send(transfer.kind)) sent[{static_cast<int>(rank), other, communicator}].push_back(transfer);
    });
    std::map<Link, std::size_t> received;
    std::set<Link> reported;
    each([&](std::size_t rank, const Action& transfer, int other, int communicator) {
      if (!is_receive(transfer.kind)) return;
      const Link link{other, static_cast<int>(rank), communicator};
      const std::size_t index = received[link]++;
      const auto& sends = sent[link];
      if (index < sends.size() && sends[index] == other_end(transfer)) return;
      if (!reported.insert(link).second) return;
      fault(rank, transfer,
            fmt::format("out of order: as number {} rank {} sends {}", index, other,
                        index < sends.size() ? to_text(sends[index]) : std::string("nothing")));
    });
  }

  // The receive that a pass waits for, if there is one.
  std::optional<Action> input_of(const Action& action) const {
    if (action.kind == ActionKind::forward && on_different_ranks(schedule_, action.stage, action.stage - 1)) {
      return make_action(action.stage, ActionKind::recv_forward, action.micro_batch);
    }
    if (makes_gradient(action.kind) && on_different_ranks(schedule_, action.stage, action.stage + 1)) {
      return make_action(action.stage, ActionKind::recv_backward, action.micro_batch);
    }
    return std::nullopt;
  }

  bool can_run(const Step& step) const {
    if (step.waits_for_shape) {
      const auto& send = place_of(other_end(step.transfers.front()));
      return send && is_posted(*send);
    }
    if (!step.transfers.empty()) return true;
    const std::optional<Action> input = input_of(step.action);
    if (!input) return true;
    const auto& place = place_of(*input);
    return place && group_at(*place).has_ended;
  }

  bool run_program(std::size_t at) {
    Rank& rank = ranks_[at];
    const Program& program = programs_[at];
    const std::size_t before = rank.next;
    for (; rank.next < program.size() && can_run(program[rank.next]); ++rank.next) {
      if (!program[rank.next].transfers.empty()) ++rank.posted;
    }
    return rank.next > before;
  }

  // The group that must end before this one may start.
  std::optional<std::size_t> group_before(const Rank& rank, std::size_t group) const {
    for (std::size_t i = rank.first; i < group && (backend_model_.in_order || backend_model_.one_at_a_time); ++i) {
      const bool is_before =
          backend_model_.one_at_a_time || rank.groups[i].step->communicator == rank.groups[group].step->communicator;
      if (is_before && !rank.groups[i].has_ended) return i;
    }
    return std::nullopt;
  }

  /// A transfer of a started group whose other end has not started.
  std::optional<Action> unmet(const Group& group) const {
    for (const Action& transfer : group.step->transfers) {
      if (is_send(transfer.kind) && !backend_model_.rendezvous) continue;
      const auto& other = place_of(other_end(transfer));
      if (!other || !group_at(*other).has_started) return transfer;
    }
    return std::nullopt;
  }

  bool run_groups(std::size_t at) {
    Rank& rank = ranks_[at];
    bool progress = false;
    std::set<int> busy;  // communicators whose stream a group blocks
    for (std::size_t i = rank.first; i < rank.posted; ++i) {
      Group& group = rank.groups[i];
      const int communicator = backend_model_.one_at_a_time ? 0 : group.step->communicator;
      if (group.has_ended || busy.contains(communicator)) continue;
      progress = progress || !group.has_started;
      group.has_started = true;
      if (!unmet(group)) {
        group.has_ended = progress = true;
      } else if (backend_model_.in_order || backend_model_.one_at_a_time) {
        busy.insert(communicator);
        if (backend_model_.one_at_a_time) break;
      }
    }
    while (rank.first < rank.posted && rank.groups[rank.first].has_ended) ++rank.first;
    return progress;
  }

  // ---- what went wrong

  std::optional<Waiter> find_stuck() const {
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      if (ranks_[r].next < programs_[r].size()) return Waiter{r, std::nullopt};
    }
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      if (ranks_[r].first < ranks_[r].groups.size()) return Waiter{r, ranks_[r].first};
    }
    return std::nullopt;
  }

  // What a waiter waits for: through which of its own actions, and the action at the other end.
  struct Wait {
    Action mine;
    std::string text;
    std::optional<Waiter> next;
    std::optional<Action> at_next;
  };

  // `mine`: the action of this waiter that the previous waiter waits for.
  Wait wait_of(const Waiter& waiter, std::optional<Action> mine) const {
    const Rank& rank = ranks_[waiter.rank];
    const auto for_other_end = [&](const Action& transfer) -> Wait {
      const Action other = other_end(transfer);
      const auto& place = place_of(other);
      std::string text = fmt::format("rank {}'s {} waits for {}", waiter.rank, to_text(transfer), to_text(other));
      if (!place) return {transfer, text + ", which is nowhere", std::nullopt, std::nullopt};
      if (is_posted(*place)) return {transfer, std::move(text), Waiter{place->rank, place->group}, other};
      return {transfer, text + fmt::format(", which rank {} has not come to", place->rank),
              Waiter{place->rank, std::nullopt}, std::nullopt};
    };
    if (waiter.group) {
      const Group& group = rank.groups[*waiter.group];
      const auto before = group.has_started ? std::nullopt : group_before(rank, *waiter.group);
      if (!before) return for_other_end(*unmet(group));
      if (!mine) mine = group.step->transfers.front();
      const Group& first = rank.groups[*before];
      const Action blocks = first.has_started ? *unmet(first) : first.step->transfers.front();
      return {*mine, fmt::format("rank {}'s {} runs behind {}", waiter.rank, to_text(*mine), to_text(blocks)),
              Waiter{waiter.rank, before}, blocks};
    }
    const Step& step = programs_[waiter.rank][rank.next];
    if (step.waits_for_shape) return for_other_end(step.transfers.front());
    const Action input = *input_of(step.action);
    const auto& place = place_of(input);
    std::string text = fmt::format("rank {}'s {} waits for {}", waiter.rank, to_text(step.action), to_text(input));
    if (place && is_posted(*place)) return {step.action, std::move(text), Waiter{waiter.rank, place->group}, input};
    return {step.action, text + ", which is not posted", std::nullopt, std::nullopt};
  }

  void name_cycle() {
    std::optional<Waiter> waiter = find_stuck();
    if (!waiter) return;
    std::map<Waiter, std::size_t> seen;
    std::vector<std::size_t> ranks;
    std::vector<Wait> way;
    std::optional<Action> mine;
    while (waiter && !seen.contains(*waiter)) {
      seen[*waiter] = way.size();
      ranks.push_back(waiter->rank);
      way.push_back(wait_of(*waiter, mine));
      waiter = way.back().next;
      mine = way.back().at_next;
    }
    const std::size_t begin = waiter ? seen[*waiter] : 0;
    std::string what = waiter ? "deadlock, a cycle of waits: " : "waits for ever: ";
    for (std::size_t i = begin; i < way.size(); ++i) what += (i > begin ? "; " : "") + way[i].text;
    fault(ranks[begin], way[begin].mine, std::move(what));
  }

  const Schedule& schedule_;
  const std::vector<Program>& programs_;
  const BackendModel& backend_model_;
  std::vector<Rank> ranks_;
  std::vector<std::optional<Place>> places_;  // of transfers, by number()
  std::vector<Fault> faults_;
};

}  // namespace

std::vector<Fault> check_deadlock(const Schedule& schedule, const std::vector<Program>& programs,
                                  const BackendModel& backend_model) {
  return DeadlockCheck(schedule, programs, backend_model).run();
}

}  // namespace phalanx::schedule
