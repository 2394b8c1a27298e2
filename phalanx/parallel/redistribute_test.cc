#include "phalanx/parallel/redistribute.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <map>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/comm/backends/gloo/gloo.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/comm/backends/local_shm/shm.h"
#include "phalanx/comm/data_type.h"
#include "phalanx/comm/hierarchical/hierarchical.h"
#include "phalanx/comm/testing/forked_ranks.h"
#include "phalanx/observe/flight_recorder.h"
#include "phalanx/store/tcp_store.h"
#include "phalanx/tensor/testing/random_specs.h"

namespace phalanx {
namespace {

using World = std::shared_ptr<Communicator>;

RedistributePlan plan_of(const MeshShape& mesh, std::vector<std::int64_t> shape, const char* from, const char* to,
                         RedistributePlanOptions options = {}) {
  const ShardSpec spec("w", std::move(shape), DataType::f32, mesh, Placement::parse(from));
  return plan_redistribute(spec, spec.with(Placement::parse(to)), options);
}

std::vector<std::string> steps_of(const RedistributePlan& plan) {
  std::vector<std::string> steps;
  for (const auto& step : plan.steps) steps.push_back(step.text());
  return steps;
}

const MeshShape kFour({{"dp", 4}});
const MeshShape kSquare({{"dp", 2}, {"tp", 2}});

TEST(RedistributePlanTest, OneAxisTakesTheCollectiveOfItsKind) {
  // 8 x 6 floats are 192 bytes. Each of 4 ranks needs three quarters from the others: 4 * 144.
  EXPECT_THAT(steps_of(plan_of(kFour, {8, 6}, "dp:S(0)", "replicated")),
              ElementsAre("all_gather over dp: dp:S(0) -> replicated, 576 B"));
  EXPECT_THAT(steps_of(plan_of(kFour, {8, 6}, "replicated", "dp:S(1)")), ElementsAre("slice: replicated -> dp:S(1)"));
  EXPECT_THAT(steps_of(plan_of(kFour, {8, 6}, "dp:P", "dp:S(0)")),
              ElementsAre("reduce_scatter over dp: dp:P -> dp:S(0), 576 B"));
  EXPECT_THAT(steps_of(plan_of(kFour, {8, 6}, "dp:P", "replicated")),
              ElementsAre("all_reduce over dp: dp:P -> replicated, 1.12 KiB"));
  // Rows to columns: a rank holds 2 x 6 and wants 8 x 2 or 8 x 1. The intersection stays.
  EXPECT_THAT(steps_of(plan_of(kFour, {8, 6}, "dp:S(0)", "dp:S(1)")),
              ElementsAre("all_to_all over dp: dp:S(0) -> dp:S(1), 144 B"));
  // Two rows move down by one rank each.
  EXPECT_THAT(steps_of(plan_of(kFour, {8, 6}, "dp:S(0)", "dp:S(0){0, 2, 2, 4}")),
              ElementsAre("all_to_all over dp: dp:S(0) -> dp:S(0){0, 2, 2, 4}, 144 B"));
  EXPECT_THAT(steps_of(plan_of(kFour, {8, 6}, "replicated", "dp:P")), ElementsAre("addend: replicated -> dp:P"));
  EXPECT_THAT(steps_of(plan_of(kFour, {8, 6}, "dp:S(0)", "dp:P")), ElementsAre("addend: dp:S(0) -> dp:P"));
  EXPECT_EQ(plan_of(kFour, {8, 6}, "dp:P", "dp:P").text(),
            "'w' float32[8, 6] on (dp=4): dp:P -> dp:P: nothing to do\n");
  // The even parts given as sizes, and an axis of one rank, change nothing either.
  EXPECT_TRUE(plan_of(kFour, {8, 6}, "dp:S(0)", "dp:S(0){2, 2, 2, 2}").steps.empty());
  EXPECT_TRUE(plan_of(MeshShape({{"dp", 1}}), {8, 6}, "dp:S(0)", "dp:P").steps.empty());
}

TEST(RedistributePlanTest, SeveralAxesTakeTheCheapestSequence) {
  // Everything that can be cut is cut before anything moves.
  EXPECT_EQ(plan_of(kSquare, {8, 6}, "dp:S(0)", "tp:S(1)").text(),
            "'w' float32[8, 6] on (dp=2, tp=2): dp:S(0) -> tp:S(1): 192 B over all ranks\n"
            "  1. slice: dp:S(0) -> dp:S(0), tp:S(1)\n"
            "  2. all_gather over dp: dp:S(0), tp:S(1) -> tp:S(1), 192 B\n");
  // From dp's rows to tp's: half of the ranks already have theirs, the others need all of it.
  EXPECT_THAT(steps_of(plan_of(kSquare, {8, 6}, "dp:S(0)", "tp:S(0)")),
              ElementsAre("all_to_all over dp: dp:S(0) -> tp:S(0), 192 B"));
  // FSDP's shards of a tensor-parallel weight, gathered along dp only.
  EXPECT_THAT(steps_of(plan_of(kSquare, {8, 6}, "tp:S(0), dp:S(0)", "tp:S(0)")),
              ElementsAre("all_gather over dp: tp:S(0), dp:S(0) -> tp:S(0), 192 B"));
  // Gathered whole, axis by axis: this moves as much as an exchange over the mesh and packs nothing.
  EXPECT_THAT(steps_of(plan_of(kSquare, {8, 6}, "tp:S(0), dp:S(0)", "replicated")),
              ElementsAre("all_gather over dp: tp:S(0), dp:S(0) -> tp:S(0), 192 B",
                          "all_gather over tp: tp:S(0) -> replicated, 384 B"));
  // Gradients: summed over one axis, separate along the other.
  EXPECT_THAT(steps_of(plan_of(kSquare, {8, 6}, "tp:S(0), dp:P", "tp:S(0), dp:S(0)")),
              ElementsAre("reduce_scatter over dp: tp:S(0), dp:P -> tp:S(0), dp:S(0), 192 B"));
  EXPECT_THAT(steps_of(plan_of(kSquare, {8, 6}, "dp:P, tp:P", "dp:S(0), tp:P")),
              ElementsAre("reduce_scatter over dp: dp:P, tp:P -> dp:S(0), tp:P, 384 B"));
}

TEST(RedistributePlanTest, AnotherNestingGoesOverTheMeshOrThroughAGather) {
  // Ranks 0 and 3 keep their two rows; 1 and 2 change them, 48 bytes each.
  EXPECT_THAT(steps_of(plan_of(kSquare, {8, 6}, "tp:S(0), dp:S(0)", "dp:S(0), tp:S(0)")),
              ElementsAre("all_to_all over the mesh: tp:S(0), dp:S(0) -> dp:S(0), tp:S(0), 96 B"));
  EXPECT_THAT(steps_of(plan_of(kSquare, {8, 6}, "tp:S(0), dp:S(0)", "dp:S(0), tp:S(0)", {.whole_mesh = false})),
              ElementsAre("all_gather over dp: tp:S(0), dp:S(0) -> tp:S(0), 192 B",
                          "all_to_all over tp: tp:S(0) -> dp:S(0), tp:S(0), 96 B"));
}

TEST(RedistributePlanTest, RefusesDifferentTensors) {
  const ShardSpec spec("w", {8, 6}, DataType::f32, kFour);
  for (const auto& other : {ShardSpec("w", {8, 5}, DataType::f32, kFour), ShardSpec("w", {8, 6}, DataType::bf16, kFour),
                            ShardSpec("w", {8, 6}, DataType::f32, kSquare)}) {
    try {
      (void)plan_redistribute(spec, other);
      ADD_FAILURE() << other.text();
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("'w' float32[8, 6] on (dp=4)"), HasSubstr(other.text()),
                                      HasSubstr("only the placement may change")));
    }
  }
}

std::vector<std::string> verbs_since(const Communicator& comm, std::size_t first) {
  std::vector<std::string> verbs;
  const auto entries = comm.recent_operations();
  for (std::size_t i = first; i < entries.size(); ++i) verbs.emplace_back(entries[i].verb);
  return verbs;
}

TEST(Redistribute, RunsTheCollectivesOfThePlan) {
  run_local_ranks(4, [](const World& world) {
    const DeviceMesh mesh(world, {{"dp", 4}});
    const auto whole = at::arange(48, at::TensorOptions(at::kFloat)).view({8, 6});
    const auto spec = [&](const char* placement) {
      return ShardSpec("w", {8, 6}, DataType::f32, mesh.shape(), Placement::parse(placement));
    };
    const auto verbs = [&](const char* from, const char* to) {
      const std::size_t before = world->recent_operations().size();
      const ShardSpec source = spec(from), target = spec(to);
      const auto result =
          redistribute(view_of(whole, source.global_box(), source.local_box(mesh.rank())), source, target, mesh);
      const auto sum = whole.mul(source.placement().partial.empty() ? 1 : 4);
      EXPECT_TRUE(at::equal(result, view_of(sum, target.global_box(), target.local_box(mesh.rank()))));
      EXPECT_TRUE(result.is_contiguous());
      return verbs_since(*world, before);
    };
    EXPECT_THAT(verbs("dp:S(1)", "replicated"), ElementsAre("all_gather"));
    EXPECT_THAT(verbs("dp:P", "dp:S(1)"), ElementsAre("reduce_scatter"));
    EXPECT_THAT(verbs("dp:P", "replicated"), ElementsAre("all_reduce"));
    EXPECT_THAT(verbs("dp:S(1)", "dp:S(0)"), ElementsAre("all_to_all"));
    EXPECT_THAT(verbs("replicated", "dp:S(0)"), ElementsAre());
    EXPECT_THAT(verbs("dp:S(0)", "dp:S(0)"), ElementsAre());
  });
}

TEST(Redistribute, SharesNothingWithItsInputAndHasNoGradient) {
  run_local_ranks(2, [](const World& world) {
    const DeviceMesh mesh(world, {{"dp", 2}});
    const ShardSpec whole("w", {4, 3}, DataType::f32, mesh.shape());
    const ShardSpec rows = whole.with({.splits = {{"dp", 0}}}), addend = whole.with({.partial = {"dp"}});
    const auto local = at::ones({4, 3}).requires_grad_();
    for (const auto& target : {rows, addend}) {
      const auto result = redistribute(local, whole, target, mesh);
      EXPECT_FALSE(result.is_alias_of(local));
      EXPECT_FALSE(result.requires_grad());
    }
    const auto sum = redistribute(local, addend, whole, mesh);
    EXPECT_TRUE(at::equal(sum, at::ones({4, 3}) * 2));
    EXPECT_TRUE(at::equal(local, at::ones({4, 3})));
    EXPECT_TRUE(redistribute(local, whole, whole, mesh).is_same(local));
    // Any strides.
    const auto transposed = at::arange(6, at::TensorOptions(at::kFloat)).view({3, 2}).t();
    const auto both = redistribute(transposed, rows, whole, mesh);
    EXPECT_TRUE(at::equal(both.narrow(0, 2, 2), transposed));
  });
}

TEST(Redistribute, RefusesATensorThatIsNotTheBox) {
  run_local_ranks(2, [](const World& world) {
    const DeviceMesh mesh(world, {{"dp", 2}});
    const ShardSpec rows("w", {5, 3}, DataType::f32, mesh.shape(), {.splits = {{"dp", 0}}});
    const auto error = [&](const at::Tensor& local, const ShardSpec& from) {
      return error_text([&] { (void)redistribute(local, from, from.with({}), mesh); });
    };
    const std::string box = world->rank() == 0 ? "[0:3, 0:3]" : "[3:5, 0:3]";
    EXPECT_THAT(error(at::ones({4, 3}), rows),
                AllOf(HasSubstr(fmt::format("rank {} holds {}", world->rank(), box)),
                      HasSubstr("expected a float32 tensor of shape"), HasSubstr("found Float of [4, 3]")));
    EXPECT_THAT(error(at::ones(rows.local_box(mesh.rank()).shape, at::kDouble), rows), HasSubstr("found Double"));
    const ShardSpec elsewhere("w", {5, 3}, DataType::f32, MeshShape({{"tp", 2}}));
    EXPECT_THAT(error(at::ones({5, 3}), elsewhere),
                AllOf(HasSubstr("on (tp=2)"), HasSubstr("is not on DeviceMesh((dp=2), device: 'cpu')")));
    EXPECT_THROW((void)data_type_of(at::kComplexFloat), Error);
  });
}

// --- properties ------------------------------------------------------------------------------------------------------

TEST(RedistributePlanProperties, StepsJoinAndMoveLittleMoreThanMustMove) {
  constexpr std::int64_t kScale = 64;  // so that bytes outweigh the number of steps
  std::map<std::string, int> kinds;
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    RandomSpecs random(seed);
    const MeshShape mesh = random.mesh(12);
    auto shape = random.shape();
    for (auto& size : shape) size *= kScale;
    const Placement source = random.placement(shape, mesh), target = random.placement(shape, mesh);
    const ShardSpec from("w", shape, DataType::f32, mesh, source), to = from.with(target);
    for (const bool whole_mesh : {true, false}) {
      const auto plan = plan_redistribute(from, to, {.whole_mesh = whole_mesh});
      SCOPED_TRACE(fmt::format("seed {}: {}", seed, plan.text()));
      EXPECT_EQ(plan.steps.empty(), from.same_layout(to));
      for (std::size_t i = 0; i < plan.steps.size(); ++i) {
        const auto& step = plan.steps[i];
        EXPECT_EQ(step.before, i == 0 ? from : plan.steps[i - 1].after);
        const bool local = step.kind == RedistributeStep::Kind::slice || step.kind == RedistributeStep::Kind::addend;
        EXPECT_EQ(local, step.bytes == 0);
        EXPECT_TRUE(whole_mesh || local || !step.axis.empty());
        ++kinds[std::string(name_of(step.kind)) + (local || !step.axis.empty() ? "" : " over the mesh")];
      }
      if (!plan.steps.empty()) {
        EXPECT_EQ(plan.steps.back().after, to);
      }
      if (!whole_mesh || !source.partial.empty() || !target.partial.empty()) continue;
      std::int64_t must_move = 0;
      for (int rank = 0; rank < mesh.size(); ++rank) {
        const Box had = from.local_box(rank), gets = to.local_box(rank);
        const auto kept = intersect(had, gets);
        must_move += 4 * (gets.numel() - (kept ? kept->numel() : 0));
      }
      EXPECT_GE(plan.bytes(), must_move);
      EXPECT_LE(plan.bytes(), must_move + must_move / 2 + 128 * 1024 * mesh.size());
    }
    if (testing::Test::HasFailure()) return;
  }
  for (const char* kind :
       {"slice", "addend", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "all_to_all over the mesh"})
    EXPECT_GE(kinds[kind], 50) << kind;
}

/// One process's view of a case: the global tensor, or the addends that sum to it, and what each rank must hold.
class RedistributeModel {
 public:
  RedistributeModel(std::uint64_t seed, const MeshShape& mesh) : mesh_(mesh) {
    RandomSpecs random(seed);
    static const std::vector<DataType> types = {DataType::f32, DataType::f64, DataType::bf16, DataType::i64,
                                                DataType::boolean};
    shape_ = random.shape();
    from_ = random.placement(shape_, mesh);
    to_ = random.placement(shape_, mesh);
    dtype_ = types[static_cast<std::size_t>(random.below(5))];
    if (!from_.partial.empty() || !to_.partial.empty()) dtype_ = types[static_cast<std::size_t>(random.below(4))];
    std::int64_t numel = 1;
    for (const auto size : shape_) numel *= size;
    // Whole numbers that bfloat16 holds, and sums of a few of them, too.
    const auto options = at::TensorOptions(at::kLong);
    global_ = at::arange(numel, options).remainder(97).view(shape_);
    at::Tensor rest = global_;
    for (int i = 1; i < addends_of(from_); ++i) {
      addends_.push_back(
          (at::arange(numel, options) * (2 * i + 1) + static_cast<std::int64_t>(seed)).remainder(7).view(shape_));
      rest = rest - addends_.back();
    }
    addends_.insert(addends_.begin(), rest);
  }

  ShardSpec from() const { return {"w", shape_, dtype_, mesh_, from_}; }
  ShardSpec to() const { return {"w", shape_, dtype_, mesh_, to_}; }

  at::Tensor input_of(int rank) const {
    return part_of(addends_[static_cast<std::size_t>(addend_number(from_, rank))], from_, rank);
  }

  /// Compares the results of all ranks with the model. Returns the text of the first difference, or "".
  std::string difference(const std::vector<at::Tensor>& results) const {
    std::map<std::vector<int>, int> first_with;  // the first of the ranks that must hold the same bits
    for (int rank = 0; rank < mesh_.size(); ++rank) {
      const auto& result = results[static_cast<std::size_t>(rank)];
      std::vector<int> role = mesh_.coordinates_of(rank);
      for (std::size_t axis = 0; axis < role.size(); ++axis)
        if (!mentions(to_, mesh_.axes()[axis].name)) role[axis] = 0;
      const int first = first_with.emplace(role, rank).first->second;
      if (!result.is_contiguous() || result.scalar_type() != scalar_type_of(dtype_))
        return fmt::format("rank {}: not contiguous, or of another type", rank);
      if (!at::equal(result, results[static_cast<std::size_t>(first)]))
        return fmt::format("ranks {} and {} differ", first, rank);
      if (addend_number(to_, rank) != 0) continue;
      at::Tensor sum = result;
      for (int other = 0; other < mesh_.size(); ++other)
        if (addend_number(to_, other) != 0 && is_peer(rank, other))
          sum = sum + results[static_cast<std::size_t>(other)];
      if (!at::equal(sum, part_of(global_, to_, rank))) return fmt::format("rank {} holds other values", rank);
    }
    return "";
  }

 private:
  static bool mentions(const Placement& placement, const std::string& axis) {
    return is_partial(placement, axis) || std::any_of(placement.splits.begin(), placement.splits.end(),
                                                      [&](const Split& split) { return split.axis == axis; });
  }
  static bool is_partial(const Placement& placement, const std::string& axis) {
    return std::find(placement.partial.begin(), placement.partial.end(), axis) != placement.partial.end();
  }
  int addends_of(const Placement& placement) const { return addend_number(placement, mesh_.size() - 1) + 1; }
  int addend_number(const Placement& placement, int rank) const {
    const auto coordinates = mesh_.coordinates_of(rank);
    int number = 0;
    for (std::size_t axis = 0; axis < coordinates.size(); ++axis)
      if (is_partial(placement, mesh_.axes()[axis].name)) number = number * mesh_.axes()[axis].size + coordinates[axis];
    return number;
  }
  bool is_peer(int rank, int other) const {  // they differ only along partial axes
    const auto a = mesh_.coordinates_of(rank), b = mesh_.coordinates_of(other);
    for (std::size_t axis = 0; axis < a.size(); ++axis)
      if (a[axis] != b[axis] && !is_partial(to_, mesh_.axes()[axis].name)) return false;
    return true;
  }
  at::Tensor part_of(at::Tensor tensor, const Placement& placement, int rank) const {
    const auto held = held_indices(shape_, mesh_, placement, rank);
    for (std::size_t d = 0; d < held.size(); ++d) {
      auto index = at::ones({static_cast<std::int64_t>(held[d].size())}, at::kLong);
      std::copy(held[d].begin(), held[d].end(), index.mutable_data_ptr<std::int64_t>());
      tensor = tensor.index_select(static_cast<std::int64_t>(d), index);
    }
    return tensor.to(scalar_type_of(dtype_));
  }

  MeshShape mesh_;
  std::vector<std::int64_t> shape_;
  Placement from_, to_;
  DataType dtype_ = DataType::f32;
  at::Tensor global_;
  std::vector<at::Tensor> addends_;
};

class RedistributeOnMesh : public testing::TestWithParam<std::vector<int>> {};

TEST_P(RedistributeOnMesh, AnyPlacementToAnyOtherIsWhatOneProcessHas) {
  constexpr std::uint64_t kCases = 150;
  std::vector<MeshAxis> axes;
  std::uint64_t first_seed = 0;
  for (const int size : GetParam()) {
    axes.push_back({std::string(1, static_cast<char>('a' + axes.size())), size});
    first_seed = first_seed * 10 + static_cast<std::uint64_t>(size);
  }
  const MeshShape full(axes);
  std::vector<at::Tensor> results(static_cast<std::size_t>(full.size()));
  std::atomic<bool> failed{false};
  run_local_ranks(full.size(), [&](const World& world) {
    const DeviceMesh whole_mesh(world, axes);
    for (std::uint64_t i = 0; i < kCases; ++i) {
      const std::uint64_t seed = first_seed * 1000 + i;
      // Every third case of three axes uses a part of the mesh, which has no communicator of its own.
      const DeviceMesh mesh = axes.size() == 3 && i % 3 == 0 ? whole_mesh.sub_mesh({"b", "c"}) : whole_mesh;
      const RedistributeModel model(seed, mesh.shape());
      results[static_cast<std::size_t>(world->rank())] =
          redistribute(model.input_of(mesh.rank()), model.from(), model.to(), mesh);
      world->barrier();
      if (mesh.rank() == 0) {  // the ranks of a sub-mesh of the inner axes are neighbours
        const auto mine = results.begin() + world->rank();
        const auto difference = model.difference({mine, mine + mesh.size()});
        if (!difference.empty()) {
          failed = true;
          ADD_FAILURE() << "seed " << seed << ": " << difference << "\n"
                        << explain_redistribute(model.from(), model.to(), mesh);
        }
      }
      world->barrier();
      if (failed) return;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, RedistributeOnMesh,
                         testing::Values(std::vector<int>{1}, std::vector<int>{2}, std::vector<int>{3},
                                         std::vector<int>{5}, std::vector<int>{8}, std::vector<int>{2, 2},
                                         std::vector<int>{2, 3}, std::vector<int>{4, 2}, std::vector<int>{1, 3},
                                         std::vector<int>{2, 1, 2}, std::vector<int>{1, 3, 2},
                                         std::vector<int>{2, 2, 2}),
                         [](const auto& info) { return fmt::format("Axes{}", fmt::join(info.param, "x")); });

// Every rank's result, on rank 0; an empty list on the others.
std::vector<at::Tensor> gather_results(Communicator& world, const at::Tensor& result, const ShardSpec& spec) {
  const auto bytes =
      world.gather_bytes(std::string(static_cast<const char*>(result.const_data_ptr()), result.nbytes()));
  std::vector<at::Tensor> all;
  for (std::size_t rank = 0; rank < bytes.size(); ++rank) {
    all.push_back(at::empty(spec.local_box(static_cast<int>(rank)).shape, result.options()));
    if (all.back().nbytes() != bytes[rank].size()) throw Error(fmt::format("rank {}: not the size of its box", rank));
    std::memcpy(all.back().mutable_data_ptr(), bytes[rank].data(), bytes[rank].size());
  }
  return all;
}

// The same over communicators whose ranks are processes.
struct ProcessBackend {
  const char* name;
  std::uint64_t cases;
  std::shared_ptr<Communicator> (*make)(const std::shared_ptr<Store>& store, int rank, int size);
};

class RedistributeBetweenProcesses : public testing::TestWithParam<ProcessBackend> {};

TEST_P(RedistributeBetweenProcesses, AnyPlacementToAnyOtherIsWhatOneProcessHas) {
  for (const std::vector<MeshAxis>& axes :
       {std::vector<MeshAxis>{{"a", 3}}, {{"a", 2}, {"b", 2}}, {{"a", 2}, {"b", 1}, {"c", 2}}}) {
    const MeshShape shape(axes);
    TcpStoreServer server;
    EXPECT_EQ(run_forked_ranks(shape.size(),
                               [&](int rank) {
                                 const auto store = std::make_shared<TcpStore>(server.address());
                                 const auto world = GetParam().make(store, rank, shape.size());
                                 const DeviceMesh mesh(world, axes);
                                 for (std::uint64_t seed = 0; seed < GetParam().cases; ++seed) {
                                   const RedistributeModel model(seed, mesh.shape());
                                   const at::Tensor mine =
                                       redistribute(model.input_of(rank), model.from(), model.to(), mesh);
                                   const auto results = gather_results(*world, mine, model.to());
                                   const auto difference = rank == 0 ? model.difference(results) : "";
                                   if (!difference.empty()) {
                                     throw Error(fmt::format("seed {}: {}\n{}", seed, difference,
                                                             explain_redistribute(model.from(), model.to(), mesh)));
                                   }
                                 }
                               }),
              "");
  }
}

std::shared_ptr<Communicator> shm_world(const std::shared_ptr<Store>& store, int rank, int size) {
  return make_shm_communicator(*store, rank, size);
}
std::shared_ptr<Communicator> gloo_world(const std::shared_ptr<Store>& store, int rank, int size) {
  return make_gloo_communicator(store, rank, size);
}
// The even ranks are one node, the odd ones another.
std::shared_ptr<Communicator> hierarchical_world(const std::shared_ptr<Store>& store, int rank, int size) {
  HierarchicalOptions options;
  for (int r = 0; r < size; ++r) options.nodes.push_back(r % 2);
  options.smallest_bytes = 1;
  options.by_estimate = false;
  return make_hierarchical_communicator(make_gloo_communicator(store, rank, size), options);
}

INSTANTIATE_TEST_SUITE_P(Backends, RedistributeBetweenProcesses,
                         testing::Values(ProcessBackend{"shm", 60, &shm_world}, ProcessBackend{"gloo", 25, &gloo_world},
                                         ProcessBackend{"two_levels", 25, &hierarchical_world}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace phalanx
