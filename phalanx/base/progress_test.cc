#include "phalanx/base/progress.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>
#include <thread>
#include <vector>

#include "phalanx/base/testing/matchers.h"

namespace phalanx {
namespace {

class Progress : public ::testing::Test {
 protected:
  ProgressOptions options(ProgressStyle style, ProgressUnit unit = ProgressUnit::items) {
    return {.unit = unit, .style = style, .out = &out_, .clock = [this] { return now_; }, .columns = 80};
  }
  std::vector<std::string> lines() const {
    std::istringstream text(out_.str());
    std::vector<std::string> result;
    for (std::string line; std::getline(text, line);) result.push_back(line);
    return result;
  }

  std::ostringstream out_;
  double now_ = 100.0;
};

TEST_F(Progress, LinesAppearAtTenthsAndNotTooOften) {
  ProgressBar bar("work", 640, options(ProgressStyle::lines));
  for (int i = 0; i < 640; ++i) {
    now_ += 1.0 / 64;  // ten seconds in all: a tenth each second, so every second tenth gets a line
    bar.advance();
  }
  bar.finish();
  EXPECT_THAT(lines(), ElementsAre("work: 20% (128 of 640), 64/s, ETA 8.00 s", HasSubstr("work: 40%"),
                                   HasSubstr("work: 60%"), HasSubstr("work: 80%"), "work: 640 in 10.0 s, 64/s"));
}

TEST_F(Progress, SlowWorkStillGivesASignOfLife) {
  ProgressBar bar("work", 1000, options(ProgressStyle::lines, ProgressUnit::steps));
  now_ += 31;
  bar.advance();
  EXPECT_THAT(lines(), ElementsAre("work: 0% (1 steps of 1,000 steps), 31.0 s each, ETA 8h 36m"));
}

TEST_F(Progress, BarRedrawsAtMostTenTimesASecondAndFitsTheTerminal) {
  ProgressBar bar("tokenizing", 2 << 20, options(ProgressStyle::bar, ProgressUnit::bytes));
  for (int i = 0; i < 1024; ++i) {
    now_ += 1.0 / 1024;
    bar.advance(1 << 10);
  }
  std::string text = out_.str();
  const auto redraws = std::count(text.begin(), text.end(), '\r');
  EXPECT_GE(redraws, 9);
  EXPECT_LE(redraws, 11);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 0);
  now_ += 0.1;
  bar.set_postfix("loss 3.12");
  bar.advance(0);
  text = out_.str();
  const std::string last = text.substr(text.rfind('\r') + 1);
  EXPECT_THAT(last, AllOf(HasSubstr("tokenizing  50% [###"), HasSubstr("]  1.00 MiB of 2.00 MiB"),
                          HasSubstr("953 kB/s"), HasSubstr("ETA 1.10 s"), HasSubstr("loss 3.12")));
  EXPECT_LT(last.size() - std::string("\x1b[K").size(), 80u);
}

TEST_F(Progress, NarrowTerminalCutsTheLine) {
  ProgressOptions narrow = options(ProgressStyle::bar);
  narrow.columns = 20;
  ProgressBar bar("a rather long title", 10, narrow);
  const std::string text = out_.str();
  EXPECT_LE(text.size(), std::string("\r\x1b[K").size() + 19);
}

TEST_F(Progress, NarrowTerminalsLeaveOutWholeFiguresTheLeastWantedFirst) {
  const auto drawn = [&](int columns) {
    out_.str("");
    ProgressOptions options = this->options(ProgressStyle::bar, ProgressUnit::steps);
    options.columns = columns;
    now_ = 100;
    ProgressBar bar("training", 10'000, options);
    now_ += 100;
    bar.set_postfix("loss 8.3123");
    bar.set(300);
    const std::string text = out_.str();
    const std::size_t begin = text.rfind('\r') + 1;
    return text.substr(begin, text.rfind("\x1b[K") - begin);
  };
  EXPECT_EQ(drawn(40), "training   3%  ETA 53m 53s  loss 8.3123");
  EXPECT_EQ(drawn(30), "training   3%  ETA 53m 53s");
  EXPECT_EQ(drawn(20), "training   3%");
  EXPECT_EQ(drawn(70), "training   3%  300 steps of 10,000 steps  ETA 53m 53s  loss 8.3123");
  EXPECT_EQ(drawn(90), "training   3% [            ]  300 steps of 10,000 steps  3.00/s  ETA 53m 53s  loss 8.3123");
}

TEST_F(Progress, LinesAboveTheBarDoNotTearIt) {
  ProgressBar bar("work", 10, options(ProgressStyle::bar));
  bar.print_line("step: 1");
  EXPECT_THAT(out_.str(), HasSubstr("\r\x1b[Kstep: 1\n\rwork   0%"));
  now_ += 2;
  bar.set(10);
  bar.finish();
  bar.finish();
  EXPECT_THAT(out_.str(), EndsWith("\r\x1b[Kwork: 10 in 2.00 s, 5.00/s\n"));
}

TEST_F(Progress, ResumedWorkDoesNotInflateTheRate) {
  ProgressOptions resumed = options(ProgressStyle::lines);
  resumed.start = 900;
  ProgressBar bar("work", 1000, resumed);
  now_ += 50;
  bar.set(950);
  EXPECT_THAT(lines(), ElementsAre("work: 95% (950 of 1,000), 1.00/s, ETA 50.0 s"));
}

TEST_F(Progress, UnknownTotalHasNoPercentage) {
  ProgressBar bar("reading", 0, options(ProgressStyle::lines, ProgressUnit::bytes));
  now_ += 40;
  bar.advance(1 << 20);
  EXPECT_THAT(out_.str(), AllOf(HasSubstr("reading: 1.00 MiB, 26.2 kB/s"), Not(HasSubstr("%")), Not(HasSubstr("ETA"))));
}

TEST_F(Progress, SilentWritesNothingAndAnAbandonedBarEndsItsLine) {
  {
    ProgressBar silent("x", 10, options(ProgressStyle::silent));
    silent.advance(10);
    silent.finish();
  }
  EXPECT_EQ(out_.str(), "");
  { ProgressBar abandoned("x", 10, options(ProgressStyle::bar)); }
  EXPECT_THAT(out_.str(), EndsWith("\n"));
}

TEST(ProgressThreads, CountsEveryAdvance) {
  std::ostringstream out;
  ProgressBar bar("x", 40'000, {.style = ProgressStyle::lines, .out = &out});
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&bar] {
      for (int i = 0; i < 10'000; ++i) bar.advance();
    });
  }
  for (std::thread& thread : threads) thread.join();
  bar.finish();
  EXPECT_THAT(out.str(), HasSubstr("x: 40,000 in "));
}

}  // namespace
}  // namespace phalanx
