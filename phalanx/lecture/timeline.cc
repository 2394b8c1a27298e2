#include "phalanx/lecture/timeline.h"

#include <fmt/format.h>

#include <algorithm>

namespace phalanx::lecture {
namespace {

double seconds_between(Timeline::Clock::time_point begin, Timeline::Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

}  // namespace

Timeline::Timeline(std::vector<std::string> lanes) : lanes_(std::move(lanes)), events_(lanes_.size()) {}

Timeline Timeline::of_ranks(int ranks) {
  std::vector<std::string> lanes;
  for (int rank = 0; rank < ranks; ++rank) lanes.push_back(fmt::format("rank {}", rank));
  return Timeline(std::move(lanes));
}

void Timeline::add(int lane, const std::string& what, const std::string& style, Clock::time_point begin,
                   Clock::time_point end) {
  events_[static_cast<std::size_t>(lane)].push_back({what, style, begin, end});
}

Timeline::Times Timeline::times() const {
  Clock::time_point begin = Clock::time_point::max(), end = Clock::time_point::min();
  for (const auto& lane : events_) {
    for (const Event& event : lane) begin = std::min(begin, event.begin), end = std::max(end, event.end);
  }
  return begin < end ? Times{begin, seconds_between(begin, end)} : Times{{}, 1};
}

void Timeline::show(Stage& stage, const std::string& title) const {
  constexpr int kLength = 48;
  const Times all = times();
  std::size_t width = 0;
  for (const std::string& lane : lanes_) width = std::max(width, lane.size());
  stage.print(title);
  for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
    std::string line(kLength, '.');
    for (const Event& event : events_[lane]) {
      const auto place = [&](Clock::time_point time) {
        return static_cast<std::size_t>(kLength * seconds_between(all.begin, time) / all.seconds);
      };
      const std::size_t begin = std::min<std::size_t>(place(event.begin), kLength - 1);
      const std::size_t end = std::clamp<std::size_t>(place(event.end), begin + 1, kLength);
      line.replace(begin, end - begin, std::string(end - begin, event.what.front()));
    }
    stage.print(fmt::format("  {:<{}} ~ |{}|", lanes_[lane], width, line));
  }
  stage.show({picture(title)});
}

Picture Timeline::picture(const std::string& title) const {
  constexpr double kWidth = 480, kNarrowest = 2;
  const auto [first, seconds] = times();
  std::vector<Lane> lanes;
  for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
    lanes.push_back({lanes_[lane], {}});
    for (const Event& event : events_[lane]) {
      const double begin = kWidth * seconds_between(first, event.begin) / seconds;
      const double end = kWidth * seconds_between(first, event.end) / seconds;
      lanes.back().spans.push_back({begin, std::max(end, begin + kNarrowest), event.what, event.style});
    }
  }
  return picture_of_spans(fmt::format("{}; {} ms in all", title, measured(seconds * 1e3)), lanes, 1);
}

}  // namespace phalanx::lecture
