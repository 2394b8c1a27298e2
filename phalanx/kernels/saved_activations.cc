#include "phalanx/kernels/saved_activations.h"

#include "phalanx/base/error.h"

namespace phalanx::kernels {
namespace {

thread_local SavedActivations* current_outputs = nullptr;

}  // namespace

SavedActivations* SavedActivations::current() noexcept { return current_outputs; }

SavedActivations::Scope::Scope(SavedActivations* saved, Run run) : before_(current_outputs), saved_(saved) {
  current_outputs = saved;
  if (saved == nullptr) return;
  saved->run_ = run;
  saved->counts_ = {};
}

SavedActivations::Scope::~Scope() {
  if (saved_ != nullptr && saved_->run_ == Run::recompute) saved_->outputs_.clear();
  current_outputs = before_;
}

void SavedActivations::save(SavedOp op, const std::vector<at::Tensor>& outputs) {
  // Saves only the values: the tensors themselves stay with their users, in whatever graph.
  auto& values = outputs_.emplace_back(op, std::vector<at::Tensor>()).second;
  for (const auto& output : outputs) values.push_back(output.defined() ? output.detach() : output);
}

std::vector<at::Tensor> SavedActivations::pop(SavedOp op) {
  if (outputs_.empty() || outputs_.front().first != op) {
    throw Error(
        "a checkpointed layer ran other operations when it was run again than in its forward pass; expected the same "
        "ones in the same order");
  }
  std::vector<at::Tensor> outputs = std::move(outputs_.front().second);
  outputs_.pop_front();
  return outputs;
}

}  // namespace phalanx::kernels
