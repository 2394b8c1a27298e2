// The parts of the tools for checkpoints: values, verification, comparison, rewriting.
#include <ATen/ops/from_blob.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/logical_or.h>
#include <ATen/ops/nan_to_num.h>
#include <ATen/ops/signbit.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/faulty_file_system.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/checkpoint/checkpoint_manager.h"
#include "phalanx/checkpoint/files/compare_states.h"
#include "phalanx/checkpoint/files/element_values.h"
#include "phalanx/checkpoint/files/rewrite.h"
#include "phalanx/checkpoint/files/verify_step.h"
#include "phalanx/checkpoint/tensor_bytes.h"
#include "phalanx/checkpoint/testing/sharded_state.h"
#include "phalanx/checkpoint/testing/small_step.h"
#include "phalanx/checkpoint/testing/test_state.h"
#include "phalanx/checkpoint/weights.h"
#include "phalanx/comm/backends/local_shm/local.h"

namespace phalanx {
namespace {

using checkpoint_testing::flip_bit;
using checkpoint_testing::small_state;
using checkpoint_testing::write_small_step;
using safetensors::Dtype;

/// The bytes in torch's hands.
at::Tensor as_tensor(std::vector<std::byte>& bytes, Dtype dtype) {
  return at::from_blob(bytes.data(), {static_cast<std::int64_t>(bytes.size() / safetensors::element_size(dtype))},
                       at::TensorOptions().dtype(scalar_type_of(dtype)));
}

TEST(ElementValues, AreTorchsForEveryBitPattern) {
  for (const auto dtype : {Dtype::boolean, Dtype::u8, Dtype::i8, Dtype::f8_e4m3, Dtype::f8_e5m2, Dtype::u16, Dtype::i16,
                           Dtype::f16, Dtype::bf16}) {
    std::vector<std::byte> bytes;
    for (unsigned bits = 0; bits < (dtype == Dtype::boolean                 ? 2U
                                    : safetensors::element_size(dtype) == 1 ? 256U
                                                                            : 65536U);
         ++bits) {
      bytes.push_back(static_cast<std::byte>(bits & 255U));
      if (safetensors::element_size(dtype) == 2) bytes.push_back(static_cast<std::byte>(bits >> 8));
    }
    std::vector<double> values(bytes.size() / safetensors::element_size(dtype));
    decode_elements(dtype, bytes, values);
    const auto expected = as_tensor(bytes, dtype).to(at::kDouble);
    const auto* theirs = expected.const_data_ptr<double>();
    for (std::size_t i = 0; i < values.size(); ++i)
      ASSERT_TRUE(std::isnan(theirs[i]) ? std::isnan(values[i])
                                        : std::memcmp(&theirs[i], &values[i], sizeof(double)) == 0)
          << safetensors::name_of(dtype) << " " << i << ": " << values[i] << ", not " << theirs[i];
  }
}

TEST(ElementValues, AreConvertedToTorchsBits) {
  // Magnitudes from far below the smallest half to beyond the largest, ties, infinities, NaN.
  std::mt19937_64 random(9);
  std::normal_distribution<double> normal;
  std::vector<double> inputs;
  for (int i = 0; i < 20'000; ++i) inputs.push_back(normal(random) * std::exp(12 * normal(random)));
  for (const double special : {0.0, -0.0, 65504.0, 65519.99, 65520.0, 1e9, 1e300, 0x1p-24, 0x1p-25, 0x1.8p-24, 0x1p-14,
                               1.0 + 0x1p-11, 1.0 + 3 * 0x1p-11, 1.0 + 0x1p-8, 1.0 + 3 * 0x1p-8, 0x1.fffffep127,
                               std::numeric_limits<double>::infinity(), std::nan("")}) {
    inputs.push_back(special);
    inputs.push_back(-special);
  }
  for (const auto dtype : {Dtype::f64, Dtype::f32, Dtype::f16, Dtype::bf16}) {
    ASSERT_TRUE(can_encode(dtype));
    std::vector<std::byte> bytes(inputs.size() * safetensors::element_size(dtype));
    encode_elements(dtype, inputs, bytes);
    const auto ours = as_tensor(bytes, dtype);
    const auto theirs =
        at::from_blob(inputs.data(), {static_cast<std::int64_t>(inputs.size())}, at::TensorOptions().dtype(at::kDouble))
            .to(ours.scalar_type());
    EXPECT_TRUE(ours.isnan().equal(theirs.isnan()));
    EXPECT_TRUE(ours.nan_to_num(7).equal(theirs.nan_to_num(7))) << safetensors::name_of(dtype);
    EXPECT_TRUE(ours.signbit().logical_or(ours.isnan()).equal(theirs.signbit().logical_or(theirs.isnan())));
  }
  EXPECT_FALSE(can_encode(Dtype::i32));
}

TEST(BoxCopy, PiecesFollowEachOtherInRowMajorOrder) {
  for (const std::int64_t most : {1, 2, 5, 7, 24, 1000}) {
    for (const Box& box : {Box{{2, 1, 3}, {3, 4, 5}}, Box{{0, 0}, {1, 40}}, Box{{5}, {9}}, Box{{}, {}}}) {
      std::int64_t next = 0;
      for_each_chunk(box, most, [&](const Box& piece) {
        EXPECT_LE(piece.numel(), most);
        const auto ranges = flat_ranges(relative_to(piece, box), box.shape);
        ASSERT_EQ(ranges.size(), 1u) << piece.text() << " of " << box.text();
        EXPECT_EQ(ranges[0].begin, next);
        next += piece.numel();
      });
      EXPECT_EQ(next, box.numel());
    }
  }
  for_each_chunk({{0, 0}, {0, 4}}, 8, [](const Box&) { ADD_FAILURE() << "an empty box has no pieces"; });
}

TEST(VerifyStep, FindsAllDamageAndNamesIt) {
  const TempDirectory scratch("verify");
  // The first tensor takes the blocks 0 to 3, and the second continues in 3.
  const auto step = write_small_step(
      scratch.path(), 1,
      {checkpoint_testing::counting("model.a", {900'000}, 0), checkpoint_testing::counting("model.b", {100'000}, 0)});
  std::uint64_t told = 0;
  EXPECT_THAT(verify_step(step, [&](std::uint64_t bytes) { told += bytes; }), IsEmpty());
  EXPECT_EQ(told, bytes_to_verify(step));
  const auto file = step / shard_file_name(0);
  for (const std::size_t at : {1'500'000, 3'500'000}) flip_bit(file, at);
  auto found = verify_step(step);
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].file, shard_file_name(0));
  EXPECT_EQ(found[0].reason, "bytes 1048576 to 2097152 do not match their hash; they hold tensor \"model.a\"");
  EXPECT_EQ(found[1].reason,
            "bytes 3145728 to 4000320 do not match their hash; they hold tensor \"model.a\" and tensor \"model.b\"");
  flip_bit(file, 9);  // in the header's JSON
  found = verify_step(step);
  ASSERT_EQ(found.size(), 3u);
  for (const auto& damage : found)
    EXPECT_THAT(damage.reason, HasSubstr("hash; the header is damaged, so that the tensors in them are not known"));
  std::filesystem::resize_file(file, 5);
  EXPECT_THAT(verify_step(step)[0].reason, HasSubstr("has 5 bytes; the manifest says 4000320"));
  std::filesystem::remove(step / "manifest.json");
  EXPECT_THROW(verify_step(step), DamagedError);
}

// A flipped bit in a name leaves a header that can be read. Manifests of earlier versions have no hash of it alone.
TEST(VerifyStep, ADamagedHeaderNamesNoTensors) {
  const TempDirectory scratch("verify");
  const auto step = write_small_step(
      scratch.path(), 1,
      {checkpoint_testing::counting("model.a", {300'000}, 0), checkpoint_testing::counting("model.b", {300'000}, 0)});
  const auto reasons = [&] {
    std::vector<std::string> found;
    for (const auto& damage : verify_step(step)) found.push_back(damage.reason);
    return found;
  };
  auto manifest = parse_manifest("", read_file(step / kManifestName));
  ASSERT_TRUE(manifest.files[0].header_hash);
  const auto file = step / shard_file_name(0);
  const auto name_at = read_file(file).find("model.a\":{\"dtype");
  ASSERT_NE(name_at, std::string::npos);
  const std::string first = "bytes 0 to 1048576 do not match their hash; ";
  const auto last = read_file(file).size() - 1;
  const std::string of_last = fmt::format("bytes 2097152 to {} do not match their hash; ", last + 1);

  flip_bit(file, last);
  EXPECT_THAT(reasons(), ElementsAre(of_last + "they hold tensor \"model.b\""));
  flip_bit(file, name_at + 6);
  EXPECT_THAT(read_file(file), HasSubstr("model.`\""));
  EXPECT_THAT(reasons(), ElementsAre(first + "the header is damaged, so that the tensors in them are not known",
                                     of_last + "the header is damaged, so that the tensors in them are not known"));
  manifest.files[0].header_hash.reset();
  write_file(step / kManifestName, format_manifest(manifest));
  EXPECT_THAT(reasons(), ElementsAre(first + "they hold the header, so that the tensors in them are not known for sure",
                                     of_last + "the header is damaged, so that the tensors in them are not known"));
  flip_bit(file, name_at + 6);
  EXPECT_THAT(reasons(), ElementsAre(of_last + "they hold tensor \"model.b\""));
}

TEST(VerifyStep, AStepUnderAnotherStepsNameIsFound) {
  const TempDirectory scratch("verify");
  std::filesystem::rename(write_small_step(scratch.path(), 1, small_state(1)), scratch.path() / "step-2");
  const auto found = verify_step(scratch.path() / "step-2/");
  ASSERT_EQ(found.size(), 1u);
  EXPECT_THAT(found[0].reason, HasSubstr("its manifest is of step 1"));
  std::filesystem::rename(scratch.path() / "step-2", scratch.path() / "kept");
  EXPECT_THAT(verify_step(scratch.path() / "kept"), IsEmpty());
}

TEST(VerifyStep, BoxesThatDoNotMakeAWholeTensorAreDamage) {
  const TempDirectory scratch("verify");
  const auto step = write_small_step(scratch.path(), 1, small_state(1), 3);
  auto manifest = parse_manifest("m", read_file(step / "manifest.json"));
  manifest.files.erase(manifest.files.begin() + 1);
  write_file(step / "manifest.json", format_manifest(manifest));
  const auto found = verify_step(step);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_THAT(found[0].reason, HasSubstr("tensor \"optimizer.embedding.weight.exp_avg\": 16 of the 24 elements"));
}

StateDifference compare(const std::filesystem::path& a, const std::filesystem::path& b) {
  static std::vector<std::unique_ptr<SavedState>> kept;  // the objects that a difference points to
  kept.push_back(std::make_unique<SavedState>(a));
  kept.push_back(std::make_unique<SavedState>(b));
  return compare_states(**(kept.end() - 2), *kept.back());
}

TEST(CompareStates, IsAboutValuesNotAboutLayouts) {
  const TempDirectory scratch("compare");
  const auto whole = checkpoint_testing::global_state(4);
  std::vector<std::filesystem::path> steps;
  for (const auto& layout : checkpoint_testing::layouts()) {
    const auto folder = scratch.path() / std::to_string(steps.size());
    run_local_ranks(layout.world, [&](const std::shared_ptr<Communicator>& comm) {
      CheckpointManager(folder, {}, comm).save(checkpoint_testing::hold_state(whole, layout, comm->rank()), 1);
    });
    steps.push_back(folder / "step-1");
    EXPECT_TRUE(compare(steps[0], steps.back()).is_none()) << layout.name;
  }
}

TEST(CompareStates, FindsTheLargestDifferenceAndItsPlace) {
  const TempDirectory scratch("compare");
  const double nan = std::nan(""), infinity = std::numeric_limits<double>::infinity();
  auto first = small_state(1), second = small_state(1);
  second[0].values[5] += 0.25;
  second[0].values[22] -= 2;
  first[1].values = {0.0, nan, 1, 2};
  second[1].values = {-0.0, nan, 1, 2};
  first[2].values[3] = nan;
  second[2].values[9] = infinity;
  const auto a = write_small_step(scratch.path() / "a", 1, first),
             b = write_small_step(scratch.path() / "b", 1, second);
  const auto difference = compare(a, b);
  ASSERT_EQ(difference.tensors.size(), 3u);
  EXPECT_EQ(difference.tensors[0].elements, 2);
  EXPECT_EQ(difference.tensors[0].largest, 2);
  EXPECT_THAT(difference.tensors[0].largest_at, ElementsAre(5, 2));
  EXPECT_EQ(difference.tensors[1].elements, 1);  // zeros of two signs are different bits, no distance apart
  EXPECT_EQ(difference.tensors[1].largest, 0);
  EXPECT_EQ(difference.tensors[2].elements, 2);
  EXPECT_EQ(difference.tensors[2].largest, infinity);
  EXPECT_THAT(difference.integers, IsEmpty());
  EXPECT_THAT(compare(a, write_small_step(scratch.path() / "c", 2, first)).integers, ElementsAre("step: 1 and 2"));
}

TEST(CompareStates, APlaceIsThatInTheWholeTensor) {
  // More than is compared at once, so that the position is in a later piece.
  const TempDirectory scratch("compare");
  const at::Tensor first = at::zeros({3, 1000, 300}), second = first.clone();
  second[2][713][41] = 1.5;
  for (const auto& [name, tensor] : {std::pair("a", first), std::pair("b", second)}) {
    TrainState state;
    state.tensors = {{"w", tensor}};
    CheckpointManager(scratch.path() / name).save(state, 1);
  }
  const auto difference = compare(scratch.path() / "a" / "step-1", scratch.path() / "b" / "step-1");
  ASSERT_EQ(difference.tensors.size(), 1u);
  EXPECT_EQ(difference.tensors[0].elements, 1);
  EXPECT_THAT(difference.tensors[0].largest_at, ElementsAre(2, 713, 41));
}

TEST(Rewrite, ConsolidatedWeightsAreLoadedAndConverted) {
  const TempDirectory scratch("rewrite");
  const auto whole = checkpoint_testing::global_state(4);
  const auto layout = checkpoint_testing::layouts()[8];  // cut by rows and columns
  run_local_ranks(layout.world, [&](const std::shared_ptr<Communicator>& comm) {
    CheckpointManager(scratch.path(), {}, comm).save(checkpoint_testing::hold_state(whole, layout, comm->rank()), 1);
  });
  SavedState saved(scratch.path() / "step-1");
  std::vector<NamedTensor> model;
  for (const auto& named : whole.tensors)
    if (named.name.starts_with("model.")) model.push_back({named.name.substr(6), at::zeros_like(named.tensor)});
  const auto expect_loaded = [&](const std::filesystem::path& path, bool halves) {
    for (const auto& named : model) named.tensor.zero_();
    load_weights(path, model);
    for (std::size_t i = 0; i < model.size(); ++i) {
      const auto& expected = whole.tensors[i].tensor;
      EXPECT_TRUE(model[i].tensor.equal(halves ? expected.to(at::kHalf).to(expected.scalar_type()) : expected));
    }
  };
  const auto written = consolidate(saved, scratch.path() / "one.safetensors");
  EXPECT_EQ(written.tensors, 4u);
  EXPECT_EQ(written.bytes, consolidated_bytes(saved, {}));
  expect_loaded(scratch.path() / "one.safetensors", false);
  consolidate(saved, scratch.path() / "half.safetensors", {.dtype = Dtype::f16});
  expect_loaded(scratch.path() / "half.safetensors", true);
  std::filesystem::create_directory(scratch.path() / "hf");
  EXPECT_THAT(consolidate(saved, scratch.path() / "hf/", {.max_file_bytes = 300}).files.size(), 4);  // one is the index
  expect_loaded(scratch.path() / "hf", false);
  EXPECT_THAT(error_text<CheckpointError>([&] { consolidate(saved, scratch.path() / "hf"); }),
              HasSubstr("exists already"));
  const auto all = consolidate(saved, scratch.path() / "all", {.all = true});
  EXPECT_THAT(all.files, ElementsAre(scratch.path() / "all" / "model.safetensors"));
  EXPECT_EQ(all.tensors, whole.tensors.size());
}

TEST(Rewrite, ReshardedStatesAreTheSameInEvenFiles) {
  const TempDirectory scratch("rewrite");
  const auto step = write_small_step(
      scratch.path() / "a", 3,
      {checkpoint_testing::counting("model.w", {9'000, 10}, 0), checkpoint_testing::counting("model.none", {0, 10}, 0)},
      2);
  for (const int files : {1, 3, 5}) {
    SavedState saved(step);
    const auto folder = scratch.path() / std::to_string(files);
    const auto written = reshard(saved, folder, {.files = files});
    EXPECT_EQ(written.files.size(), static_cast<std::size_t>(files));
    for (const auto& file : written.files)
      EXPECT_NEAR(static_cast<double>(std::filesystem::file_size(file)), 360'000.0 / files, 1'000);
    EXPECT_THAT(verify_step(folder / "step-3"), IsEmpty());
    EXPECT_TRUE(compare(step, folder / "step-3").is_none());
    EXPECT_EQ(read_step_manifest(folder / "step-3").metadata, saved.manifest().metadata);
  }
}

TEST(Rewrite, AFailureAtAnyOperationLeavesNothingBehind) {
  const TempDirectory scratch("rewrite");
  const auto step = write_small_step(scratch.path() / "a", 3, small_state(1), 2);
  const auto out = scratch.path() / "out";
  const std::vector<std::function<void(SavedState&, FileSystem&)>> rewrites = {
      [&](SavedState& saved, FileSystem& fs) { consolidate(saved, out / "w.safetensors", {}, fs); },
      [&](SavedState& saved, FileSystem& fs) { consolidate(saved, out / "hf", {.max_file_bytes = 100}, fs); },
      [&](SavedState& saved, FileSystem& fs) { reshard(saved, out, {.files = 2}, fs); }};
  for (const auto& rewrite : rewrites) {
    FaultyFileSystem counter(posix_file_system());
    SavedState saved(step);
    rewrite(saved, counter);
    EXPECT_FALSE(std::filesystem::is_empty(out));
    std::filesystem::remove_all(out);
    for (std::int64_t n = 0; n + 1 < counter.operations(); ++n) {  // all but the last: syncing the directory
      FaultyFileSystem fs(posix_file_system(), {.fail_at = n, .kind = Fault::error});
      EXPECT_THROW(rewrite(saved, fs), Error) << n;
      EXPECT_TRUE(!std::filesystem::exists(out) || std::filesystem::is_empty(out)) << n;
      std::filesystem::remove_all(out);
    }
  }
  flip_bit(step / shard_file_name(1), 200);
  EXPECT_THROW(SavedState{step}, DamagedError);
}

}  // namespace
}  // namespace phalanx
