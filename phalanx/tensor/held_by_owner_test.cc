// A tensor that only the ranks at one coordinate of an axis have keeps its cuts among them.
#include "phalanx/tensor/held_by_owner.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include "phalanx/base/testing/matchers.h"
#include "phalanx/comm/backends/local_shm/local.h"

namespace phalanx::held_by_owner_test {
namespace {

const MeshShape kMesh({{"pp", 2}, {"dp_shard", 2}, {"tp", 2}});

/// 10 rows, cut over tp into 5 and 5, and each of these over dp_shard into 4 and 1.
NamedTensor cut_tensor() {
  const MeshShape ranks({{"dp_shard", 2}, {"tp", 2}});
  const ShardSpec spec("w", {10, 3}, DataType::f32, ranks, {.splits = {{"tp", 0}, {"dp_shard", 0, {4, 1}}}});
  return {"w", at::empty({4, 3}), std::make_shared<const Shard>(Shard{spec, 0})};
}

TEST(HeldByOwner, RanksOfTheOwnerHoldWhatTheyHeldAndOthersNothing) {
  const NamedTensor held = cut_tensor();
  for (const int owner : {0, 1}) {
    const ShardSpec spec = held_by_owner(held, kMesh, "pp", owner);
    EXPECT_EQ(spec.mesh(), kMesh);
    EXPECT_EQ(spec.shape(), (std::vector<std::int64_t>{10, 3}));
    for (int rank = 0; rank < kMesh.size(); ++rank) {
      const std::vector<int> place = kMesh.coordinates_of(rank);
      const Box box = spec.local_box(rank);
      if (place[0] == owner) {
        EXPECT_EQ(box, held.shard->spec.local_box({place[1], place[2]})) << rank;
      } else {
        EXPECT_EQ(box.numel(), 0) << rank;
      }
    }
  }
}

// As experts of a stage of a pipeline: first one axis, then another.
TEST(HeldByOwner, OwnersOfTwoAxesAreNested) {
  const MeshShape mesh({{"pp", 2}, {"dp_shard", 1}, {"ep", 2}});
  const NamedTensor whole{"w", at::empty({6, 2})};
  const ShardSpec of_expert = held_by_owner(whole, mesh, "ep", 1);
  const NamedTensor held{"w", at::empty({6, 2}), std::make_shared<const Shard>(Shard{of_expert, 1})};
  const ShardSpec spec = held_by_owner(held, MeshShape({{"pp", 2}}), "pp", 0);  // its own mesh has the axis
  EXPECT_EQ(spec.mesh(), mesh);
  for (int rank = 0; rank < mesh.size(); ++rank) EXPECT_EQ(spec.local_box(rank).numel(), rank == 1 ? 12 : 0) << rank;
}

TEST(SpecsOfGroup, EveryRankLearnsThoseOfAll) {
  run_local_ranks(3, [](const std::shared_ptr<Communicator>& comm) {
    const MeshShape mesh({{"ep", 3}});
    std::vector<ShardSpec> own;
    for (int i = 0; i < comm->rank(); ++i) {  // rank 0 owns nothing
      const NamedTensor whole{std::to_string(comm->rank()) + "." + std::to_string(i), at::empty({4})};
      own.push_back(held_by_owner(whole, mesh, "ep", comm->rank()));
    }
    const auto specs = specs_of_group(*comm, own);
    ASSERT_THAT(specs, SizeIs(3));
    for (const char* name : {"1.0", "2.0", "2.1"}) {
      const int owner = name[0] - '0';
      EXPECT_EQ(specs.at(name), held_by_owner({name, at::empty({4})}, mesh, "ep", owner)) << name;
    }
  });
}

}  // namespace
}  // namespace phalanx::held_by_owner_test
