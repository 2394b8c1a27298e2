// FsdpRuntime: the machine inside FullyShardedDataParallel. It decides when each unit is gathered, let go, and its
// gradients are averaged. See fully_shard.h for the contract with the user.
//
// A training step, unit by unit in the order of use (learned from the forward pass before)
//   pre_forward(u)     gathers u if it is not there, starts to gather the next one; lets nobody but u and that one keep
//                     gathered memory
//   post_forward(u)      lets u go, unless it is the last one, which the backward pass begins with; hooks its output
//   pre_backward   the gradient of u's output has come: units behind it are through and let go; gathers u, starts to
//                     gather the one before it, gives its gradients memory
//   grad_ready        the last gradient of u: starts its reduce-scatter
//   memory is short   the oldest reduce-scatter is waited for; the average over replicas begins
//   end of backward   finalize_backward(): waits for the rest, publishes the shards' gradients
//   an exception      abandon() aborts the communicators: no rank waits for one that will not come
// Of a step of several passes all but the last end with accumulate_partial_reduce() instead: each rank's rows are added up, and neither
// averaged over replicas nor handed out. Units whose whole gradients stay anyhow add up those.
// Every rank issues the same sequence, because it follows from the model's graph alone.
//
// In a pipeline (StageSharding, fsdp_runtime_in_pipeline.cc) steps and engine runs are told from outside: gradients
// stay whole from begin_step() on, grad_ready comes when one is complete, and end_step() does what finalize_backward() does. The
// units of a stage are then used one behind the other: a unit is let go of when the gradient of an earlier one's output
// has come.
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

class FsdpRuntime : public StageSharding, public std::enable_shared_from_this<FsdpRuntime> {
 public:
  /// `replicas` is null without a replicating axis, `post_forward_group` (param_group.h) without such. Without `prefetch` a unit is
  /// gathered when it is used. `levels` of units inside units: that many are in use at a time. `attached`: what the
  /// module had. Collective.
  static std::shared_ptr<FsdpRuntime> make(std::vector<std::unique_ptr<ParamGroup>> units,
                                           std::shared_ptr<Communicator> comm, std::shared_ptr<Communicator> replicas,
                                           std::shared_ptr<Communicator> post_forward_group, bool prefetch, int levels,
                                           AttachedParameters attached);
  void detach();

  void pre_forward(std::size_t group);
  /// Returns the output, which may be hooked.
  at::Tensor post_forward(std::size_t group, at::Tensor output);

  void hold();
  void release() noexcept { --holds_; }
  /// Passes that begin from now on are parts of a step, until as many ends have been told.
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
    bool no_all_reduce = false;    // they are averaged and added to the rank's rows, but more of them follow
    bool callback_queued = false;  // the engine will call back at the end of the innermost running backward pass
  };
  struct State {
    bool in_use = false;       // between pre_forward and post_forward
    bool in_recorded = false;  // in use, while autograd records it or what it is used inside of
    bool in_backward = false;  // between pre_backward and its last gradient
    bool is_through = false;   // in this backward pass
    bool was_used = false;     // in this step of a pipeline
    std::size_t pending = 0;   // trained parameters without a gradient in this pass
    std::vector<bool> ready;
    std::vector<bool> inner;  // the units that were used inside its use
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
  void start_averaging(std::size_t group);
  void finish_averaging();
  [[noreturn]] void fail_unused(const Pass& pass);
  [[noreturn]] void fail(const std::string& message);

  std::vector<std::unique_ptr<ParamGroup>> param_groups_;
  std::vector<State> states_;
  std::shared_ptr<Communicator> comm_, replicas_, post_forward_group_;
  bool prefetches_ = true;
  int levels_ = 1;
  AttachedParameters attached_;
  std::vector<GradReadySubscription> subscriptions_;
  MemoryPool parameter_pool_;
  std::optional<MemoryPool> grad_pool_;  // made by the first training pass

  std::vector<std::size_t> pre_forward_order_;  // of use
  std::vector<std::size_t>
      post_forward_order_;  // the same in the order of the ends: the backward pass comes the other way
  std::vector<std::size_t> seen_pre_forward_, seen_post_forward_;  // in the forward pass under way
  int holds_ = 0, all_reduce_holds_ = 0;
  bool keeps_unsharded_grads_ = false;
  std::shared_ptr<Pass> pass_;
  std::shared_ptr<Pass> step_;  // of a pipeline, while it lasts
  std::deque<std::size_t> reducing_;
  std::vector<std::size_t> reduced_;
  std::vector<Work> averaging_;  // over replicas
  FullyShardStatistics statistics_;
};

}  // namespace phalanx::fsdp
