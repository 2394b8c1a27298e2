// redistribute: brings a tensor from one placement on a mesh to another, by the collectives that cost least.
//
// Contract
// - Collective over the mesh: every rank of it calls, with the same specs and its own local tensor, which has the shape
//   of from.local_box(mesh.rank()) and the spec's dtype (Error otherwise); any strides. The mesh is the one of the
//   specs (ConfigError). CPU and CUDA tensors; on CUDA the result is ready on the current stream, as after any verb.
// - The result is contiguous, has the shape of to.local_box(mesh.rank()) and shares no storage with `local`, which may
//   be freed; only where nothing has to change, `local` itself is returned. `local` is not modified.
// - Ranks that hold the same box get the same bits; after a sum only where the backend sums in rank order (local, shm:
//   communicator.h), for replicas along another axis add in communicators of their own. Several axes are summed one
//   after the other, as the plan has them.
// - Not differentiable: the result has no grad_fn. For what must be, see the autograd pairs of the parallel folder.
// - A partial target along an axis that was not partial before gets zeros where another rank has the value.
// - Beside local and result, a step allocates at most one buffer of what it sends (in an exchange each receiver's copy
//   counts) and one of what it receives.
//
//   // Column-parallel under FSDP -> whole, for a checkpoint's reader:
//   at::Tensor w = redistribute(local, spec, spec.with({}), mesh);
//   std::fputs(explain_redistribute(spec, spec.with({}), mesh).c_str(), stderr);
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "phalanx/mesh/device_mesh.h"
#include "phalanx/tensor/redistribute_plan.h"
#include "phalanx/tensor/shard_spec.h"

namespace phalanx {

at::Tensor redistribute(const at::Tensor& local, const ShardSpec& from, const ShardSpec& to, const DeviceMesh& mesh);

/// The same in two parts, for who moves many tensors alike, or wants to see what will be done.
RedistributePlan plan_redistribute(const ShardSpec& from, const ShardSpec& to, const DeviceMesh& mesh);
at::Tensor redistribute(const at::Tensor& local, const RedistributePlan& plan, const DeviceMesh& mesh);

/// The plan's text (redistribute_plan.h). Not collective.
std::string explain_redistribute(const ShardSpec& from, const ShardSpec& to, const DeviceMesh& mesh);

/// A local tensor's part, as a view: `part` and `held` are boxes of the global tensor, `local` holds the latter.
at::Tensor view_of(const at::Tensor& local, const Box& held, const Box& part);

}  // namespace phalanx
