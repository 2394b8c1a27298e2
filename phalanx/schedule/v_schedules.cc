#include "phalanx/schedule/v_schedules.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <deque>
#include <utility>

#include "phalanx/schedule/actions.h"

namespace phalanx::schedule {
namespace {

// The passes of a rank's two stages. Each kind takes the micro-batches in order.
class VRank {
 public:
  enum Way : std::size_t { down = 0, up = 1 };

  explicit VRank(const VSize& size) : stages_{size.rank, 2 * size.ranks - 1 - size.rank} {}

  void forward(Way way) { actions_.push_back(next_forward(way)); }
  void backward(Way way) { actions_.push_back(next_backward(way)); }
  void backward_input(Way way) {
    waiting_.push_back({way, backwards_[way]});
    actions_.push_back(next(way, ActionKind::backward_input, backwards_));
  }
  // For the stage's oldest micro-batch whose backward_input has run and whose backward_weight has not.
  void backward_weight(Way way) {
    const auto oldest =
        std::find_if(waiting_.begin(), waiting_.end(), [&](const Half& half) { return half.way == way; });
    if (oldest == waiting_.end()) return;
    finish(*oldest);
    waiting_.erase(oldest);
  }
  // For the oldest of both stages.
  void backward_weight() {
    if (waiting_.empty()) return;
    finish(waiting_.front());
    waiting_.pop_front();
  }
  void forward_beside_backward(Way forward_way) {
    Action both = make_action(-1, ActionKind::overlap);
    both.sub_actions.push_back(next_forward(forward_way));
    both.sub_actions.push_back(next_backward(forward_way == down ? up : down));
    actions_.push_back(std::move(both));
  }

  int forwards(Way way) const { return forwards_[way]; }
  bool weights_wait(Way way) const {
    return std::any_of(waiting_.begin(), waiting_.end(), [&](const Half& half) { return half.way == way; });
  }
  std::vector<Action> take() { return std::move(actions_); }

 private:
  struct Half {
    Way way;
    int micro_batch;
  };
  using Counts = std::array<int, 2>;

  Action next(Way way, ActionKind kind, Counts& counts) { return make_action(stages_[way], kind, counts[way]++); }
  Action next_forward(Way way) { return next(way, ActionKind::forward, forwards_); }
  Action next_backward(Way way) { return next(way, ActionKind::backward, backwards_); }
  void finish(const Half& half) {
    actions_.push_back(make_action(stages_[half.way], ActionKind::backward_weight, half.micro_batch));
  }

  std::array<int, 2> stages_;
  Counts forwards_{};
  Counts backwards_{};
  std::deque<Half> waiting_;  // backward_input has run, backward_weight has not
  std::vector<Action> actions_;
};

}  // namespace

std::vector<Action> zbv_actions(const VSize& size) {
  constexpr auto kDown = VRank::down, kUp = VRank::up;
  // With too few micro-batches to fill the V: the schedule for enough of them, without those that do not exist.
  const int micro_batches = std::max(2 * size.ranks - 1, size.micro_batches);
  const int rank = size.rank, ranks_to_end = size.ranks - size.rank;
  VRank v(size);
  const auto split_backward = [&](VRank::Way way) {
    v.backward_input(way);
    v.backward_weight(way);
  };
  // Warm-up: fill the way down, then both ways, then start on the way back.
  for (int i = 0; i < 2 * ranks_to_end - 1; ++i) v.forward(kDown);
  for (int i = 0; i < rank; ++i) {
    v.forward(kUp);
    v.forward(kDown);
  }
  for (int i = 0; i < ranks_to_end; ++i) {
    v.forward(kUp);
    split_backward(kUp);
  }
  // Steady: one forward and one full backward of each stage in turn.
  while (v.forwards(kUp) < v.forwards(kDown) || v.forwards(kDown) < micro_batches) {
    if (v.forwards(kDown) < micro_batches) v.forward(kDown);
    split_backward(kDown);
    v.forward(kUp);
    split_backward(kUp);
  }
  // Cool-down: backward_input first, because other ranks wait for it; backward_weight fills the rest.
  for (int i = 0; i < rank; ++i) {
    v.backward_input(kDown);
    v.backward_input(kUp);
  }
  for (int i = 0; i < ranks_to_end; ++i) {
    v.backward_input(kDown);
    v.backward_weight(kDown);
  }
  while (v.weights_wait(kUp)) v.backward_weight(kUp);
  while (v.weights_wait(kDown)) v.backward_weight(kDown);

  std::vector<Action> actions = v.take();
  std::erase_if(actions, [&](const Action& action) { return action.micro_batch >= size.micro_batches; });
  return actions;
}

std::vector<Action> dual_pipe_v_actions(const VSize& size) {
  constexpr auto kDown = VRank::down, kUp = VRank::up;
  const int rank = size.rank, ranks_after = size.ranks - 1 - size.rank;
  VRank v(size);
  // Fill the way down, then both ways.
  for (int i = 0; i < 2 * ranks_after; ++i) v.forward(kDown);
  for (int i = 0; i < rank + 1; ++i) {
    v.forward(kDown);
    v.forward(kUp);
  }
  // The last stages start backward, split, so that the gradient is sent at once.
  for (int i = 0; i < ranks_after; ++i) {
    v.backward_input(kUp);
    v.backward_weight();
    v.forward(kUp);
  }
  // Steady: each forward beside a backward of the other stage. The bottom of the V has nothing to overlap at first.
  for (int i = 0; i < size.micro_batches - 2 * size.ranks + rank + 1; ++i) {
    if (i == 0 && ranks_after == 0) {
      v.forward(kDown);
      v.backward(kUp);
    } else {
      v.forward_beside_backward(kDown);
    }
    v.forward_beside_backward(kUp);
  }
  for (int i = 0; i < ranks_after; ++i) {
    v.backward(kUp);
    v.forward_beside_backward(kUp);
  }
  // Cool-down: from the middle on backward is split, and backward_weight fills the waiting time.
  bool split = false;
  const auto backward = [&](VRank::Way way) { split ? v.backward_input(way) : v.backward(way); };
  for (int i = 0; i < rank + 1; ++i) {
    const bool middle = i == (rank + 1) / 2;
    if (middle && rank % 2 == 1) split = true;
    backward(kUp);
    if (middle && rank % 2 == 0) split = true;
    backward(kDown);
  }
  for (int i = 0; i < ranks_after; ++i) {
    v.backward_weight();
    backward(kDown);
  }
  for (int i = 0; i < rank + 1; ++i) v.backward_weight();
  return v.take();
}

}  // namespace phalanx::schedule
