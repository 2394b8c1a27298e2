// One operation of the hierarchical backend: the comparison of what the ranks call, then the steps that move the data.
#include <ATen/DeviceAccelerator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include "phalanx/base/error.h"
#include "phalanx/comm/device/device_completion.h"
#include "phalanx/comm/hierarchical/collective_schedule.h"

namespace phalanx {
namespace {

bool is_reduction(Verb verb) {
  return verb == Verb::all_reduce || verb == Verb::reduce || verb == Verb::reduce_scatter;
}

class HierarchicalOperation : public Operation {
 public:
  HierarchicalOperation(HierarchicalBackend& backend, const OperationDescription& description)
      : backend_(backend), d_(description), schedule_(backend, backend.has_device()) {
    for (const Transfer& transfer : description.transfers)
      if (transfer.tag == kHierarchicalTag)
        throw CommError(fmt::format("tag {} is reserved for messages between nodes: choose another", kHierarchicalTag));
  }

  Progress advance() override {
    if (stage_ == Stage::begins) {
      stage_ = d_.transfers.empty() ? compare() : add_messages();
      return Progress::moved;
    }
    const Progress progress = schedule_.advance();
    if (progress != Progress::done || stage_ == Stage::moves) return progress;
    stage_ = Stage::moves;
    add_steps();
    return Progress::moved;
  }
  bool add_doorbells(std::vector<Doorbell>& bells) override { return schedule_.add_doorbells(bells); }
  void check_peers() override { schedule_.check_peers(); }
  bool retire() noexcept override { return schedule_.retire(); }
  std::vector<int> missing_ranks() override { return schedule_.missing_ranks(); }

 protected:
  HierarchicalBackend& backend_;
  const OperationDescription& d_;

 private:
  enum class Stage : std::uint8_t { begins, compares, moves };

  Backend& flat_for_caller() { return schedule_.on_device() ? backend_.staged_flat() : backend_.flat(); }

  Stage compare() {
    if (backend_.intra_node() != nullptr) schedule_.intra_node({});
    if (!uses_hierarchy(backend_, d_, schedule_.on_device())) {
      schedule_.operation(flat_for_caller(), d_);
      return Stage::moves;
    }
    OperationDescription compared = d_;
    compared.compare_only = true;
    compared.on_device = false;
    schedule_.operation(backend_.flat(), std::move(compared));
    return Stage::compares;
  }

  // What stays on the node, and what leaves it, run together.
  Stage add_messages() {
    OperationDescription intra_node = d_, inter_node = d_;
    intra_node.transfers.clear();
    inter_node.transfers.clear();
    for (const Transfer& transfer : d_.transfers) {
      const bool is_local = backend_.is_local(transfer.peer);
      (is_local ? intra_node : inter_node).transfers.push_back(transfer);
      if (is_local) intra_node.transfers.back().peer = backend_.layout().local_rank_of(transfer.peer);
    }
    if (!intra_node.transfers.empty()) schedule_.operation(*backend_.intra_node(), std::move(intra_node));
    if (!inter_node.transfers.empty()) schedule_.operation(flat_for_caller(), std::move(inter_node));
    return Stage::moves;
  }

  virtual void add_steps() {
    if (is_reduction(d_.verb))
      add_reduction_steps(backend_, d_, schedule_);
    else
      add_data_steps(backend_, d_, schedule_);
  }

 protected:
  CollectiveSchedule schedule_;

 private:
  Stage stage_ = Stage::begins;
};

// An operation on device memory. The device begins it after the work queued on the caller's stream, and the caller's
// stream waits for its end.
class DeviceOperation final : public HierarchicalOperation {
 public:
  DeviceOperation(HierarchicalBackend& backend, const OperationDescription& description)
      : HierarchicalOperation(backend, description),
        completion_(std::make_shared<DeviceCompletion>(backend.shared_streams())) {
    // On the caller's stream, whose earlier work may still use that memory.
    if (is_reduction(d_.verb) && uses_hierarchy(backend, d_, /*on_device=*/true))
      scratch_ = device_memory(node_sum_scratch_bytes(backend, d_));
    issued_ = backend.streams().record_current();
  }

  Progress advance() override {
    if (const auto end = completion_->event()) return end->is_done() ? Progress::done : Progress::blocked;
    if (issued_) {
      backend_.streams().wait(backend_.stream(), *std::exchange(issued_, nullptr));
      completion_->began(backend_.streams().record_timed(backend_.stream()));
    }
    const Progress progress = HierarchicalOperation::advance();
    if (progress != Progress::done) return progress;
    completion_->set(backend_.streams().record_timed(backend_.stream()));
    return Progress::moved;
  }
  bool add_doorbells(std::vector<Doorbell>& bells) override {
    return !completion_->event() && HierarchicalOperation::add_doorbells(bells);
  }
  // Once the host's part is done, no other rank's end concerns this operation.
  void check_peers() override {
    if (!completion_->event()) HierarchicalOperation::check_peers();
  }
  bool retire() noexcept override {
    return HierarchicalOperation::retire() && (!completion_->event() || completion_->is_done());
  }
  std::shared_ptr<StreamCompletion> completion() override { return completion_; }

 private:
  void add_steps() override {
    if (!is_reduction(d_.verb)) return add_data_steps(backend_, d_, schedule_);
    add_node_sum_steps(backend_, d_, schedule_,
                       scratch_.defined() ? static_cast<std::byte*>(scratch_.mutable_data_ptr()) : nullptr);
  }

  at::Tensor device_memory(std::size_t bytes) const {
    if (bytes == 0) return {};
    const int index = backend_.cuda_device();
    const at::Device device = index < 0 ? at::Device(at::kCPU)
                                        : at::Device(at::accelerator::getAccelerator(/*checked=*/true).value(),
                                                     static_cast<c10::DeviceIndex>(index));
    return at::empty({static_cast<std::int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte).device(device));
  }

  std::shared_ptr<DeviceCompletion> completion_;
  std::shared_ptr<DeviceEvent> issued_;  // marks the work queued on the caller's stream
  at::Tensor scratch_;
};

}  // namespace

std::unique_ptr<Operation> make_hierarchical_operation(HierarchicalBackend& backend,
                                                       const OperationDescription& description) {
  if (backend.has_device()) return std::make_unique<DeviceOperation>(backend, description);
  return std::make_unique<HierarchicalOperation>(backend, description);
}

}  // namespace phalanx
