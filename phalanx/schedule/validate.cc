#include "phalanx/schedule/validate.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/schedule/actions.h"
#include "phalanx/schedule/dataflow.h"
#include "phalanx/schedule/deadlock_check.h"
#include "phalanx/schedule/posting.h"
#include "phalanx/schedule/schedule_text.h"

namespace phalanx::schedule {
namespace {

constexpr std::size_t kMostFaults = 1000;

using Key = std::tuple<ActionKind, int, int>;  // kind, stage, micro-batch

struct Place {
  int rank;
  int position;
};

class Validator {
 public:
  Validator(const Schedule& schedule, const ValidateOptions& options)
      : schedule_(schedule), options_(options), transfers_(has_transfers(schedule)) {}

  std::vector<Fault> run() {
    // Later checks rely on what earlier ones have checked.
    if (!check_range()) return take();
    place();
    check_completeness();
    check_inputs();
    if (transfers_) check_transfers();
    check_sharding();
    if (faults_.empty() && transfers_) check_transfer_order();
    if (faults_.empty()) check_end();
    check_memory();
    return take();
  }

 private:
  // ---- helpers

  void fault(int rank, int position, const Action& action, std::string what) {
    if (faults_.size() < kMostFaults) faults_.push_back({rank, position, to_text(action), std::move(what)});
  }
  std::vector<Fault> take() {
    // A missing action has no position: it comes last for its rank.
    std::stable_sort(faults_.begin(), faults_.end(), [](const Fault& a, const Fault& b) {
      return std::tuple(a.rank, a.position < 0, a.position) < std::tuple(b.rank, b.position < 0, b.position);
    });
    return std::move(faults_);
  }

  template <typename Visit>  // visit(rank, position, part)
  void each_part(const Visit& visit) const {
    for (int rank = 0; rank < schedule_.ranks(); ++rank) {
      const auto& row = schedule_.actions[static_cast<std::size_t>(rank)];
      for (std::size_t i = 0; i < row.size(); ++i) {
        for_each_sub_action(row[i], [&](const Action& part) { visit(rank, static_cast<int>(i), part); });
      }
    }
  }

  std::optional<Place> find(int stage, ActionKind kind, int micro_batch) const {
    const auto found = places_.find({kind, stage, micro_batch});
    return found == places_.end() ? std::nullopt : std::optional(found->second);
  }
  std::optional<Place> find_gradient(int stage, int micro_batch) const {
    const auto whole = find(stage, ActionKind::backward, micro_batch);
    return whole ? whole : find(stage, ActionKind::backward_input, micro_batch);
  }

  // ---- checks

  bool check_range() {
    const int stages = schedule_.stages(), ranks = schedule_.ranks(), micro_batches = schedule_.micro_batches;
    for (int stage = 0; stage < stages; ++stage) {
      const int rank = rank_of(schedule_, stage);
      if (rank < 0 || rank >= ranks) {
        fault(0, -1, make_action(stage, ActionKind::forward, -1),
              fmt::format("stage {} is said to be on rank {}: there are ranks 0 to {}", stage, rank, ranks - 1));
      }
    }
    const auto in_range = [&](int rank, int position, const Action& action) {
      const bool numbered = is_pass(action.kind) || is_transfer(action.kind);
      if (action.stage < 0 || action.stage >= stages) {
        fault(rank, position, action, fmt::format("there are stages 0 to {}", stages - 1));
      } else if (numbered && (action.micro_batch < 0 || action.micro_batch >= micro_batches)) {
        fault(rank, position, action, fmt::format("there are micro-batches 0 to {}", micro_batches - 1));
      } else if (!numbered && action.micro_batch != -1) {
        fault(rank, position, action, "this kind of action has no micro-batch");
      }
    };
    for (int rank = 0; rank < ranks; ++rank) {
      const auto& row = schedule_.actions[static_cast<std::size_t>(rank)];
      for (std::size_t i = 0; i < row.size(); ++i) {
        const auto position = static_cast<int>(i);
        if (row[i].kind != ActionKind::overlap) {
          in_range(rank, position, row[i]);
          if (!row[i].sub_actions.empty()) fault(rank, position, row[i], "only an OVERLAP_F_B has parts");
          continue;
        }
        if (row[i].sub_actions.empty()) fault(rank, position, row[i], "an overlap needs parts");
        for (const Action& part : row[i].sub_actions) {
          if (!is_pass(part.kind))
            fault(rank, position, row[i], "the parts of an overlap are passes: F, B, I or W");
          else
            in_range(rank, position, part);
        }
      }
    }
    if (stages == 0 || micro_batches < 1) {
      fault(0, -1, make_action(0, ActionKind::forward, 0), "a schedule has at least one stage and one micro-batch");
    }
    return faults_.empty();
  }

  // Records where everything is; reports what is on a wrong rank or occurs twice.
  void place() {
    each_part([&](int rank, int position, const Action& action) {
      const int home = rank_of(schedule_, action.stage);
      if (rank != home) {
        fault(rank, position, action, fmt::format("stage {} is on rank {}", action.stage, home));
        strayed_.insert({action.kind, action.stage, action.micro_batch});
        return;
      }
      if (!is_pass(action.kind) && !is_transfer(action.kind)) return;  // these may repeat: check_sharding()
      const auto [earlier, added] =
          places_.try_emplace({action.kind, action.stage, action.micro_batch}, Place{rank, position});
      if (!added) {
        fault(rank, position, action,
              fmt::format("for the second time: position {} has it, too", earlier->second.position));
      }
    });
  }

  void check_completeness() {
    const bool training = any_action(schedule_, [](ActionKind k) { return is_pass(k) && k != ActionKind::forward; });
    const auto missing = [&](int stage, ActionKind kind, int micro_batch, std::string what) {
      if (strayed_.contains({kind, stage, micro_batch})) return;
      fault(rank_of(schedule_, stage), -1, make_action(stage, kind, micro_batch), std::move(what));
    };
    for (int stage = 0; stage < schedule_.stages() && faults_.size() < kMostFaults; ++stage) {
      for (int m = 0; m < schedule_.micro_batches && faults_.size() < kMostFaults; ++m) {
        const auto whole = find(stage, ActionKind::backward, m);
        const auto backward_input = find(stage, ActionKind::backward_input, m);
        const auto backward_weight = find(stage, ActionKind::backward_weight, m);
        if (!find(stage, ActionKind::forward, m)) missing(stage, ActionKind::forward, m, "it is missing");
        if (!training) continue;
        for (const auto& [kind, half] : {std::pair(ActionKind::backward_input, backward_input),
                                         std::pair(ActionKind::backward_weight, backward_weight)}) {
          if (!whole || !half) continue;
          fault(half->rank, half->position, make_action(stage, kind, m),
                fmt::format("the whole backward pass is there, too, at position {}", whole->position));
        }
        if (whole) continue;
        if (!backward_input && !backward_weight) {
          if (strayed_.contains({ActionKind::backward_input, stage, m}) ||
              strayed_.contains({ActionKind::backward_weight, stage, m})) {
            continue;
          }
          missing(stage, ActionKind::backward, m, "it is missing, and so are its halves I and W");
        } else if (!backward_input) {
          missing(stage, ActionKind::backward_input, m, "it is missing, though W is there");
        } else if (!backward_weight) {
          missing(stage, ActionKind::backward_weight, m, "it is missing, though I is there");
        }
      }
    }
  }

  // The inputs of an action must be made, or received, earlier on its own rank. In a compute schedule check_end()
  // checks what comes from another rank.
  void check_inputs() {
    each_part([&](int rank, int position, const Action& action) {
      const int stage = action.stage, m = action.micro_batch;
      const auto need = [&](std::optional<Place> place, const Action& input) {
        const Key key{input.kind, input.stage, input.micro_batch};
        if (!place) {
          // check_completeness() names missing passes.
          if (is_pass(input.kind) || strayed_.contains(key)) return;
          fault(rank, position, action, fmt::format("needs {} before it, which is missing", to_text(input)));
        } else if (place->rank == rank && place->position == position) {
          fault(rank, position, action, fmt::format("needs {}, which is part of the same overlap", to_text(input)));
        } else if (place->rank == rank && place->position > position) {
          fault(rank, position, action,
                fmt::format("needs {} before it, which comes at position {}", to_text(input), place->position));
        }
      };
      const auto need_gradient = [&](int of_stage) {
        const bool halves = find(of_stage, ActionKind::backward_input, m).has_value();
        need(find_gradient(of_stage, m),
             make_action(of_stage, halves ? ActionKind::backward_input : ActionKind::backward, m));
      };
      const auto need_one = [&](int of_stage, ActionKind kind) {
        need(find(of_stage, kind, m), make_action(of_stage, kind, m));
      };
      switch (action.kind) {
        case ActionKind::forward:
          if (stage == 0) break;
          if (!on_different_ranks(schedule_, stage, stage - 1)) {
            need_one(stage - 1, ActionKind::forward);
          } else if (transfers_) {
            need_one(stage, ActionKind::recv_forward);
          }
          break;
        case ActionKind::backward:
        case ActionKind::backward_input:
          need_one(stage, ActionKind::forward);
          if (stage == schedule_.stages() - 1) break;
          if (!on_different_ranks(schedule_, stage, stage + 1)) {
            need_gradient(stage + 1);
          } else if (transfers_) {
            need_one(stage, ActionKind::recv_backward);
          }
          break;
        case ActionKind::backward_weight:
          need_one(stage, ActionKind::backward_input);
          break;
        case ActionKind::send_forward:
          need_one(stage, ActionKind::forward);
          break;
        case ActionKind::send_backward:
          need_gradient(stage);
          break;
        default:
          break;
      }
    });
  }

  // Everything that goes between ranks is sent and received; nothing else is.
  void check_transfers() {
    each_part([&](int rank, int position, const Action& action) {
      if (rank != rank_of(schedule_, action.stage)) return;
      const auto check_end_of = [&](ActionKind kind, int other) {
        const Action transfer = make_action(action.stage, kind, action.micro_batch);
        if (!on_different_ranks(schedule_, action.stage, other)) return;
        if (find(action.stage, kind, action.micro_batch)) return;
        if (strayed_.contains({kind, action.stage, action.micro_batch})) return;
        fault(rank, -1, transfer,
              fmt::format("it is missing: stage {} on rank {} needs what {} makes", other, rank_of(schedule_, other),
                          to_text(action)));
      };
      if (action.kind == ActionKind::forward) check_end_of(ActionKind::send_forward, action.stage + 1);
      if (makes_gradient(action.kind)) check_end_of(ActionKind::send_backward, action.stage - 1);
      if (!is_transfer(action.kind)) return;
      const Action other = other_end(action);
      if (!on_different_ranks(schedule_, action.stage, other.stage)) {
        const bool outside = other.stage < 0 || other.stage >= schedule_.stages();
        fault(rank, position, action,
              outside ? fmt::format("there is no stage {} to exchange with", other.stage)
                      : fmt::format("stage {} is on the same rank: nothing is to be sent", other.stage));
      } else if (!find(other.stage, other.kind, other.micro_batch) &&
                 !strayed_.contains({other.kind, other.stage, other.micro_batch})) {
        fault(rank, position, action,
              fmt::format("its other end, {} on rank {}, is missing", to_text(other), rank_of(schedule_, other.stage)));
      }
    });
  }

  // Ranks must receive in the order of the sends.
  void check_transfer_order() {
    std::map<std::pair<int, int>, std::vector<Action>> sent;  // from, to
    each_part([&](int rank, int, const Action& action) {
      if (is_send(action.kind)) sent[{rank, rank_of(schedule_, other_end(action).stage)}].push_back(action);
    });
    std::map<std::pair<int, int>, std::size_t> received;
    std::set<std::pair<int, int>> reported;
    each_part([&](int rank, int position, const Action& action) {
      if (!is_receive(action.kind)) return;
      const std::pair link{rank_of(schedule_, other_end(action).stage), rank};
      const Action& expected = sent[link][received[link]++];
      if (expected == other_end(action) || !reported.insert(link).second) return;
      fault(rank, position, action,
            fmt::format("out of order: as number {} rank {} sends {}, to be received by {}", received[link] - 1,
                        link.first, to_text(expected), to_text(other_end(expected))));
    });
  }

  void check_sharding() {
    const bool sharded =
        any_action(schedule_, [](ActionKind k) { return k == ActionKind::unshard || k == ActionKind::reshard; });
    const bool reduces = any_action(schedule_, [](ActionKind k) { return k == ActionKind::reduce_gradients; });
    if (!sharded && !reduces) return;
    const auto stages = static_cast<std::size_t>(schedule_.stages());
    std::vector<int> whole_since(stages, -1), reduced(stages, -1);
    each_part([&](int rank, int position, const Action& action) {
      int& since = whole_since[static_cast<std::size_t>(action.stage)];
      int& done = reduced[static_cast<std::size_t>(action.stage)];
      if (action.kind == ActionKind::unshard) {
        if (since >= 0)
          fault(rank, position, action, fmt::format("the stage is whole already, from position {}", since));
        since = position;
      } else if (action.kind == ActionKind::reshard) {
        if (since < 0) fault(rank, position, action, "the stage is not whole: no UNSHARD before it");
        since = -1;
      } else if (sharded && is_pass(action.kind) && since < 0) {
        fault(rank, position, action, fmt::format("needs {}UNSHARD before it", action.stage));
      }
      if (action.kind == ActionKind::reduce_gradients) {
        if (done >= 0) fault(rank, position, action, fmt::format("for the second time: position {} has it, too", done));
        done = position;
      } else if (ends_micro_batch(action.kind) && done >= 0) {
        fault(rank, position, action, fmt::format("comes after {}REDUCE_GRAD at position {}", action.stage, done));
      }
    });
    for (int stage = 0; stage < schedule_.stages(); ++stage) {
      const int home = rank_of(schedule_, stage), since = whole_since[static_cast<std::size_t>(stage)];
      if (since >= 0) {
        fault(home, -1, make_action(stage, ActionKind::reshard, -1),
              fmt::format("it is missing after {}UNSHARD at position {}", stage, since));
      }
      if (reduces && reduced[static_cast<std::size_t>(stage)] < 0) {
        fault(home, -1, make_action(stage, ActionKind::reduce_gradients, -1), "it is missing, other stages have it");
      }
    }
  }

  // No rank waits forever.
  void check_end() {
    const Dataflow flow = walk(schedule_, {.action = [](const Action&) { return 1.0; }});
    halts("waits for ever for", flow.ran, flow.waiting_for);
    if (!faults_.empty() || !transfers_ || options_.transport != Transport::rendezvous) return;
    faults_ = check_deadlock(schedule_, post(schedule_, posting_for(/*has_tags=*/false)));
  }

  void halts(std::string_view how, const std::vector<std::size_t>& ran,
             const std::vector<std::optional<Action>>& waiting_for) {
    for (std::size_t rank = 0; rank < ran.size(); ++rank) {
      if (!waiting_for[rank]) continue;
      const Action& missing = *waiting_for[rank];
      std::optional<Place> place = find(missing.stage, missing.kind, missing.micro_batch);
      if (!place && missing.kind == ActionKind::backward) place = find_gradient(missing.stage, missing.micro_batch);
      std::string where;
      if (place) {
        const std::size_t stopped = ran[static_cast<std::size_t>(place->rank)];
        const auto& row = schedule_.actions[static_cast<std::size_t>(place->rank)];
        where = fmt::format(", at position {} of rank {}", place->position, place->rank);
        if (stopped < static_cast<std::size_t>(place->position)) {
          where += fmt::format(" which waits itself, at position {}, {}", stopped, to_text(row[stopped]));
        }
      }
      fault(static_cast<int>(rank), static_cast<int>(ran[rank]), schedule_.actions[rank][ran[rank]],
            fmt::format("deadlock: {} {}{}", how, to_text(missing), where));
    }
  }

  void check_memory() {
    if (options_.max_live_activations.empty()) return;
    if (options_.max_live_activations.size() != static_cast<std::size_t>(schedule_.ranks())) {
      throw ConfigError(fmt::format("max_live_activations has {} numbers: expected one for each of {} ranks",
                                    options_.max_live_activations.size(), schedule_.ranks()));
    }
    const bool training = any_action(schedule_, ends_micro_batch);
    std::vector<int> alive(static_cast<std::size_t>(schedule_.ranks()), 0);
    std::set<int> reported;
    each_part([&](int rank, int position, const Action& action) {
      const auto r = static_cast<std::size_t>(rank);
      if (ends_micro_batch(action.kind)) --alive[r];
      if (action.kind != ActionKind::forward || !training) return;
      if (++alive[r] <= options_.max_live_activations[r] || !reported.insert(rank).second) return;
      fault(rank, position, action,
            fmt::format("makes {} live activations, the rank may have {}", alive[r], options_.max_live_activations[r]));
    });
  }

  const Schedule& schedule_;
  const ValidateOptions& options_;
  bool transfers_;
  std::map<Key, Place> places_;  // first positions of passes and transfers
  std::set<Key> strayed_;        // on a wrong rank
  std::vector<Fault> faults_;
};

}  // namespace

std::string Fault::text() const {
  return position < 0 ? fmt::format("rank {}, {}: {}", rank, action, what)
                      : fmt::format("rank {}, position {}, {}: {}", rank, position, action, what);
}

std::vector<Fault> validate(const Schedule& schedule, const ValidateOptions& options) {
  return Validator(schedule, options).run();
}

void check(const Schedule& schedule, const ValidateOptions& options) {
  const std::vector<Fault> faults = validate(schedule, options);
  if (faults.empty()) return;
  constexpr std::size_t kMostNamed = 8;
  std::string text =
      fmt::format("schedule {} is wrong in {}{} place{}", schedule.name,
                  faults.size() == kMostFaults ? "at least " : "", faults.size(), faults.size() == 1 ? "" : "s");
  for (std::size_t i = 0; i < std::min(faults.size(), kMostNamed); ++i) text += "\n  " + faults[i].text();
  if (faults.size() > kMostNamed) text += fmt::format("\n  and {} more", faults.size() - kMostNamed);
  throw ConfigError(text);
}

}  // namespace phalanx::schedule
