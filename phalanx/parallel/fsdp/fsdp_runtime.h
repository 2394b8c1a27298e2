// FsdpRuntime: the implementation of FullyShardedDataParallel. It decides when each unit is unsharded, when it is
// resharded, and when its gradients are averaged. fully_shard.h has the contract with the user.
//
// A training step, unit by unit in the order of use (learned from the previous forward pass)
//   pre_forward(u)    unshards u if needed and starts to prefetch the next unit. Only u and that one may hold unsharded
//                     memory
//   post_forward(u)   reshards u, unless it is the last unit, with which the backward pass begins. Hooks its output
//   pre_backward      runs when the gradient of u's output has arrived. The units behind u are done and resharded.
//                     Unshards u, starts to prefetch the unit before it, and gives u's gradients memory
//   grad_ready        after the last gradient of u: starts its reduce-scatter
//   memory is short   waits for the oldest reduce-scatter, then starts the average over replicas
//   end of backward   finalize_backward(): waits for the rest, publishes the shards' gradients
//   an exception      abandon() aborts the communicators, so that no rank waits for one that will not come
//
// In a step of several passes, all passes but the last end with accumulate_partial_reduce() instead. It accumulates
// each rank's rows, without averaging them over replicas or publishing them. Units whose unsharded gradients stay
// anyway accumulate those. Every rank issues the same sequence, because it follows from the model's graph alone.
//
// A group that is gathered on use (operator_use.h) has no forward hooks. The first operator that reads one of its
// parameters is its pre_forward, or its pre_backward. The first operator that reads another such group ends its use.
// This is safe at any time, because an operator that comes later gathers it again.
//
// In a pipeline (StageSharding, fsdp_runtime_in_pipeline.cc) the pipeline announces steps and engine runs. Gradients
// stay unsharded from begin_step() on, grad_ready fires when one is complete, and end_step() does the work of
// finalize_backward(). The units of a stage are then used one after the other: a unit is resharded when the gradient of
// an earlier unit's output has arrived.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/observe/memory_counters.h"
#include "phalanx/parallel/attached_parameters.h"
#include "phalanx/parallel/fsdp/fully_shard.h"
#include "phalanx/parallel/fsdp/param_group.h"
#include "phalanx/parallel/stage_sharding.h"

namespace phalanx::fsdp {

class FsdpRuntime : public StageSharding, public UseListener, public std::enable_shared_from_this<FsdpRuntime> {
 public:
  /// Collective.
  /// - `replicas` is null if there is no replicating axis.
  /// - `post_forward_group` (param_group.h) is null if there is none.
  /// - Without `prefetch`, a unit is unsharded only when it is used.
  /// - `levels` is the nesting depth of units: that many are in use at a time.
  /// - `attached` holds the module's parameters as they were at construction.
  static std::shared_ptr<FsdpRuntime> make(std::vector<std::unique_ptr<ParamGroup>> units,
                                           std::shared_ptr<Communicator> comm, std::shared_ptr<Communicator> replicas,
                                           std::shared_ptr<Communicator> post_forward_group, bool prefetch, int levels,
                                           AttachedParameters attached);
  ~FsdpRuntime() { finish_copies(); }
  void detach();

  void pre_forward(std::size_t group);
  /// Returns the output, possibly hooked.
  at::Tensor post_forward(std::size_t group, at::Tensor output);

  /// Gathers groups that are gathered on use. Throws Error for another group whose values are not there.
  void before_use(at::ArrayRef<std::size_t> groups) override;

  void hold();
  void release() noexcept { --holds_; }
  /// Passes that begin from now on are parts of one step, until release_all_reduce() has been called as often.
  void hold_all_reduce() noexcept { ++all_reduce_holds_; }
  void release_all_reduce() noexcept { --all_reduce_holds_; }
  void invalidate_unsharded();

  void begin_step() override;
  void begin_backward() override;
  void end_backward() override;
  void collect_gradients() override;
  void show_gradients() override;
  void end_step() override;
  void abandon_step() noexcept override;
  void unshard() override;
  void reshard() override;

  const std::vector<std::unique_ptr<ParamGroup>>& units() const noexcept { return param_groups_; }
  const std::shared_ptr<Communicator>& post_forward_group() const noexcept { return post_forward_group_; }
  const FullyShardStatistics& statistics() const noexcept { return statistics_; }

 private:
  using Clock = std::chrono::steady_clock;
  struct Pass {
    bool no_sync = false;          // gradients are only accumulated
    bool no_all_reduce = false;    // they are averaged and added to the rank's rows, and more passes follow
    bool callback_queued = false;  // the engine will call back at the end of the innermost running backward pass
  };
  struct State {
    bool in_use = false;       // between pre_forward and post_forward
    bool in_recorded = false;  // in use, while autograd records it or an enclosing unit
    bool in_backward = false;  // between pre_backward and its last gradient
    bool is_through = false;   // done in this backward pass
    bool was_used = false;     // in this step of a pipeline
    std::size_t pending = 0;   // trained parameters without a gradient in this pass
    std::vector<bool> ready;
    std::vector<bool> inner;  // the units that were used inside this one
  };

  FsdpRuntime(std::vector<std::unique_ptr<ParamGroup>> units, std::shared_ptr<Communicator> comm,
              std::shared_ptr<Communicator> replicas, std::shared_ptr<Communicator> post_forward_group, bool prefetch,
              int levels, AttachedParameters attached);
  void subscribe();
  at::Tensor allocate(std::int64_t bytes, observe::MemoryCategory what_for = observe::MemoryCategory::buffers) const;
  void make_pools();
  void unshard(std::size_t group);
  void unshard_and_wait(std::size_t group);
  void reshard(std::size_t group);
  void prefetch(std::size_t group, int direction);
  void try_unshard(std::size_t group);
  bool is_idle(std::size_t group) const;
  at::Tensor acquire_parameter_memory();
  at::Tensor acquire_grad_memory();
  void alloc_grads(std::size_t group);

  void use_in_forward(at::ArrayRef<std::size_t> groups);
  void use_in_backward(at::ArrayRef<std::size_t> groups);
  void drop_outdated();
  static void append_once(std::vector<std::size_t>& order, std::size_t group);
  void end_use(std::size_t group);

  bool in_step() const noexcept { return step_ != nullptr; }
  void expect_gradients();
  void adopt_seen_order();
  void keep_unsharded_grads();
  void publish();
  void accumulate_partial_reduce();
  bool accumulates_unsharded(std::size_t group, const Pass& pass) const;
  void require_as_attached();
  [[noreturn]] void fail_changed(const std::string& changes);
  void prepare_for_backward();
  void queue_final_callback();
  void pre_backward(std::size_t group);
  void post_accumulate_grad_hook(std::size_t group, std::size_t parameter);
  void post_backward(std::size_t group);
  void finish_oldest_reduce_scatter();
  void finalize_backward(const std::shared_ptr<Pass>& pass);
  void abandon(const std::shared_ptr<Pass>& pass) noexcept;
  void abort_backward() noexcept;
  void start_replica_reduction(std::size_t group);
  void finish_replica_reductions();
  void wait_for_copies() const;
  void finish_copies() const noexcept;
  [[noreturn]] void fail_unused(const Pass& pass);
  [[noreturn]] void fail(const std::string& message);

  std::vector<std::unique_ptr<ParamGroup>> param_groups_;
  std::vector<State> states_;
  std::shared_ptr<Communicator> comm_, replicas_, post_forward_group_;
  bool prefetches_ = true;
  int levels_ = 1;
  CopyStream to_host_, from_host_;  // with offload
  AttachedParameters attached_;
  std::vector<GradReadySubscription> subscriptions_;
  MemoryPool parameter_pool_;
  std::optional<MemoryPool> grad_pool_;  // made by the first training pass

  std::vector<std::size_t> pre_forward_order_;   // in the order of use
  std::vector<std::size_t> post_forward_order_;  // in the order in which uses ended; backward goes in reverse
  std::vector<std::size_t> seen_pre_forward_, seen_post_forward_;  // in the forward pass in progress
  int holds_ = 0, all_reduce_holds_ = 0;
  bool keeps_unsharded_grads_ = false;
  std::shared_ptr<Pass> pass_;
  std::shared_ptr<Pass> step_;  // the current step of a pipeline
  std::deque<std::size_t> reducing_;
  std::vector<std::size_t> reduced_;
  std::vector<Work> replica_reductions_;  // over replicas
  FullyShardStatistics statistics_;
};

}  // namespace phalanx::fsdp
