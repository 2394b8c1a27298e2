// Timeline: when what happened, on lanes below each other, as it was measured. A line of characters for each lane in
// text, and a picture of the same.
//
//   Timeline timeline({"rank 0", "rank 1"});
//   stage.on_ranks(2, [&](Rank& rank) {
//     timeline.run(rank.number(), "all_reduce", "t0", [&] { rank.comm().all_reduce(x); });
//   });
//   timeline.show(stage, "a sum");              // rank 0 ~ |aaaa......|
#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/lecture/stage.h"

namespace phalanx::lecture {

class Timeline {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Timeline(std::vector<std::string> lanes);
  static Timeline of_ranks(int ranks);  // a lane each

  /// Each lane is written by one thread at a time, without a lock. In text `what` is its first letter.
  void add(int lane, const std::string& what, const std::string& style, Clock::time_point begin, Clock::time_point end);
  template <class Body>
  decltype(auto) run(int lane, const std::string& what, const std::string& style, Body&& body) {
    struct AtEnd {
      ~AtEnd() { timeline.add(lane, what, style, begin, Clock::now()); }
      Timeline& timeline;
      int lane;
      const std::string &what, &style;
      Clock::time_point begin;
    } const at_end{*this, lane, what, style, Clock::now()};
    return std::forward<Body>(body)();
  }

  /// Prints the lanes under the title and ends the block with their picture.
  void show(Stage& stage, const std::string& title) const;
  Picture picture(const std::string& title) const;

 private:
  struct Event {
    std::string what, style;
    Clock::time_point begin, end;
  };
  struct Times {
    Clock::time_point begin;
    double seconds = 0;
  };
  Times times() const;  // from the first event to the last

  std::vector<std::string> lanes_;
  std::vector<std::vector<Event>> events_;  // by lane
};

}  // namespace phalanx::lecture
