// ParamGroup: parameters that are unsharded, used and resharded together, in one flat buffer with one shard per rank.
//
// Its buffers (S = layout.shard_elements, N ranks along the sharding axis)
//   full     N * S   the parameters. Every parameter of the module is a view of it. It has memory only while unsharded.
//   shard    S       this rank's slice, always present. The optimizer updates it. In a resident group it is a part of
//                    `full`, unless `full` has another dtype or the shard is kept on the host.
//   part     N*S/k   (sharded_post_forward_) what a rank keeps between the forward and the backward pass if k
//                    neighbouring ranks keep the group together
//   grads    N * S   the gradients while a backward pass makes them. Every grad buffer is a view of it.
//   reduced  S       this rank's slice of the averaged gradients. The shards' gradients become views of it. If `grads`
//                    owns its memory from the start, `reduced` is a part of `grads`. Otherwise it is allocated when the
//                    group's gradients are complete, and freed when the shards' gradients are reset. If the result is
//                    kept on the host, it is computed in `grads` and then copied there.
//   sum      S       (partial_reduce_output_) the sum of `reduced` over the micro-batches of a step so far, if each is
//                    reduced. In float32 if the reduction has 16 bits. On the host if the result is kept there.
// `full` has the parameters' dtype, `grads` and `reduced` have that of the reduction, `shard` has the module's own.
//
// Frozen parameters (requires_grad = false) have no gradients. If a unit has both kinds, the frozen ones form a group
// of their own inside this one: with `full` and `shard` and nothing else, in a dtype of its own, gathered and freed
// together with the trained ones, in the same piece of memory. Frozen parameters of several dtypes are as many groups,
// each inside of the one before. Those of bytes keep their dtype.
//
// ParamGroup does not decide when its operations run: FsdpRuntime does (fsdp_runtime.h). The rank's thread calls them
// or, inside a backward pass, the thread that runs it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/layout/flat_layout.h"
#include "phalanx/parallel/fsdp/flat_buffer.h"
#include "phalanx/parallel/fsdp/operator_use.h"
#include "phalanx/tensor/copy_stream.h"
#include "phalanx/tensor/grad_ready.h"
#include "phalanx/tensor/named.h"

namespace phalanx::fsdp {

struct ParamGroupOptions {
  MeshShape mesh;                                           // of the specs
  int mesh_rank = 0;                                        // this rank in it
  std::string shard_axis;                                   // the axis of `comm`
  bool resident = false;                                    // `full` keeps its memory
  bool own_grads = false;                                   // `grads` owns its memory
  bool watched = false;                                     // operators that read parameters are reported (watch())
  bool gathered_on_use = false;                             // the first such operator gathers it
  bool offload = false;                                     // shards and their gradients are kept on the host
  std::optional<at::ScalarType> param_dtype, reduce_dtype;  // unset: unchanged; same as the parameters
  ReduceOp gradient_reduction = ReduceOp::avg;
  std::shared_ptr<Communicator>
      post_forward_group;  // the neighbours that keep the group from forward to backward; null: none
};

class ParamGroup {
 public:
  /// Collective. Takes over the parameters: copies this rank's rows of those that have values, then replaces their
  /// memory. Throws Error for a parameter without dimensions, or on another device,
  /// and for trained parameters of several dtypes.
  ParamGroup(std::string name, std::vector<NamedTensor> parameters, std::shared_ptr<Communicator> comm,
             const ParamGroupOptions& options);

  const std::string& name() const noexcept { return name_; }
  const FlatLayout& layout() const noexcept { return layout_; }  // of the trained parameters, if there are both kinds
  std::int64_t bytes() const noexcept;                           // of `full`, of both kinds of parameters
  std::int64_t grad_bytes() const noexcept;                      // of `grads`; 0 if nothing is trained
  std::int64_t shard_bytes() const noexcept;                     // of `shard`
  std::int64_t resident_bytes() const noexcept;  // of the memory that holds parameters even while sharded
  std::int64_t reduced_bytes() const noexcept;   // of `reduced` at the end of a pass, where not in `grads`
  std::int64_t padding_bytes() const noexcept;   // of `full`
  std::size_t size() const noexcept { return parameters_.size() + (frozen_ ? frozen_->size() : 0); }
  const NamedTensor& parameter(std::size_t i) const { return at(i).full; }  // the trained ones first
  /// This rank's rows with their spec. The spec splits further what the parameter's own shard describes. .grad() is the
  /// result of the last synchronised pass.
  const NamedTensor& shard(std::size_t i) const { return at(i).shard; }
  bool is_trained(std::size_t i) const { return at(i).is_trained; }  // as it was at construction
  bool has_trained() const;
  bool resident() const noexcept { return resident_; }
  bool own_grads() const noexcept { return own_grads_; }
  bool gathered_on_use() const noexcept { return gathered_on_use_; }
  /// Has the operators that read its parameters reported, as those of group `number`.
  void watch(std::weak_ptr<UseListener> listener, std::size_t number);

  // Parameters.
  bool is_unsharded() const noexcept { return unsharded_ && (!frozen_ || frozen_->is_unsharded()); }
  /// False if a shard has been written to (by an optimizer, or by loading it) since its values were gathered.
  bool is_current() const;
  bool has_memory() const noexcept { return full_.is_attached(); }
  void attach(const at::Tensor& memory);
  /// A shard on the host comes by way of `from_host`, behind the work on the current stream.
  void unshard(const CopyStream& from_host);
  /// The current stream waits, with a communicator of host memory the host.
  void wait_for_unshard();
  /// Call before a detach() if the group is needed again before its values change: the ranks of post_forward_group can
  /// then gather it among themselves.
  void to_sharded_post_forward();
  /// Marks the unsharded values as out of date: the shards have changed.
  void invalidate_unsharded();
  at::Tensor detach();

  // Gradients.
  bool has_grad_memory() const noexcept { return grads_.is_attached(); }
  void attach_grads(const at::Tensor& memory) { grads_.attach(memory); }
  at::Tensor detach_grads();  // undefined if they keep their memory
  void offer_grad_buffers();
  void withdraw_grad_buffers();
  /// From now on `grads` keeps this memory.
  void keep_grads(const at::Tensor& memory);
  /// Moves the gradient that autograd produced to its place in `grads`.
  void place_grad(std::size_t i);
  /// For steps of many passes in which gradients and parameters differ in dtype: moves the gradients so far into
  /// `grads`. show_grads() moves them back to .grad(), in the gradients' dtype.
  void to_accumulated_grads();
  void show_grads();
  bool has_shard_grads() const;
  /// Saves the averages of earlier passes that have not been reset, so that a further pass adds to them.
  void carry_reduced();
  void start_reduce_scatter();
  /// Waits, then frees the full gradients.
  void finish_reduce_scatter();
  /// Adds `reduced` to `sum` and frees it.
  /// REQUIRES: with offload, the copy of `reduced` to the host is complete.
  void add_to_partial_reduce_output();
  /// Starts to copy a sum on the host to the device, by way of `from_host`.
  void fetch_partial_reduce_output(const CopyStream& from_host);
  /// Sets `reduced` to the accumulated sum, including itself.
  /// REQUIRES: a sum on the host has been fetched.
  void take_partial_reduce_output();
  /// Reduces `reduced` over the replicas of the shards, in the reduction's dtype.
  Work reduce_over(Communicator& replicas);
  /// Whether `reduced` has to be copied to the host before `grads` may go.
  bool offloads() const noexcept { return offload_; }
  /// Copies it to the host by way of `to_host`, behind the work on the current stream. Returns the end of the copy: the
  /// host must wait before it reads, and `grads` keeps its values until then.
  CopyStream::Mark copy_to_host(const CopyStream& to_host);
  /// Sets shard(i).tensor.grad() to the reduced gradient plus the carried one. From then on only the shards' gradients
  /// own that memory.
  void publish_grads();
  void drop_full_grads();
  void drop_partial_reduce_output() { partial_reduce_output_.reset(); }

 private:
  struct Parameter {
    NamedTensor full, shard;
    bool is_trained = false;
    at::Tensor grad_view;    // into grads_
    at::Tensor carried;      // the shard's gradient of earlier passes
    bool is_placed = false;  // its gradient is in grad_view, not in .grad(), which has another dtype
  };
  const Parameter& at(std::size_t i) const;
  std::int64_t own_bytes() const noexcept;  // without those of frozen_
  void check(const std::vector<NamedTensor>& parameters, const ParamGroupOptions& options) const;
  void make_shard(const ParamGroupOptions& options);
  at::Tensor slice_of(const at::Tensor& flat) const;
  std::uint64_t shard_version() const;
  at::TensorOptions on_host(at::TensorOptions options) const;

  std::string name_;
  std::shared_ptr<Communicator> comm_;
  FlatLayout layout_;
  std::shared_ptr<Communicator> post_forward_group_;
  at::TensorOptions shard_options_, options_, grad_options_;
  std::vector<Parameter> parameters_;
  std::unique_ptr<ParamGroup> frozen_;  // those of the other kinds; null: there is one kind
  FlatBuffer full_, grads_;
  at::Tensor shard_, sharded_post_forward_, reduced_, partial_reduce_output_;
  ReduceOp gradient_reduction_ = ReduceOp::avg;
  bool resident_ = false, own_grads_ = false, offload_ = false, gathered_on_use_ = false;
  bool direct_ = true;  // `full` holds the shards' own values, not a cast of them
  bool keeps_grads_ = false, unsharded_ = false, is_sharded_post_forward_ = false;
  std::uint64_t gathered_version_ = 0;  // shard_version() of the unsharded values
  CopyStream::Mark came_from_host_, sum_came_from_host_;
  Work all_gather_, reduce_scatter_;
};

}  // namespace phalanx::fsdp
