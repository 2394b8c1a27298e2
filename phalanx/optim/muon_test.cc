#include "phalanx/optim/muon.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/svd.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/optim/optimizer_set.h"
#include "phalanx/tensor/init.h"
#include "phalanx/tensor/narrow_to_box.h"

namespace phalanx::muon_test {
namespace {

const nlohmann::json& golden() {
  static const nlohmann::json json =
      nlohmann::json::parse(std::ifstream(std::string(PHALANX_OPTIM_TESTDATA) + "/muon_golden.json"));
  return json;
}

at::Tensor golden_tensor(const nlohmann::json& values, const std::string& name) {
  return at::tensor(values.at(name).get<std::vector<float>>())
      .view(golden().at("shapes").at(name).get<std::vector<std::int64_t>>());
}

std::vector<NamedTensor> golden_parameters(at::ScalarType dtype = at::kFloat) {
  std::vector<NamedTensor> parameters;
  for (const auto& [name, shape] : golden().at("shapes").items()) {
    parameters.push_back({name, golden_tensor(golden().at("start"), name).to(dtype).requires_grad_()});
  }
  return parameters;
}

/// With the gradients of the golden run, from this step to the last one.
void run_golden(Optimizer& optimizer, std::size_t first = 0) {
  const auto rates = golden().at("learning_rates").get<std::vector<double>>();
  for (std::size_t step = first; step < rates.size(); ++step) {
    for (const auto& [name, tensor, shard] : optimizer.parameters()) {
      tensor.mutable_grad() = golden_tensor(golden().at("gradients").at(step), name).to(tensor.scalar_type());
    }
    optimizer.step(rates[step]);
  }
}

/// The difference from torch's parameters, as a share of what the run has changed. Products in bfloat16 are summed in
/// another order on other processors; on one with the instructions of torch's machine the share is below 1e-5.
double share_off(const std::vector<NamedTensor>& parameters, const std::string& run) {
  double most = 0;
  for (const auto& [name, tensor, shard] : parameters) {
    const at::Tensor expected = golden_tensor(golden().at(run), name);
    const at::Tensor moved = expected - golden_tensor(golden().at("start"), name);
    most = std::max(most, ((tensor.detach().to(at::kFloat) - expected).norm() / moved.norm()).item<double>());
  }
  return most;
}

TEST(Muon, FollowsTorch) {
  const std::vector<std::pair<std::string, MuonOptions>> runs = {
      {"default", {}},
      {"match_rms_adamw", {.adjust_lr = MuonAdjustment::match_rms_adamw, .weight_decay = 0.5}},
      {"plain_momentum", {.momentum = 0.6, .nesterov = false, .weight_decay = 0}},
      {"little_momentum", {.momentum = 0.3}},
      {"coefficients", {.newton_schulz = {.steps = 3, .coefficients = {2.0, -1.5, 0.5}}}},
      {"eps", {.newton_schulz = {.eps = 20}, .weight_decay = 0}}};
  for (const auto& [run, options] : runs) {
    for (const auto dtype : {at::kFloat, at::kDouble}) {  // our own kernels, libtorch's
      Muon muon(golden_parameters(dtype), options);
      run_golden(muon);
      EXPECT_LT(share_off(muon.parameters(), run), 0.01) << run << ", " << dtype;
      for (const auto& [other, different] : runs) {
        if (other == run) continue;
        EXPECT_GT(share_off(muon.parameters(), other), 0.02) << run << ", not " << other;
      }
    }
  }
}

TEST(Muon, MakesSingularValuesAlike) {
  for (const std::vector<std::int64_t>& shape : std::vector<std::vector<std::int64_t>>{{30, 70}, {70, 30}}) {
    at::Tensor x = at::empty(shape);
    fill(x, Init::normal(0.0, 1.0), 3, "x");
    const at::Tensor result = newton_schulz(x.to(at::kBFloat16), {}).to(at::kFloat);
    EXPECT_EQ(result.sizes(), x.sizes());
    const auto [u, s, v] = at::svd(result);
    EXPECT_GT(s.min().item<double>(), 0.5);
    EXPECT_LT(s.max().item<double>(), 1.4);
  }
  EXPECT_TRUE(at::equal(newton_schulz(at::zeros({3, 5}, at::kBFloat16), {}), at::zeros({3, 5}, at::kBFloat16)));
}

TEST(Muon, ItsStateRoundTripsBitwise) {
  Muon whole(golden_parameters()), first(golden_parameters()), second(golden_parameters());
  run_golden(whole, 1);
  for (const auto& [name, tensor, shard] : first.parameters()) {
    tensor.mutable_grad() = golden_tensor(golden().at("gradients").at(1), name);
  }
  first.step(golden().at("learning_rates").at(1));
  TrainState saved, loaded;
  first.collect_state(saved);
  second.collect_state(loaded);
  ASSERT_THAT(saved.tensors, SizeIs(3));
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(saved.tensors[i].name, "optimizer." + first.parameters()[i].name + ".momentum_buffer");
    loaded.tensors[i].tensor.copy_(saved.tensors[i].tensor);
    second.parameters()[i].tensor.copy_(first.parameters()[i].tensor);
  }
  run_golden(second, 2);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(at::equal(second.parameters()[i].tensor, whole.parameters()[i].tensor)) << i;
  }
}

TEST(Muon, A16BitParameterIsItsMasterRounded) {
  auto wide = golden_parameters(), narrow = golden_parameters(at::kBFloat16);
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < wide.size(); ++i) wide[i].tensor.copy_(narrow[i].tensor);  // the same start
  Muon of_wide(wide), of_narrow(narrow);
  for (int step = 0; step < 3; ++step) {
    for (std::size_t i = 0; i < wide.size(); ++i) {
      narrow[i].tensor.mutable_grad() =
          golden_tensor(golden().at("gradients").at(static_cast<std::size_t>(step)), wide[i].name).to(at::kBFloat16);
      wide[i].tensor.mutable_grad() = narrow[i].tensor.grad().to(at::kFloat);
    }
    of_wide.step(0.01);
    of_narrow.step(0.01);
  }
  for (std::size_t i = 0; i < wide.size(); ++i) {
    EXPECT_TRUE(at::equal(wide[i].tensor.to(at::kBFloat16), narrow[i].tensor)) << wide[i].name;
  }
}

// Groups and factors multiply the rate; a factor of the gradients (clipping) acts before the momentum.
TEST(Muon, RatesDecaysAndFactors) {
  Muon muon(golden_parameters(), {.lr_factor = 4, .groups = {{.params = {"tall"}, .lr_factor = 0.5}}});
  Muon fast(golden_parameters()), slow(golden_parameters());
  for (Muon* const one : {&muon, &fast, &slow}) {
    for (const auto& [name, tensor, shard] : one->parameters()) {
      tensor.mutable_grad() = golden_tensor(golden().at("gradients").at(0), name);
    }
  }
  muon.step(0.01);
  fast.step(0.04);
  slow.step(0.02);
  for (std::size_t i = 0; i < 3; ++i) {
    const auto& [name, tensor, shard] = muon.parameters()[i];
    EXPECT_TRUE(at::equal(tensor, (name == "tall" ? slow : fast).parameters()[i].tensor)) << name;
  }

  Muon scaled(golden_parameters()), halved(golden_parameters());
  for (std::size_t i = 0; i < 3; ++i) {
    const at::Tensor grad = golden_tensor(golden().at("gradients").at(0), scaled.parameters()[i].name);
    scaled.parameters()[i].tensor.mutable_grad() = grad.clone();
    halved.parameters()[i].tensor.mutable_grad() = grad * 0.5;
  }
  scaled.step(0.1, {.grad_factor = 0.5});
  halved.step(0.1);
  TrainState a, b;
  scaled.collect_state(a);
  halved.collect_state(b);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(at::equal(a.tensors[i].tensor, b.tensors[i].tensor));
    EXPECT_TRUE(at::equal(scaled.parameters()[i].tensor, halved.parameters()[i].tensor));
  }
}

/// A matrix and how it is cut on a mesh; no placement: every rank has all of it.
struct Cut {
  std::string name;
  std::vector<std::int64_t> shape;
  std::optional<Placement> placement = {};
};

std::vector<Cut> matrices_of(const MeshShape& mesh) {
  const bool has_tp = mesh.axes().back().name == "tp" && mesh.axes().size() > 1;
  const auto& shards = mesh.axes()[mesh.axes().size() - (has_tp ? 2 : 1)];
  const auto ragged = [&](std::int64_t rows) {  // one rank has none, if there are more than two
    std::vector<std::int64_t> sizes(static_cast<std::size_t>(shards.size), shards.size > 2 ? rows / 4 : rows / 3);
    if (shards.size > 2) sizes[1] = 0;
    std::int64_t given = 0;
    for (std::size_t i = 1; i < sizes.size(); ++i) given += sizes[i];
    sizes[0] = rows - given;
    return sizes;
  };
  std::vector<Cut> cuts = {{"whole", {24, 40}}};
  cuts.push_back({"rows", {45, 20}, Placement{.splits = {{shards.name, 0, ragged(45)}}}});
  cuts.push_back({"square", {32, 32}, Placement{.splits = {{shards.name, 0, ragged(32)}}}});
  cuts.push_back({"few", {3, 50}, Placement{.splits = {{shards.name, 0, {}}}}});
  if (has_tp) {
    cuts.push_back({"columns", {16, 24}, Placement{.splits = {{"tp", 1, {}}, {shards.name, 0, {}}}}});
    cuts.push_back({"rows of tp", {24, 16}, Placement{.splits = {{"tp", 0, {}}}}});
  }
  return cuts;
}

at::Tensor part_of(const at::Tensor& whole, const Shard* shard) {
  return (shard == nullptr ? whole : narrow_to_box(whole, shard->box())).clone();
}

at::Tensor random_matrix(const std::string& name, const std::vector<std::int64_t>& shape) {
  at::Tensor x = at::empty(shape);
  fill(x, Init::normal(0.0, 1.0), 11, name);
  return x;
}

/// Three steps; the matrices after them.
std::vector<at::Tensor> steps_of(const std::vector<Cut>& cuts, const MeshShape& mesh, Communicator* comm,
                                 std::vector<int>* owners = nullptr) {
  std::vector<NamedTensor> parameters;
  for (const Cut& cut : cuts) {
    std::shared_ptr<const Shard> shard;
    if (comm != nullptr && cut.placement) {
      shard = std::make_shared<const Shard>(
          Shard{ShardSpec(cut.name, cut.shape, DataType::f32, mesh, *cut.placement), comm->rank()});
    }
    parameters.push_back({cut.name, part_of(random_matrix(cut.name, cut.shape), shard.get()).requires_grad_(), shard});
  }
  Muon muon(parameters, {}, comm);
  for (int step = 0; step < 3; ++step) {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto& [name, tensor, shard] = parameters[i];
      tensor.mutable_grad() = part_of(random_matrix(fmt::format("{} {}", name, step), cuts[i].shape), shard.get());
    }
    muon.step(0.02);
  }
  std::vector<at::Tensor> result;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    result.push_back(parameters[i].tensor.detach());
    if (owners != nullptr) owners->push_back(muon.owner_of(i));
  }
  return result;
}

TEST(Muon, EveryLayoutGetsTheBitsOfOneRank) {
  const std::vector<MeshShape> meshes = {
      MeshShape({{"dp_shard", 2}}), MeshShape({{"dp_shard", 4}}), MeshShape({{"dp_replicate", 2}, {"dp_shard", 3}}),
      MeshShape({{"dp_shard", 2}, {"tp", 2}}), MeshShape({{"dp_replicate", 2}, {"dp_shard", 2}, {"tp", 2}})};
  std::mutex mutex;
  for (const MeshShape& mesh : meshes) {
    const std::vector<Cut> cuts = matrices_of(mesh);
    const std::vector<at::Tensor> expected = steps_of(cuts, mesh, nullptr);
    run_local_ranks(mesh.size(), [&](const std::shared_ptr<Communicator>& comm) {
      std::vector<int> owners;
      const std::vector<at::Tensor> found = steps_of(cuts, mesh, comm.get(), &owners);
      const std::lock_guard lock(mutex);
      for (std::size_t i = 0; i < cuts.size(); ++i) {
        std::optional<Shard> shard;
        if (cuts[i].placement) {
          shard = Shard{ShardSpec(cuts[i].name, cuts[i].shape, DataType::f32, mesh, *cuts[i].placement), comm->rank()};
        }
        EXPECT_TRUE(at::equal(found[i], part_of(expected[i], shard ? &*shard : nullptr)))
            << cuts[i].name << " on rank " << comm->rank() << " of " << mesh.size();
      }
      EXPECT_GT(std::set<int>(owners.begin(), owners.end()).size(), 1U);
    });
  }
}

TEST(MatrixExchange, SharesTheWorkAmongTheHolders) {
  std::vector<NamedTensor> matrices;
  for (const std::int64_t size : {5, 100, 60, 61, 4, 62}) {
    matrices.push_back({fmt::format("{}", size), at::zeros({size, size})});
  }
  std::mutex mutex;
  run_local_ranks(2, [&](const std::shared_ptr<Communicator>& comm) {
    const MatrixExchange exchange(matrices, newton_schulz_cost, comm.get());
    std::vector<int> owners;
    for (std::size_t i = 0; i < matrices.size(); ++i) owners.push_back(exchange.owner_of(i));
    const std::lock_guard lock(mutex);
    // 100^3 against 62^3 + 61^3 + 60^3 + 5^3 + 4^3.
    EXPECT_THAT(owners, ElementsAre(1, 0, 1, 1, 1, 1));
  });
}

TEST(MatrixExchange, GoesInRoundsAndLeavesOutWhatIsNotChosen) {
  std::mutex mutex;
  for (const std::int64_t round : {1, 64, 1 << 20}) {
    run_local_ranks(3, [&](const std::shared_ptr<Communicator>& comm) {
      const MeshShape mesh({{"dp", 3}});
      std::vector<NamedTensor> matrices;
      std::vector<std::size_t> chosen;
      std::vector<at::Tensor> parts, expected;
      for (std::size_t i = 0; i < 11; ++i) {
        const auto shape = std::vector<std::int64_t>{static_cast<std::int64_t>(i) + 1, 7};
        const at::Tensor whole = random_matrix(fmt::format("{}", i), shape);
        auto shard = std::make_shared<const Shard>(
            Shard{ShardSpec("w", shape, DataType::f32, mesh, Placement{.splits = {{"dp", 0, {}}}}), comm->rank()});
        matrices.push_back({fmt::format("{}", i), part_of(whole, shard.get()), shard});
        if (i % 4 == 1) continue;
        chosen.push_back(i);
        parts.push_back(matrices.back().tensor);
        expected.push_back(part_of(whole * whole.sum(), shard.get()));
      }
      const MatrixExchange exchange(matrices, newton_schulz_cost, comm.get(), round);
      const auto found = exchange.apply(chosen, parts, [](const at::Tensor& whole) { return whole * whole.sum(); });
      EXPECT_THAT(exchange.apply({}, {}, nullptr), IsEmpty());
      const std::lock_guard lock(mutex);
      for (std::size_t i = 0; i < chosen.size(); ++i) {
        EXPECT_TRUE(at::equal(found[i].reshape(expected[i].sizes()), expected[i])) << chosen[i] << ", " << round;
      }
    });
  }
}

TEST(Muon, RefusesWrongParametersAndOptions) {
  const auto refusal = [](const std::function<void()>& body) { return error_text([&] { body(); }); };
  const std::vector<NamedTensor> one = {{"w", at::ones({3, 4}).requires_grad_()}};
  EXPECT_THAT(refusal([] {
                Muon muon({{"bias", at::ones({3})}});
              }),
              HasSubstr("Muon: parameter 'bias' has 1 dimensions: expected a matrix"));
  EXPECT_THAT(refusal([&] { Muon muon(one, {.momentum = 1}); }), HasSubstr("Muon: momentum is 1: expected 0 <="));
  EXPECT_THAT(refusal([&] { Muon muon(one, {.newton_schulz = {.steps = 100}}); }),
              HasSubstr("Muon: ns_steps is 100: expected 1 to 99"));
  EXPECT_THAT(refusal([&] { Muon muon(one, {.newton_schulz = {.eps = 0}}); }), HasSubstr("Muon: eps is 0"));
  EXPECT_THAT(refusal([&] { Muon muon(one, {.weight_decay = -1}); }), HasSubstr("Muon: weight_decay is -1"));
  EXPECT_THAT(refusal([&] { Muon muon(one, {.lr_factor = -1}); }), HasSubstr("Muon: lr_factor is -1"));
  EXPECT_THAT(refusal([] { muon_adjustment_from("match_rms_adam"); }),
              HasSubstr("adjust_lr is 'match_rms_adam': expected original or match_rms_adamw (did you mean"));
  const auto half = std::make_shared<const Shard>(
      Shard{ShardSpec("w", {6, 4}, DataType::f32, MeshShape({{"dp", 2}}), Placement::parse("dp:S(0)")), 1});
  EXPECT_THAT(
      refusal([&] {
        Muon muon({{"w", at::ones({3, 4}), half}});
      }),
      AllOf(HasSubstr("'w' is held by 2 ranks"), HasSubstr("there is no communicator: pass the communicator of")));
}

TEST(OptimizerSet, StepsEachMemberAsItWouldAlone) {
  const auto make = [] {
    auto parameters = golden_parameters();
    parameters.push_back({"norm", at::ones({5}).requires_grad_()});
    for (const auto& parameter : parameters) {
      parameter.tensor.mutable_grad() = parameter.tensor.detach() * 0.5;
    }
    return parameters;
  };
  const auto together = make(), apart = make();
  const auto members = [](const std::vector<NamedTensor>& all) {
    std::vector<std::unique_ptr<Optimizer>> result;
    result.push_back(
        std::make_unique<Muon>(std::vector<NamedTensor>(all.begin(), all.end() - 1), MuonOptions{.lr_factor = 3}));
    result.push_back(std::make_unique<AdamW>(std::vector<NamedTensor>{all.back()}));
    return result;
  };
  OptimizerSet set(members(together));
  const auto alone = members(apart);
  set.step(0.01);
  for (const auto& member : alone) member->step(0.01);
  TrainState state;
  set.collect_state(state);
  EXPECT_THAT(state.tensors, SizeIs(6));
  ASSERT_THAT(set.parameters(), SizeIs(4));
  for (std::size_t i = 0; i < together.size(); ++i) EXPECT_TRUE(at::equal(together[i].tensor, apart[i].tensor)) << i;
  set.zero_grad();
  EXPECT_FALSE(together.back().tensor.grad().defined());
  auto twice = members(together);
  twice.push_back(std::make_unique<AdamW>(std::vector<NamedTensor>{together.back()}));
  EXPECT_THAT(error_text([&] { OptimizerSet wrong(std::move(twice)); }), HasSubstr("two parameters are named 'norm'"));
}

}  // namespace
}  // namespace phalanx::muon_test
