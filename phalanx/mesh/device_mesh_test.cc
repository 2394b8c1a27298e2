#include "phalanx/mesh/device_mesh.h"

#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/comm/backends/local_shm/local.h"

namespace phalanx {
namespace {

double sum_over(Communicator& comm, double value) {
  auto tensor = at::full({1}, value, at::kDouble);
  comm.all_reduce(tensor);
  return tensor.data_ptr<double>()[0];
}

class MeshOfWorld : public testing::TestWithParam<int> {};

TEST_P(MeshOfWorld, OneAxisIsTheWorld) {
  run_local_ranks(GetParam(), [&](const std::shared_ptr<Communicator>& world) {
    DeviceMesh mesh(world, {{"dp", world->size()}});
    EXPECT_EQ(mesh.communicator("dp"), world);
    EXPECT_EQ(mesh.coordinate("dp"), world->rank());
    EXPECT_EQ(mesh.text(), "DeviceMesh((dp=" + std::to_string(world->size()) + "), device: 'cpu')");
  });
}

TEST_P(MeshOfWorld, GroupsAreRowMajorWithTheInnermostAxisLast) {
  const int world_size = GetParam();
  for (int tp = 1; tp <= world_size; tp *= 2) {
    const int dp = world_size / tp;
    run_local_ranks(world_size, [&](const std::shared_ptr<Communicator>& world) {
      DeviceMesh mesh(world, {{"dp", dp}, {"tp", tp}}, "cpu");
      const int d = world->rank() / tp, t = world->rank() % tp;
      EXPECT_EQ(mesh.coordinate("dp"), d);
      EXPECT_EQ(mesh.coordinate("tp"), t);
      EXPECT_EQ(mesh.size("dp"), dp);
      EXPECT_EQ(mesh.size("tp"), tp);
      EXPECT_EQ(mesh.size(), world_size);
      EXPECT_EQ(mesh.communicator("dp")->rank(), d);
      EXPECT_EQ(mesh.communicator("tp")->rank(), t);
      EXPECT_EQ(mesh.communicator("tp")->size(), tp);
      // Powers of two show which ranks took part.
      double expected_dp = 0, expected_tp = 0;
      for (int i = 0; i < dp; ++i) expected_dp += 1 << (i * tp + t);
      for (int i = 0; i < tp; ++i) expected_tp += 1 << (d * tp + i);
      EXPECT_EQ(sum_over(*mesh.communicator("dp"), 1 << world->rank()), expected_dp);
      EXPECT_EQ(sum_over(*mesh.communicator("tp"), 1 << world->rank()), expected_tp);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, MeshOfWorld, testing::Values(1, 2, 4, 8));

TEST(DeviceMeshTest, SubMeshesAndFlattenedAxes) {
  run_local_ranks(8, [](const std::shared_ptr<Communicator>& world) {
    DeviceMesh mesh(world, {{"pp", 2}, {"dp", 2}, {"tp", 2}});
    const int rank = world->rank();
    const int strides[] = {4, 2, 1};
    for (std::size_t i = 0; i < 3; ++i) {  // each axis pairs the ranks that differ only in it
      const auto& axis = mesh.communicator(mesh.axes()[i].name);
      EXPECT_EQ(axis->size(), 2);
      EXPECT_EQ(axis->name(), mesh.axes()[i].name);
      EXPECT_EQ(sum_over(*axis, 1 << rank), (1 << rank) + (1 << (rank ^ strides[i])));
    }
    const DeviceMesh inner = mesh.sub_mesh({"tp", "dp"});
    EXPECT_EQ(inner.text(), "DeviceMesh((dp=2, tp=2), device: 'cpu')");
    EXPECT_EQ(inner.size(), 4);
    EXPECT_EQ(inner.rank(), rank % 4);
    EXPECT_EQ(inner.shape(), MeshShape({{"dp", 2}, {"tp", 2}}));
    EXPECT_EQ(mesh.rank(), rank);
    EXPECT_EQ(mesh.shape().coordinates_of(rank), (std::vector<int>{rank / 4, rank / 2 % 2, rank % 2}));
    EXPECT_EQ(inner.communicator("dp"), mesh.communicator("dp"));
    EXPECT_FALSE(inner.has("pp"));
    EXPECT_THAT(error_text<ConfigError>([&] { inner.coordinate("pp"); }), HasSubstr("no axis 'pp'"));
    const auto flat = inner.flatten({"dp", "tp"});
    EXPECT_EQ(flat->rank(), rank % 4);
    EXPECT_EQ(flat->name(), "dp_tp");
    EXPECT_EQ(sum_over(*flat, 1 << rank), rank < 4 ? 15 : 240);
    const auto outer = mesh.flatten({"pp", "tp"});
    EXPECT_EQ(outer->rank(), rank / 4 * 2 + rank % 2);
    EXPECT_EQ(sum_over(*outer, 1 << rank), (rank / 2) % 2 == 0 ? 1 + 2 + 16 + 32 : 4 + 8 + 64 + 128);
  });
}

TEST(DeviceMeshTest, RefusesWhatDoesNotFit) {
  run_local_ranks(4, [](const std::shared_ptr<Communicator>& world) {
    EXPECT_THAT(error_text<ConfigError>([&] {
                  DeviceMesh(world, {{"dp", 2}, {"tp", 3}});
                }),
                AllOf(HasSubstr("(dp=2, tp=3)"), HasSubstr("6 ranks"), HasSubstr("world 4")));
    EXPECT_THAT(error_text<ConfigError>([&] {
                  DeviceMesh(world, {{"dp", 2}, {"dp", 2}});
                }),
                HasSubstr("two axes are named 'dp'"));
    EXPECT_THAT(error_text<ConfigError>([&] {
                  DeviceMesh(world, {{"dp", 2}, {"tp", 1}});
                }),
                AllOf(HasSubstr("2 ranks"), HasSubstr("world 4")));
    EXPECT_THAT(error_text<ConfigError>([&] { DeviceMesh(world, {{"dp", -4}}); }), HasSubstr("size -4"));
    EXPECT_THAT(error_text<ConfigError>([&] { DeviceMesh(world, {{"dp", 0}}); }), HasSubstr("size 0"));
    EXPECT_THAT(error_text<ConfigError>([&] { DeviceMesh(world, {{"", 4}}); }), HasSubstr("no name"));
    EXPECT_THAT(error_text<ConfigError>([&] { DeviceMesh(world, {}); }), HasSubstr("at least one axis"));
    const DeviceMesh mesh(world, {{"dp_shard", 4}});
    EXPECT_THAT(error_text<ConfigError>([&] { mesh.size("dp_shrad"); }),
                AllOf(HasSubstr("no axis 'dp_shrad'"), HasSubstr("did you mean 'dp_shard'")));
    EXPECT_THAT(error_text<ConfigError>([&] { mesh.sub_mesh({"dp_shard", "dp_shard"}); }), HasSubstr("twice"));
  });
}

}  // namespace
}  // namespace phalanx
