// Reducer: the implementation of DistributedDataParallel. It places gradients into buckets, starts their all-reduces in
// order as the buckets fill up, and finishes the backward pass. ddp.h has the contract with the user.
//
// One synchronised backward pass
//   first grad_ready      prepare_for_backward(): adopts a loaded bucket order, resets the state, and asks the engine
//                         for a callback at its end
//   every grad_ready      copy_to_bucket_view(): the gradient becomes a view of its bucket. mark_variable_ready():
//                         launches every full bucket, strictly in bucket order, so that all ranks issue the same
//                         sequence
//   end of backward       finalize_backward(): handles unused parameters, waits for all buckets, rebuilds them after
//                         the first pass
//   an exception          abandon() aborts the communicator, so that no rank waits for one that will not come
//
// A checkpointed layer runs a backward pass inside the backward pass. The end of the inner pass is not the end of the
// outer one. finalize_backward() then does nothing unless every gradient has arrived, and the next event asks the
// engine again.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/parallel/attached_parameters.h"
#include "phalanx/parallel/ddp/bucket_plan.h"
#include "phalanx/parallel/ddp/ddp.h"
#include "phalanx/tensor/grad_ready.h"

namespace phalanx {

class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  static std::shared_ptr<Reducer> attach(std::vector<NamedTensor> parameters, AttachedParameters attached,
                                         std::shared_ptr<Communicator> comm, DdpOptions options);
  void detach();

  void hold() noexcept { ++holds_; }
  void release() noexcept { --holds_; }

  const std::vector<NamedTensor>& parameters() const noexcept { return parameters_; }
  const BucketPlan& plan() const noexcept { return plan_; }
  const at::Tensor& order_state() const noexcept { return order_state_; }
  DdpStatistics statistics();

 private:
  using Clock = std::chrono::steady_clock;
  struct Pass {
    bool callback_queued = false;  // the engine will call back at the end of the innermost running backward pass
  };
  struct Bucket {
    at::Tensor flat;
    std::size_t pending = 0;
    Work work;
    Clock::time_point launched;
  };
  struct Slot {
    at::Tensor view;  // into its bucket; p.grad() is this very tensor once placed
    std::size_t bucket = 0;
    bool ready = false;
  };

  Reducer(std::vector<NamedTensor> parameters, AttachedParameters attached, std::shared_ptr<Communicator> comm,
          DdpOptions options);
  bool alone() const noexcept { return comm_->size() == 1; }
  void autograd_hook(std::size_t index);
  void require_as_attached();
  [[noreturn]] void fail_changed(const std::string& changes);
  void prepare_for_backward();
  void queue_final_callback();
  void copy_to_bucket_view(std::size_t index);
  void mark_variable_ready(std::size_t index);
  void all_reduce_bucket(std::size_t bucket);
  void finalize_backward(const std::shared_ptr<Pass>& pass);
  void abandon(const std::shared_ptr<Pass>& pass) noexcept;
  void contribute_zeros_for_unused();
  void drop_globally_unused_gradients(const std::vector<std::uint8_t>& local_used_map);
  [[noreturn]] void fail_unused();
  void record_finished_buckets(bool all);

  void initialize_buckets(BucketPlan plan);
  void rebuild_buckets();
  void adopt_loaded_order();
  bool expects_more() const;
  std::string names_of_unready() const;

  std::vector<NamedTensor> parameters_;
  AttachedParameters attached_;
  std::shared_ptr<Communicator> comm_;
  DdpOptions options_;
  std::vector<GradReadySubscription> subscriptions_;
  std::int64_t fingerprint_ = 0;

  BucketPlan plan_;
  std::vector<Bucket> buckets_;
  std::vector<Slot> slots_;
  at::Tensor order_state_;                   // int64 on the CPU; a checkpoint may write into it
  std::vector<std::int64_t> adopted_order_;  // the order that the buckets were laid out by

  int holds_ = 0;
  std::shared_ptr<Pass> pass_;  // the synchronised backward pass in progress
  std::size_t ready_ = 0, next_ = 0, finished_ = 0;
  std::vector<std::size_t> ready_order_;
  std::vector<std::uint8_t> local_used_map_;
  DdpStatistics statistics_;
  Clock::time_point busy_until_;
};

}  // namespace phalanx
