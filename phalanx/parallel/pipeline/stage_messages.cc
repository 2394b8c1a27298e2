#include "phalanx/parallel/pipeline/stage_messages.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "phalanx/base/error.h"
#include "phalanx/schedule/schedule_text.h"

namespace phalanx {
namespace {

using schedule::Action;
using schedule::ActionKind;

constexpr std::int64_t kMostDimensions = 14;
constexpr std::int64_t kShapeWords = kMostDimensions + 2;  // dtype, dimensions, sizes

bool is_gradient(const Action& action) {
  return action.kind == ActionKind::send_backward || action.kind == ActionKind::receive_backward;
}

}  // namespace

std::string TensorShape::text() const { return fmt::format("{} [{}]", c10::toString(dtype), fmt::join(sizes, ", ")); }

StageMessages::StageMessages(std::shared_ptr<Communicator> comm, const schedule::Schedule& schedule, at::Device device,
                             std::vector<Action> receives, int ahead)
    : comm_(std::move(comm)),
      schedule_(schedule),
      device_(device),
      has_tags_(comm_->backend_name() != "nccl"),
      ahead_(std::max(ahead, 0)),
      receives_(std::move(receives)) {}

StageMessages::Boundary StageMessages::boundary_of(const Action& action) {
  switch (action.kind) {
    case ActionKind::receive_forward:
      return {action.stage - 1, false};
    case ActionKind::send_backward:
      return {action.stage - 1, true};
    default:
      return {action.stage, is_gradient(action)};
  }
}

int StageMessages::peer_of(const Action& action) const {
  const bool to_next = action.kind == ActionKind::send_forward || action.kind == ActionKind::receive_backward;
  return schedule_.rank_of_stage.at(static_cast<std::size_t>(action.stage + (to_next ? 1 : -1)));
}

// Even numbers are tensors, odd ones their shapes.
int StageMessages::tag_of(const Action& action) const {
  if (!has_tags_) return 0;
  const auto [stage, gradient] = boundary_of(action);
  return 2 * ((2 * stage + (gradient ? 1 : 0)) * schedule_.micro_batches + action.micro_batch);
}

void StageMessages::begin(bool forgets_shapes) {
  if (forgets_shapes) shapes_.clear();
  reached_ = posted_count_ = 0;
}

void StageMessages::send_shape(const Action& action, const TensorShape& shape) {
  const auto dimensions = static_cast<std::int64_t>(shape.sizes.size());
  if (dimensions > kMostDimensions) {
    throw Error(fmt::format("a tensor of {} dimensions; expected {} at most", dimensions, kMostDimensions));
  }
  const at::Tensor words = at::empty({kShapeWords}, at::kLong);
  auto* word = words.mutable_data_ptr<std::int64_t>();
  std::fill_n(word, kShapeWords, 0);
  word[0] = static_cast<std::int64_t>(shape.dtype);
  word[1] = dimensions;
  std::ranges::copy(shape.sizes, word + 2);
  const at::Tensor message = words.to(device_);
  sends_.emplace_back(
      comm_->send(message, peer_of(action), {.tag = tag_of(action) + (has_tags_ ? 1 : 0), .async = true}), message);
}

TensorShape StageMessages::receive_shape(const Action& action) {
  const at::Tensor message = at::empty({kShapeWords}, at::TensorOptions(at::kLong).device(device_));
  comm_->recv(message, peer_of(action), {.tag = tag_of(action) + (has_tags_ ? 1 : 0), .async = true}).wait();
  const at::Tensor words = message.to(at::kCPU);
  const auto* word = words.const_data_ptr<std::int64_t>();
  return {static_cast<at::ScalarType>(word[0]), std::vector<std::int64_t>(word + 2, word + 2 + word[1])};
}

void StageMessages::send(const Action& action, const at::Tensor& tensor) {
  const Boundary boundary = boundary_of(action);
  const TensorShape found = TensorShape::of(tensor);
  if (const auto known = shapes_.find(boundary); known == shapes_.end()) {
    shapes_[boundary] = found;
    send_shape(action, found);
  } else if (known->second != found) {
    throw Error(fmt::format(
        "micro-batch {}: the {} of stage {} is {}, expected {} as in the first micro-batch: all micro-batches of all "
        "steps must be of one shape (pad sequences, drop a last incomplete batch)",
        action.micro_batch, is_gradient(action) ? "gradient of the input" : "output", action.stage, found.text(),
        known->second.text()));
  }
  while (!sends_.empty() && sends_.front().first.is_done()) sends_.pop_front();
  const at::Tensor message = tensor.contiguous();
  sent_bytes_ += static_cast<std::int64_t>(message.nbytes());
  sends_.emplace_back(comm_->send(message, peer_of(action), {.tag = tag_of(action), .async = true}), message);
}

void StageMessages::post(const Action& receive) {
  if (reached_ >= receives_.size() || receives_[reached_] != receive) {
    throw Error(fmt::format("{} is not the receive whose turn it is", schedule::to_text(receive)));
  }
  ++reached_;
  const std::size_t until = std::min(reached_ + static_cast<std::size_t>(ahead_), receives_.size());
  for (; posted_count_ < until; ++posted_count_) {
    const Action& action = receives_[posted_count_];
    const Boundary boundary = boundary_of(action);
    if (!shapes_.contains(boundary)) {
      if (posted_count_ >= reached_) return;  // nothing is waited for before its turn
      shapes_[boundary] = receive_shape(action);
    }
    const TensorShape& shape = shapes_.at(boundary);
    const at::Tensor tensor = at::empty(shape.sizes, at::TensorOptions(shape.dtype).device(device_));
    posted_[{boundary.first, boundary.second, action.micro_batch}] = {
        tensor, comm_->recv(tensor, peer_of(action), {.tag = tag_of(action), .async = true})};
  }
}

at::Tensor StageMessages::take(const Action& receive) {
  const auto [stage, gradient] = boundary_of(receive);
  auto found = posted_.extract({stage, gradient, receive.micro_batch});
  if (found.empty()) throw Error(fmt::format("{} has not come before it is needed", schedule::to_text(receive)));
  found.mapped().work.wait();
  return found.mapped().tensor;
}

void StageMessages::finish_sends() {
  for (; !sends_.empty(); sends_.pop_front()) sends_.front().first.wait();
}

void StageMessages::forget() {
  posted_.clear();
  sends_.clear();
  shapes_.clear();
}

}  // namespace phalanx
