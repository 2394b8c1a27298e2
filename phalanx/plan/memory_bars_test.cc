#include "phalanx/plan/memory_bars.h"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "phalanx/base/testing/matchers.h"
#include "phalanx/base/testing/xml.h"

namespace phalanx::plan {
namespace {

constexpr std::int64_t kGibibyte = std::int64_t{1} << 30;

Candidate candidate(const ParallelPlan& parallel, std::array<std::int64_t, observe::kMemoryCategories> bytes,
                    std::int64_t available) {
  Candidate one{.layout = {.parallel = parallel}, .available = available};
  one.memory.peak.bytes = bytes;
  one.memory.runtime = kGibibyte / 2;
  one.comm_volume.intra_node = 3 * kGibibyte;
  return one;
}

std::vector<std::string> texts_of(const XmlElement& svg) {
  std::vector<std::string> texts;
  for (const XmlElement* text : elements_of(svg, "text")) {
    std::string whole = text->text;
    for (const XmlElement& part : text->children) whole += "[" + part.text + "]";
    texts.push_back(whole);
  }
  return texts;
}

struct Box {
  std::string category;
  double x, width;
  double bytes;
};

/// The boxes of the bars, in document order, from their tooltips "parameters: 1.00 GiB (1073741824 bytes)".
std::vector<Box> boxes_of(const XmlElement& svg) {
  std::vector<Box> boxes;
  for (const XmlElement* group : elements_of(svg, "g")) {
    if (group->children.size() < 2 || group->children[1].name != "rect") continue;
    const std::string& title = group->children[0].text;
    const XmlElement& box = group->children[1];
    boxes.push_back({title.substr(0, title.find(':')), box.number("x"), box.number("width"),
                     std::stod(title.substr(title.find('(') + 1))});
  }
  return boxes;
}

const std::vector<Candidate> kTwo = {
    candidate({.dp_replicate = 4}, {4 * kGibibyte, 4 * kGibibyte, 8 * kGibibyte, 3 * kGibibyte, 0}, 16 * kGibibyte),
    candidate({.dp_shard = 4, .zero_stage = 3}, {kGibibyte, kGibibyte, 2 * kGibibyte, 3 * kGibibyte, kGibibyte / 50},
              16 * kGibibyte)};

TEST(MemoryBars, WidthsAreProportionalToBytes) {
  const XmlElement svg = parse_xml(memory_bars(kTwo, {.title = "t"}));
  const std::vector<Box> boxes = boxes_of(svg);
  ASSERT_THAT(boxes, SizeIs(5 + 6));  // what has no bytes has no box
  const double scale = boxes[0].width / boxes[0].bytes;
  double right = boxes[0].x;
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    if (i == 5) right = boxes[0].x;  // the second bar
    EXPECT_NEAR(boxes[i].width, boxes[i].bytes * scale, 0.002) << i;
    EXPECT_NEAR(boxes[i].x, right, 0.002) << i;  // one after the other, without gap
    right = boxes[i].x + boxes[i].width;
  }
  EXPECT_EQ(boxes[2].category, "optimizer");
  EXPECT_EQ(boxes[2].bytes, static_cast<double>(8 * kGibibyte));
  EXPECT_EQ(boxes[9].category, "buffers");
  EXPECT_EQ(boxes[10].category, "beside tensors");
  // The line of the device's memory is drawn to the same scale, across each of the bars.
  int lines = 0;
  for (const XmlElement* path : elements_of(svg, "path")) {
    const auto width = path->attributes.find("stroke-width");
    if (width == path->attributes.end() || width->second != "2.5") continue;
    const double at = std::stod(path->attributes.at("d").substr(1));
    if (++lines > 2) continue;
    EXPECT_NEAR(at, boxes[0].x + 16.0 * kGibibyte * scale, 0.01);
  }
  EXPECT_EQ(lines, 3);  // and in the legend
}

TEST(MemoryBars, SaysItInWordsToo) {
  const XmlElement svg =
      parse_xml(memory_bars(kTwo, {.title = "5M on 4 x <A> & \"B\"", .detail = "float32", .headroom = 0.05}));
  EXPECT_THAT(
      texts_of(svg),
      AllOf(Contains("5M on 4 x <A> & \"B\""), Contains("float32"),
            Contains("[data parallelism][dp_replicate=4,batch=1]"), Contains("[ZeRO-3][dp_shard=4,zero=3,batch=1]"),
            Contains("19.5 GiB of 16.0 GiB, 3.50 GiB too much"), Contains("7.52 GiB of 16.0 GiB, fits"),
            Contains("P 4.00 GiB + G 4.00 GiB + O 8.00 GiB + A 3.00 GiB + R 512 MiB"),
            Contains("P 1.00 GiB + G 1.00 GiB + O 2.00 GiB + A 3.00 GiB + B 20.5 MiB + R 512 MiB"),
            Contains("sends 3.00 GiB a step"), Contains(" parameters[P]"), Contains(" beside tensors[R]"),
            Contains("what the device has, less 5 % that stay free"), Contains("0 GiB"), Contains("2")));
  // Letters are in the boxes that are wide enough for them: all except the buffers of 20 MiB.
  std::map<std::string, int> letters;
  for (const std::string& text : texts_of(svg)) ++letters[text];
  EXPECT_EQ(letters["P"], 2);
  EXPECT_EQ(letters["R"], 2);
  EXPECT_EQ(letters["B"], 0);
}

TEST(MemoryBars, NeighboursDifferWithoutColour) {
  const XmlElement svg = parse_xml(memory_bars(kTwo, {.title = "t"}));
  std::vector<std::string> fills;
  for (const XmlElement* box : elements_of(svg, "rect")) {
    if (box->attributes.contains("x")) fills.push_back(box->attributes.at("fill"));
  }
  ASSERT_THAT(fills, SizeIs(11));
  std::vector<std::string> patterns;
  for (const XmlElement* pattern : elements_of(svg, "pattern")) {
    patterns.push_back("url(#" + pattern->attributes.at("id") + ")");
  }
  for (const std::size_t i : {1, 2, 4, 6, 7, 9, 10}) EXPECT_THAT(patterns, Contains(fills[i])) << i;
}

TEST(MemoryBars, ALineFarAwayIsToldInsteadOfDrawn) {
  std::vector<Candidate> small = kTwo;
  for (Candidate& one : small) one.available = 80 * kGibibyte;
  const XmlElement svg = parse_xml(memory_bars(small, {.title = "t"}));
  EXPECT_THAT(texts_of(svg), Contains("what the device has; it is further right than this picture goes"));
  const std::vector<Box> boxes = boxes_of(svg);
  EXPECT_NEAR(boxes[4].x + boxes[4].width, 895, 2);  // the longest bar takes the whole width
}

TEST(MemoryBars, LongNamesHaveRoom) {
  Candidate one = kTwo[0];
  EXPECT_EQ(parse_xml(memory_bars({one}, {.title = "t"})).number("width"), 920);
  one.layout.parallel = {.pp = 4, .dp_replicate = 16, .tp = 8, .sequence_parallel = false};
  one.layout.schedule = "InterleavedZeroBubble";
  one.layout.recompute_every = 1;
  const double characters = 31 + 76 + 38;  // of the kind, the layout and what is too much
  EXPECT_GT(parse_xml(memory_bars({one}, {.title = "t"})).number("width"), 7 * characters);
  EXPECT_GT(parse_xml(memory_bars({one}, {.title = std::string(200, 'm')})).number("width"), 2000);
}

TEST(MemoryBars, OfAnySize) {
  for (const std::int64_t bytes : {std::int64_t{1}, std::int64_t{700}, std::int64_t{5} << 20, std::int64_t{3} << 50}) {
    Candidate one = candidate({}, {bytes, 0, 0, 0, 0}, bytes);
    one.memory.runtime = 0;
    const std::string svg = memory_bars({one}, {.title = "t"});
    ASSERT_THAT(boxes_of(parse_xml(svg)), SizeIs(1));
    EXPECT_THAT(svg, AllOf(Not(HasSubstr("nan")), Not(HasSubstr("inf"))));
    EXPECT_LT(svg.size(), 6000U);
  }
}

}  // namespace
}  // namespace phalanx::plan
