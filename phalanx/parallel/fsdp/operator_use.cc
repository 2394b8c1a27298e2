#include "phalanx/parallel/fsdp/operator_use.h"

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "phalanx/base/error.h"

namespace phalanx::fsdp {
namespace {

constexpr c10::DispatchKey kKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

struct WatchedStorage final : c10::StorageImpl {
  using StorageImpl::StorageImpl;
  std::weak_ptr<UseListener> listener;
  std::size_t group = 0;
};

/// The groups that one operator reads, of each listener.
class Uses {
 public:
  void add(const c10::IValue& argument) {
    if (argument.isTensor()) {
      add(argument.toTensor());
    } else if (argument.isTensorList() || argument.isOptionalTensorList()) {
      for (const c10::IValue& element : argument.toListRef()) add(element);
    }
  }
  void tell() const {
    for (const auto& [listener, groups] : uses_) listener->before_use(groups);
  }

 private:
  void add(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.key_set().has(kKey)) return;
    const auto* storage = dynamic_cast<const WatchedStorage*>(tensor.storage().unsafeGetStorageImpl());
    auto listener = storage == nullptr ? nullptr : storage->listener.lock();
    if (!listener) return;
    auto found = std::ranges::find(uses_, listener, &Use::listener);
    if (found == uses_.end()) found = uses_.insert(uses_.end(), Use{std::move(listener), {}});
    if (std::ranges::find(found->groups, storage->group) == found->groups.end())
      found->groups.push_back(storage->group);
  }
  struct Use {
    std::shared_ptr<UseListener> listener;
    c10::SmallVector<std::size_t, 4> groups;
  };
  c10::SmallVector<Use, 1> uses_;
};

/// Operators that use a tensor for its shape and type alone: zeros_like and its kind, new_empty and its kind.
bool needs_no_values(std::string_view name) {
  return name.starts_with("aten::") && (name.ends_with("_like") || name.starts_with("aten::new_"));
}

bool is_watched(const c10::IValue& argument) {
  if (argument.isTensor()) return argument.toTensor().defined() && argument.toTensor().key_set().has(kKey);
  return argument.isTensorList() && std::ranges::any_of(argument.toListRef(), is_watched);
}

void stop_at_operator(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard inside(kKey);
  Uses uses;
  const auto& declared = op.schema().arguments();
  const auto arguments = torch::jit::last(*stack, declared.size());
  for (std::size_t i = 0; i < declared.size(); ++i) {
    uses.add(arguments[i]);
    const auto* alias = declared[i].alias_info();
    if (alias != nullptr && alias->isWrite() && is_watched(arguments[i]))
      throw Error(
          fmt::format("fully_shard: {} writes to a parameter of a sharded module, which holds a copy that is gathered "
                      "and dropped: write to FullyShardedDataParallel::parameters(), or before the module is sharded",
                      op.schema().name()));
  }
  if (!needs_no_values(op.schema().name())) uses.tell();
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
}

void register_fallback() {
  static const c10::RegistrationHandleRAII registered = [] {
    try {
      return c10::Dispatcher::singleton().registerFallback(
          kKey, c10::KernelFunction::makeFromBoxedFunction<&stop_at_operator>(), "phalanx: uses of sharded parameters");
    } catch (const c10::Error& error) {
      throw Error(
          fmt::format("fully_shard: other code of this process uses libtorch's dispatch key {}, which sharded "
                      "parameters of plain modules need: {}",
                      c10::toString(kKey), error.what_without_backtrace()));
    }
  }();
}

}  // namespace

c10::Storage watched_storage(std::int64_t bytes, at::Device device) {
  return c10::Storage(c10::make_intrusive<WatchedStorage>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                          c10::DataPtr(nullptr, device), /*allocator=*/nullptr,
                                                          /*resizable=*/false));
}

void watch(const c10::Storage& storage, std::weak_ptr<UseListener> listener, std::size_t group) {
  auto& watched = *static_cast<WatchedStorage*>(storage.unsafeGetStorageImpl());
  watched.listener = std::move(listener);
  watched.group = group;
}

at::Tensor watched_view(const at::Tensor& tensor) {
  register_fallback();
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(tensor.storage()), tensor.key_set().add(kKey),
                                                       tensor.dtype());
  auto* impl = view.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return view;
}

}  // namespace phalanx::fsdp
