// StageP2P: what goes from stage to stage between ranks: posts the groups of a program (schedule/posting.h) as
// they are, and nothing else, so that what check_deadlock() says of the program holds.
//
// Before the first output of a stage its dtype and shape go over, in host memory: neither end waits for a device. All
// others must be like it, and the gradients of a stage's output are.
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

/// Of the tensor that goes over a boundary between stages.
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

  /// A new run over a program. With `forgets_shapes` they are sent again.
  void begin(bool forgets_shapes);
  /// One group; made_for(send) gives up what is sent. Throws where that is not like the first of its stage. Waits on
  /// the host for nothing but the shape of a stage's first input.
  void post(const schedule::Step& group, const std::function<at::Tensor(const schedule::Action& send)>& made_for);
  /// Waits for what a receive that was posted brings.
  at::Tensor wait_recv(const schedule::Action& receive);
  /// Waits for what has not been taken yet.
  void wait_sends();
  /// Lets go of everything, after an error.
  void clear_runtime_states();

  std::int64_t sent_bytes() const noexcept { return sent_bytes_; }

 private:
  struct Posted {
    at::Tensor tensor;
    Work work;
  };
  /// Of an output or its gradient: the stage that makes the output.
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
  std::map<std::tuple<int, bool, int>, Posted> posted_;  // maker, whether it is the gradient, and micro-batch
  std::deque<Work> sends_;
  std::int64_t sent_bytes_ = 0;
};

}  // namespace phalanx
