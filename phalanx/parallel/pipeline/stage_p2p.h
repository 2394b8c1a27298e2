// StageP2P: transfers activations and gradients between the stages of different ranks. It posts the groups of a program
// (schedule/posting.h) exactly as they are and nothing else, so that check_deadlock()'s result for the program holds.
//
// Before the first output of a stage, its dtype and shape are sent, in host memory: neither end waits for a device. All
// later outputs of the stage must match it, and so do the gradients of its outputs.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/schedule/posting.h"
#include "phalanx/schedule/schedule.h"

namespace phalanx {

/// Shape and dtype of the tensor that crosses a boundary between stages.
struct TensorShape {
  at::ScalarType dtype = at::kFloat;
  std::vector<std::int64_t> sizes;

  static TensorShape of(const at::Tensor& tensor) { return {tensor.scalar_type(), tensor.sizes().vec()}; }
  std::string text() const;  // "float32 [2, 16, 64]"
  bool operator==(const TensorShape&) const = default;
};

class StageP2P {
 public:
  StageP2P(std::shared_ptr<Communicator> comm, const schedule::Schedule& schedule, at::Device device);

  /// Collective over the pipeline, and the host waits. Where messages are kernels, NCCL connects two ranks at their
  /// first message in each direction, and takes the call only when both have made it. Here each rank exchanges one with
  /// all that it will exchange with, so that no later one waits for a rank that waits for it.
  void connect();
  /// Starts a new run over a program. With `forgets_shapes`, shapes are sent again.
  void begin(bool forgets_shapes);
  /// Posts one group. made_for(send) hands over the tensor to send. Throws if it does not match the first one of its
  /// stage. The host waits only for the shape of a stage's first input.
  void post(const schedule::Step& group, const std::function<at::Tensor(const schedule::Action& send)>& made_for);
  /// Waits for a posted receive and returns its tensor.
  at::Tensor wait_recv(const schedule::Action& receive);
  /// Whether something is posted that wait_recv() has not returned yet.
  bool has_posted() const noexcept { return !posted_.empty(); }
  /// Waits for all sends that are still pending.
  void wait_sends();
  /// Frees everything, after an error.
  void clear_runtime_states();

  std::int64_t sent_bytes() const noexcept { return sent_bytes_; }

 private:
  struct Posted {
    at::Tensor tensor;
    Work work;
  };
  /// The stage that makes the output, for an output or its gradient.
  static int producer_of(const schedule::Action& action);
  int peer_of(const schedule::Action& action) const;
  int tag_of(const schedule::Action& action) const;
  void check_shape(const schedule::Action& send, const at::Tensor& tensor);
  TensorShape receive_shape(const schedule::Action& action);
  void send_shape(const schedule::Action& action, const TensorShape& shape);

  std::shared_ptr<Communicator> comm_;
  const schedule::Schedule& schedule_;
  at::Device device_;
  bool has_tags_;
  std::map<int, TensorShape> shapes_;                    // of the stages' outputs
  std::map<std::tuple<int, bool, int>, Posted> posted_;  // producer stage, whether it is the gradient, micro-batch
  std::deque<Work> sends_;
  std::int64_t sent_bytes_ = 0;
};

}  // namespace phalanx
