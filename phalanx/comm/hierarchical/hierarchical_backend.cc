#include "phalanx/comm/hierarchical/hierarchical_backend.h"

#include <fmt/format.h>

#include "phalanx/base/error.h"
#include "phalanx/comm/device/staged_backend.h"

namespace phalanx {
namespace {

constexpr std::size_t kMostCachedBytes = 64U << 20;

}  // namespace

HierarchicalBackend::HierarchicalBackend(std::shared_ptr<Backend> flat, std::shared_ptr<Backend> intra_node,
                                         NodeLayout layout, Tuning tuning, HierarchicalDevice device)
    : flat_(std::move(flat)),
      intra_node_(std::move(intra_node)),
      layout_(std::move(layout)),
      tuning_(tuning),
      device_(std::move(device)),
      name_(fmt::format("{}+{}", has_device() ? "nccl" : "shm", flat_->traits().name)) {
  if (!has_device()) return;
  staged_flat_ = staged(flat_);
  stream_ = device_.streams->make_stream();
  pinned_ = std::make_shared<PinnedPool>(device_.streams);
}

std::shared_ptr<Backend> HierarchicalBackend::staged(std::shared_ptr<Backend> host) const {
  return make_staged_backend(std::move(host), device_.cuda_device, device_.streams);
}

BackendTraits HierarchicalBackend::traits() const noexcept {
  BackendTraits traits = flat_->traits();
  traits.name = name_;
  traits.sleeps = false;  // it waits for the ranks of its node, too
  if (has_device()) {
    traits.rank_order_reduction = false;
    traits.host_only = device_.cuda_device < 0;
    traits.has_tags = false;  // NCCL has none
    traits.stream_ordered = true;
    traits.cuda_device = device_.cuda_device;
  } else {
    traits.oversubscribed = traits.oversubscribed || (intra_node_ && intra_node_->traits().oversubscribed);
  }
  return traits;
}

std::unique_ptr<Operation> HierarchicalBackend::start(const OperationDescription& description) {
  if (has_device() && !description.on_device) return flat_->start(description);
  return make_hierarchical_operation(*this, description);
}

std::shared_ptr<Backend> HierarchicalBackend::split(const SplitRequest& request) {
  // The members that are on this node, in the order of the new group.
  std::vector<int> node_of, local_indices, names;
  int local_rank = -1;
  for (std::size_t i = 0; i < request.members.size(); ++i) {
    const int member = request.members[i];
    node_of.push_back(layout_.node_of(member));
    if (node_of.back() != node()) continue;
    if (static_cast<int>(i) == request.rank) local_rank = static_cast<int>(local_indices.size());
    local_indices.push_back(layout_.local_rank_of(member));
    names.push_back(static_cast<int>(i));
  }
  const NodeLayout layout(node_of);
  const bool is_on_one = layout.nodes() == 1;
  // A device's memory also moves without the host if the group has one rank.
  const bool has_intra_node = local_indices.size() > 1 || (is_on_one && has_device());

  // Every rank of this group takes part in the same exchanges, even if it joins no group: the two that every backend of
  // a node makes (shm, or nccl over shm), and one more, so that all give up together if one cannot go on.
  SplitRequest within = request;
  within.members = has_intra_node ? local_indices : std::vector<int>();
  within.rank = has_intra_node ? local_rank : -1;
  within.names = names;
  within.exchange = [&](const std::string& value) {
    const std::vector<std::string> all = request.exchange(value);
    std::vector<std::string> of_node;
    for (const int rank : local_members()) of_node.push_back(all[static_cast<std::size_t>(rank)]);
    return of_node;
  };
  std::shared_ptr<Backend> intra_node;
  std::string failure_reason;
  if (intra_node_) {
    try {
      intra_node = intra_node_->split(within);
    } catch (const CommError& error) {
      failure_reason = error.what();
    }
  } else {
    request.exchange("");
    request.exchange("");
  }
  const std::vector<std::string> failure_reasons = request.exchange(failure_reason);
  for (const int member : request.members)
    if (const std::string& text = failure_reasons[static_cast<std::size_t>(member)]; !text.empty())
      throw CommError(text);
  if (is_on_one && intra_node) {
    flat_->split({.members = {},
                  .rank = -1,
                  .name = request.name,
                  .serial = request.serial,
                  .names = {},
                  .exchange = request.exchange});
    return intra_node;
  }
  std::shared_ptr<Backend> flat = flat_->split(request);
  if (!flat) return nullptr;
  if (layout.nodes() == layout.ranks() || is_on_one) return has_device() ? staged(std::move(flat)) : flat;
  return std::make_shared<HierarchicalBackend>(std::move(flat), std::move(intra_node), layout, tuning_, device_);
}

std::shared_ptr<Backend> HierarchicalBackend::split_host(const SplitRequest& request) {
  return has_device() ? flat_->split_host(request) : split(request);
}

void HierarchicalBackend::abort(const std::string& reason) noexcept {
  if (intra_node_) intra_node_->abort(reason);
  if (staged_flat_) staged_flat_->abort(reason);
  flat_->abort(reason);
}

void HierarchicalBackend::check_ranks() {
  if (intra_node_) intra_node_->check_ranks();
  flat_->check_ranks();
}

std::shared_ptr<std::byte> HierarchicalBackend::acquire_buffer(std::size_t bytes) {
  if (pinned_) return pinned_->take(bytes);
  const auto found = memory_.find(bytes);
  if (found == memory_.end())
    return std::shared_ptr<std::byte>(new std::byte[bytes], std::default_delete<std::byte[]>());
  std::shared_ptr<std::byte> memory = std::move(found->second);
  memory_.erase(found);
  cached_bytes_ -= bytes;
  return memory;
}

void HierarchicalBackend::release_buffer(std::shared_ptr<std::byte> memory, std::size_t bytes) {
  if (pinned_) return pinned_->give_back(bytes, std::move(memory));
  if (cached_bytes_ + bytes > kMostCachedBytes) return;
  cached_bytes_ += bytes;
  memory_.emplace(bytes, std::move(memory));
}

}  // namespace phalanx
