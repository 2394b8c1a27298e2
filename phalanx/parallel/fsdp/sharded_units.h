// ShardedUnits: the machine inside FullyShardedDataParallel. It decides when each unit is gathered, let go, and its
// gradients are averaged. See fully_shard.h for the contract with the user.
//
// A training step, unit by unit in the order of use (learned from the forward pass before)
//   before_use(u)     gathers u if it is not there, starts to gather the next one; lets nobody but u and that one keep
//                     gathered memory
//   after_use(u)      lets u go, unless it is the last one, which the backward pass begins with; hooks its output
//   before_backward   the gradient of u's output has come: units behind it are through and let go; gathers u, starts to
//                     gather the one before it, gives its gradients memory
//   grad_ready        the last gradient of u: starts its reduce-scatter
//   memory is short   the oldest reduce-scatter is waited for; the average over replicas begins
//   end of backward   finish(): waits for the rest, publishes the shards' gradients
//   an exception      abandon() aborts the communicators: no rank waits for one that will not come
// Of a step of several passes all but the last end with add_up() instead: each rank's rows are added up, and neither
// averaged over replicas nor handed out. Units whose whole gradients stay anyhow add up those.
// Every rank issues the same sequence, because it follows from the model's graph alone.
//
// In a pipeline (StageSharding, sharded_units_in_pipeline.cc) steps and engine runs are told from outside: gradients
// stay whole from begin_step() on, grad_ready comes when one is complete, and end_step() does what finish() does. The
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
#include "phalanx/parallel/fsdp/unit.h"
#include "phalanx/parallel/stage_sharding.h"

namespace phalanx::fsdp {

class ShardedUnits : public StageSharding, public std::enable_shared_from_this<ShardedUnits> {
 public:
  /// `replicas` is null without a replicating axis, `keepers` (unit.h) without such. Without `prefetch` a unit is
  /// gathered when it is used. `levels` of units inside units: that many are in use at a time. `attached`: what the
  /// module had. Collective.
  static std::shared_ptr<ShardedUnits> make(std::vector<std::unique_ptr<Unit>> units,
                                            std::shared_ptr<Communicator> comm, std::shared_ptr<Communicator> replicas,
                                            std::shared_ptr<Communicator> keepers, bool prefetch, int levels,
                                            AttachedParameters attached);
  void detach();

  void before_use(std::size_t unit);
  /// Returns the output, which may be hooked.
  at::Tensor after_use(std::size_t unit, at::Tensor output);

  void hold();
  void release() noexcept { --holds_; }
  /// Passes that begin from now on are parts of a step, until as many ends have been told.
  void begin_parts() noexcept { ++parts_; }
  void end_parts() noexcept { --parts_; }
  void forget_values();

  void begin_step() override;
  void begin_backward() override;
  void end_backward() override;
  void collect_gradients() override;
  void show_gradients() override;
  void end_step() override;
  void abandon_step() noexcept override;
  void gather_ahead() override;
  void let_go_of_all() override;

  const std::vector<std::unique_ptr<Unit>>& units() const noexcept { return units_; }
  const std::shared_ptr<Communicator>& keepers() const noexcept { return keepers_; }
  const FullyShardStatistics& statistics() const noexcept { return statistics_; }

 private:
  using Clock = std::chrono::steady_clock;
  struct Pass {
    bool held = false;     // gradients are only accumulated
    bool is_part = false;  // they are averaged and added to the rank's rows, but more of them follow
    bool asked = false;    // the engine will call back at the end of the innermost running backward pass
  };
  struct State {
    bool in_use = false;       // between before_use and after_use
    bool in_recorded = false;  // in use, while autograd records it or what it is used inside of
    bool in_backward = false;  // between before_backward and its last gradient
    bool is_through = false;   // in this backward pass
    bool was_used = false;     // in this step of a pipeline
    std::size_t pending = 0;   // trained parameters without a gradient in this pass
    std::vector<bool> ready;
    std::vector<bool> inner;  // the units that were used inside its use
  };

  ShardedUnits(std::vector<std::unique_ptr<Unit>> units, std::shared_ptr<Communicator> comm,
               std::shared_ptr<Communicator> replicas, std::shared_ptr<Communicator> keepers, bool prefetch, int levels,
               AttachedParameters attached);
  void subscribe();
  at::Tensor allocate(std::int64_t bytes, observe::MemoryCategory what_for = observe::MemoryCategory::buffers) const;
  void make_pools();
  void start_gather(std::size_t unit);
  void gather(std::size_t unit);
  void let_go(std::size_t unit);
  void prefetch(std::size_t unit, int direction);
  void gather_ahead_if_room(std::size_t unit);
  bool is_idle(std::size_t unit) const;
  at::Tensor parameter_memory();
  at::Tensor grad_memory();
  void give_grads_memory(std::size_t unit);

  bool in_step() const noexcept { return step_ != nullptr; }
  void expect_gradients();
  void take_order();
  void keep_all_grads();
  void publish();
  void add_up();
  bool adds_whole(std::size_t unit, const Pass& pass) const;
  void require_as_attached();
  [[noreturn]] void fail_changed(const std::string& changes);
  void begin_pass();
  void ask_for_end();
  void before_backward(std::size_t unit);
  void on_ready(std::size_t unit, std::size_t parameter);
  void complete(std::size_t unit);
  void finish_oldest_reduce();
  void finish(const std::shared_ptr<Pass>& pass);
  void abandon(const std::shared_ptr<Pass>& pass) noexcept;
  void give_up() noexcept;
  void start_averaging(std::size_t unit);
  void finish_averaging();
  [[noreturn]] void fail_unused(const Pass& pass);
  [[noreturn]] void fail(const std::string& message);

  std::vector<std::unique_ptr<Unit>> units_;
  std::vector<State> states_;
  std::shared_ptr<Communicator> comm_, replicas_, keepers_;
  bool prefetches_ = true;
  int levels_ = 1;
  AttachedParameters attached_;
  std::vector<GradReadySubscription> subscriptions_;
  MemoryPool parameter_pool_;
  std::optional<MemoryPool> grad_pool_;  // made by the first training pass

  std::vector<std::size_t> order_;  // of use
  std::vector<std::size_t> ends_;   // the same in the order of the ends: the backward pass comes the other way
  std::vector<std::size_t> seen_, seen_ends_;  // in the forward pass under way
  int holds_ = 0, parts_ = 0;
  bool keeps_all_grads_ = false;
  std::shared_ptr<Pass> pass_;
  std::shared_ptr<Pass> step_;  // of a pipeline, while it lasts
  std::deque<std::size_t> reducing_;
  std::vector<std::size_t> reduced_;
  std::vector<Work> averaging_;  // over replicas
  FullyShardStatistics statistics_;
};

}  // namespace phalanx::fsdp
