// AttachedParameters: detects changes to a module's parameters after DistributedDataParallel or
// FullyShardedDataParallel was attached to it.
//
// Buckets, shards and hooks are made for the parameters that were trained at that time. A parameter that is frozen,
// unfrozen or added later would be missed, and the ranks would drift apart silently.
//
//   AttachedParameters attached(*module);
//   auto watches = attached.hook_frozen(fail);    // calls fail if a frozen parameter gets a gradient
//   if (const std::string changes = attached.changes(); !changes.empty()) fail(changes);    // before anything is sent
//
// It only reads flags on the host. Added parameters are detected only in a module that a shared_ptr owns: a module on
// the stack may no longer exist.
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

  /// Returns for example "the parameters have changed ('a' has been frozen (requires_grad = false))", or an empty
  /// string if nothing has changed.
  std::string changes() const;
  /// Calls `found` with such a text when a backward pass brings a gradient to a parameter that was frozen at
  /// construction.
  /// REQUIRES: this object outlives the result and is not moved.
  std::vector<GradReadySubscription> hook_frozen(const std::function<void(const std::string& changes)>& found) const;

 private:
  struct Parameter {
    NamedTensor named;
    bool is_trained = false;
  };
  std::vector<Parameter> parameters_;
  std::weak_ptr<torch::nn::Module> module_;
  std::size_t count_ = 0;  // number of the module's parameters
};

}  // namespace phalanx
