// [quantize.linear.float8].
#include <gtest/gtest.h>

#include "phalanx/config/testing/parse.h"

namespace phalanx::config::float8_keys_test {
namespace {

TEST(Float8Keys, Float8HasTorchtitansKeys) {
  const std::string on =
      "[model]\nconverters = [\"quantize.linear.float8\"]\n[training]\nmixed_precision_param = \"bfloat16\"\n";
  const TrainConfig plain = parse(on);
  EXPECT_TRUE(uses_float8(plain));
  EXPECT_EQ(plain.float8.recipe_name, "tensorwise");
  const TrainConfig set = parse(on +
                                "[quantize.linear.float8]\nrecipe_name = \"rowwise\"\nfilter_fqns = [\"output\", "
                                "\"wk\"]\nemulate = true\nenable_fsdp_float8_all_gather = false\n");
  EXPECT_EQ(set.float8.recipe_name, "rowwise");
  EXPECT_THAT(set.float8.filter_fqns, ElementsAre("output", "wk"));
  EXPECT_TRUE(set.float8.emulate);
  EXPECT_EQ(print_config(parse_config(print_config(set), "again", {})), print_config(set));
  const TrainConfig flags = parse(on, {"--quantize.linear.float8.recipe_name=rowwise",
                                       "--quantize.linear.float8.emulate", "--quantize.linear.float8.filter_fqns=a,b"});
  EXPECT_EQ(flags.float8.recipe_name, "rowwise");
  EXPECT_TRUE(flags.float8.emulate);
  EXPECT_THAT(flags.float8.filter_fqns, ElementsAre("a", "b"));
  // The section's older name.
  const TrainConfig old = parse(
      "[model]\nconverters = [\"float8\"]\n[training]\nmixed_precision_param = \"bfloat16\"\n[float8]\n"
      "recipe_name = \"rowwise\"\n");
  EXPECT_TRUE(uses_float8(old));
  EXPECT_EQ(old.float8.recipe_name, "rowwise");
  EXPECT_FALSE(uses_float8(parse("")));
}

TEST(Float8Keys, WhatFloat8CannotDoIsRefused) {
  const std::string model = "[model]\nconverters = [\"quantize.linear.float8\"]\n";
  const std::string on = model + "[training]\nmixed_precision_param = \"bfloat16\"\n";
  const std::string section = "[quantize.linear.float8]\n";
  EXPECT_THAT(refusal(model),
              HasSubstr("mixed_precision_param is \"float32\": products of float8 numbers have results in "
                        "bfloat16; set mixed_precision_param = \"bfloat16\""));
  EXPECT_THAT(refusal("[model]\nconverters = [\"mx\"]\n"),
              HasSubstr("[model] converters names \"mx\": expected \"quantize.linear.float8\""));
  EXPECT_THAT(
      refusal(on + section + "recipe_name = \"rowwise_with_gw_hp\"\n"),
      AllOf(HasSubstr("[quantize.linear.float8] recipe_name is \"rowwise_with_gw_hp\""), HasSubstr("tensorwise")));
  EXPECT_THAT(refusal(on + section + "enable_fsdp_float8_all_gather = true\n"),
              AllOf(HasSubstr("run.toml:6: "), HasSubstr("gathered in mixed_precision_param and cast afterwards")));
  EXPECT_THAT(refusal(on + section + "precompute_float8_dynamic_scale_for_fsdp = true\n"),
              HasSubstr("gathered in mixed_precision_param"));
  EXPECT_THAT(refusal(on + section + "recipe = \"rowwise\"\n"),
              HasSubstr("unknown key [quantize.linear.float8] recipe"));
  EXPECT_THAT(refusal(on + section + "filter_fqns = [\"auto_filter_small_kn\"]\n"),
              HasSubstr("a rule of torchao that Phalanx does not have"));
  EXPECT_THAT(refusal(on + section + "filter_fqns = [\"\"]\n"), HasSubstr("has an empty name"));
  EXPECT_THAT(refusal("", {"--quantize.linear.mx.recipe_name=x"}), HasSubstr("unknown section [quantize.linear.mx]"));
  EXPECT_THAT(refusal("[quantize]\nbits = 8\n", {"--quantize.bits=8"}), HasSubstr("are the only ones"));
}

TEST(Float8Keys, ASectionOfFloat8WithoutTheConverterIsSaid) {
  EXPECT_THAT(notes_of("[quantize.linear.float8]\nfilter_fqns = [\"output\"]\n"),
              ElementsAre("[quantize.linear.float8] has no effect: [model] converters does not name "
                          "\"quantize.linear.float8\""));
  EXPECT_THAT(notes_of("", {"--quantize.linear.float8.recipe_name=rowwise"}), SizeIs(1));
}

}  // namespace
}  // namespace phalanx::config::float8_keys_test
