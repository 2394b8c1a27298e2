#include "cli/parse_options.h"

#include <gtest/gtest.h>

#include <functional>

#include "cli/train_arguments.h"
#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx::cli {
namespace {

struct Parsed {
  std::string text, ranks;
  std::vector<std::string> inputs, layouts;
  std::int64_t steps = 3;
  double rate = 0;
  bool all = false, quiet = false;
  Arguments rest;
};

Parsed parse(
    const Arguments& arguments, const std::function<void(CLI::App&)>& set_up = [](CLI::App&) {}) {
  Parsed parsed;
  CLI::App app;
  set_up(app);
  if (!app.get_allow_extras() && !app.get_prefix_command()) app.add_option("inputs", parsed.inputs);
  app.add_option("--json-file", parsed.text);
  app.add_option("--steps", parsed.steps);
  app.add_option("--rate", parsed.rate);
  app.add_flag("--all", parsed.all)->disable_flag_override();
  app.add_flag("-q,--quiet", parsed.quiet);
  add_repeated_option(app, "-l,--layout", parsed.layouts);
  add_ranks_option(app, parsed.ranks);
  parsed.rest = parse_options(app, arguments);
  return parsed;
}

std::string refusal(
    const Arguments& arguments, const std::function<void(CLI::App&)>& set_up = [](CLI::App&) {}) {
  return error_text<UsageError>([&] { parse(arguments, set_up); });
}

void keeps_keys(CLI::App& app) { app.allow_extras(); }
void starts_program(CLI::App& app) { app.prefix_command(); }

TEST(ParseOptionsTest, AValueMayFollowItsOptionInEveryWay) {
  for (const Arguments& words : std::vector<Arguments>{
           {"-n", "4"}, {"-n4"}, {"-n=4"}, {"--nproc-per-node=4"}, {"--nproc_per_node", "4"}, {"-qn", "4"}}) {
    EXPECT_EQ(parse(words).ranks, "4") << words[0];
  }
  for (const char* text : {"", "--all", "--", "-q", "[a,b]", "x=y"}) {
    EXPECT_EQ(parse({"--json-file", text, "--steps", "5"}).text, text);
    const Parsed joined = parse({std::string("--json_file=") + text, "--steps", "5"});
    EXPECT_EQ(joined.text, text);
    EXPECT_EQ(joined.steps, 5);
  }
}

TEST(ParseOptionsTest, ARepeatedOptionTakesOneValueEachTime) {
  const Parsed parsed = parse({"--layout", "tp=2", "a", "-l", "[x]", "b", "--", "--all", "-l"});
  EXPECT_THAT(parsed.layouts, ElementsAre("tp=2", "[x]"));
  EXPECT_THAT(parsed.inputs, ElementsAre("a", "b", "--all", "-l"));
  EXPECT_FALSE(parsed.all);
  EXPECT_THAT(parse({"-5", "-"}).inputs, ElementsAre("-5", "-"));
}

TEST(ParseOptionsTest, WhatIsWrongIsNamed) {
  EXPECT_EQ(refusal({"--stepps", "3"}), "unknown option '--stepps' (did you mean '--steps'?)");
  EXPECT_EQ(refusal({"--json-file", "-x", "-y"}), "unknown option '-y'");
  EXPECT_EQ(refusal({"a", "--steps"}), "--steps needs a value");
  EXPECT_EQ(refusal({"--steps=", "3"}), "--steps needs a value");
  EXPECT_EQ(refusal({"-n", ""}), "-n needs a value");
  EXPECT_EQ(refusal({"--steps", "many"}), "--steps is 'many': expected a whole number");
  EXPECT_EQ(refusal({"--steps", "1.5"}), "--steps is '1.5': expected a whole number");
  EXPECT_EQ(refusal({"--steps", "99999999999999999999"}), "--steps is '99999999999999999999': the number is too large");
  EXPECT_EQ(refusal({"--rate", "fast"}), "--rate is 'fast': expected a number");
  EXPECT_EQ(refusal({"--steps", "1", "--steps=2"}), "--steps is given twice: expected it once");
  EXPECT_EQ(refusal({"-n2", "--nproc_per_node", "3"}), "--nproc_per_node is given twice: expected it once");
  EXPECT_EQ(refusal({"--all=true"}), "--all takes no value");
  EXPECT_EQ(error_text<UsageError>([] { require_range("--steps", 0, 1); }), "--steps is 0: expected 1 or more");
  EXPECT_EQ(error_text<UsageError>([] { require_range("--ranks", 9, 1, 8); }), "--ranks is 9: expected 1 to 8");
}

TEST(ParseOptionsTest, ConfigurationKeysStayWithTheirValues) {
  const Parsed parsed = parse({"--training.steps", "5", "-n4", "a.toml", "--metrics.sample_prompt", "-name",
                               "--optimizer.lr", "-1", "--steps", "2", "--checkpoint.no-enable", "--all"},
                              keeps_keys);
  EXPECT_THAT(parsed.rest, ElementsAre("--training.steps", "5", "a.toml", "--metrics.sample_prompt", "-name",
                                       "--optimizer.lr", "-1", "--checkpoint.no-enable"));
  EXPECT_EQ(parsed.ranks, "4");
  EXPECT_EQ(parsed.steps, 2);
  EXPECT_TRUE(parsed.all);
  EXPECT_THAT(parse({"--like", "torchtitan", "--", "-n", "4"}, keeps_keys).rest,
              ElementsAre("--like", "torchtitan", "--", "-n", "4"));
  EXPECT_EQ(refusal({"a.toml", "--step", "2"}, keeps_keys), "unknown option '--step' (did you mean '--steps'?)");
}

TEST(ParseOptionsTest, AnOptionIsNoValueOfABooleanKeyHoweverItIsWritten) {
  for (const Arguments& option : std::vector<Arguments>{
           {"--nproc_per_node", "2"}, {"--nproc-per-node", "2"}, {"--nproc_per_node=2"}, {"-n", "2"}, {"-n2"}}) {
    for (const char* key : {"--checkpoint.enable", "--checkpoint.no-enable", "--checkpoint.no_enable"}) {
      Arguments words{"a.toml", key};
      words.insert(words.end(), option.begin(), option.end());
      const Parsed parsed = parse(words, keeps_keys);
      EXPECT_EQ(parsed.ranks, "2") << key << " " << option[0];
      EXPECT_THAT(parsed.rest, ElementsAre("a.toml", key)) << option[0];
    }
  }
  EXPECT_THAT(parse({"--checkpoint.enable", "false", "-q"}, keeps_keys).rest,
              ElementsAre("--checkpoint.enable", "false"));
  EXPECT_EQ(refusal({"--checkpoint.enable", "--nproc_per_nod", "2"}, keeps_keys),
            "unknown option '--nproc_per_nod' (did you mean '--nproc-per-node'?)");
}

TEST(ParseOptionsTest, OnlyAnOptionsNameIsNoValueOfAnotherKey) {
  for (const char* value : {"-1", "-1e-3", "-name", "--nproc"}) {
    const Parsed parsed = parse({"--optimizer.lr", value, "--nproc_per_node", "2"}, keeps_keys);
    EXPECT_THAT(parsed.rest, ElementsAre("--optimizer.lr", value));
    EXPECT_EQ(parsed.ranks, "2") << value;
  }
  for (const char* name : {"--nproc_per_node", "--nproc-per-node"}) {
    const Parsed parsed = parse({"--training.steps", name, "2"}, keeps_keys);
    EXPECT_THAT(parsed.rest, ElementsAre("--training.steps"));
    EXPECT_EQ(parsed.ranks, "2");
  }
}

TEST(ParseOptionsTest, ASubcommandReadsTheWordsAfterItsName) {
  CLI::App app;
  std::vector<std::string> paths;
  app.add_subcommand("look")->alias("see")->add_option("paths", paths);
  app.add_subcommand("listen");
  for (const char* name : {"look", "see"}) {
    Arguments words{name, "listen", "look"};  // folders may have the names of subcommands
    CLI::App& look = take_subcommand(app, words);
    EXPECT_EQ(look.get_name(), "look");
    parse_options(look, words);
    EXPECT_THAT(paths, ElementsAre("listen", "look"));
  }
  const auto wrong = [&](Arguments words) { return error_text<UsageError>([&] { take_subcommand(app, words); }); };
  EXPECT_EQ(wrong({"lisen"}), "unknown subcommand 'lisen' (did you mean 'listen'?): expected look, listen");
  EXPECT_EQ(wrong({}), "expected a subcommand: look, listen");
}

TEST(ParseOptionsTest, AProgramBeginsAtTheFirstWordThatIsNoOption) {
  const Parsed parsed = parse({"--steps", "2", "prog", "--steps", "3", "--"}, starts_program);
  EXPECT_EQ(parsed.steps, 2);
  EXPECT_THAT(parsed.rest, ElementsAre("prog", "--steps", "3", "--"));
  EXPECT_THAT(parse({"--", "-n", "4"}, starts_program).rest, ElementsAre("-n", "4"));
  EXPECT_THROW(parse({"--help", "prog"}, starts_program), CLI::CallForHelp);
  EXPECT_EQ(refusal({"--help"}), "unknown option '--help'");
}

TEST(TrainArgumentsTest, TheConfigurationIsFoundAmongOverrides) {
  for (const Arguments& words : std::vector<Arguments>{{"run.toml", "-n", "2", "--training.steps", "9"},
                                                       {"-n2", "--training.steps", "9", "run.toml"},
                                                       {"--nproc_per_node=2", "--training.steps", "9", "run.toml"}}) {
    const TrainArguments parsed = parse_train_arguments(words);
    EXPECT_EQ(parsed.config, "run.toml");
    EXPECT_EQ(parsed.ranks, "2");
    EXPECT_THAT(parsed.overrides, ElementsAre("--training.steps", "9"));
    EXPECT_FALSE(parsed.print_config);
  }
  EXPECT_TRUE(parse_train_arguments({"--print-config", "run"}).print_config);
  const auto refused = [](const Arguments& words) {
    return error_text<UsageError>([&] { parse_train_arguments(words); });
  };
  EXPECT_EQ(refused({}), "expected a configuration file: phalanx train CONFIG.toml");
  EXPECT_EQ(refused({"run.toml", "-n"}), "-n needs a value");
  EXPECT_EQ(refused({"run.toml", "-n", "2", "-n", "3"}), "-n is given twice: expected it once");
  EXPECT_EQ(refused({"run.toml", "--print-confg"}), "unknown option '--print-confg' (did you mean '--print-config'?)");
  EXPECT_EQ(refused({"run.toml", "--print_config=yes"}), "--print_config takes no value");
  EXPECT_THAT(refused({"--print-config-reference", "x"}), HasSubstr("unexpected argument 'x'"));
}

}  // namespace
}  // namespace phalanx::cli
