// StageMessages: what goes from stage to stage between ranks, asynchronously, with receives posted ahead.
//
// Before the first tensor of each kind its dtype and shape go over, in a message of their own; all others must be like
// it. Messages are told apart by tags, so that neither side depends on the other's order; on a backend without tags
// both orders must be the same.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "phalanx/comm/communicator.h"
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

class StageMessages {
 public:
  /// `receives`: this rank's, in the order of its list.
  StageMessages(std::shared_ptr<Communicator> comm, const schedule::Schedule& schedule, at::Device device,
                std::vector<schedule::Action> receives, int ahead);

  /// A new run over the list. With `forgets_shapes` they are sent again.
  void begin(bool forgets_shapes);
  /// Throws where the tensor is not like the first of its boundary.
  void send(const schedule::Action& action, const at::Tensor& tensor);
  /// The receive of the list whose turn it is: posts it, if it is not yet, and so many of those after it.
  void post(const schedule::Action& receive);
  /// Waits for what a receive that was posted brings.
  at::Tensor take(const schedule::Action& receive);
  /// Waits for what has not been taken yet.
  void finish_sends();
  /// Lets go of everything, after an error.
  void forget();

  std::int64_t sent_bytes() const noexcept { return sent_bytes_; }

 private:
  struct Posted {
    at::Tensor tensor;
    Work work;
  };
  using Boundary = std::pair<int, bool>;  // of the output of a stage, and whether it is the gradient that goes over
  static Boundary boundary_of(const schedule::Action& action);
  int peer_of(const schedule::Action& action) const;
  int tag_of(const schedule::Action& action) const;
  TensorShape receive_shape(const schedule::Action& action);
  void send_shape(const schedule::Action& action, const TensorShape& shape);

  std::shared_ptr<Communicator> comm_;
  const schedule::Schedule& schedule_;
  at::Device device_;
  bool has_tags_;
  int ahead_;
  std::vector<schedule::Action> receives_;
  std::map<Boundary, TensorShape> shapes_;
  std::size_t reached_ = 0;                              // receives whose turn has come
  std::size_t posted_count_ = 0;                         // and those posted
  std::map<std::tuple<int, bool, int>, Posted> posted_;  // boundary and micro-batch
  std::deque<std::pair<Work, at::Tensor>> sends_;
  std::int64_t sent_bytes_ = 0;
};

}  // namespace phalanx
