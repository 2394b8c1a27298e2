#include "phalanx/base/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <iostream>
#include <utility>

#include "phalanx/base/human.h"

namespace phalanx {
namespace {

constexpr double kRedrawSeconds = 0.1;
constexpr double kMinSecondsBetweenLines = 2.0;
constexpr double kMaxSecondsBetweenLines = 30.0;
constexpr double kLineCheckSeconds = 0.25;

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int terminal_columns() {
  constexpr int kUsual = 80;
  winsize size{};
  if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return kUsual;
}

}  // namespace

ProgressBar::ProgressBar(std::string title, std::uint64_t total, ProgressOptions options)
    : title_(std::move(title)), total_(total), options_(std::move(options)), done_(options_.start) {
  if (options_.style == ProgressStyle::automatic) {
    options_.style = isatty(STDERR_FILENO) != 0 ? ProgressStyle::bar : ProgressStyle::lines;
  }
  if (options_.out == nullptr) options_.out = &std::cerr;
  if (!options_.clock) options_.clock = steady_seconds;
  started_ = options_.clock();
  last_line_ = started_;
  last_tenth_ = total_ > 0 ? options_.start * 10 / total_ : 0;
  next_update_ = started_;
  update(/*force=*/options_.style == ProgressStyle::bar);
}

ProgressBar::~ProgressBar() {
  if (!finished_ && bar_shown_) *options_.out << '\n' << std::flush;
}

void ProgressBar::advance(std::uint64_t amount) {
  done_.fetch_add(amount, std::memory_order_relaxed);
  update(/*force=*/false);
}

void ProgressBar::set(std::uint64_t done) {
  done_.store(done, std::memory_order_relaxed);
  update(/*force=*/false);
}

void ProgressBar::set_postfix(std::string postfix) {
  const std::lock_guard lock(mutex_);
  postfix_ = std::move(postfix);
}

void ProgressBar::print_line(std::string_view line) {
  const std::lock_guard lock(mutex_);
  clear_bar();
  *options_.out << line << '\n' << std::flush;
  if (options_.style == ProgressStyle::bar && !finished_) draw_bar(options_.clock());
}

void ProgressBar::finish() {
  const std::lock_guard lock(mutex_);
  if (std::exchange(finished_, true) || options_.style == ProgressStyle::silent) return;
  clear_bar();
  const double now = options_.clock();
  *options_.out << fmt::format("{}: {} in {}, {}\n", title_, quantity(done_), human_duration(now - started_),
                               rate_text(now))
                << std::flush;
}

void ProgressBar::update(bool force) {
  if (options_.style == ProgressStyle::silent) return;
  const double now = options_.clock();
  if (!force && now < next_update_.load(std::memory_order_relaxed)) return;
  std::unique_lock lock(mutex_, std::defer_lock);
  if (force) {
    lock.lock();
  } else if (!lock.try_lock()) {
    return;  // another thread is drawing: do not wait
  }
  if (finished_) return;
  if (options_.style == ProgressStyle::bar) {
    next_update_ = now + kRedrawSeconds;
    draw_bar(now);
  } else {
    next_update_ = now + kLineCheckSeconds;
    write_progress_line(now);
  }
}

void ProgressBar::draw_bar(double now) {
  const int columns = options_.columns > 0 ? options_.columns : terminal_columns();
  const std::size_t space = static_cast<std::size_t>(std::max(0, columns - 1));  // a wrapped line cannot be redrawn
  const double share = total_ > 0 ? std::min(1.0, static_cast<double>(done_) / static_cast<double>(total_)) : 0;
  const std::string head = total_ > 0 ? fmt::format("{} {:3.0f}%", title_, std::floor(share * 100)) : title_;
  const std::string eta = eta_text(now).empty() ? "" : "ETA " + eta_text(now);
  // Each part is shown completely or not at all. Parts that do not fit are dropped in the order of kLeastWanted.
  std::array<std::string, 4> parts = {amount_text(), rate_text(now), eta, postfix_};
  constexpr std::array<std::size_t, 4> kLeastWanted = {1, 0, 3, 2};
  const auto length = [&] {
    std::size_t sum = head.size();
    for (const std::string& part : parts) sum += part.empty() ? 0 : part.size() + 2;
    return sum;
  };
  for (const std::size_t part : kLeastWanted) {
    if (length() > space) parts[part].clear();
  }
  constexpr std::size_t kWidest = 40, kNarrowest = 5, kFrame = 3;  // a blank and the brackets
  std::string line = head;
  if (total_ > 0 && length() + kFrame + kNarrowest <= space) {
    const std::size_t width = std::min(kWidest, space - length() - kFrame);
    const auto filled = static_cast<std::size_t>(share * static_cast<double>(width));
    line += fmt::format(" [{:<{}}]", std::string(filled, '#'), width);
  }
  for (const std::string& part : parts) {
    if (!part.empty()) line += "  " + part;
  }
  if (line.size() > space) line.resize(space);
  *options_.out << "\r" << line << "\x1b[K" << std::flush;
  bar_shown_ = true;
}

void ProgressBar::write_progress_line(double now) {
  const double since = now - last_line_;
  const std::uint64_t tenth = total_ > 0 ? done_ * 10 / total_ : 0;
  const bool due = (tenth > last_tenth_ && since >= kMinSecondsBetweenLines) || since >= kMaxSecondsBetweenLines;
  const bool complete = total_ > 0 && done_ >= total_;  // finish() reports it
  if (!due || complete) return;
  last_line_ = now;
  last_tenth_ = tenth;
  const std::string eta = eta_text(now);
  const std::string postfix = postfix_.empty() ? "" : ", " + postfix_;
  if (total_ > 0) {
    const double percent = 100.0 * std::min(1.0, static_cast<double>(done_) / static_cast<double>(total_));
    *options_.out << fmt::format("{}: {:.0f}% ({}), {}{}{}{}\n", title_, std::floor(percent), amount_text(),
                                 rate_text(now), eta.empty() ? "" : ", ETA ", eta, postfix);
  } else {
    *options_.out << fmt::format("{}: {}, {}{}\n", title_, amount_text(), rate_text(now), postfix);
  }
  *options_.out << std::flush;
}

std::string ProgressBar::quantity(std::uint64_t amount) const {
  switch (options_.unit) {
    case ProgressUnit::bytes:
      return human_bytes(amount);
    case ProgressUnit::steps:
      return fmt::format("{} steps", with_commas(static_cast<std::int64_t>(amount)));
    case ProgressUnit::items:
      break;
  }
  return with_commas(static_cast<std::int64_t>(amount));
}

std::string ProgressBar::amount_text() const {
  return total_ > 0 ? fmt::format("{} of {}", quantity(done_), quantity(total_)) : quantity(done_);
}

std::string ProgressBar::rate_text(double now) const {
  const double elapsed = now - started_;
  const std::uint64_t done = done_;
  const double amount = done > options_.start ? static_cast<double>(done - options_.start) : 0.0;
  const double rate = elapsed > 0 ? amount / elapsed : 0.0;
  if (options_.unit == ProgressUnit::bytes) return human_bytes_per_second(rate);
  if (rate > 0 && rate < 1) return fmt::format("{} each", human_duration(1.0 / rate));
  return rate < 10 ? fmt::format("{:.2f}/s", rate) : human_count(rate) + "/s";
}

std::string ProgressBar::eta_text(double now) const {
  const std::uint64_t done = done_;
  if (total_ == 0 || done <= options_.start || done >= total_) return "";
  const double per_unit = (now - started_) / static_cast<double>(done - options_.start);
  return human_duration(per_unit * static_cast<double>(total_ - done));
}

void ProgressBar::clear_bar() {
  if (bar_shown_) *options_.out << "\r\x1b[K";
  bar_shown_ = false;
}

}  // namespace phalanx
