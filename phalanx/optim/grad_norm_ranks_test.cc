// The gradient norm of a model that is spread over ranks has the bits that one rank alone gets.
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>
#include <random>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/comm/data_type.h"
#include "phalanx/optim/grad_norm.h"
#include "phalanx/tensor/narrow_to_box.h"

namespace phalanx {
namespace {

/// A parameter of the whole model with its gradient, and how its rows are cut on a mesh.
struct Whole {
  std::string name;
  at::Tensor grad;
  std::optional<Placement> placement;  // unset: not sharded
};

at::Tensor random_gradient(std::mt19937_64& generator, const std::vector<std::int64_t>& shape, at::ScalarType dtype) {
  const auto grad = at::empty(shape, at::TensorOptions(at::kFloat));
  for (std::int64_t i = 0; i < grad.numel(); ++i) {
    const double unit = static_cast<double>(generator() >> 11) * 0x1p-53 - 0.5;
    grad.mutable_data_ptr<float>()[i] = static_cast<float>(std::ldexp(unit, static_cast<int>(generator() % 12) - 8));
  }
  return grad.to(dtype);
}

Split random_split(std::mt19937_64& generator, const std::string& axis, int parts, int dim, std::int64_t length) {
  std::vector<std::int64_t> ends(static_cast<std::size_t>(parts), length);
  for (std::size_t i = 0; i + 1 < ends.size(); ++i) {
    ends[i] = static_cast<std::int64_t>(generator() % static_cast<std::uint64_t>(length + 1));
  }
  std::sort(ends.begin(), ends.end());
  std::vector<std::int64_t> sizes = ends;
  for (std::size_t i = 1; i < ends.size(); ++i) sizes[i] = ends[i] - ends[i - 1];
  return {axis, dim, sizes};
}

std::vector<Whole> random_model(std::mt19937_64& generator, const MeshShape& mesh, int dim, bool wide) {
  std::vector<std::vector<std::int64_t>> shapes = {{64, 33}, {1000}, {7, 3, 5}, {1, 300}, {40, 1}, {3}, {17, 256}};
  if (wide) shapes.push_back({3, 40'000});  // a row of several blocks
  std::vector<Whole> model;
  for (const auto& shape : shapes) {
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      if (dtype != at::kFloat && generator() % 3 != 0) continue;
      Whole whole{fmt::format("w{}", model.size()), random_gradient(generator, shape, dtype), std::nullopt};
      const int cut = std::min(dim, static_cast<int>(shape.size()) - 1);
      if (generator() % 5 != 0) {
        whole.placement.emplace();
        for (const auto& axis : mesh.axes()) {
          if (axis.name != "dp_shard" && generator() % 4 != 0) continue;  // replicated along the other, mostly
          if (!whole.placement->splits.empty()) continue;                 // sizes of one cut only
          whole.placement->splits.push_back(
              random_split(generator, axis.name, axis.size, cut, shape[static_cast<std::size_t>(cut)]));
        }
      }
      model.push_back(std::move(whole));
    }
  }
  model.push_back({"scalar", at::full({}, 0.3F), std::nullopt});
  return model;
}

NamedTensor parameter_with(std::string name, const at::Tensor& grad, std::shared_ptr<const Shard> shard = nullptr) {
  const auto parameter = at::ones(grad.sizes(), grad.options()).requires_grad_();
  parameter.mutable_grad() = grad;
  return {std::move(name), parameter, std::move(shard)};
}

std::vector<NamedTensor> whole_parameters(const std::vector<Whole>& model) {
  std::vector<NamedTensor> parameters;
  for (const auto& whole : model) parameters.push_back(parameter_with(whole.name, whole.grad.clone()));
  return parameters;
}

std::vector<NamedTensor> rank_parameters(const std::vector<Whole>& model, const MeshShape& mesh, int rank) {
  std::vector<NamedTensor> parameters;
  for (const auto& whole : model) {
    if (!whole.placement) {
      parameters.push_back(parameter_with(whole.name, whole.grad.clone()));
      continue;
    }
    const auto shard = std::make_shared<const Shard>(Shard{
        ShardSpec(whole.name, whole.grad.sizes().vec(), data_type_of(whole.grad.scalar_type()), mesh, *whole.placement),
        rank});
    parameters.push_back(
        parameter_with(whole.name, narrow_to_box(whole.grad, shard->box()).contiguous().clone(), shard));
  }
  return parameters;
}

bool same_bits(double a, double b) { return std::memcmp(&a, &b, sizeof a) == 0; }

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
         (a.numel() == 0 || std::memcmp(a.contiguous().const_data_ptr(), b.contiguous().const_data_ptr(),
                                        static_cast<std::size_t>(a.numel() * a.itemsize())) == 0);
}

std::vector<MeshShape> meshes_of(int ranks) {
  std::vector<MeshShape> meshes = {MeshShape({{"dp_shard", ranks}}), MeshShape({{"dp_replicate", ranks}})};
  if (ranks == 4) meshes.push_back(MeshShape({{"dp_replicate", 2}, {"dp_shard", 2}}));
  return meshes;
}

TEST(GradNormRanks, RowsCutAnywhereGiveTheBitsOfOneRank) {
  std::mt19937_64 generator(21);
  for (const int ranks : {1, 2, 3, 4}) {
    for (const auto& mesh : meshes_of(ranks)) {
      for (int round = 0; round < 4; ++round) {
        const auto model = random_model(generator, mesh, 0, round == 0);
        const auto reference = whole_parameters(model);
        const double expected = clip_grad_norm(reference, 0.5).value();
        ASSERT_GT(expected, 0.5);  // so that it was clipped
        run_local_ranks(ranks, [&](const std::shared_ptr<Communicator>& comm) {
          const auto parameters = rank_parameters(model, mesh, comm->rank());
          EXPECT_TRUE(same_bits(grad_norm(parameters, comm.get()).value(), expected)) << mesh.text();
          EXPECT_TRUE(same_bits(clip_grad_norm(parameters, 0.5, comm.get()).value(), expected)) << mesh.text();
          for (std::size_t i = 0; i < model.size(); ++i) {
            const auto& whole = reference[i].tensor.grad();
            const auto& shard = parameters[i].shard;
            EXPECT_TRUE(same_bytes(parameters[i].tensor.grad(), shard ? narrow_to_box(whole, shard->box()) : whole))
                << mesh.text() << " " << parameters[i].name;
          }
        });
      }
    }
  }
}

TEST(GradNormRanks, ColumnsCutAnywhereAgreeToTwelveDigitsAndTheRanksToTheBit) {
  std::mt19937_64 generator(22);
  for (const int ranks : {2, 3, 4}) {
    for (int round = 0; round < 3; ++round) {
      const MeshShape mesh({{"dp_shard", ranks}});
      const auto model = random_model(generator, mesh, 1, false);
      const double expected = grad_norm(whole_parameters(model)).value();
      std::mutex mutex;
      std::vector<double> norms;
      run_local_ranks(ranks, [&](const std::shared_ptr<Communicator>& comm) {
        const double norm = grad_norm(rank_parameters(model, mesh, comm->rank()), comm.get()).value();
        const std::lock_guard lock(mutex);
        norms.push_back(norm);
      });
      EXPECT_NEAR(norms[0], expected, 1e-12 * expected);
      for (const double norm : norms) EXPECT_TRUE(same_bits(norm, norms[0]));
    }
  }
}

TEST(GradNormRanks, ARankMayHaveNoGradientAtAll) {
  const MeshShape mesh({{"dp_shard", 3}});
  const auto spec = ShardSpec("w", {3, 4}, DataType::f32, mesh, Placement::parse("dp_shard:S(0){2, 0, 1}"));
  run_local_ranks(3, [&](const std::shared_ptr<Communicator>& comm) {
    const auto shard = std::make_shared<const Shard>(Shard{spec, comm->rank()});
    std::vector<NamedTensor> parameters = {parameter_with("w", at::full(shard->box().shape, 2.0F), shard)};
    EXPECT_EQ(grad_norm(parameters, comm.get()).value(), std::sqrt(12 * 4.0));
    if (comm->rank() == 1) parameters[0].tensor.mutable_grad().reset();
    EXPECT_EQ(grad_norm(parameters, comm.get()).value(), std::sqrt(12 * 4.0));
    EXPECT_EQ(grad_norm({}, comm.get()).value(), 0);
  });
}

TEST(GradNormRanks, Float64IsSummedTensorByTensor) {
  std::mt19937_64 generator(23);
  const MeshShape mesh({{"dp_shard", 2}});
  const std::vector<Whole> model = {
      {"a", random_gradient(generator, {20, 11}, at::kDouble), Placement::parse("dp_shard:S(0){13, 7}")},
      {"b", random_gradient(generator, {9}, at::kDouble), std::nullopt},
      {"c", random_gradient(generator, {9}, at::kFloat), std::nullopt}};
  double sum = 0;
  for (const auto& whole : model) sum += whole.grad.to(at::kDouble).square().sum().item<double>();
  run_local_ranks(2, [&](const std::shared_ptr<Communicator>& comm) {
    const auto parameters = rank_parameters(model, mesh, comm->rank());
    EXPECT_NEAR(grad_norm(parameters, comm.get()).value(), std::sqrt(sum), 1e-12);
  });
}

TEST(GradNormRanks, OneRanksNanIsEveryRanks) {
  const MeshShape mesh({{"dp_shard", 3}});
  const auto spec = ShardSpec("w", {6, 4}, DataType::f32, mesh, Placement::parse("dp_shard:S(0)"));
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    run_local_ranks(3, [&](const std::shared_ptr<Communicator>& comm) {
      const auto shard = std::make_shared<const Shard>(Shard{spec, comm->rank()});
      const auto grad = at::full({2, 4}, 3.0F);
      if (comm->rank() == 2) grad.mutable_data_ptr<float>()[5] = bad;
      const std::vector<NamedTensor> parameters = {parameter_with("w", grad, shard)};
      EXPECT_FALSE(clip_grad_norm(parameters, 1.0, comm.get()).is_finite());
      EXPECT_EQ(grad.const_data_ptr<float>()[0], 3.0F);  // unchanged
    });
  }
}

template <class Body>
void expect_norm_error(const std::string& part, Body&& body) {
  EXPECT_THAT(error_text([&] { body(); }), HasSubstr(part));
}

TEST(GradNormRanks, RefusesACommunicatorThatIsNotTheShards) {
  const auto spec = ShardSpec("w", {6, 4}, DataType::f32, MeshShape({{"dp", 3}}), Placement::parse("dp:S(0)"));
  const auto shard = std::make_shared<const Shard>(Shard{spec, 1});
  const std::vector<NamedTensor> parameters = {parameter_with("w", at::ones({2, 4}), shard)};
  expect_norm_error("of 'w' this rank has [2:4, 0:4] alone", [&] { (void)grad_norm(parameters); });
  expect_norm_error("pass the communicator of the 3 ranks", [&] { (void)clip_grad_norm(parameters, 1.0); });
  run_local_ranks(2, [&](const std::shared_ptr<Communicator>& comm) {
    expect_norm_error("'w' is shared by 3 ranks ('w' float32[6, 4] on (dp=3): dp:S(0)), communicator 'world' has 2",
                      [&] { (void)grad_norm(parameters, comm.get()); });
  });
}

}  // namespace
}  // namespace phalanx
