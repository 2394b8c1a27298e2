#include "phalanx/kernels/kept_outputs.h"

#include "phalanx/base/error.h"

namespace phalanx::kernels {
namespace {

thread_local KeptOutputs* current_outputs = nullptr;

}  // namespace

KeptOutputs* KeptOutputs::current() noexcept { return current_outputs; }

KeptOutputs::Scope::Scope(KeptOutputs* kept, Run run) : before_(current_outputs), kept_(kept) {
  current_outputs = kept;
  if (kept == nullptr) return;
  kept->run_ = run;
  kept->counts_ = {};
}

KeptOutputs::Scope::~Scope() {
  if (kept_ != nullptr && kept_->run_ == Run::second) kept_->outputs_.clear();
  current_outputs = before_;
}

void KeptOutputs::keep(const std::vector<at::Tensor>& outputs) {
  // Values only: what becomes of the tensors themselves, in whichever graph, is their users' business.
  auto& values = outputs_.emplace_back();
  for (const auto& output : outputs) values.push_back(output.detach());
}

std::vector<at::Tensor> KeptOutputs::take() {
  if (outputs_.empty()) {
    throw Error(
        "a checkpointed layer ran other operations when it was run again than in its forward pass; expected the same "
        "ones in the same order");
  }
  std::vector<at::Tensor> outputs = std::move(outputs_.front());
  outputs_.pop_front();
  return outputs;
}

}  // namespace phalanx::kernels
