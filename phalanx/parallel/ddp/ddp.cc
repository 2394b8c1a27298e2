#include "phalanx/parallel/ddp/ddp.h"

#include <fmt/format.h>
#include <torch/nn/module.h>

#include <string>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/nn/init.h"
#include "phalanx/parallel/ddp/reducer.h"
#include "phalanx/parallel/replicate.h"

namespace phalanx {

DistributedDataParallel::DistributedDataParallel(torch::nn::Module& module, std::shared_ptr<Communicator> comm,
                                                 DdpOptions options)
    : comm_(std::move(comm)), options_(options), buffers_(named_buffers(module)) {
  if (!comm_) throw Error("DistributedDataParallel: the communicator is null; pass the one of init_from_environment()");
  const std::vector<NamedTensor> all = nn::named_parameters(module);
  std::vector<std::string> lines = {
      fmt::format("first_bucket_bytes = {}, bucket_bytes = {}, find_unused_parameters = {}, gradient_reduction = {}",
                  options_.first_bucket_bytes, options_.bucket_bytes, options_.find_unused_parameters,
                  options_.gradient_reduction == ReduceOp::sum ? "sum" : "avg")};
  if (options_.gradient_reduction != ReduceOp::avg && options_.gradient_reduction != ReduceOp::sum) {
    throw ConfigError("DistributedDataParallel: gradient_reduction: expected ReduceOp::avg or ReduceOp::sum");
  }
  for (const auto& [name, tensor, shard] : all)
    lines.push_back(fmt::format("parameter '{}' {}", name, describe(tensor)));
  for (const auto& [name, tensor, shard] : buffers_)
    lines.push_back(fmt::format("buffer '{}' {}", name, describe(tensor)));
  require_same_on_all_ranks(*comm_, lines);

  std::vector<NamedTensor> trained;
  for (const auto& named : all) {
    if (named.tensor.requires_grad()) trained.push_back(named);
  }
  if (trained.empty()) throw Error("DistributedDataParallel: the module has no parameter that requires grad");
  broadcast_coalesced(*comm_, all, options_.bucket_bytes);
  broadcast_buffers();
  reducer_ = Reducer::attach(std::move(trained), AttachedParameters(module), comm_, options_);
}

DistributedDataParallel::~DistributedDataParallel() { reducer_->detach(); }

DistributedDataParallel::NoSync::NoSync(std::shared_ptr<Reducer> reducer) : reducer_(std::move(reducer)) {
  reducer_->hold();
}

DistributedDataParallel::NoSync::~NoSync() {
  if (reducer_) reducer_->release();
}

DistributedDataParallel::NoSync DistributedDataParallel::no_sync() { return NoSync(reducer_); }

void DistributedDataParallel::broadcast_buffers() { broadcast_coalesced(*comm_, buffers_, options_.bucket_bytes); }

const std::vector<NamedTensor>& DistributedDataParallel::parameters() const noexcept { return reducer_->parameters(); }

const std::vector<std::vector<std::size_t>>& DistributedDataParallel::buckets() const noexcept {
  return reducer_->plan().buckets;
}

DdpStatistics DistributedDataParallel::statistics() const { return reducer_->statistics(); }

void DistributedDataParallel::collect_state(TrainState& state) const {
  state.tensors.push_back({"layout.ddp.bucket_order", reducer_->order_state()});
}

}  // namespace phalanx
