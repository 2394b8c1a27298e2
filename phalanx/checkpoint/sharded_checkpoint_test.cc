// Sharded states through checkpoints: any layout into any other.
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <fstream>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/checkpoint/checkpoint_manager.h"
#include "phalanx/checkpoint/checkpoint_reader.h"
#include "phalanx/checkpoint/files/saved_state.h"
#include "phalanx/checkpoint/testing/sharded_state.h"
#include "phalanx/checkpoint/testing/test_state.h"
#include "phalanx/checkpoint/weights.h"
#include "phalanx/comm/backends/local_shm/local.h"

namespace phalanx {
namespace {

using checkpoint_testing::counted;
using checkpoint_testing::global_state;
using checkpoint_testing::hold;
using checkpoint_testing::hold_state;
using checkpoint_testing::Layout;
using checkpoint_testing::same_state;

void save_sharded(const std::filesystem::path& folder, const Layout& layout, const TrainState& whole, int step = 1) {
  run_local_ranks(layout.world, [&](const std::shared_ptr<Communicator>& comm) {
    CheckpointManager(folder, {}, comm).save(hold_state(whole, layout, comm->rank()), step);
  });
}

/// Fills every rank's part, which begins as zeros; each must then be its part of `whole`.
void expect_loads(const std::filesystem::path& folder, const Layout& layout, const TrainState& whole) {
  TrainState zeros{{}, whole.integers};
  for (const auto& named : whole.tensors) zeros.tensors.push_back({named.name, at::zeros_like(named.tensor)});
  for (auto& [name, value] : zeros.integers) value = -1;
  run_local_ranks(layout.world, [&](const std::shared_ptr<Communicator>& comm) {
    auto state = hold_state(zeros, layout, comm->rank());
    const auto loaded = CheckpointManager(folder, {}, comm).load_latest(state);
    ASSERT_TRUE(loaded);
    EXPECT_TRUE(same_state(state, hold_state(whole, layout, comm->rank()))) << "rank " << comm->rank();
  });
}

/// No element is missing and none occurs twice.
void expect_complete(const std::filesystem::path& step, const TrainState& whole) {
  const SavedState saved(step);
  EXPECT_EQ(saved.tensors().size(), whole.tensors.size());
  for (const auto& named : whole.tensors) {
    const auto* tensor = saved.find(named.name);
    ASSERT_NE(tensor, nullptr) << named.name;
    EXPECT_EQ(tensor->shape, named.tensor.sizes().vec()) << named.name;
    EXPECT_NO_THROW(saved.check_complete(*tensor));
    EXPECT_TRUE(named.tensor.numel() > 0 || tensor->boxes.size() == 1) << named.name;
  }
}

TEST(ShardedCheckpoint, AnyLayoutLoadsIntoAnyOther) {
  const auto whole = global_state(3);
  for (const auto& saved : checkpoint_testing::layouts()) {
    SCOPED_TRACE("saved as " + saved.name);
    const TempDirectory scratch("sharded");
    save_sharded(scratch.path(), saved, whole);
    expect_complete(scratch.path() / "step-1", whole);
    for (const auto& loaded : checkpoint_testing::layouts()) {
      SCOPED_TRACE("loaded as " + loaded.name);
      expect_loads(scratch.path(), loaded, whole);
    }
  }
}

/// A placement that has no partial axes, of any shape on any mesh.
Placement full_placement(RandomSpecs& random, const std::vector<std::int64_t>& shape, const MeshShape& mesh) {
  auto placement = random.placement(shape, mesh);
  placement.partial.clear();
  return placement;
}

TEST(ShardedCheckpoint, RandomPlacementsLoadIntoRandomPlacements) {
  for (std::uint64_t seed = 0; seed < 25; ++seed) {
    RandomSpecs random(seed);
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    const MeshShape from = random.mesh(8), to = random.mesh(8);
    std::vector<NamedTensor> wholes;
    std::vector<Placement> before, after;
    for (int i = 0; i < 12; ++i) {
      const auto shape = random.shape();
      wholes.push_back({"model.t" + std::to_string(i), counted(shape, 100 * i)});
      before.push_back(full_placement(random, shape, from));
      after.push_back(full_placement(random, shape, to));
    }
    const TempDirectory scratch("random");
    run_local_ranks(from.size(), [&](const std::shared_ptr<Communicator>& comm) {
      TrainState state;
      for (std::size_t i = 0; i < wholes.size(); ++i)
        state.tensors.push_back(hold(wholes[i], from, before[i], comm->rank()));
      CheckpointManager(scratch.path(), {}, comm).save(state, 1);
    });
    run_local_ranks(to.size(), [&](const std::shared_ptr<Communicator>& comm) {
      TrainState state;
      for (std::size_t i = 0; i < wholes.size(); ++i) {
        state.tensors.push_back(hold(wholes[i], to, after[i], comm->rank()));
        state.tensors.back().tensor.fill_(-1);
      }
      ASSERT_TRUE(CheckpointManager(scratch.path(), {}, comm).load_latest(state));
      for (std::size_t i = 0; i < wholes.size(); ++i)
        EXPECT_TRUE(state.tensors[i].tensor.equal(hold(wholes[i], to, after[i], comm->rank()).tensor))
            << before[i].text() << " on " << from.text() << " -> " << after[i].text() << " on " << to.text();
    });
  }
}

Layout rows_of(int world) {
  const Placement rows{.splits = {{"dp", 0, {}}}};
  return {"rows", MeshShape({{"dp", world}}), rows, rows, world};
}

TEST(ShardedCheckpoint, ARankReadsItsPartOnly) {
  // 16 MB, so that a quarter is many blocks.
  const TrainState whole{{{"model.w", counted({4096, 1024}, 0)}}, {}};
  const TempDirectory scratch("sharded");
  save_sharded(scratch.path(), rows_of(2), whole);
  constexpr std::uint64_t kQuarter = 4 << 20;
  run_local_ranks(4, [&](const std::shared_ptr<Communicator>& comm) {
    auto state = hold_state(whole, rows_of(4), comm->rank());
    state.tensors[0].tensor.zero_();
    const auto loaded = CheckpointManager(scratch.path(), {}, comm).load_latest(state);
    EXPECT_TRUE(same_state(state, hold_state(whole, rows_of(4), comm->rank())));
    EXPECT_EQ(loaded->bytes, kQuarter);
    EXPECT_LE(loaded->verified_bytes, kQuarter + (4 << 20));  // the blocks of two headers, and one at either end
  });
}

TEST(ShardedCheckpoint, RanksShareTheWriting) {
  const TrainState whole{{{"model.w", counted({4000, 50}, 0)}, {"rng.state", counted({100'000}, 0, at::kLong)}}, {}};
  const TempDirectory scratch("sharded");
  save_sharded(scratch.path(), rows_of(4), whole);
  for (const auto& file : read_step_manifest(scratch.path() / "step-1").files)
    EXPECT_NEAR(static_cast<double>(file.size), 400'000, 2'000) << file.name;
}

TEST(ShardedCheckpoint, DtypesAreConvertedIntoShardsOfAnyStrides) {
  const TempDirectory scratch("sharded");
  const auto whole = global_state(2);
  save_sharded(scratch.path(), rows_of(3), whole);
  const CheckpointReader reader(scratch.path() / "step-1");
  const MeshShape mesh({{"tp", 2}});
  const Placement columns{.splits = {{"tp", 1, {4, 2}}}};
  auto wanted = hold({"model.wq.weight", at::zeros({11, 6}, at::kDouble)}, mesh, columns, 1);
  wanted.tensor = wanted.tensor.t().contiguous().t();
  ASSERT_FALSE(wanted.tensor.is_contiguous());
  EXPECT_THAT(error_text<CheckpointError>([&] { reader.read({wanted}, {.allow_unexpected = true}); }),
              HasSubstr("\"model.wq.weight\": expected F64 [11, 6], found F32 [11, 6]"));
  reader.read({wanted}, {.allow_unexpected = true, .convert_dtype = true});
  EXPECT_TRUE(wanted.tensor.equal(whole.tensors[0].tensor.narrow(1, 4, 2).to(at::kDouble)));
}

TEST(ShardedCheckpoint, ErrorsSpeakOfGlobalTensors) {
  const TempDirectory scratch("sharded");
  save_sharded(scratch.path(), rows_of(2), global_state(2));
  run_local_ranks(3, [&](const std::shared_ptr<Communicator>& comm) {
    auto other = global_state(2);
    other.tensors[0].tensor = at::zeros({12, 6});
    auto state = hold_state(other, rows_of(3), comm->rank());
    const auto message =
        error_text<CheckpointError>([&] { CheckpointManager(scratch.path(), {}, comm).load_latest(state); });
    EXPECT_THAT(message, AllOf(HasSubstr("\"model.wq.weight\": expected F32 [12, 6], found F32 [11, 6]"),
                               HasSubstr("step-1 does not fit this model")));
    EXPECT_THAT(message, Not(HasSubstr("rank 0:")));  // all ranks say the same
  });
}

TEST(ShardedCheckpoint, StatesThatAreNotWholeAreRefused) {
  const TempDirectory scratch("sharded");
  const MeshShape mesh({{"dp", 2}});
  const NamedTensor whole{"model.w", counted({4, 2}, 0)};
  const auto refused_with = [&](int world, const std::function<NamedTensor(int)>& tensor, const std::string& reason) {
    run_local_ranks(world, [&](const std::shared_ptr<Communicator>& comm) {
      TrainState state{{tensor(comm->rank())}, {}};
      EXPECT_THAT(error_text<CheckpointError>([&] { CheckpointManager(scratch.path(), {}, comm).save(state, 1); }),
                  HasSubstr(reason));
    });
    EXPECT_TRUE(std::filesystem::is_empty(scratch.path()));
  };
  refused_with(
      2, [&](int rank) { return hold(whole, mesh, {.partial = {"dp"}}, rank); },
      "\"model.w\" is partial along 'dp' ('model.w' float32[4, 2] on (dp=2): dp:P)");
  refused_with(
      1,
      [&](int rank) {
        return hold(whole, mesh, {.splits = {{"dp", 0, {}}}}, rank);
      },
      "no rank is at place 1 of its mesh, which holds [2:4, 0:2] of 'model.w' float32[4, 2] on (dp=2): dp:S(0); 1 rank "
      "is saving");
  refused_with(
      2,
      [&](int rank) {
        auto named = hold(whole, mesh, {.splits = {{"dp", 0, {}}}}, rank);
        return NamedTensor{named.name, at::zeros({3, 2}), named.shard};
      },
      "has the shape [3, 2] on mesh rank 0");
  refused_with(
      2,
      [&](int rank) {
        return hold(whole, mesh, {.splits = {{"dp", rank, {}}}}, rank);
      },
      "saving different states");
}

TEST(ShardedCheckpoint, EveryFlippedBitIsFoundAndNamed) {
  const TempDirectory scratch("sharded");
  auto state = global_state(2);
  state.tensors.resize(4);  // no more in a block than a message names
  save_sharded(scratch.path(), rows_of(3), state);
  const auto step = scratch.path() / "step-1";
  for (const auto& file : read_step_manifest(step).files) {
    const auto whole = read_file(step / file.name);
    const auto header = safetensors::parse_header(file.name, std::as_bytes(std::span(whole)), whole.size());
    std::fstream bytes(step / file.name, std::ios::in | std::ios::out | std::ios::binary);
    const auto put = [&](std::size_t at, char byte) {
      bytes.seekp(static_cast<std::streamoff>(at)).put(byte).flush();
      ASSERT_TRUE(bytes.good());
    };
    // Every bit of the header, one of every other byte.
    for (std::size_t bit = 0; bit < 8 * whole.size(); bit += bit < 8 * header.data_begin ? 1 : 9) {
      const std::size_t i = bit / 8;
      put(i, static_cast<char>(whole[i] ^ (1 << (bit % 8))));
      const auto message = error_text<DamagedError>([&] { VerifiedFile(step, file); });
      EXPECT_THAT(message, HasSubstr(file.name + " is damaged: bytes 0 to ")) << "bit " << bit;
      const auto holder = std::ranges::find_if(header.tensors, [&](const auto& tensor) {
        return header.data_begin + tensor.begin <= i && i < header.data_begin + tensor.end;
      });
      const bool is_in_header = i < header.data_begin;
      EXPECT_EQ(message.find("the header is damaged") != std::string::npos, is_in_header) << "bit " << bit << message;
      EXPECT_EQ(message.find("tensor \"") == std::string::npos, is_in_header) << "bit " << bit << message;
      ASSERT_TRUE(is_in_header || holder != header.tensors.end());
      if (!is_in_header) {
        EXPECT_THAT(message, HasSubstr("tensor \"" + holder->name + "\"")) << "bit " << bit;
      }
      if (i % 29 == 0) {  // and where all of it is loaded
        EXPECT_EQ(error_text<CheckpointError>([&] { CheckpointManager(scratch.path()).load(step, state); }), message);
      }
      put(i, whole[i]);
    }
  }
  const auto manifest = read_file(step / "manifest.json");
  for (std::size_t i = 0; i < manifest.size(); ++i) {
    auto damaged = manifest;
    damaged[i] = static_cast<char>(damaged[i] ^ (1 << (i % 8)));
    write_file(step / "manifest.json", damaged);
    EXPECT_THAT(error_text<CheckpointError>([&] { CheckpointManager(scratch.path()).load(step, state); }),
                HasSubstr("manifest.json: damaged"));
  }
}

TEST(ShardedCheckpoint, ARankIsNotStoppedByDamageInWhatOthersRead) {
  const TrainState whole{{{"model.w", counted({2048, 1024}, 0)}}, {}};  // 8 MB
  const TempDirectory scratch("sharded");
  save_sharded(scratch.path(), rows_of(1), whole);
  const auto file = scratch.path() / "step-1" / read_step_manifest(scratch.path() / "step-1").files[0].name;
  auto bytes = read_file(file);
  bytes[7 << 20] = static_cast<char>(bytes[7 << 20] ^ 1);
  write_file(file, bytes);
  const CheckpointReader reader(scratch.path() / "step-1");
  for (const int rank : {0, 1}) {
    const auto state = hold_state(whole, rows_of(2), rank);
    const auto message = error_text<CheckpointError>([&] { reader.read(state.tensors); });
    EXPECT_EQ(message.empty(), rank == 0) << message;
    if (rank == 1) {
      EXPECT_THAT(message, AllOf(HasSubstr("bytes 7340032 to 8388608"), HasSubstr("tensor \"model.w\"")));
    }
  }
}

TEST(ShardedCheckpoint, MissingForeignAndChangedFilesAreOneClearErrorEach) {
  const TempDirectory scratch("sharded"), other("sharded-other");
  save_sharded(scratch.path(), rows_of(2), global_state(2));
  save_sharded(other.path(), rows_of(2), global_state(3));
  const auto step = scratch.path() / "step-1";
  const auto name = read_step_manifest(step).files[1].name;
  const auto message = [&] {
    std::string found;
    run_local_ranks(4, [&](const std::shared_ptr<Communicator>& comm) {
      auto state = hold_state(global_state(0), rows_of(4), comm->rank());
      const auto text =
          error_text<CheckpointError>([&] { CheckpointManager(scratch.path(), {}, comm).load_latest(state); });
      if (comm->rank() == 0) found = text;
    });
    return found;
  };
  const auto whole = read_file(step / name);
  const auto foreign = read_file(other.path() / "step-1" / name);
  ASSERT_EQ(foreign.size(), whole.size());
  write_file(step / name, foreign);
  EXPECT_THAT(message(), AllOf(HasSubstr("can be loaded"), HasSubstr(name), HasSubstr("do not match their hash")));
  std::filesystem::remove(step / name);
  EXPECT_THAT(message(), AllOf(HasSubstr("can be loaded"), HasSubstr(name), HasSubstr("No such file")));
  write_file(step / name, whole);
  EXPECT_EQ(message(), "");
}

TEST(ShardedWeights, AFileIsCutForEachRankAndAPartIsNotExported) {
  const TempDirectory scratch("sharded-weights");
  const auto path = scratch.path() / "w.safetensors";
  const auto whole = counted({5, 4}, 3);
  export_weights(path, {{"w", whole}}, {}, posix_file_system());
  const MeshShape mesh({{"tp", 2}});
  const Placement columns{.splits = {{"tp", 1, {1, 3}}}};
  for (const int rank : {0, 1}) {
    auto wanted = hold({"w", at::zeros({5, 4})}, mesh, columns, rank);
    EXPECT_EQ(load_weights(path, {wanted}).bytes, rank == 0 ? 20u : 60u);
    EXPECT_TRUE(wanted.tensor.equal(hold({"w", whole}, mesh, columns, rank).tensor));
    EXPECT_THAT(error_text<CheckpointError>([&] { export_weights(path, {wanted}, {}, posix_file_system()); }),
                AllOf(HasSubstr("this rank has only"), HasSubstr("of F32 [5, 4]"), HasSubstr("consolidate")));
  }
}

}  // namespace
}  // namespace phalanx
