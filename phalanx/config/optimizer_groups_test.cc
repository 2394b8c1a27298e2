#include "phalanx/config/optimizer_groups.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "phalanx/config/testing/parse.h"

namespace phalanx::config::optimizer_groups_test {
namespace {

/// The error of a single table with these lines.
std::string refusal_of(const std::string& lines) { return refusal("[[optimizer.groups]]\n" + lines); }

constexpr std::string_view kTwo = R"(
[optimizer]
lr = 0.001
[[optimizer.groups]]
params = ["*norm*", "*.bias"]
weight_decay = 0
[[optimizer.groups]]
params = ["tok_embeddings.weight"]
lr_factor = 0.25
)";

TEST(OptimizerGroups, AreTablesOfPatternsAndWhatTheyAreGiven) {
  const TrainConfig config = parse(kTwo);
  EXPECT_EQ(config.optimizer.lr, 0.001);
  const OptimizerGroups expected = {{.params = {"*norm*", "*.bias"}, .weight_decay = 0},
                                    {.params = {"tok_embeddings.weight"}, .lr_factor = 0.25}};
  EXPECT_EQ(config.optimizer.groups, expected);
  EXPECT_EQ(parse(print_config(config)).optimizer.groups, expected);
  EXPECT_EQ(parse(kTwo, {"--optimizer.groups", R"([{params = ["a"], lr_factor = 2}])"}).optimizer.groups,
            (OptimizerGroups{{.params = {"a"}, .lr_factor = 2}}));
  EXPECT_THAT(parse(kTwo, {"--optimizer.groups=[]"}).optimizer.groups, IsEmpty());
  EXPECT_EQ(nlohmann::json(expected[0]).dump(), R"({"lr_factor":1.0,"params":["*norm*","*.bias"],"weight_decay":0.0})");
}

TEST(OptimizerGroups, SayWhatIsWrongWithThem) {
  EXPECT_THAT(refusal_of("lr_factor = 2\n"),
              HasSubstr("run.toml:1: [optimizer] groups, group 1: params is no list of patterns"));
  EXPECT_THAT(refusal_of("params = []\nlr_factor = 2\n"), HasSubstr("params is no list of patterns"));
  EXPECT_THAT(refusal_of("params = [\"a\", 1]\nlr_factor = 2\n"), HasSubstr("params is no list of patterns"));
  EXPECT_THAT(refusal_of("params = [\"a\"]\n"), HasSubstr("sets nothing: expected lr_factor, weight_decay or both"));
  EXPECT_THAT(refusal_of("params = [\"a\"]\nlr_factor = 0\n"),
              HasSubstr("lr_factor is 0: expected a number above 0; [training] frozen names what is not trained"));
  EXPECT_THAT(refusal_of("params = [\"a\"]\nlr_factor = \"2\"\n"), HasSubstr("lr_factor is no finite number"));
  EXPECT_THAT(refusal_of("params = [\"a\"]\nweight_decay = -1\n"), HasSubstr("weight_decay is -1: expected 0"));
  EXPECT_THAT(refusal_of("params = [\"a\"]\nweight_decay = inf\n"), HasSubstr("weight_decay is no finite number"));
  EXPECT_THAT(refusal_of("params = [\"a\"]\nlr_facto = 2\n"),
              HasSubstr("unknown key lr_facto (did you mean 'lr_factor'?)"));
  EXPECT_THAT(refusal("[optimizer]\ngroups = 3\n"), HasSubstr("expected a list of tables, each with params"));
  EXPECT_THAT(refusal("[optimizer]\ngroups = [3]\n"), HasSubstr("expected a table with params, found another value"));
  EXPECT_THAT(refusal("", {"--optimizer.groups=norm"}), HasSubstr("--optimizer.groups"));
}

}  // namespace
}  // namespace phalanx::config::optimizer_groups_test
