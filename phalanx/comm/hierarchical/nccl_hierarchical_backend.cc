#include "phalanx/comm/hierarchical/nccl_hierarchical_backend.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "phalanx/base/error.h"
#include "phalanx/comm/device/device_completion.h"
#include "phalanx/comm/device/staged_backend.h"
#include "phalanx/comm/hierarchical/hierarchical_backend.h"

namespace phalanx {
namespace {

class NcclHierarchicalOperation final : public Operation {
 public:
  NcclHierarchicalOperation(NcclHierarchicalBackend& backend, const OperationDescription& description)
      : backend_(backend), completion_(std::make_shared<DeviceCompletion>(backend.streams())) {
    if (description.transfers.empty()) {
      stages_.push_back(comparison(description));
      for (NcclStage& stage : plan_nccl_stages(backend, description, memory_)) stages_.push_back(std::move(stage));
    } else {
      stages_.push_back(messages(description));
    }
    // What the operation does comes behind what the caller's stream has in hand.
    backend_.streams()->wait(backend_.stream(), *backend_.streams()->record_current());
  }

  Progress advance() override {
    if (const auto end = completion_->event()) return end->is_done() ? Progress::done : Progress::blocked;
    NcclStage& stage = stages_[at_];
    if (!has_begun_) {
      has_begun_ = true;
      begin(stage);
      return Progress::moved;
    }
    bool moved = false, all = true;
    for (NcclStage::Part& part : stage.parts) {
      if (!part.operation) continue;
      const Progress progress = named(part, [&] { return part.operation->advance(); });
      moved |= progress != Progress::blocked;
      if (progress == Progress::done)
        part.operation.reset();
      else
        all = false;
    }
    if (!all) return moved ? Progress::moved : Progress::blocked;
    has_begun_ = false;
    if (++at_ == stages_.size()) completion_->set(backend_.streams()->record(backend_.stream()));
    return Progress::moved;
  }
  bool add_doorbells(std::vector<Doorbell>& bells) override {
    if (completion_->event() || !has_begun_) return false;
    bool all = true;
    for_each_running([&](NcclStage::Part& part) { all = part.operation->add_doorbells(bells) && all; });
    return all;
  }
  void check_peers() override {
    if (completion_->event()) return;
    // A neighbour may wait for a rank of another node, of which this one would not hear otherwise.
    backend_.flat().check_ranks();
    for_each_running([this](NcclStage::Part& part) { named(part, [&] { part.operation->check_peers(); }); });
  }
  std::vector<int> missing_ranks() override {
    std::vector<int> missing;
    for_each_running([&](NcclStage::Part& part) {
      for (const int rank : part.operation->missing_ranks()) missing.push_back(rank_of(part, rank));
    });
    std::ranges::sort(missing);
    missing.erase(std::unique(missing.begin(), missing.end()), missing.end());
    return missing;
  }
  bool retire() noexcept override {
    bool all = true;
    for_each_running([&](NcclStage::Part& part) { all = part.operation->retire() && all; });
    try {
      return all && (!copied_ || copied_->is_done()) && (!completion_->event() || completion_->is_done());
    } catch (const std::exception&) {
      return all;  // the device has failed
    }
  }
  std::shared_ptr<StreamCompletion> completion() override { return completion_; }

 private:
  // The ranks of the node have come, which finds those that are in a message instead; all ranks call the same.
  NcclStage comparison(const OperationDescription& description) {
    NcclStage stage;
    OperationDescription compared = description;
    compared.on_device = false;
    compared.compare_only = true;
    OperationDescription barrier;
    barrier.sequence = backend_.next_intra_node_sequence();
    stage.parts.push_back({&backend_.intra_node(), std::move(barrier), nullptr});
    stage.parts.push_back({&backend_.flat(), std::move(compared), nullptr});
    return stage;
  }

  NcclStage messages(const OperationDescription& description) {
    NcclStage stage;
    OperationDescription intra_node = description, inter_node = description;
    intra_node.transfers.clear();
    inter_node.transfers.clear();
    for (const Transfer& transfer : description.transfers) {
      if (transfer.tag == kHierarchicalTag)
        throw CommError(
            fmt::format("tag {} is reserved for messages between machines: choose another", kHierarchicalTag));
      const bool is_local = backend_.layout().node_of(transfer.peer) == backend_.node();
      (is_local ? intra_node : inter_node).transfers.push_back(transfer);
      if (is_local) intra_node.transfers.back().peer = backend_.layout().local_rank_of(transfer.peer);
    }
    if (!intra_node.transfers.empty()) stage.parts.push_back({&backend_.intra_node(), std::move(intra_node), nullptr});
    if (!inter_node.transfers.empty()) stage.parts.push_back({&backend_.staged_flat(), std::move(inter_node), nullptr});
    return stage;
  }

  void begin(NcclStage& stage) {
    const auto current = backend_.streams()->enter_stream(backend_.stream());
    for (const NcclStage::Copy& copy : stage.copies)
      backend_.streams()->copy(backend_.stream(), copy.to, copy.from, copy.bytes);
    if (!stage.copies.empty()) copied_ = backend_.streams()->record(backend_.stream());
    for (NcclStage::Part& part : stage.parts) {
      count(part);
      named(part, [&] {
        part.operation = part.transport->start(part.description);
        part.operation->completion();  // advance() launches it
      });
    }
  }

  void count(const NcclStage::Part& part) {
    const OperationDescription& d = part.description;
    if (d.compare_only) return;
    std::int64_t given = 0;
    for (const Transfer& one : d.transfers)
      if (one.is_send) given += one.count * static_cast<std::int64_t>(element_size(one.dtype));
    if (d.transfers.empty()) {
      const bool gives_output = d.input == nullptr && (d.verb != Verb::broadcast || d.root == part.transport->rank());
      given = (gives_output ? d.output_count : d.input_count) * static_cast<std::int64_t>(element_size(d.dtype));
    }
    backend_.count(part.transport == &backend_.intra_node(), static_cast<std::size_t>(given));
  }

  int rank_of(const NcclStage::Part& part, int rank) const {
    const NodeLayout& layout = backend_.layout();
    if (part.transport == &backend_.intra_node())
      return layout.members(backend_.node())[static_cast<std::size_t>(rank)];
    if (part.transport == &backend_.lane())
      return layout.members(rank)[static_cast<std::size_t>(backend_.local_rank())];
    return rank;
  }

  // What a backend of a part of the ranks says of them by its own numbers is said by those of the group.
  template <class Body>
  auto named(const NcclStage::Part& part, Body body) -> decltype(body()) {
    try {
      return body();
    } catch (const CommError& error) {
      if (part.transport != &backend_.lane()) throw;
      backend_.flat().check_ranks();  // knows who has died, stopped or given up
      std::vector<int> ranks;
      for (int node = 0; node < backend_.layout().nodes(); ++node) ranks.push_back(rank_of(part, node));
      throw CommError(fmt::format("between machines, where ranks {} are called 0, 1, ...: {}", fmt::join(ranks, ", "),
                                  error.what()));
    }
  }
  template <class Body>
  void for_each_running(Body body) {
    if (at_ >= stages_.size()) return;
    for (NcclStage::Part& part : stages_[at_].parts)
      if (part.operation) body(part);
  }

  NcclHierarchicalBackend& backend_;
  std::vector<at::Tensor> memory_;
  std::shared_ptr<DeviceCompletion> completion_;
  std::shared_ptr<DeviceEvent> copied_;
  std::vector<NcclStage> stages_;
  std::size_t at_ = 0;
  bool has_begun_ = false;
};

}  // namespace

NcclHierarchicalBackend::NcclHierarchicalBackend(Setup setup)
    : setup_(std::move(setup)),
      lane_(make_staged_backend(setup_.lane, setup_.cuda_device, setup_.streams)),
      staged_flat_(make_staged_backend(setup_.flat, setup_.cuda_device, setup_.streams)),
      stream_(setup_.streams->make_stream()),
      name_(fmt::format("nccl+{}", setup_.flat->traits().name)) {}

bool NcclHierarchicalBackend::can_serve(const NodeLayout& layout) {
  return layout.nodes() > 1 && layout.is_contiguous() && layout.lanes() > 1 &&
         layout.lanes() * layout.nodes() == layout.ranks();
}

BackendTraits NcclHierarchicalBackend::traits() const noexcept {
  return {.name = name_,
          .host_only = setup_.cuda_device < 0,
          .oversubscribed = setup_.flat->traits().oversubscribed,
          .has_tags = false,  // inside of a node there are none
          .stream_ordered = true,
          .cuda_device = setup_.cuda_device};
}

std::unique_ptr<Operation> NcclHierarchicalBackend::start(const OperationDescription& description) {
  if (!description.on_device) return setup_.flat->start(description);
  return std::make_unique<NcclHierarchicalOperation>(*this, description);
}

std::shared_ptr<Backend> NcclHierarchicalBackend::split(const SplitRequest& request) {
  std::vector<int> node_of, local_indices, names;
  int local_rank = -1;
  for (std::size_t i = 0; i < request.members.size(); ++i) {
    const int member = request.members[i];
    node_of.push_back(setup_.layout.node_of(member));
    if (node_of.back() != node()) continue;
    if (static_cast<int>(i) == request.rank) local_rank = static_cast<int>(local_indices.size());
    local_indices.push_back(setup_.layout.local_rank_of(member));
    names.push_back(static_cast<int>(i));
  }
  // Every rank takes part in the same exchanges, whatever becomes of it: those of inside's, and one for agreement.
  SplitRequest within = request;
  within.members = local_indices;
  within.rank = local_rank;
  within.names = names;
  within.exchange = [&](const std::string& value) {
    const std::vector<std::string> all = request.exchange(value);
    std::vector<std::string> of_node;
    for (const int rank : setup_.layout.members(node())) of_node.push_back(all[static_cast<std::size_t>(rank)]);
    return of_node;
  };
  std::shared_ptr<Backend> intra_node;
  std::string failure_reason;
  try {
    intra_node = setup_.intra_node->split(within);
  } catch (const CommError& error) {
    failure_reason = error.what();
  }
  const std::vector<std::string> failure_reasons = request.exchange(failure_reason);
  if (request.members.empty()) return nullptr;
  for (const int member : request.members)
    if (const std::string& text = failure_reasons[static_cast<std::size_t>(member)]; !text.empty())
      throw CommError(text);

  const NodeLayout layout(node_of);
  if (layout.nodes() == 1) return intra_node;
  // Two groups of flat come of one split. Number 0 was the world's lanes.
  SplitRequest whole = request;
  whole.serial = 2 * request.serial + 1;
  Setup setup = setup_;
  setup.flat = setup_.flat->split(whole);
  if (!can_serve(layout)) return make_staged_backend(std::move(setup.flat), setup_.cuda_device, setup_.streams);
  SplitRequest across = request;
  across.serial = 2 * request.serial + 2;
  across.members.clear();
  for (int m = 0; m < layout.nodes(); ++m)
    across.members.push_back(
        request.members[static_cast<std::size_t>(layout.members(m)[static_cast<std::size_t>(local_rank)])]);
  across.rank = layout.node_of(request.rank);
  setup.lane = setup_.flat->split(across);
  setup.intra_node = std::move(intra_node);
  setup.layout = layout;
  return std::make_shared<NcclHierarchicalBackend>(std::move(setup));
}

void NcclHierarchicalBackend::abort(const std::string& reason) noexcept {
  setup_.flat->abort(reason);
  lane_->abort(reason);
  setup_.intra_node->abort(reason);
}

void NcclHierarchicalBackend::check_ranks() {
  setup_.flat->check_ranks();
  setup_.intra_node->check_ranks();
}

at::Tensor NcclHierarchicalBackend::device_memory(std::int64_t bytes) const {
  const at::Device device = setup_.cuda_device < 0
                                ? at::Device(at::kCPU)
                                : at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(setup_.cuda_device));
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
}

}  // namespace phalanx
