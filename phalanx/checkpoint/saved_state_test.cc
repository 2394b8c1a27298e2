#include "phalanx/checkpoint/files/saved_state.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/checkpoint/files/block_writer.h"
#include "phalanx/checkpoint/files/box_copy.h"
#include "phalanx/checkpoint/files/shard_plan.h"
#include "phalanx/checkpoint/testing/test_state.h"

namespace phalanx {
namespace {

using safetensors::Dtype;

/// Writes files that hold one box each of the tensor "t", whose elements (int32) are their own numbers in [rows, cols].
SavedState save_boxes(const std::filesystem::path& folder, std::int64_t cols, const std::vector<Box>& boxes) {
  Manifest manifest;
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    const auto& box = boxes[i];
    const auto header = safetensors::make_header({{.name = "t", .dtype = Dtype::i32, .shape = box.shape}},
                                                 sharding_metadata({{"t", box.offsets}}));
    BlockWriter writer(posix_file_system(), folder / shard_file_name(static_cast<int>(i)));
    writer.append_header(safetensors::format_header(header));
    for (std::int64_t row = 0; row < box.shape[0]; ++row)
      for (std::int64_t col = 0; col < box.shape[1]; ++col) {
        const auto value = static_cast<std::int32_t>((box.offsets[0] + row) * cols + box.offsets[1] + col);
        writer.append(std::as_bytes(std::span(&value, 1)));
      }
    manifest.files.push_back(writer.finish());
  }
  return {folder, manifest};
}

TEST(BoxCopy, AgreesWithCopyingElementByElement) {
  std::mt19937 random(4);
  const auto below = [&](std::int64_t n) { return static_cast<std::int64_t>(random() % static_cast<unsigned>(n)); };
  for (int trial = 0; trial < 400; ++trial) {
    const auto dims = static_cast<std::size_t>(below(4));
    Box a, b;
    for (std::size_t d = 0; d < dims; ++d) {
      a.offsets.push_back(below(4)), a.shape.push_back(below(6));
      b.offsets.push_back(below(4)), b.shape.push_back(below(6));
    }
    std::vector<std::int16_t> source(static_cast<std::size_t>(a.numel()));
    for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::int16_t>(i + 1);
    std::vector<std::int16_t> target(static_cast<std::size_t>(b.numel()), 0), expected = target;
    std::uint64_t common = 0;
    for (std::int64_t i = 0; i < b.numel(); ++i) {  // where element i of b is in a
      std::int64_t rest = i, index = 0, stride = 1;
      bool inside = true;
      for (std::size_t d = dims; d-- > 0; rest /= b.shape[d], stride *= a.shape[d]) {
        const auto at = b.offsets[d] + rest % b.shape[d] - a.offsets[d];
        inside = inside && at >= 0 && at < a.shape[d];
        index += at * stride;
      }
      if (!inside) continue;
      expected[static_cast<std::size_t>(i)] = source[static_cast<std::size_t>(index)];
      ++common;
    }
    const auto copied =
        copy_overlap(a, std::as_bytes(std::span(source)), b, std::as_writable_bytes(std::span(target)), 2);
    EXPECT_EQ(target, expected) << a.text() << " to " << b.text();
    EXPECT_EQ(copied, common * 2);
  }
}

TEST(SavedState, PutsBoxesOfAnyCutTogether) {
  const TempDirectory scratch("saved");
  // 5 rows of 7: the two first rows in one box, the others cut by columns.
  auto saved = save_boxes(scratch.path(), 7, {{{2, 4}, {3, 3}}, {{0, 0}, {2, 7}}, {{2, 0}, {3, 4}}});
  ASSERT_EQ(saved.tensors().size(), 1u);
  const auto& tensor = saved.tensors()[0];
  EXPECT_EQ(tensor.shape, (std::vector<std::int64_t>{5, 7}));
  EXPECT_EQ(tensor.boxes[0].box.text(), "[0:2, 0:7]");
  EXPECT_NO_THROW(saved.check_complete(tensor));
  EXPECT_EQ(saved.find("other"), nullptr);
  for (std::int64_t top = 0; top < 5; ++top)
    for (std::int64_t left = 0; left < 7; ++left) {
      const Box wanted{{top, left}, {5 - top, 7 - left}};
      std::vector<std::int32_t> values(static_cast<std::size_t>(wanted.numel()), -1);
      EXPECT_EQ(saved.read(tensor, wanted, std::as_writable_bytes(std::span(values))), values.size() * 4);
      for (std::size_t i = 0; i < values.size(); ++i) {
        const auto at = static_cast<std::int64_t>(i);
        EXPECT_EQ(values[i], (top + at / (7 - left)) * 7 + left + at % (7 - left));
      }
    }
}

TEST(SavedState, HolesAndOverlapsAreFoundAlsoWhereTheirSizesAgree) {
  const TempDirectory scratch("saved");
  const auto reason = [&](const std::vector<Box>& boxes) {
    const auto saved = save_boxes(scratch.path(), 4, boxes);
    return error_text<DamagedError>([&] { saved.check_complete(saved.tensors()[0]); });
  };
  EXPECT_EQ(reason({{{0, 0}, {2, 4}}, {{2, 0}, {2, 4}}}), "");
  EXPECT_THAT(reason({{{0, 0}, {2, 4}}, {{3, 0}, {1, 4}}}),
              AllOf(HasSubstr("tensor \"t\""), HasSubstr("12 of the 16 elements of I32 [4, 4] are there")));
  // 8 elements twice, 8 missing.
  EXPECT_THAT(reason({{{0, 0}, {2, 4}}, {{0, 0}, {2, 4}}, {{3, 3}, {1, 1}}}),
              AllOf(HasSubstr("[0:2, 0:4]"), HasSubstr("overlap"), HasSubstr("shard-00002")));
  EXPECT_THAT(reason({{{0, 0}, {3, 2}}, {{1, 2}, {2, 2}}, {{2, 1}, {1, 1}}}), HasSubstr("overlap"));
}

TEST(SavedState, PartsOfDifferentTypesAreDamage) {
  const TempDirectory scratch("saved");
  auto manifest = save_boxes(scratch.path(), 4, {{{0, 0}, {2, 4}}}).manifest();
  const auto header = safetensors::make_header({{.name = "t", .dtype = Dtype::f32, .shape = {2, 4}}},
                                               sharding_metadata({{"t", {2, 0}}}));
  BlockWriter writer(posix_file_system(), scratch.path() / shard_file_name(1));
  const auto text = safetensors::format_header(header) + std::string(32, '\0');
  writer.append(std::as_bytes(std::span(text)));
  manifest.files.push_back(writer.finish());
  EXPECT_THAT(error_text<DamagedError>([&] { SavedState(scratch.path(), manifest); }),
              AllOf(HasSubstr("tensor \"t\""), HasSubstr("I32 [2, 4]"), HasSubstr("F32 [2, 4]")));
}

}  // namespace
}  // namespace phalanx
