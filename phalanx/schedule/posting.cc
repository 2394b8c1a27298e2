#include "phalanx/schedule/posting.h"

#include <algorithm>
#include <cstddef>
#include <set>
#include <utility>

#include "phalanx/schedule/actions.h"

namespace phalanx::schedule {
namespace {

class Posting {
 public:
  Posting(const std::vector<Action>& row, const PostingOptions& options) : options_(options) {
    std::set<int> known;
    for (const Action& action : row) {
      for_each_sub_action(action, [&](const Action& part) {
        parts_.push_back(part);
        if (!is_receive(part.kind)) return;
        const bool is_first = part.kind == ActionKind::recv_forward && known.insert(part.stage).second;
        receives_.push_back({part, is_first});
      });
    }
  }

  Program run() {
    for (const Action& part : parts_) {
      if (is_receive(part.kind)) {
        receive();
      } else if (is_send(part.kind)) {
        add(part, /*waits_for_shape=*/false);
      } else {
        program_.push_back({.action = part, .transfers = {}});
      }
    }
    return std::move(program_);
  }

 private:
  struct Receive {
    Action action;
    bool waits_for_shape = false;
  };

  // The next receive is due: posts it, and those ahead of it.
  void receive() {
    ++reached_;
    const std::size_t until =
        std::min(reached_ + static_cast<std::size_t>(std::max(options_.receives_ahead, 0)), receives_.size());
    for (; posted_ < until; ++posted_) {
      const Receive& next = receives_[posted_];
      const bool is_ahead = posted_ >= reached_;
      const bool has_shape =
          next.action.kind == ActionKind::recv_forward ? !next.waits_for_shape : sent_.contains(next.action.stage);
      if (is_ahead && !has_shape) return;
      add(next.action, next.waits_for_shape);
    }
  }

  void add(const Action& transfer, bool waits_for_shape) {
    const bool is_gradient = transfer.kind == ActionKind::send_backward || transfer.kind == ActionKind::recv_backward;
    const int communicator = is_gradient && options_.communicators > 1 ? 1 : 0;
    const bool joins = options_.groups && !waits_for_shape && !program_.empty() && !program_.back().transfers.empty() &&
                       is_send(program_.back().transfers.back().kind) && program_.back().communicator == communicator;
    if (!joins) {
      program_.push_back(
          {.action = {}, .transfers = {}, .communicator = communicator, .waits_for_shape = waits_for_shape});
    }
    program_.back().transfers.push_back(transfer);
    if (transfer.kind == ActionKind::send_forward) sent_.insert(transfer.stage);
  }

  const PostingOptions& options_;
  std::vector<Action> parts_;
  std::vector<Receive> receives_;
  std::size_t reached_ = 0;  // receives that were due
  std::size_t posted_ = 0;   // receives that were posted
  std::set<int> sent_;       // stages that have sent an output
  Program program_;
};

}  // namespace

PostingOptions posting_for(bool has_tags) {
  return has_tags ? PostingOptions{.receives_ahead = 1} : PostingOptions{.groups = true};
}

std::vector<Program> post(const Schedule& schedule, const PostingOptions& options) {
  std::vector<Program> programs;
  for (const auto& row : schedule.actions) programs.push_back(Posting(row, options).run());
  return programs;
}

Schedule forward_only(const Schedule& schedule) {
  Schedule result = schedule;
  for (auto& row : result.actions) {
    std::vector<Action> kept;
    for (const Action& action : row) {
      for_each_sub_action(action, [&](const Action& part) {
        const bool goes_forward = part.kind == ActionKind::forward || part.kind == ActionKind::send_forward ||
                                  part.kind == ActionKind::recv_forward || part.kind == ActionKind::unshard ||
                                  part.kind == ActionKind::reshard;
        if (goes_forward) kept.push_back(part);
      });
    }
    row = std::move(kept);
  }
  return result;
}

}  // namespace phalanx::schedule
