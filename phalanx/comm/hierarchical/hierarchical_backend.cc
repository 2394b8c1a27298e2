#include "phalanx/comm/hierarchical/hierarchical_backend.h"

#include <fmt/format.h>

#include <algorithm>

#include "phalanx/base/error.h"
#include "phalanx/comm/hierarchical/collective_schedule.h"

namespace phalanx {
namespace {

constexpr std::size_t kHierarchicalMemory = 64U << 20;

class HierarchicalCollective final : public Operation {
 public:
  HierarchicalCollective(HierarchicalBackend& backend, const OperationDescription& description)
      : backend_(backend), d_(description), schedule_(backend), is_flat_(!uses_hierarchy(backend, description)) {
    if (backend_.intra_node() != nullptr) schedule_.intra_node({});
    OperationDescription compared = d_;
    compared.compare_only = !is_flat_;
    schedule_.flat(compared);
  }

  Progress advance() override {
    const Progress progress = schedule_.advance();
    if (progress != Progress::done || is_flat_ || has_data_) return progress;
    has_data_ = true;
    if (d_.verb == Verb::all_reduce || d_.verb == Verb::reduce || d_.verb == Verb::reduce_scatter)
      add_reduction_steps(backend_, d_, schedule_);
    else
      add_data_steps(backend_, d_, schedule_);
    return Progress::moved;
  }
  bool add_doorbells(std::vector<Doorbell>& bells) override { return schedule_.add_doorbells(bells); }
  void check_peers() override { schedule_.check_peers(); }
  bool retire() noexcept override { return schedule_.retire(); }
  std::vector<int> missing_ranks() override { return schedule_.missing_ranks(); }

 private:
  HierarchicalBackend& backend_;
  const OperationDescription& d_;
  CollectiveSchedule schedule_;
  const bool is_flat_;
  bool has_data_ = false;
};

// send, recv and batch_p2p: what stays on the node, and what leaves it, at once.
class HierarchicalMessages final : public Operation {
 public:
  HierarchicalMessages(HierarchicalBackend& backend, const OperationDescription& description) : backend_(backend) {
    for (const Transfer& transfer : description.transfers) {
      if (transfer.tag == kHierarchicalTag)
        throw CommError(
            fmt::format("tag {} is reserved for messages between machines: choose another", kHierarchicalTag));
      const bool intra_node = backend.intra_node() != nullptr && backend.is_local(transfer.peer);
      Part& part = intra_node ? intra_node_ : inter_node_;
      part.description.transfers.push_back(transfer);
      if (intra_node) part.description.transfers.back().peer = backend.layout().local_rank_of(transfer.peer);
      if (transfer.is_send)
        backend.count(intra_node, static_cast<std::size_t>(transfer.count) * element_size(transfer.dtype));
    }
    for (Part* part : {&intra_node_, &inter_node_}) {
      if (part->description.transfers.empty()) continue;
      part->description.verb = description.verb;
      part->description.sequence = description.sequence;
      Backend& transport = part == &intra_node_ ? *backend.intra_node() : backend.flat();
      part->operation = transport.start(part->description);
    }
  }

  Progress advance() override {
    bool moved = false, all = true;
    for (Part* part : {&intra_node_, &inter_node_}) {
      if (!part->operation) continue;
      const Progress progress = part->operation->advance();
      moved |= progress != Progress::blocked;
      if (progress == Progress::done)
        part->operation.reset();
      else
        all = false;
    }
    return all ? Progress::done : moved ? Progress::moved : Progress::blocked;
  }
  bool add_doorbells(std::vector<Doorbell>& bells) override {
    bool all = true;
    for (Part* part : {&intra_node_, &inter_node_})
      if (part->operation) all = part->operation->add_doorbells(bells) && all;
    return all;
  }
  void check_peers() override {
    for (Part* part : {&intra_node_, &inter_node_})
      if (part->operation) part->operation->check_peers();
    if (!inter_node_.operation) backend_.flat().check_ranks();  // an abort from another node
  }
  bool retire() noexcept override {
    bool all = true;
    for (Part* part : {&intra_node_, &inter_node_})
      if (part->operation) all = part->operation->retire() && all;
    return all;
  }
  std::vector<int> missing_ranks() override {
    std::vector<int> missing;
    if (intra_node_.operation)
      for (const int local_rank : intra_node_.operation->missing_ranks())
        missing.push_back(backend_.local_members()[static_cast<std::size_t>(local_rank)]);
    if (inter_node_.operation)
      for (const int rank : inter_node_.operation->missing_ranks()) missing.push_back(rank);
    std::ranges::sort(missing);
    return missing;
  }

 private:
  struct Part {
    OperationDescription description;
    std::unique_ptr<Operation> operation;
  };
  HierarchicalBackend& backend_;
  Part intra_node_, inter_node_;
};

}  // namespace

HierarchicalBackend::HierarchicalBackend(std::shared_ptr<Backend> flat, std::shared_ptr<Backend> intra_node,
                                         NodeLayout layout, Tuning tuning)
    : flat_(std::move(flat)),
      intra_node_(std::move(intra_node)),
      layout_(std::move(layout)),
      tuning_(tuning),
      name_(fmt::format("shm+{}", flat_->traits().name)) {}

BackendTraits HierarchicalBackend::traits() const noexcept {
  BackendTraits traits = flat_->traits();
  traits.name = name_;
  traits.oversubscribed = traits.oversubscribed || (intra_node_ && intra_node_->traits().oversubscribed);
  return traits;
}

std::unique_ptr<Operation> HierarchicalBackend::start(const OperationDescription& description) {
  if (description.transfers.empty()) return std::make_unique<HierarchicalCollective>(*this, description);
  return std::make_unique<HierarchicalMessages>(*this, description);
}

std::shared_ptr<Backend> HierarchicalBackend::split(const SplitRequest& request) {
  // The members that are on this node, in the order of the new group.
  std::vector<int> node_of, local_indices, names;
  int local_rank = -1;
  for (std::size_t i = 0; i < request.members.size(); ++i) {
    const int member = request.members[i];
    node_of.push_back(layout_.node_of(member));
    if (!is_local(member)) continue;
    if (static_cast<int>(i) == request.rank) local_rank = static_cast<int>(local_indices.size());
    local_indices.push_back(layout_.local_rank_of(member));
    names.push_back(static_cast<int>(i));
  }
  const NodeLayout layout(node_of);
  const bool is_on_one = layout.nodes() == 1;

  // Every rank of this group takes part in the same exchanges, whatever becomes of it: two of inner's, and one more, so
  // that all give up together if one cannot go on.
  SplitRequest within = request;
  within.members = local_indices.size() > 1 ? local_indices : std::vector<int>();
  within.rank = within.members.empty() ? -1 : local_rank;
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
  if (!flat || layout.nodes() == layout.ranks() || is_on_one) return flat;
  return std::make_shared<HierarchicalBackend>(std::move(flat), std::move(intra_node), layout, tuning_);
}

void HierarchicalBackend::abort(const std::string& reason) noexcept {
  if (intra_node_) intra_node_->abort(reason);
  flat_->abort(reason);
}

void HierarchicalBackend::check_ranks() {
  if (intra_node_) intra_node_->check_ranks();
  flat_->check_ranks();
}

std::unique_ptr<std::byte[]> HierarchicalBackend::acquire_buffer(std::size_t bytes) {
  const auto found = memory_.find(bytes);
  if (found == memory_.end()) return std::unique_ptr<std::byte[]>(new std::byte[bytes]);
  std::unique_ptr<std::byte[]> memory = std::move(found->second);
  memory_.erase(found);
  cached_bytes_ -= bytes;
  return memory;
}

void HierarchicalBackend::release_buffer(std::unique_ptr<std::byte[]> memory, std::size_t bytes) {
  if (cached_bytes_ + bytes > kHierarchicalMemory) return;
  cached_bytes_ += bytes;
  memory_.emplace(bytes, std::move(memory));
}

}  // namespace phalanx
