#include "phalanx/parallel/fsdp/find_units.h"

#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include <memory>
#include <string>
#include <vector>

namespace phalanx::fsdp {
namespace {

constexpr int kWidth = 4;

/// A block with a parameter of its own, which the net may share.
struct ScaledBlock : torch::nn::Module {
  ScaledBlock(const at::Tensor& scale, bool has_child) {
    register_parameter("scale", scale);
    if (has_child) register_module("fc", torch::nn::Linear(kWidth, kWidth));
  }
};

struct ListedNet : torch::nn::Module {
  explicit ListedNet(const std::vector<std::shared_ptr<torch::nn::Module>>& listed) {
    for (const auto& block : listed) blocks->push_back(block);
  }
  at::Tensor scale = register_parameter("scale", at::zeros({kWidth}));
  torch::nn::ModuleList blocks = register_module("blocks", torch::nn::ModuleList());
};

bool can_be_split(const std::vector<ParamGroupPlan>& plans, const std::string& name) {
  for (const ParamGroupPlan& plan : plans)
    if (plan.name == name) return plan.can_be_split;
  ADD_FAILURE() << "no unit " << name;
  return false;
}

TEST(FindUnits, AUnitCanBeSplitIfItHoldsParametersOfChildren) {
  ListedNet net({std::make_shared<ScaledBlock>(at::zeros({kWidth}), /*has_child=*/false),
                 std::make_shared<ScaledBlock>(at::zeros({kWidth}), /*has_child=*/true)});
  const auto plans = find_units(net, /*smallest=*/0, /*on_use=*/true);
  EXPECT_FALSE(can_be_split(plans, "blocks.0"));
  EXPECT_TRUE(can_be_split(plans, "blocks.1"));
}

// The root holds the shared parameter, so the unit has no more parameters than the block has of its own.
TEST(FindUnits, AUnitWhoseOwnParametersAreSharedCanBeSplit) {
  ListedNet net({});
  auto block = std::make_shared<ScaledBlock>(net.scale, /*has_child=*/false);
  block->register_module("fc", torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false)));
  net.blocks->push_back(block);
  EXPECT_TRUE(can_be_split(find_units(net, /*smallest=*/0, /*on_use=*/true), "blocks.0"));
}

}  // namespace
}  // namespace phalanx::fsdp
