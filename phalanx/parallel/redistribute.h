// redistribute: converts a tensor from one placement on a mesh to another, by the cheapest sequence of collectives.
//
// Public API for resharding from memory to memory. Nothing else in the library calls it: checkpoints reshard through
// files, FSDP and tensor parallelism have collectives of their own.
//
// Contract
// - Collective over the mesh: every rank calls with the same specs and its own local tensor. `local` has the shape of
//   from.local_box(mesh.rank()) and the spec's dtype (Error otherwise), with any strides. The mesh is the one of the
//   specs (ConfigError). CPU and CUDA tensors. On CUDA the result is ready on the current stream, as after any
//   collective.
// - The result is contiguous, has the shape of to.local_box(mesh.rank()) and shares no storage with `local`, which may
//   be freed. If nothing has to change, `local` itself is returned. `local` is not modified.
// - Ranks that hold the same box get the same bits. After a sum, this holds only if the backend sums in rank order
//   (local, shm: communicator.h), because replicas along another axis sum in separate communicators. Several axes are
//   summed one after the other, in the plan's order.
// - Not differentiable: the result has no grad_fn.
//   parallel/tensor/functional_collectives.h has differentiable collectives.
// - A partial target along an axis that was not partial before: a rank gets zeros where another rank supplies the
//   value.
// - Beside `local` and the result, a step allocates at most one buffer for what it sends (in an exchange, one copy per
//   receiver) and one for what it receives.
//
//   // Column-parallel under FSDP -> whole, for a checkpoint's reader:
//   at::Tensor w = redistribute(local, spec, spec.with({}), mesh);
//   std::fputs(explain_redistribute(spec, spec.with({}), mesh).c_str(), stderr);
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "phalanx/mesh/device_mesh.h"
#include "phalanx/parallel/redistribute_plan.h"
#include "phalanx/tensor/shard_spec.h"

namespace phalanx {

at::Tensor redistribute(const at::Tensor& local, const ShardSpec& from, const ShardSpec& to, const DeviceMesh& mesh);

/// The same in two steps: to convert many tensors alike, or to look at the plan first.
RedistributePlan plan_redistribute(const ShardSpec& from, const ShardSpec& to, const DeviceMesh& mesh);
at::Tensor redistribute(const at::Tensor& local, const RedistributePlan& plan, const DeviceMesh& mesh);

/// The plan's text (redistribute_plan.h). Not collective.
std::string explain_redistribute(const ShardSpec& from, const ShardSpec& to, const DeviceMesh& mesh);

/// Returns a part of a local tensor as a view. `part` and `held` are boxes of the global tensor, and `local` holds the
/// latter.
at::Tensor view_of(const at::Tensor& local, const Box& held, const Box& part);

}  // namespace phalanx
