#include "phalanx/schedule/draw.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <vector>

#include "phalanx/base/testing/matchers.h"
#include "phalanx/base/testing/xml.h"
#include "phalanx/schedule/generators.h"
#include "phalanx/schedule/schedule_text.h"
#include "phalanx/schedule/transfers.h"

namespace phalanx::schedule {
namespace {

struct Box {
  double x, y, width, height;
};

// The box with this pass's tooltip; -1 everywhere if there is none.
Box box_of(const std::string& svg, const std::string& pass) {
  const std::size_t at = svg.find("<title>" + pass + ": ");
  const auto number = [&](const std::string& name) {
    const std::size_t found = at == std::string::npos ? at : svg.find(" " + name + "=\"", at);
    return found == std::string::npos ? -1.0 : std::stod(svg.substr(found + name.size() + 3, 20));
  };
  return {number("x"), number("y"), number("width"), number("height")};
}

TEST(Draw, BoxesStandWhereTheSimulationHasThem) {
  const Schedule schedule = make_schedule({.name = "1F1B", .ranks = 4, .micro_batches = 8});
  const std::string svg = to_svg(schedule, simulate(schedule));
  EXPECT_NO_THROW(parse_xml(svg));
  EXPECT_THAT(svg,
              AllOf(HasSubstr("<svg xmlns=\"http://www.w3.org/2000/svg\""), HasSubstr(">1F1B: 27.3 % bubble</text>"),
                    HasSubstr("4 ranks, 8 micro-batches, makespan 33"), HasSubstr(">Rank 3</text>"),
                    HasSubstr("F  forward"), HasSubstr("B  backward"), HasSubstr(">F0</text>"),
                    HasSubstr("<title>0F0: 0 to 1</title>"), HasSubstr("<title>0B7: 31 to 33</title>")));
  EXPECT_THAT(svg, AllOf(Not(HasSubstr("input half")), Not(HasSubstr("lighter"))));  // what does not occur
  const Box first = box_of(svg, "0F0"), second = box_of(svg, "0F1"), backward = box_of(svg, "0B0"),
            below = box_of(svg, "1F0"), last = box_of(svg, "0B7");
  EXPECT_NEAR(second.x, first.x + first.width, 0.02);
  EXPECT_NEAR(backward.width, 2 * first.width, 0.02);
  EXPECT_NEAR(backward.x, first.x + 10 * first.width, 0.1);
  EXPECT_EQ(below.x, second.x);  // starts when 0F0 has ended
  EXPECT_GT(below.y, first.y + first.height);
  EXPECT_NEAR(last.x + last.width, first.x + 33 * first.width, 0.2);
}

TEST(Draw, EverySchedulesPassesAreThere) {
  for (const std::string& name : schedule_names()) {
    const Schedule schedule = make_schedule({.name = name, .ranks = 4, .micro_batches = 8});
    const std::string svg = to_svg(schedule, simulate(schedule));
    EXPECT_NO_THROW(parse_xml(svg)) << name;
    for (int stage = 0; stage < schedule.stages(); ++stage) {
      for (int m = 0; m < 8; ++m) {
        EXPECT_GT(box_of(svg, std::to_string(stage) + "F" + std::to_string(m)).width, 16) << name;
      }
    }
    // Transfers take no space.
    EXPECT_EQ(to_svg(add_transfers(schedule), simulate(add_transfers(schedule))), svg);
  }
}

TEST(Draw, PartsOfAnOverlapShareTheirTime) {
  const Schedule schedule = make_schedule({.name = "DualPipeV", .ranks = 2, .micro_batches = 4});
  const std::string svg = to_svg(schedule, simulate(schedule));
  const Box forward = box_of(svg, "0F3"), backward = box_of(svg, "3B1"), alone = box_of(svg, "0F0");
  EXPECT_EQ(forward.x, backward.x);
  EXPECT_EQ(forward.width, backward.width);
  EXPECT_EQ(backward.y, forward.y + forward.height);
  EXPECT_EQ(forward.height, alone.height / 2);
  EXPECT_THAT(svg, AllOf(HasSubstr("lighter: the rank's last stage"), HasSubstr("2 ranks with 2 stages")));
}

TEST(Draw, StrangeNamesTimesAndSizes) {
  Schedule schedule = make_schedule({.name = "GPipe", .ranks = 2, .micro_batches = 2});
  schedule.name = "<a & \"b\">";
  const std::string svg = to_svg(schedule, simulate(schedule));
  EXPECT_THAT(svg, HasSubstr("&lt;a &amp; &quot;b&quot;&gt;: 33.3 % bubble"));
  EXPECT_NO_THROW(parse_xml(svg));

  const std::vector<PassTimes> strange = {
      {.forward = 0, .backward = 0}, {.forward = 1e-9, .backward = 1e-9}, {.forward = 1e9, .backward = 1}};
  for (const PassTimes& times : strange) {
    const std::string drawn = to_svg(schedule, simulate(schedule, {.common = times}));
    EXPECT_NO_THROW(parse_xml(drawn));
    EXPECT_THAT(drawn, AllOf(Not(HasSubstr("nan")), Not(HasSubstr("inf\""))));
    EXPECT_LT(drawn.size(), 20000U);
  }
  // Passes that take no time are neither drawn nor in the legend: a forward-only pipeline.
  const std::string forward = to_svg(schedule, simulate(schedule, {.common = {.forward = 1, .backward = 0}}));
  EXPECT_THAT(forward, AllOf(HasSubstr("<title>1F1: 2 to 3</title>"), HasSubstr("F  forward"), Not(HasSubstr(">B0<")),
                             Not(HasSubstr("<title>0B0")), Not(HasSubstr("backward")), Not(HasSubstr("live at most"))));
  // Many micro-batches: as wide as it may be, labels left out.
  const Schedule large = make_schedule({.name = "GPipe", .ranks = 2, .micro_batches = 2000});
  EXPECT_THAT(to_svg(large, simulate(large)), AllOf(Not(HasSubstr(">F7</text>")), HasSubstr("<title>1F1999: ")));
}

}  // namespace
}  // namespace phalanx::schedule
