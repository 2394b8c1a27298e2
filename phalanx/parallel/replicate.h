// Makes a model start as equal copies: every rank holds the same tensors by name, with rank 0's values.
//
//   require_same_on_all_ranks(comm, lines);                               // throws on every rank, names the difference
//   broadcast_coalesced(comm, nn::named_parameters(model), 25 << 20);     // rank 0's values, packed into few messages
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/tensor/named.h"

namespace torch::nn {
class Module;
}

namespace phalanx {

/// The module's defined buffers in the order of registration. A shared buffer appears once.
std::vector<NamedTensor> named_buffers(const torch::nn::Module& module);

/// For example "Float [3, 4] requires_grad": what the ranks must agree on.
std::string describe(const at::Tensor& tensor);
/// The same for the whole parameter, where the tensor may be a part of it.
std::string describe_global(const NamedTensor& parameter);

/// Collective. Compares `lines` with rank 0's. The first difference throws Error on every rank.
void require_same_on_all_ranks(Communicator& comm, const std::vector<std::string>& lines);

/// Collective. Copies rank `root`'s values into every rank's tensors, in messages of at least one tensor and at most
/// about `chunk_bytes`. The tensors may have any dtypes.
/// REQUIRES: all tensors are on one device.
void broadcast_coalesced(Communicator& comm, const std::vector<NamedTensor>& tensors, std::size_t chunk_bytes,
                         int root = 0);

}  // namespace phalanx
