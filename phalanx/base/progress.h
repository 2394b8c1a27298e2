// ProgressBar: the progress of a long job, as a bar with rate and remaining time on a terminal, and as plain lines
// elsewhere.
//
//   ProgressBar bar("tokenizing", total_bytes, {.unit = ProgressUnit::bytes});
//   while (...) bar.advance(block.size());
//   bar.finish();
//
//   terminal:   tokenizing  43% [############                ] 12.3 MiB of 28.6 MiB  11.8 MB/s  ETA 1.38 s
//   elsewhere:  tokenizing: 40% (11.4 MiB of 28.6 MiB), 11.8 MB/s, ETA 1.45 s
//
// On a terminal the bar is drawn at most ten times a second. Elsewhere a line appears at every tenth of the work, but
// at most every two seconds and at least every thirty. advance() costs one atomic addition and one read of the clock;
// any thread may call it. A line that is written through print_line() does not damage the bar. The lines of base/log.h
// clear the bar first, and the next update draws it again.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <ostream>
#include <string>
#include <string_view>

namespace phalanx {

enum class ProgressUnit { items, bytes, steps };
enum class ProgressStyle { automatic, bar, lines, silent };  // automatic: bar if standard error is a terminal

struct ProgressOptions {
  ProgressUnit unit = ProgressUnit::items;
  ProgressStyle style = ProgressStyle::automatic;
  std::uint64_t start = 0;             // done before this run, e.g. resumed steps; not counted in the rate
  std::ostream* out = nullptr;         // null: standard error; must outlive the bar
  std::function<double()> clock = {};  // in seconds; empty: a steady clock
  int columns = 0;                     // width of the terminal; 0: detected
};

class ProgressBar {
 public:
  /// `total` 0: unknown; then no percentage and no ETA are shown.
  ProgressBar(std::string title, std::uint64_t total, ProgressOptions options = {});
  ~ProgressBar();  // moves the terminal to a new line; does not report that the work is finished
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  void advance(std::uint64_t amount = 1);
  void set(std::uint64_t done);
  void set_postfix(std::string postfix);  // shown at the end of the bar, e.g. "loss 3.12"
  void print_line(std::string_view line);
  void finish();  // writes the last line: the amount, the duration and the rate

 private:
  void update(bool force);
  void draw_bar(double now);
  void write_progress_line(double now);
  std::string quantity(std::uint64_t amount) const;
  std::string rate_text(double now) const;
  std::string amount_text() const;
  std::string eta_text(double now) const;
  void clear_bar();

  const std::string title_;
  const std::uint64_t total_;
  ProgressOptions options_;
  std::atomic<std::uint64_t> done_;
  std::atomic<double> next_update_;
  std::mutex mutex_;  // guards what follows, and the stream
  std::string postfix_;
  double started_ = 0;
  double last_line_ = 0;
  std::uint64_t last_tenth_ = 0;
  bool bar_shown_ = false;
  bool finished_ = false;
};

}  // namespace phalanx
