#include "phalanx/checkpoint/checkpoint_manager.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/checkpoint/files/checkpoint_list.h"
#include "phalanx/checkpoint/testing/test_state.h"

namespace phalanx {
namespace {

using checkpoint_testing::make_state;
using checkpoint_testing::same_state;

constexpr const char* kShard = "shard-00001-model-00001-of-00001.safetensors";

std::vector<std::string> names_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    names.push_back(entry.path().filename().string());
  std::ranges::sort(names);
  return names;
}

TEST(CheckpointManager, LoadsInPlaceExactlyWhatWasSaved) {
  const TempDirectory scratch("checkpoint");
  CheckpointManager checkpoints(scratch.path() / "run" / "checkpoint");
  const auto saved = checkpoints.save(make_state(3), 30, R"({"model":{"dim":5}})");
  EXPECT_EQ(saved.path, scratch.path() / "run" / "checkpoint" / "step-30");
  EXPECT_THAT(names_in(saved.path), ElementsAre("manifest.json", kShard));

  auto state = make_state(100);
  const auto* storage = state.tensors[0].tensor.const_data_ptr();
  const auto loaded = checkpoints.load_latest(state);
  ASSERT_TRUE(loaded);
  EXPECT_TRUE(same_state(state, make_state(3)));
  EXPECT_EQ(state.tensors[0].tensor.const_data_ptr(), storage);
  EXPECT_EQ(loaded->step, 30);
  EXPECT_EQ(loaded->metadata, R"({"model":{"dim":5}})");
  EXPECT_THAT(loaded->skipped, IsEmpty());
}

TEST(CheckpointManager, FilesOfSeveralBlocksAreWritten) {
  const TempDirectory scratch("checkpoint");
  CheckpointManager checkpoints(scratch.path());
  const auto big = make_state(0, 300'000);  // two tensors of 6 MB
  checkpoints.save(big, 1);
  auto state = make_state(9, 300'000);
  checkpoints.load_latest(state);
  EXPECT_TRUE(same_state(state, big));
}

TEST(CheckpointManager, AFolderWithoutCheckpointsIsAFreshStart) {
  const TempDirectory scratch("checkpoint");
  auto state = make_state(1);
  EXPECT_FALSE(CheckpointManager(scratch.path()).load_latest(state));
  EXPECT_FALSE(CheckpointManager(scratch.path() / "absent").load_latest(state));
}

TEST(CheckpointManager, AStateOfAnotherModelIsRefusedBeforeAnythingIsOverwritten) {
  const TempDirectory scratch("checkpoint");
  CheckpointManager checkpoints(scratch.path());
  checkpoints.save(make_state(3), 30);
  auto state = make_state(50);
  state.tensors[0].tensor = at::full({7, 6}, 1.0);                   // another shape
  state.tensors[1].tensor = state.tensors[1].tensor.to(at::kFloat);  // another dtype
  state.tensors[5].name = "renamed";                                 // one missing, one unexpected
  const auto before = state.tensors[3].tensor.clone();
  const auto message = error_text<CheckpointError>([&] { checkpoints.load_latest(state); });
  EXPECT_THAT(message, HasSubstr("step-30 does not fit this model"));
  EXPECT_THAT(message, HasSubstr("\"model.embedding.weight\": expected F32 [7, 6], found F32 [7, 5]"));
  EXPECT_THAT(message, HasSubstr("\"model.norm.weight\": expected F32 [5], found BF16 [5]"));
  EXPECT_THAT(message, HasSubstr("\"renamed\" is missing (expected I64 [3, 2, 2])"));
  EXPECT_THAT(message, HasSubstr("\"counts\" is unexpected (found I64 [3, 2, 2])"));
  EXPECT_TRUE(state.tensors[3].tensor.equal(before));

  state = make_state(50);
  state.tensors.push_back(state.tensors[2]);
  EXPECT_THAT(error_text<CheckpointError>([&] { checkpoints.load_latest(state); }),
              HasSubstr("the state names tensor \"" + state.tensors[2].name + "\" twice"));

  state = make_state(50);
  state.integers["optimizer.buckets"] = 1;
  EXPECT_THAT(error_text<CheckpointError>([&] { checkpoints.load_latest(state); }),
              HasSubstr("the integer \"optimizer.buckets\" is missing"));
}

// A state of 16-bit weights resumes in 32 bits and vice versa, including optimizer and integers.
TEST(CheckpointManager, TypesAreConvertedOnRequest) {
  const TempDirectory scratch("checkpoint");
  const auto in_type = [](TrainState state, at::ScalarType type) {
    for (NamedTensor& one : state.tensors)
      if (one.tensor.is_floating_point()) one.tensor = one.tensor.to(type);
    return state;
  };
  const TrainState narrow = in_type(make_state(3), at::kBFloat16);
  CheckpointManager(scratch.path()).save(narrow, 30);
  TrainState wide = in_type(make_state(50), at::kFloat);
  EXPECT_THAT(error_text<CheckpointError>([&] { CheckpointManager(scratch.path()).load_latest(wide); }),
              AllOf(HasSubstr("expected F32"), HasSubstr("found BF16"), HasSubstr("convert_dtype")));
  EXPECT_TRUE(same_state(wide, in_type(make_state(50), at::kFloat)));
  CheckpointManager converts(scratch.path(), {.convert_dtype = true});
  converts.load_latest(wide);
  EXPECT_TRUE(same_state(wide, in_type(narrow, at::kFloat)));

  // Back to 16 bits: values that came from 16 bits are exact there.
  converts.save(wide, 31);
  TrainState again = in_type(make_state(50), at::kBFloat16);
  converts.load_latest(again);
  EXPECT_TRUE(same_state(again, narrow));
}

TEST(CheckpointManager, ManyDifferencesAreCutShort) {
  const TempDirectory scratch("checkpoint");
  CheckpointManager checkpoints(scratch.path());
  checkpoints.save({}, 1);
  TrainState state;
  for (int i = 0; i < 40; ++i) state.tensors.push_back({"layer." + std::to_string(i), at::full({1}, 0.0)});
  EXPECT_THAT(error_text<CheckpointError>([&] { checkpoints.load_latest(state); }), HasSubstr("and 34 more"));
}

TEST(CheckpointManager, KeepsTheLatestAndTheMilestones) {
  const TempDirectory scratch("checkpoint");
  CheckpointManager checkpoints(scratch.path(), {.keep_latest_k = 2, .keep_every_steps = 20});
  for (int step = 10; step <= 50; step += 10) checkpoints.save(make_state(step), step);
  EXPECT_THAT(names_in(scratch.path()), ElementsAre("step-20", "step-30", "step-40", "step-50"));
  EXPECT_THROW(CheckpointManager(scratch.path(), {.keep_latest_k = -1}), ConfigError);
}

TEST(CheckpointManager, NeverRemovesTheOneJustSaved) {
  const TempDirectory scratch("checkpoint");
  for (int step : {100, 200, 300}) CheckpointManager(scratch.path()).save(make_state(step), step);
  CheckpointManager(scratch.path(), {.keep_latest_k = 2}).save(make_state(110), 110);  // went back to step 100
  EXPECT_THAT(names_in(scratch.path()), ElementsAre("step-110", "step-300"));
}

TEST(CheckpointManager, SavingAStepAgainReplacesIt) {
  const TempDirectory scratch("checkpoint");
  CheckpointManager checkpoints(scratch.path());
  checkpoints.save(make_state(1), 5);
  checkpoints.save(make_state(2), 5);
  EXPECT_THAT(names_in(scratch.path()), ElementsAre("step-5"));
  auto state = make_state(0);
  checkpoints.load_latest(state);
  EXPECT_TRUE(same_state(state, make_state(2)));
}

TEST(CheckpointManager, ClearsWhatEarlierSavesLeftBehind) {
  const TempDirectory scratch("checkpoint");
  std::filesystem::create_directories(scratch.path() / "step-4.tmp" / "part");
  std::filesystem::create_directories(scratch.path() / "step-3.removed.tmp");
  std::filesystem::create_directories(scratch.path() / "notes.tmp");
  CheckpointManager(scratch.path()).save(make_state(1), 5);
  EXPECT_THAT(names_in(scratch.path()), ElementsAre("notes.tmp", "step-5"));
}

TEST(CheckpointManager, SaysWhyItPassesOverNewerCheckpoints) {
  const TempDirectory scratch("checkpoint");
  CheckpointManager checkpoints(scratch.path());
  for (int step : {10, 20, 30, 40, 50}) checkpoints.save(make_state(step), step);
  std::filesystem::remove(scratch.path() / "step-20" / kShard);
  std::filesystem::resize_file(scratch.path() / "step-30" / kShard, 17);
  std::filesystem::remove(scratch.path() / "step-40" / "manifest.json");
  auto shard = read_file(scratch.path() / "step-50" / kShard);
  shard.back() = static_cast<char>(shard.back() ^ 4);
  write_file(scratch.path() / "step-50" / kShard, shard);
  std::filesystem::create_directories(scratch.path() / "step-60.tmp");

  auto state = make_state(0);
  const auto loaded = checkpoints.load_latest(state);
  ASSERT_TRUE(loaded);
  EXPECT_EQ(loaded->step, 10);
  EXPECT_TRUE(same_state(state, make_state(10)));
  const auto& skipped = loaded->skipped;
  EXPECT_THAT(skipped,
              UnorderedElementsAre(HasSubstr("step-20: "), AllOf(HasSubstr("step-30: "), HasSubstr("has 17 bytes")),
                                   HasSubstr("step-40: "), AllOf(HasSubstr("step-50: "), HasSubstr("damaged")),
                                   HasSubstr("step-60.tmp: its saving or removal was not finished")));

  write_file(scratch.path() / "step-10" / "manifest.json", "{}");
  const auto message = error_text<CheckpointError>([&] { checkpoints.load_latest(state); });
  EXPECT_THAT(message, HasSubstr("no checkpoint in"));
  EXPECT_THAT(message, HasSubstr("step-10: "));
}

TEST(CheckpointManager, EveryFlippedByteIsDetected) {
  const TempDirectory scratch("checkpoint");
  CheckpointManager checkpoints(scratch.path());
  const auto folder = checkpoints.save(make_state(3), 1).path;
  const auto whole = read_file(folder / kShard);
  auto state = make_state(0);
  for (std::size_t i = 0; i < whole.size(); ++i) {
    auto damaged = whole;
    damaged[i] = static_cast<char>(damaged[i] ^ (1 << (i % 8)));
    write_file(folder / kShard, damaged);
    const auto message = error_text<CheckpointError>([&] { checkpoints.load(folder, state); });
    EXPECT_THAT(message, AllOf(HasSubstr(kShard), HasSubstr("do not match their hash"))) << i;
  }
}

TEST(CheckpointManager, DamageBehindTheHeaderNamesTheTensor) {
  const TempDirectory scratch("checkpoint");
  CheckpointManager checkpoints(scratch.path());
  const auto folder = checkpoints.save(make_state(3, 300'000), 1).path;
  auto bytes = read_file(folder / kShard);
  bytes[8'000'000] = static_cast<char>(bytes[8'000'000] ^ 1);
  write_file(folder / kShard, bytes);
  auto state = make_state(0, 300'000);
  EXPECT_THAT(error_text<CheckpointError>([&] { checkpoints.load(folder, state); }),
              AllOf(HasSubstr("bytes 7340032 to 8388608"), HasSubstr("tensor \"optimizer.embedding.weight.exp_avg\"")));
}

TEST(CheckpointManager, RefusesStatesThatCannotBeSaved) {
  const TempDirectory scratch("checkpoint");
  CheckpointManager checkpoints(scratch.path());
  auto twice = make_state(1);
  twice.tensors.push_back(twice.tensors[0]);
  const auto names_its_step = AllOf(HasSubstr("cannot save checkpoint"), HasSubstr("/step-7: "),
                                    HasSubstr("earlier checkpoints are as they were"));
  const auto expect_refused = [&](const TrainState& state, const std::string& metadata, const char* reason) {
    EXPECT_THAT(error_text<CheckpointError>([&] { checkpoints.save(state, 7, metadata); }),
                AllOf(HasSubstr(reason), names_its_step));
    EXPECT_THAT(error_text<CheckpointError>([&] {
                  checkpoints.async_save(state, 7, metadata);
                  checkpoints.finish();
                }),
                AllOf(HasSubstr(reason), names_its_step));
  };
  expect_refused(twice, "{}", "used twice");
  expect_refused(make_state(1), "[]", "JSON object");
  auto odd = make_state(1);
  odd.tensors[0].tensor = at::empty({2}, at::TensorOptions(at::kFloat8_e5m2fnuz));
  expect_refused(odd, "{}", "Float8_e5m2fnuz");  // found while the save is planned
  EXPECT_THAT(names_in(scratch.path()), IsEmpty());
}

TEST(CheckpointList, ResolvesAFolderOrAStep) {
  const TempDirectory scratch("checkpoint");
  CheckpointManager checkpoints(scratch.path());
  EXPECT_THAT(error_text<CheckpointError>([&] { resolve_checkpoint(scratch.path()); }),
              HasSubstr("no complete checkpoint"));
  EXPECT_THAT(error_text<CheckpointError>([&] { resolve_checkpoint(scratch.path() / "x"); }),
              HasSubstr("not a directory"));
  checkpoints.save(make_state(1), 9);
  checkpoints.save(make_state(1), 10);
  EXPECT_EQ(resolve_checkpoint(scratch.path()), scratch.path() / "step-10");
  EXPECT_EQ(resolve_checkpoint(scratch.path() / "step-9"), scratch.path() / "step-9");
  // Older weights are not taken without a word.
  std::filesystem::resize_file(scratch.path() / "step-10" / kShard, 10);
  testing::internal::CaptureStderr();
  EXPECT_EQ(resolve_checkpoint(scratch.path()), scratch.path() / "step-9");
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("step-10 is passed over, and step-9 taken: "), HasSubstr("has 10 bytes")));
}

TEST(CheckpointList, ADirectoryUnderAnotherStepsNameIsNotUsed) {
  const TempDirectory scratch("checkpoint");
  CheckpointManager(scratch.path()).save(make_state(1), 9);
  std::filesystem::rename(scratch.path() / "step-9", scratch.path() / "step-12");
  const auto list = list_checkpoints(scratch.path());
  EXPECT_THAT(list.complete, IsEmpty());
  EXPECT_THAT(list.skipped, ElementsAre("step-12: its manifest is of step 9"));
}

TEST(CheckpointList, StepsAreThoseWhoseNamesAreWhole) {
  EXPECT_EQ(step_of_name("step-7"), 7);
  EXPECT_EQ(step_of_name("step-0"), 0);
  EXPECT_EQ(step_of_name("step-7.replaced"), 7);
  for (const char* name : {"", "step-", "step--1", "step-+7", "step- 7", "step-7x", "step-7.tmp", "step-7.replaced.tmp",
                           "Step-7", "xstep-7", "step-99999999999999999999"}) {
    EXPECT_FALSE(step_of_name(name)) << name;
  }
}

}  // namespace
}  // namespace phalanx
