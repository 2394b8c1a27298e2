#include "phalanx/parallel/pipeline/stage_p2p.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "phalanx/base/assert.h"
#include "phalanx/base/error.h"
#include "phalanx/comm/backend.h"
#include "phalanx/schedule/actions.h"
#include "phalanx/schedule/schedule_text.h"

namespace phalanx {
namespace {

using schedule::Action;
using schedule::ActionKind;

constexpr std::int64_t kMostDimensions = 14;
constexpr std::int64_t kShapeWords = kMostDimensions + 2;  // dtype, dimensions, sizes

bool is_gradient(const Action& action) {
  return action.kind == ActionKind::send_backward || action.kind == ActionKind::recv_backward;
}

}  // namespace

std::string TensorShape::text() const { return fmt::format("{} [{}]", c10::toString(dtype), fmt::join(sizes, ", ")); }

StageP2P::StageP2P(std::shared_ptr<Communicator> comm, const schedule::Schedule& schedule, at::Device device)
    : comm_(std::move(comm)), schedule_(schedule), device_(device), has_tags_(comm_->backend()->traits().has_tags) {}

int StageP2P::producer_of(const Action& action) {
  const bool is_before = action.kind == ActionKind::recv_forward || action.kind == ActionKind::send_backward;
  return action.stage - (is_before ? 1 : 0);
}

int StageP2P::peer_of(const Action& action) const {
  return schedule_.rank_of_stage.at(static_cast<std::size_t>(schedule::other_end(action).stage));
}

int StageP2P::tag_of(const Action& action) const {
  if (!has_tags_) return 0;
  return (2 * producer_of(action) + (is_gradient(action) ? 1 : 0)) * schedule_.micro_batches + action.micro_batch;
}

void StageP2P::connect() {
  if (!comm_->backend()->traits().stream_ordered) return;
  const auto& rank_of_stage = schedule_.rank_of_stage;
  std::set<int> peers;
  for (std::size_t stage = 1; stage < rank_of_stage.size(); ++stage) {
    const int a = rank_of_stage[stage - 1], b = rank_of_stage[stage];
    if (a == comm_->rank()) peers.insert(b);
    if (b == comm_->rank()) peers.insert(a);
  }
  peers.erase(comm_->rank());
  std::vector<Communicator::P2POp> operations;
  for (const int peer : peers) {
    for (const bool is_send : {true, false}) {
      operations.push_back({.is_send = is_send,
                            .tensor = at::empty({1}, at::TensorOptions(at::kFloat).device(device_)).zero_(),
                            .peer = peer});
    }
  }
  if (!operations.empty()) comm_->batch_isend_irecv(std::move(operations));
}

void StageP2P::begin(bool forgets_shapes) {
  if (forgets_shapes) shapes_.clear();
}

void StageP2P::send_shape(const Action& action, const TensorShape& shape) {
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
  sends_.push_back(comm_->send(words, peer_of(action), {.tag = kHostMemoryTag + producer_of(action), .async = true}));
}

TensorShape StageP2P::receive_shape(const Action& action) {
  const at::Tensor words = at::empty({kShapeWords}, at::kLong);
  comm_->recv(words, peer_of(action), {.tag = kHostMemoryTag + producer_of(action)});
  const auto* word = words.const_data_ptr<std::int64_t>();
  return {static_cast<at::ScalarType>(word[0]), std::vector<std::int64_t>(word + 2, word + 2 + word[1])};
}

void StageP2P::check_shape(const Action& send, const at::Tensor& tensor) {
  const TensorShape found = TensorShape::of(tensor);
  const auto [known, is_first] = shapes_.try_emplace(producer_of(send), found);
  if (is_first) return send_shape(send, found);
  if (known->second == found) return;
  throw Error(fmt::format(
      "micro-batch {}: the {} of stage {} is {}, expected {} as in the first micro-batch: all micro-batches of all "
      "steps must be of one shape (pad sequences, drop a last incomplete batch)",
      send.micro_batch, is_gradient(send) ? "gradient of the input" : "output", send.stage, found.text(),
      known->second.text()));
}

void StageP2P::post(const schedule::Step& group, const std::function<at::Tensor(const Action& send)>& made_for) {
  std::vector<Communicator::P2POp> operations;
  for (const Action& action : group.transfers) {
    at::Tensor tensor;
    if (schedule::is_send(action.kind)) {
      tensor = made_for(action).contiguous();
      check_shape(action, tensor);
      sent_bytes_ += static_cast<std::int64_t>(tensor.nbytes());
    } else {
      const int maker = producer_of(action);
      if (group.waits_for_shape && !shapes_.contains(maker)) shapes_[maker] = receive_shape(action);
      const TensorShape& shape = shapes_.at(maker);
      tensor = at::empty(shape.sizes, at::TensorOptions(shape.dtype).device(device_));
    }
    operations.push_back(
        {.is_send = schedule::is_send(action.kind), .tensor = tensor, .peer = peer_of(action), .tag = tag_of(action)});
  }
  while (!sends_.empty() && sends_.front().is_done()) sends_.pop_front();
  const auto start = [&]() -> Work {
    if (operations.size() > 1) return comm_->batch_isend_irecv(operations, {.async = true});
    const auto& [is_send, tensor, peer, tag] = operations.front();
    const P2POptions options{.tag = tag, .async = true};
    return is_send ? comm_->send(tensor, peer, options) : comm_->recv(tensor, peer, options);
  };
  const Work work = start();
  bool has_receives = false;
  for (std::size_t i = 0; i < operations.size(); ++i) {
    const Action& action = group.transfers[i];
    if (!schedule::is_receive(action.kind)) continue;
    has_receives = true;
    const std::tuple key(producer_of(action), is_gradient(action), action.micro_batch);
    [[maybe_unused]] const bool is_new = posted_.try_emplace(key, Posted{operations[i].tensor, work}).second;
    PHALANX_ASSERT(is_new, "a tensor is received once before it is taken");
  }
  if (!has_receives) sends_.push_back(work);
}

at::Tensor StageP2P::wait_recv(const Action& receive) {
  auto found = posted_.extract({producer_of(receive), is_gradient(receive), receive.micro_batch});
  if (found.empty()) throw Error(fmt::format("{} has not come before it is needed", schedule::to_text(receive)));
  found.mapped().work.wait();
  return found.mapped().tensor;
}

void StageP2P::wait_sends() {
  for (; !sends_.empty(); sends_.pop_front()) sends_.front().wait();
}

void StageP2P::clear_runtime_states() {
  posted_.clear();
  sends_.clear();
  shapes_.clear();
}

}  // namespace phalanx
