#include "phalanx/base/env.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx {
namespace {

constexpr const char* kEnvName = "PHALANX_ENV_TEST";

class Env : public ::testing::Test {
 protected:
  void SetUp() override { unsetenv(kEnvName); }
  void TearDown() override { unsetenv(kEnvName); }
  static void set(const char* value) { setenv(kEnvName, value, 1); }
};

TEST_F(Env, UnsetAndEmptyAreAbsent) {
  EXPECT_EQ(env_int(kEnvName), std::nullopt);
  set("");
  EXPECT_EQ(env_string(kEnvName), std::nullopt);
  EXPECT_EQ(env_int(kEnvName), std::nullopt);
  EXPECT_EQ(env_double(kEnvName), std::nullopt);
  EXPECT_EQ(env_bool(kEnvName), std::nullopt);
  EXPECT_EQ(env_choice(kEnvName, {"a"}), std::nullopt);
}

TEST_F(Env, IntegersAreParsedWholeAndRangeChecked) {
  set("-12");
  EXPECT_EQ(env_int(kEnvName), -12);
  EXPECT_THAT([] { env_int(kEnvName, {.min = 0}); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr(kEnvName), HasSubstr("'-12'"), HasSubstr("at least 0"))));
  EXPECT_THAT([] { env_int(kEnvName, {.min = 1, .max = 9}); }, ThrowsMessage<ConfigError>(HasSubstr("from 1 to 9")));
  for (const char* bad : {"12x", "x", "1.5", " 1", "99999999999999999999"}) {
    set(bad);
    EXPECT_THROW(env_int(kEnvName), ConfigError) << bad;
  }
}

TEST_F(Env, NumbersAndFlags) {
  set("2.5e-3");
  EXPECT_DOUBLE_EQ(*env_double(kEnvName), 2.5e-3);
  set("2.5,");
  EXPECT_THROW(env_double(kEnvName), ConfigError);
  for (const char* yes : {"1", "true", "YES", "On"}) {
    set(yes);
    EXPECT_EQ(env_bool(kEnvName), true) << yes;
  }
  for (const char* no : {"0", "False", "no", "OFF"}) {
    set(no);
    EXPECT_EQ(env_bool(kEnvName), false) << no;
  }
  set("maybe");
  EXPECT_THROW(env_bool(kEnvName), ConfigError);
}

TEST_F(Env, ChoiceNamesTheNearest) {
  set("warm");
  EXPECT_THAT(
      [] {
        env_choice(kEnvName, {"debug", "warn"});
      },
      ThrowsMessage<ConfigError>(AllOf(HasSubstr("debug, warn"), HasSubstr("did you mean 'warn'?"))));
  set("debug");
  EXPECT_EQ(env_choice(kEnvName, {"debug", "warn"}), "debug");
}

TEST_F(Env, RequiredVariableThatIsMissing) {
  EXPECT_THAT([] { require_env_int(kEnvName, {}, "it is set by phalanx launch"); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("is not set"), HasSubstr("phalanx launch"))));
  set("7");
  EXPECT_EQ(require_env_int(kEnvName), 7);
  EXPECT_EQ(require_env_string(kEnvName), "7");
}

}  // namespace
}  // namespace phalanx
