#include "phalanx/base/dtype_names.h"

#include <gtest/gtest.h>

namespace phalanx {
namespace {

TEST(DtypeNames, EveryUsualNameMeansTheSameType) {
  for (const char* name : {"bf16", "bfloat16", "torch.bfloat16"}) EXPECT_EQ(canonical_dtype(name), "bfloat16") << name;
  for (const char* name : {"f16", "fp16", "half", "float16", "torch.half"}) {
    EXPECT_EQ(canonical_dtype(name), "float16") << name;
  }
  for (const char* name : {"f32", "fp32", "float", "float32"}) EXPECT_EQ(canonical_dtype(name), "float32") << name;
  for (const char* name : {"f64", "fp64", "double", "float64"}) EXPECT_EQ(canonical_dtype(name), "float64") << name;
}

TEST(DtypeNames, OtherTextsStayAsTheyAre) {
  for (const char* name : {"", "bf", "int32", "torch.int8", "BF16"}) EXPECT_EQ(canonical_dtype(name), name);
}

}  // namespace
}  // namespace phalanx
