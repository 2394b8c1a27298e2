// ParamGroup: some parameters that are gathered, used and let go together: one flat buffer, one shard of it per rank.
//
// What lives where (S = layout.shard_elements, N ranks along the sharding axis)
//   full     N * S   the parameters; every parameter of the module is a view of it. Its memory is there while gathered.
//   shard    S       this rank's slice, always there; what the optimizer steps. A resident unit's lies in `full` unless
//                    that is of another dtype or the shard is kept on the host.
//   part     N*S/k   what a rank keeps from the forward to the backward pass where k neighbours keep the unit together
//   grads    N * S   the gradients while a backward pass makes them; every grad buffer is a view of it
//   reduced  S       this rank's slice of their average, which the shards' gradients become views of. In `grads` where
//                    that has memory of its own from the start; else made when the unit's gradients are complete, and
//                    gone when the shards' gradients are reset. Where the result is kept on the host: in `grads`, then
//                    copied there.
//   sum      S       of `reduced` of a step's micro-batches so far, where each is reduced: in float32 where the
//                    reduction is in 16 bits; on the host where the result is kept there
// `full` is in the parameters' dtype, `grads` and `reduced` in that of the reduction, `shard` in the module's own.
// No operation here decides when: that is FsdpRuntime' business (fsdp_runtime.h). All are called by the rank's thread
// or, inside a backward pass, by the thread that runs it.
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
#include "phalanx/tensor/grad_ready.h"
#include "phalanx/tensor/named.h"

namespace phalanx::fsdp {

struct ParamGroupOptions {
  MeshShape mesh;                                           // of the specs
  int mesh_rank = 0;                                        // this rank in it
  std::string shard_axis;                                   // the axis of `comm`
  bool resident = false;                                    // `full` keeps its memory
  bool own_grads = false;                                   // `grads` has memory of its own
  bool offload = false;                                     // shards and their gradients are kept on the host
  std::optional<at::ScalarType> param_dtype, reduce_dtype;  // unset: as they are; as the parameters
  std::shared_ptr<Communicator>
      post_forward_group;  // the neighbours that keep the unit from forward to backward; null: nobody
};

class ParamGroup {
 public:
  /// Collective. Takes over the parameters: copies this rank's rows of those that have values, then replaces their
  /// memory. Throws Error for one without dimensions, or of another dtype or device than the first.
  ParamGroup(std::string name, std::vector<NamedTensor> parameters, std::shared_ptr<Communicator> comm,
             const ParamGroupOptions& options);

  const std::string& name() const noexcept { return name_; }
  const FlatLayout& layout() const noexcept { return layout_; }
  std::int64_t bytes() const noexcept;           // of `full`
  std::int64_t grad_bytes() const noexcept;      // of `grads`
  std::int64_t shard_bytes() const noexcept;     // of `shard`
  std::int64_t resident_bytes() const noexcept;  // of what holds parameters whether gathered or not
  std::int64_t reduced_bytes() const noexcept;   // of `reduced` at the end of a pass, where not in `grads`
  std::size_t size() const noexcept { return parameters_.size(); }
  const NamedTensor& parameter(std::size_t i) const { return parameters_[i].full; }
  /// The rank's rows, with their spec, which cuts what the parameter's own shard has left; .grad() is what the last
  /// synchronised pass left.
  const NamedTensor& shard(std::size_t i) const { return parameters_[i].shard; }
  bool is_trained(std::size_t i) const { return parameters_[i].is_trained; }  // as it was at construction
  bool has_trained() const;
  bool resident() const noexcept { return resident_; }
  bool own_grads() const noexcept { return own_grads_; }

  // Parameters.
  bool is_unsharded() const noexcept { return unsharded_; }
  bool has_memory() const noexcept { return full_.is_attached(); }
  void attach(const at::Tensor& memory) { full_.attach(memory); }
  void unshard();
  void wait_for_unshard();
  /// Before a detach() after which the unit is needed again before its values change: the keepers can gather it then.
  void to_sharded_post_forward();
  /// What it holds is not what the shards hold any more.
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
  /// Puts the gradient that autograd brought where it belongs.
  void place_grad(std::size_t i);
  /// For steps of many passes: where gradients are of another dtype than parameters, what has come so far goes where it
  /// belongs; and back to where others look for it, in the gradients' dtype.
  void to_accumulated_grads();
  void show_grads();
  bool has_shard_grads() const;
  /// Keeps what a further pass adds to: the averages of earlier ones that nobody has reset.
  void carry_reduced();
  void start_reduce_scatter();
  /// Waits, and lets go of the full gradients.
  void finish_reduce_scatter();
  /// Adds `reduced`, which is gone then, to `sum`; with offload it has been copied to the host and is there by now.
  void add_to_partial_reduce_output();
  /// `reduced` becomes all that has been added up, itself included.
  void take_partial_reduce_output();
  /// Averages `reduced` over the replicas of the shards, in the dtype of the reduction.
  Work average_over(Communicator& replicas);
  /// Whether `reduced` has to be copied to the host before `grads` may go.
  bool offloads() const noexcept { return offload_; }
  /// Copies it there, behind what the current stream has to do: synchronise before reading.
  void copy_to_host();
  /// shard(i).tensor.grad() becomes what has been reduced, plus what was carried; their memory is theirs alone then.
  void publish_grads();
  void drop_full_grads();
  void drop_partial_reduce_output() { partial_reduce_output_.reset(); }

 private:
  struct Parameter {
    NamedTensor full, shard;
    bool is_trained = false;
    at::Tensor grad_view;    // into grads_
    at::Tensor carried;      // the shard's gradient of earlier passes
    bool is_placed = false;  // its gradient is in grad_view, and not in .grad(), which has another dtype
  };
  void check(const std::vector<NamedTensor>& parameters, const ParamGroupOptions& options) const;
  void make_shard(const ParamGroupOptions& options);
  at::Tensor slice_of(const at::Tensor& flat) const;
  at::TensorOptions on_host(at::TensorOptions options) const;

  std::string name_;
  std::shared_ptr<Communicator> comm_;
  FlatLayout layout_;
  std::shared_ptr<Communicator> post_forward_group_;
  at::TensorOptions shard_options_, options_, grad_options_;
  std::vector<Parameter> parameters_;
  FlatBuffer full_, grads_;
  at::Tensor shard_, sharded_post_forward_, reduced_, partial_reduce_output_;
  bool resident_ = false, own_grads_ = false, offload_ = false;
  bool direct_ = true;  // `full` holds what the shards hold, not something made of it
  bool keeps_grads_ = false, unsharded_ = false, is_sharded_post_forward_ = false;
  Work all_gather_, reduce_scatter_;
};

}  // namespace phalanx::fsdp
