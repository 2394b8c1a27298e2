// [training] dtype, and [optimizer] state_dtype, master_weights and stochastic_rounding.
#include <gtest/gtest.h>

#include "phalanx/config/testing/parse.h"
#include "phalanx/config/training_shape.h"

namespace phalanx::config::narrow_state_keys_test {
namespace {

std::string refusal_in_16_bits(std::vector<std::string> flags) {
  flags.insert(flags.end(), {"--training.dtype=bfloat16", "--training.mixed_precision_param=bfloat16"});
  return refusal("", flags);
}

TEST(NarrowStateKeys, AreReadAndPrinted) {
  const TrainConfig config = parse(
      "[training]\ndtype = \"bfloat16\"\nmixed_precision_param = \"bfloat16\"\n"
      "[optimizer]\nstate_dtype = \"bfloat16\"\nmaster_weights = false\nstochastic_rounding = false\n");
  for (const TrainConfig& one : {config, parse(print_config(config))}) {
    EXPECT_EQ(one.training.dtype, "bfloat16");
    EXPECT_EQ(one.optimizer.state_dtype, "bfloat16");
    EXPECT_FALSE(one.optimizer.master_weights || one.optimizer.stochastic_rounding);
  }
  EXPECT_EQ(parse("").training.dtype, "float32");
  EXPECT_TRUE(parse("").optimizer.master_weights);
}

TEST(NarrowStateKeys, SayWhatTheyDoNotGoTogetherWith) {
  EXPECT_THAT(refusal("", {"--optimizer.state_dtype=int8"}),
              HasSubstr("[optimizer] state_dtype is int8: expected one of \"float32\", \"bfloat16\""));
  EXPECT_THAT(refusal("", {"--training.dtype=float16"}), HasSubstr("expected one of \"float32\", \"bfloat16\""));
  EXPECT_THAT(
      refusal("", {"--training.dtype=bfloat16"}),
      HasSubstr("dtype is \"bfloat16\", but mixed_precision_param is \"float32\": weights are used in the type in "
                "which they are kept; set mixed_precision_param = \"bfloat16\""));
  EXPECT_THAT(refusal("", {"--optimizer.no-master_weights"}),
              HasSubstr("[optimizer] master_weights is false, but [training] dtype is \"float32\""));
  for (const char* name : {"Muon", "Lion", "SGD"}) {
    const std::string key = fmt::format("--optimizer.name={}", name);
    EXPECT_THAT(
        refusal("", {key, "--optimizer.state_dtype=bfloat16"}),
        HasSubstr(fmt::format("[optimizer] state_dtype is \"bfloat16\", but [optimizer] name is \"{}\"", name)));
    EXPECT_THAT(refusal_in_16_bits({key}),
                HasSubstr(fmt::format("[training] dtype is \"bfloat16\", but [optimizer] name is \"{}\"", name)));
  }
  EXPECT_THAT(refusal_in_16_bits({"--ema.decay=0.9"}), HasSubstr("but [ema] decay is 0.9: an average is kept"));
  EXPECT_THAT(refusal_in_16_bits({"--lora.rank=4"}),
              HasSubstr("but [lora] rank is 4: adapters are trained in float32"));
  EXPECT_THAT(refusal_in_16_bits({"--dpo.preferences=pairs.jsonl", "--training.dataset_path="}),
              HasSubstr("but [dpo] tunes on preferences"));
  EXPECT_THAT(refusal_in_16_bits({"--training.enable_cpu_offload", "--parallelism.data_parallel_shard_degree=2"}),
              HasSubstr("but enable_cpu_offload is true: offloaded weights are kept in float32"));
  EXPECT_THAT(refusal_in_16_bits({"--model.converters=quantize.linear.float8"}),
              HasSubstr("but [model] converters asks for float8"));
  EXPECT_EQ(parse("", {"--training.dtype=bfloat16", "--training.mixed_precision_param=bfloat16"}).training.dtype,
            "bfloat16");
}

TEST(NarrowStateKeys, TheStateIsCounted) {
  const auto shape = [](std::vector<std::string> flags) {
    return shape_without_layout(parse("[model]\nflavor = \"debug\"\n", flags));
  };
  const plan::TrainingShape wide = shape({});
  EXPECT_EQ(std::tuple(wide.weight_bytes, wide.narrow_copies, wide.has_masters()), std::tuple(4, 0, false));
  const std::vector<std::string> narrow = {"--training.dtype=bfloat16", "--training.mixed_precision_param=bfloat16"};
  EXPECT_EQ(shape(narrow).weight_bytes, 2);
  EXPECT_EQ(shape(narrow).gather_bytes, 2);
  EXPECT_TRUE(shape(narrow).has_masters());
  EXPECT_EQ(optimizer_copies(parse("", narrow)).bytes(false), 12);
  std::vector<std::string> all = narrow;
  all.insert(all.end(), {"--optimizer.no-master_weights", "--optimizer.state_dtype=bfloat16"});
  EXPECT_EQ(std::tuple(shape(all).weight_bytes, shape(all).narrow_copies, shape(all).has_masters()),
            std::tuple(2, 2, false));
  EXPECT_EQ(optimizer_copies(parse("", all)).bytes(false), 4);
  EXPECT_EQ(optimizer_copies(parse("", {"--optimizer.state_dtype=bfloat16", "--ema.decay=0.9"})).bytes(false), 8);
}

}  // namespace
}  // namespace phalanx::config::narrow_state_keys_test
