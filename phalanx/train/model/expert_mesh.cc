#include "phalanx/train/model/expert_mesh.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/comm/data_type.h"
#include "phalanx/models/config/parameter_kinds.h"
#include "phalanx/models/expert_bias.h"
#include "phalanx/nn/mixture_of_experts.h"
#include "phalanx/parallel/expert/expert_parallel.h"
#include "phalanx/tensor/held_by_owner.h"

namespace phalanx::train {
namespace {

constexpr const char* kExpertParameters = "*.moe.experts.*";
constexpr const char* kAxis = "ep";

/// Throws unless the experts of the layer have the same trained parameters, so that every rank keeps as many.
void check_frozen(const nn::MixtureOfExperts& mixture, std::int64_t layer) {
  std::map<std::string, std::set<bool>> trained;  // by the name inside an expert
  for (const auto& [number, net] : mixture.experts->nets()) {
    for (const auto& parameter : net->named_parameters()) {
      trained[parameter.key()].insert(parameter.value().requires_grad());
    }
  }
  for (const auto& [name, kinds] : trained) {
    if (kinds.size() == 1) continue;
    throw ConfigError(
        fmt::format("[training] frozen names '{}' of some experts of layer {} and not of others, and [parallelism] "
                    "expert_parallel_degree divides them among ranks: freeze all experts of the layer or none, or set "
                    "the degree to 1",
                    name, layer));
  }
}

/// The whole tensor, or the part that tensor parallelism left, on this mesh.
std::shared_ptr<const Shard> on_mesh(const NamedTensor& parameter, const ExpertMesh& mesh) {
  const Placement cut = parameter.shard ? parameter.shard->spec.placement() : Placement{};
  return std::make_shared<const Shard>(Shard{ShardSpec(parameter.name, parameter.global_shape(),
                                                       data_type_of(parameter.tensor.scalar_type()), mesh.shape(), cut),
                                             mesh.rank()});
}

}  // namespace

std::shared_ptr<const ExpertMesh> ExpertMesh::make(const ParallelPlan& plan, const DeviceMesh& mesh) {
  if (plan.ep == 1) return nullptr;
  const auto degree = static_cast<int>(plan.ep);
  std::vector<MeshAxis> axes;
  const std::string of_shards = plan.shard_axis();
  for (const MeshAxis& axis : mesh.axes()) {
    if (axis.name != of_shards) {
      axes.push_back(axis);
      continue;
    }
    axes.push_back({axis.name, axis.size / degree});
    axes.push_back({kAxis, degree});
  }
  const std::shared_ptr<Communicator>& shards = mesh.communicator(of_shards);
  const int rank = shards->rank();
  std::shared_ptr<ExpertMesh> made(new ExpertMesh);
  made->shape_ = MeshShape(std::move(axes));
  made->rank_ = mesh.rank();
  made->ep_ = shards->split(rank / degree, rank, kAxis);
  made->dp_shard_ = shards->split(rank % degree, rank, "dp_shard_of_experts");
  return made;
}

OwnShardGroup ExpertMesh::own_group() const { return {.patterns = {kExpertParameters}, .ranks = dp_shard_}; }

std::vector<NamedTensor> ExpertMesh::with_others(const std::vector<NamedTensor>& held,
                                                 const std::vector<std::string>& names) const {
  std::map<std::string, NamedTensor> here;
  std::vector<ShardSpec> mine;  // of what only this rank has
  for (const NamedTensor& one : held) {
    here[one.name] = one;
    const bool is_expert = one.shard && one.shard->spec.mesh().has(kAxis);
    if (!is_expert) continue;
    const ShardSpec spec = held_by_owner(one, shape_, kAxis, ep_->rank());
    mine.push_back(spec);
    here[one.name].shard = std::make_shared<const Shard>(Shard{spec, rank_});
  }
  const std::map<std::string, ShardSpec> of_others = specs_of_group(*ep_, mine);
  std::vector<NamedTensor> all;
  for (const std::string& name : names) {
    if (const auto found = here.find(name); found != here.end()) {
      all.push_back(found->second);
      continue;
    }
    const auto shard = std::make_shared<const Shard>(Shard{of_others.at(name), rank_});
    all.push_back({name, at::empty(shard->box().shape, held.front().tensor.options().requires_grad(false)), shard});
  }
  return all;
}

bool apply_expert_parallelism(models::Llama& model, const ExpertMesh& mesh) {
  const std::vector<models::MixtureOfLayer> mixtures = models::mixtures_of(model);
  for (const auto& [layer, mixture] : mixtures) {
    check_frozen(*mixture, layer);
    distribute_experts(*mixture, mesh.ep());
  }
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    auto* const module = dynamic_cast<nn::Module*>(item.value().get());
    if (module == nullptr) continue;
    for (const auto& own : module->named_parameters(/*recurse=*/false)) {
      const std::string name = item.key() + "." + own.key();
      if (!models::is_expert_parameter(name)) continue;
      module->set_shard(own.key(), on_mesh({name, own.value(), module->shard_of(own.key())}, mesh));
    }
  }
  return !mixtures.empty();
}

}  // namespace phalanx::train
