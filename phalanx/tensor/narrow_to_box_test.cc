#include "phalanx/tensor/narrow_to_box.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <vector>

namespace phalanx {
namespace {

std::vector<float> values_of(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.contiguous();
  return {flat.const_data_ptr<float>(), flat.const_data_ptr<float>() + flat.numel()};
}

TEST(NarrowToBox, IsThatPartOfATensorOfAnyStrides) {
  const at::Tensor whole = at::arange(24, at::kFloat).reshape({4, 6});
  EXPECT_EQ(values_of(narrow_to_box(whole, {{1, 2}, {2, 3}})), (std::vector<float>{8, 9, 10, 14, 15, 16}));
  EXPECT_EQ(values_of(narrow_to_box(whole.t(), {{2, 1}, {3, 2}})), (std::vector<float>{8, 14, 9, 15, 10, 16}));
  EXPECT_EQ(values_of(narrow_to_box(whole.reshape({2, 2, 6}), {{1, 0, 5}, {1, 2, 1}})), (std::vector<float>{17, 23}));
  EXPECT_TRUE(narrow_to_box(whole, {{0, 0}, {4, 6}}).is_same_size(whole));
}

TEST(NarrowToBox, IsAView) {
  const at::Tensor whole = at::full({3, 2}, 1.0F);
  narrow_to_box(whole, {{1, 1}, {2, 1}}).fill_(7);
  EXPECT_EQ(values_of(whole), (std::vector<float>{1, 1, 1, 7, 1, 7}));
}

TEST(NarrowToBox, TheGradientGoesToThatPartAlone) {
  const at::Tensor whole = at::full({2, 3}, 1.0F).requires_grad_();
  narrow_to_box(whole, {{0, 1}, {2, 2}}).mul(2).sum().backward();
  EXPECT_EQ(values_of(whole.grad()), (std::vector<float>{0, 2, 2, 0, 2, 2}));
}

TEST(NarrowToBox, TakesTensorsWithoutDimensionsAndEmptyBoxes) {
  EXPECT_EQ(narrow_to_box(at::full({}, 5.0F), {}).item<float>(), 5);
  const at::Tensor none = narrow_to_box(at::full({3, 2}, 1.0F), {{3, 0}, {0, 2}});  // behind the last row
  EXPECT_EQ(none.sizes().vec(), (std::vector<std::int64_t>{0, 2}));
}

}  // namespace
}  // namespace phalanx
