// Makes the routers of a layout send tokens to the experts that one rank chose, for layout_check.h.
//
// Where two experts of a token are nearly equal, rounding decides. A layout that is right may send such a token
// elsewhere, and its gradients then say nothing. So the reference's routing is recorded, and the layout replays it.
// What its routers would have done is compared on its own:
//
// - The logits must be those of the reference, within the tolerance of activations.
// - From the reference's logits a layout must choose what the reference chose, exactly. Its biases take part in that.
//
// So a token that a layout alone would have sent elsewhere is a near tie. These tokens are counted.
//
//   reference.routing->record();
//   reference.forward_backward(step);
//   layout.routing->replay(share_routing(reference.routing.get(), *world));   // collective
//   layout.forward_backward(step);
//   layout.routing->differences();
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/layout/context_cut.h"
#include "phalanx/nn/mixture_of_experts.h"
#include "phalanx/nn/module.h"
#include "phalanx/tensor/document_boundaries.h"

namespace phalanx::verify {

/// Of the global batch, on the host.
struct RoutingOfLayer {
  at::Tensor logits;   // fp32 [rows, seq_len, experts]
  at::Tensor experts;  // int64 [rows, seq_len, experts_per_token]
};
using RoutingTable = std::map<std::int64_t, RoutingOfLayer>;  // by the layer's number

/// Of the tokens of this rank that went through a layer's router.
struct RoutingDifference {
  double squares = 0, reference_squares = 0;  // of the logits' difference, and of the reference's logits
  std::int64_t tokens = 0;
  std::int64_t elsewhere = 0;  // tokens that this side alone would have sent to other experts
  std::int64_t wrong = 0;      // tokens for which it chooses other experts from the reference's logits
  double relative() const;     // the logits' difference by their norm; infinite if one is not finite
};

class RoutingReplay {
 public:
  /// For the mixtures among `modules`, which are models or parts of one, and outlive this. They compute the rows of the
  /// global batch from `first_row` on, in their order, and of each row the positions of `cut`.
  RoutingReplay(std::span<nn::Module* const> modules, std::int64_t first_row, const ContextCut& cut);
  ~RoutingReplay();
  RoutingReplay(const RoutingReplay&) = delete;
  RoutingReplay& operator=(const RoutingReplay&) = delete;

  /// Passes record from now on.
  void record();
  /// Passes replay `table` from now on.
  void replay(std::shared_ptr<const RoutingTable> table);

  /// Around the forward and backward passes of a step. Passes at other times are left alone. `documents`: of the rows
  /// that this side computes, which a cut by work needs; null: each row is one.
  void begin_step(std::shared_ptr<const DocumentBoundaries> documents = nullptr);
  void end_step();

  /// What the last step recorded.
  RoutingTable recorded() const;
  /// Of the last step that was replayed; by layer.
  std::map<std::int64_t, RoutingDifference> differences() const;

 private:
  struct Layer;
  at::Tensor choose(Layer& layer, const nn::RouterChoice& choice);
  at::Tensor replayed(Layer& layer, const nn::RouterChoice& choice);

  std::vector<std::unique_ptr<Layer>> layers_;
  std::int64_t first_row_;
  ContextCut cut_;
  std::shared_ptr<const DocumentBoundaries> documents_;
  bool records_ = false, is_active_ = false;
  std::shared_ptr<const RoutingTable> table_;
};

/// What rank 0 recorded, on all ranks. `recorder`: null on the others. Collective.
std::shared_ptr<const RoutingTable> share_routing(const RoutingReplay* recorder, Communicator& world);

}  // namespace phalanx::verify
