// AttachedParameters: what a module's parameters were when something was attached to them (DistributedDataParallel,
// FullyShardedDataParallel), and what has become of them since. Buckets, shards and hooks are made for the parameters
// that were trained then; one that is frozen, unfrozen or added later would be passed over, and the ranks would drift
// apart without a word.
//
//   AttachedParameters attached(*module);
//   auto watches = attached.hook_frozen(fail);          // where one that was frozen gets a gradient all the same
//   if (const std::string changes = attached.changes(); !changes.empty()) fail(changes);    // before anything is sent
//
// Looks at flags on the host alone. Whether parameters were added is seen only of a module that a shared_ptr owns: one
// on the stack may be gone.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/tensor/grad_ready.h"
#include "phalanx/tensor/named.h"

namespace torch::nn {
class Module;
}

namespace phalanx {

class AttachedParameters {
 public:
  explicit AttachedParameters(torch::nn::Module& module);

  /// "the parameters have changed ('a' has been frozen (requires_grad = false))"; empty if nothing has.
  std::string changes() const;
  /// Calls `found` with a text as above in the backward pass that brings a gradient to a parameter which was frozen
  /// then. This object must outlive the result and stay where it is.
  std::vector<GradReadySubscription> hook_frozen(const std::function<void(const std::string& changes)>& found) const;

 private:
  struct Parameter {
    NamedTensor named;
    bool is_trained = false;
  };
  std::vector<Parameter> parameters_;
  std::weak_ptr<torch::nn::Module> module_;
  std::size_t count_ = 0;  // as the module counts them
};

}  // namespace phalanx
