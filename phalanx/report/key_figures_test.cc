#include "phalanx/report/key_figures.h"

#include <gtest/gtest.h>

#include "phalanx/base/testing/matchers.h"

namespace phalanx::report {
namespace {

TEST(KeyFigures, NumbersBeyondAllMeasureStayShort) {
  RunFolder run;
  run.run = {{"steps", 1e300}, {"parameters", -1e200}, {"unigram_entropy", 1e20}};
  run.metrics.steps = {1};
  run.metrics.curves.resize(curve_keys().size());
  run.metrics.curves[0].add(1, 1e300);
  for (std::size_t key = 6; key < 8; ++key) run.metrics.curves[key].add(1, 1e30);  // seconds, tokens
  run.metrics.validation_loss.add(1, 900);
  const NamedValues figures = key_figures(run);
  EXPECT_THAT(figures, Contains(Pair("steps", "1 of 1e+300")));
  EXPECT_THAT(figures, Contains(Pair("parameters", "-1e+200")));
  EXPECT_THAT(figures, Contains(Pair("training loss, nats per token", "1e+300")));
  EXPECT_THAT(figures, Contains(Pair("validation perplexity, no unit", "not finite")));
  EXPECT_THAT(figures, Contains(Pair("tokens", "1e+30")));
  EXPECT_THAT(figures, Contains(Pair("time in steps", "1e+30 s")));
  for (const auto& [name, value] : figures) EXPECT_LT(value.size(), 20U) << name;
}

TEST(KeyFigures, ALossOfPairsHasNoPerplexity) {
  RunFolder run;
  run.run = {{"loss_unit", kNatsPerPair}};
  run.metrics.curves.resize(curve_keys().size());
  run.metrics.steps = {1};
  run.metrics.curves[0].add(1, 0.7);
  run.metrics.validation_loss.add(1, 0.5);
  const NamedValues figures = key_figures(run);
  EXPECT_THAT(figures, Contains(Pair("training loss, nats per pair", "0.7000")));
  EXPECT_THAT(figures, Contains(Pair("validation loss, nats per pair", "0.5000")));
  for (const auto& [name, value] : figures) EXPECT_THAT(name, Not(HasSubstr("perplexity")));
}

TEST(KeyFigures, AreThoseThatTheFilesTell) {
  RunFolder run;
  run.run = nlohmann::json::object();
  EXPECT_THAT(key_figures(run), IsEmpty());
}

TEST(UtcText, IsEmptyForTimesThatNoCalendarHas) {
  EXPECT_EQ(utc_text(1764093600.9), "2025-11-25 18:00:00 UTC");
  for (const double time : {0.0, -1.0, 1e300}) EXPECT_EQ(utc_text(time), "");
}

}  // namespace
}  // namespace phalanx::report
