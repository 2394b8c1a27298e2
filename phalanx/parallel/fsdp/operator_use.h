// Tells a listener which operators of libtorch are about to read a tensor, without their callers' help.
//
// A watched storage knows a listener. A watched view of it tells libtorch's dispatcher to stop at every operator that
// gets this tensor, in any argument or list of tensors, whoever calls the operator: a module's forward(), user code or
// the engine in a backward pass. The listener runs first, then the operator. Views of a watched view are watched, too,
// and so is what autograd saves of it. Other tensors cost nothing.
//
//   const c10::Storage storage = watched_storage(bytes, device);
//   const at::Tensor weight = watched_view(tensor_on_that_storage);
//   watch(storage, listener, /*group=*/3);
//   at::linear(x, weight);                        // listener->before_use({3}), then linear
//
// - Code that reads data_ptr() without any operator is not noticed.
// - Operators that the operator itself calls are not reported. Nor are those that need no values, such as zeros_like.
// - It takes the dispatch key TESTING_ONLY_GenericWrapper, which libtorch leaves to code outside of it. The first
//   watched view registers the fallback of this key for the whole process. If other code has one, that is an Error; if
//   other code registers one later, libtorch throws there.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace phalanx::fsdp {

class UseListener {
 public:
  virtual ~UseListener() = default;
  /// Called with the groups of all storages that one operator is about to read, on the thread that runs it. An
  /// exception takes the place of the operator.
  virtual void before_use(at::ArrayRef<std::size_t> groups) = 0;
};

/// Without memory, and unwatched until watch() is called.
c10::Storage watched_storage(std::int64_t bytes, at::Device device);
/// REQUIRES: `storage` is a watched_storage().
void watch(const c10::Storage& storage, std::weak_ptr<UseListener> listener, std::size_t group);
/// The same elements, watched; not a view for autograd. Throws Error if other code has taken the dispatch key.
/// REQUIRES: the tensor lies on a watched_storage().
at::Tensor watched_view(const at::Tensor& tensor);

}  // namespace phalanx::fsdp
