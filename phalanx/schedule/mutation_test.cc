// Every change of a schedule by one wrong action is caught, and named.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/schedule/actions.h"
#include "phalanx/schedule/generators.h"
#include "phalanx/schedule/schedule_text.h"
#include "phalanx/schedule/transfers.h"
#include "phalanx/schedule/validate.h"

namespace phalanx::schedule {
namespace {

// Every schedule: passes, with transfers, and with everything.
std::vector<Schedule> originals() {
  std::vector<Schedule> list;
  for (const std::string& name : schedule_names()) {
    for (const int ranks : {2, 3}) {
      const Schedule passes = make_schedule({.name = name, .ranks = ranks, .micro_batches = 2 * ranks});
      list.push_back(passes);
      list.push_back(add_transfers(passes));
      list.push_back(add_transfers(passes, {.unshard_stages = 2, .reduce_gradients = true}));
    }
  }
  return list;
}

std::string one_line_each(const std::vector<Fault>& faults) {
  std::string text;
  for (const Fault& fault : faults) text += fault.text() + "\n";
  return text;
}

// spoil(schedule, rank, position) changes the action there; it returns false if there is nothing to change.
void expect_all_caught(const std::function<bool(Schedule&, std::size_t, std::size_t)>& spoil) {
  int caught = 0;
  for (const Schedule& original : originals()) {
    ASSERT_TRUE(validate(original).empty()) << original.name;
    for (std::size_t rank = 0; rank < original.actions.size(); ++rank) {
      for (std::size_t i = 0; i < original.actions[rank].size(); ++i) {
        Schedule spoiled = original;
        if (!spoil(spoiled, rank, i)) continue;
        const std::vector<Fault> faults = validate(spoiled);
        const std::string where =
            fmt::format("{} rank {} position {} {}", original.name, rank, i, to_text(original.actions[rank][i]));
        ASSERT_FALSE(faults.empty()) << where << "\n" << to_csv(spoiled);
        const Action& was = original.actions[rank][i];
        const std::string named = to_text(was.kind == ActionKind::overlap ? was.sub_actions[0] : was);
        EXPECT_NE(one_line_each(faults).find(named), std::string::npos) << where << "\n" << one_line_each(faults);
        ++caught;
      }
    }
  }
  EXPECT_GT(caught, 1000);
}

// The action itself, or the first part of an overlap.
Action& part_of(Schedule& schedule, std::size_t rank, std::size_t i) {
  Action& action = schedule.actions[rank][i];
  return action.kind == ActionKind::overlap ? action.sub_actions[0] : action;
}

TEST(ScheduleMutation, Dropped) {
  expect_all_caught([](Schedule& s, std::size_t rank, std::size_t i) {
    s.actions[rank].erase(s.actions[rank].begin() + static_cast<std::ptrdiff_t>(i));
    return true;
  });
}

TEST(ScheduleMutation, Duplicated) {
  expect_all_caught([](Schedule& s, std::size_t rank, std::size_t i) {
    const Action copy = s.actions[rank][i];
    s.actions[rank].insert(s.actions[rank].begin() + static_cast<std::ptrdiff_t>(i), copy);
    return true;
  });
  expect_all_caught([](Schedule& s, std::size_t rank, std::size_t i) {
    const Action copy = s.actions[rank][i];
    s.actions[rank].push_back(copy);
    return true;
  });
}

TEST(ScheduleMutation, OnTheWrongRank) {
  expect_all_caught([](Schedule& s, std::size_t rank, std::size_t i) {
    const Action moved = s.actions[rank][i];
    s.actions[rank].erase(s.actions[rank].begin() + static_cast<std::ptrdiff_t>(i));
    auto& other = s.actions[(rank + 1) % s.actions.size()];
    other.insert(other.begin() + static_cast<std::ptrdiff_t>(std::min(i, other.size())), moved);
    return true;
  });
}

TEST(ScheduleMutation, OfTheWrongStage) {
  for (const int by : {1, 2}) {
    expect_all_caught([by](Schedule& s, std::size_t rank, std::size_t i) {
      Action& action = part_of(s, rank, i);
      action.stage = (action.stage + by) % s.stages();
      return s.stages() > by;
    });
  }
}

TEST(ScheduleMutation, OfTheWrongMicroBatch) {
  expect_all_caught([](Schedule& s, std::size_t rank, std::size_t i) {
    Action& action = part_of(s, rank, i);
    if (action.micro_batch < 0) return false;
    action.micro_batch = (action.micro_batch + 1) % s.micro_batches;
    return true;
  });
}

TEST(ScheduleMutation, OfTheWrongKind) {
  expect_all_caught([](Schedule& s, std::size_t rank, std::size_t i) {
    Action& action = part_of(s, rank, i);
    const std::map<ActionKind, ActionKind> other = {
        {ActionKind::forward, ActionKind::backward},
        {ActionKind::backward, ActionKind::forward},
        {ActionKind::backward_input, ActionKind::backward_weight},
        {ActionKind::backward_weight, ActionKind::backward_input},
        {ActionKind::send_forward, ActionKind::send_backward},
        {ActionKind::recv_forward, ActionKind::send_forward},
        {ActionKind::send_backward, ActionKind::recv_backward},
        {ActionKind::recv_backward, ActionKind::recv_forward},
        {ActionKind::unshard, ActionKind::reshard},
        {ActionKind::reshard, ActionKind::unshard},
        {ActionKind::reduce_gradients, ActionKind::unshard},
    };
    action.kind = other.at(action.kind);
    return true;
  });
}

// ---- swapped: some swaps are valid; a graph decides which.

// Whether the actions can be run in their order: the relations "later on the same rank" and "uses the output of" have
// no cycle, and on each link the receives are in the order of the sends.
bool can_be_carried_out(const Schedule& s) {
  const bool transfers = has_transfers(s);
  std::map<std::string, int> node;
  std::vector<std::set<int>> after;
  std::map<std::pair<int, int>, std::vector<std::string>> sends, receives;
  std::vector<std::pair<Action, int>> sub_actions;
  const auto name = [](int stage, const char* kind, int m) { return std::to_string(stage) + kind + std::to_string(m); };
  for (int rank = 0; rank < s.ranks(); ++rank) {
    int before = -1;
    for (const Action& action : s.actions[static_cast<std::size_t>(rank)]) {
      const int id = static_cast<int>(after.size());
      after.emplace_back();
      if (before >= 0) after[static_cast<std::size_t>(before)].insert(id);
      before = id;
      for_each_sub_action(action, [&](const Action& part) {
        node[to_text(part)] = id;
        sub_actions.emplace_back(part, id);
        if (is_send(part.kind)) sends[{rank, rank_of(s, other_end(part).stage)}].push_back(to_text(part));
        if (is_receive(part.kind)) {
          receives[{rank_of(s, other_end(part).stage), rank}].push_back(to_text(other_end(part)));
        }
      });
    }
  }
  if (sends != receives) return false;
  for (const auto& [part, id] : sub_actions) {
    const auto takes = [&, id = id](const std::string& what) {
      if (const auto found = node.find(what); found != node.end()) {
        after[static_cast<std::size_t>(found->second)].insert(id);
      }
    };
    const int m = part.micro_batch, stage = part.stage;
    if (part.kind == ActionKind::forward && stage > 0) takes(name(stage - 1, "F", m));
    if (makes_gradient(part.kind))
      takes(name(stage, "F", m)), takes(name(stage + 1, "B", m)), takes(name(stage + 1, "I", m));
    if (part.kind == ActionKind::backward_weight) takes(name(stage, "I", m));
    if (!transfers) continue;
    if (part.kind == ActionKind::forward) takes(name(stage, "RECV_F", m)), takes(name(stage - 1, "SEND_F", m));
    if (makes_gradient(part.kind)) takes(name(stage, "RECV_B", m)), takes(name(stage + 1, "SEND_B", m));
    if (part.kind == ActionKind::send_forward) takes(name(stage, "F", m));
    if (part.kind == ActionKind::send_backward) takes(name(stage, "B", m)), takes(name(stage, "I", m));
  }
  std::vector<int> missing(after.size(), 0);
  for (const auto& targets : after) {
    for (const int target : targets) ++missing[static_cast<std::size_t>(target)];
  }
  std::vector<std::size_t> ready;
  for (std::size_t id = 0; id < after.size(); ++id) {
    if (missing[id] == 0) ready.push_back(id);
  }
  std::size_t done = 0;
  while (!ready.empty()) {
    const std::size_t id = ready.back();
    ready.pop_back();
    ++done;
    for (const int target : after[id]) {
      if (--missing[static_cast<std::size_t>(target)] == 0) ready.push_back(static_cast<std::size_t>(target));
    }
  }
  return done == after.size();
}

TEST(ScheduleMutation, SwappedIsCaughtExactlyWhereItCannotBeCarriedOut) {
  int right = 0, wrong = 0;
  for (const std::string& name : schedule_names()) {
    const Schedule passes = make_schedule({.name = name, .ranks = 2, .micro_batches = 4});
    for (const Schedule& original : {passes, add_transfers(passes)}) {
      for (std::size_t rank = 0; rank < original.actions.size(); ++rank) {
        const std::size_t size = original.actions[rank].size();
        for (std::size_t i = 0; i < size; ++i) {
          for (std::size_t j = i + 1; j < size; ++j) {
            Schedule swapped = original;
            std::swap(swapped.actions[rank][i], swapped.actions[rank][j]);
            const bool fine = can_be_carried_out(swapped);
            ASSERT_EQ(validate(swapped).empty(), fine)
                << original.name << " rank " << rank << ": " << i << " and " << j << "\n"
                << to_csv(swapped) << one_line_each(validate(swapped));
            ++(fine ? right : wrong);
          }
        }
      }
    }
  }
  EXPECT_GT(right, 100);
  EXPECT_GT(wrong, 1000);
}

}  // namespace
}  // namespace phalanx::schedule
