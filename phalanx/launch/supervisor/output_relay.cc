#include "phalanx/launch/supervisor/output_relay.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

#include "phalanx/base/error.h"

namespace phalanx {
namespace {

constexpr std::size_t kLongestLine = 64 * 1024;  // longer lines are split

// Writes all of `text` to a file.
void write_fully(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(fd, text.data(), text.size());
    if (written >= 0) {
      text.remove_prefix(static_cast<std::size_t>(written));
    } else if (errno != EINTR) {
      return;  // the disk is full; the ranks go on
    }
  }
}

}  // namespace

OutputRelay::OutputRelay(std::string prefix, BackgroundWriter* target)
    : prefix_(std::move(prefix)),
      target_(target),
      clear_(target != nullptr && target->is_terminal() ? "\r\x1b[K" : "") {
  int fds[2];
  if (pipe2(fds, O_CLOEXEC) != 0) throw Error(fmt::format("cannot make a pipe: {}", std::strerror(errno)));
  read_end_.reset(fds[0]);
  write_end_.reset(fds[1]);
  fcntl(fds[0], F_SETFL, O_NONBLOCK);
}

void OutputRelay::copy_to(UniqueFd log, std::shared_ptr<LineFilter> filter) {
  log_ = std::move(log);
  filter_ = std::move(filter);
}

void OutputRelay::pump() {
  if (target_ == nullptr || target_->has_room())
    take();
  else
    target_->acknowledge();
}

void OutputRelay::take() {
  char chunk[16 * 1024];
  // Bounded, so that a rank with very much output cannot keep the supervisor from its other work.
  for (int round = 0; round < 16 && is_open(); ++round) {
    const ssize_t got = read(read_end_.get(), chunk, sizeof chunk);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) break;
    if (got <= 0) {
      write_lines(true);
      read_end_.reset();
      return;
    }
    if (log_) write_fully(log_.get(), {chunk, static_cast<std::size_t>(got)});
    pending_.append(chunk, static_cast<std::size_t>(got));
    write_lines(false);
  }
}

void OutputRelay::finish() {
  take();  // the rest of the pipe's contents
  write_lines(true);
  read_end_.reset();
}

void OutputRelay::write_lines(bool also_unfinished) {
  std::string text, chosen;
  const auto take_line = [&](std::size_t begin, std::size_t size) {
    const std::string_view line = std::string_view(pending_).substr(begin, size);
    text.append(clear_).append(prefix_).append(line).push_back('\n');
    if (filter_ && std::any_of(filter_->needles.begin(), filter_->needles.end(),
                               [&](const auto& needle) { return line.find(needle) != std::string_view::npos; }))
      chosen.append(prefix_).append(line).push_back('\n');
  };
  std::size_t begin = 0;
  for (;;) {
    const std::size_t newline = pending_.find('\n', begin);
    if (newline != std::string::npos) {
      take_line(begin, newline - begin);
      begin = newline + 1;
    } else if (pending_.size() - begin > kLongestLine || (also_unfinished && begin < pending_.size())) {
      take_line(begin, pending_.size() - begin);
      begin = pending_.size();
    } else {
      break;
    }
  }
  pending_.erase(0, begin);
  if (target_ != nullptr) target_->write(text);
  if (filter_) write_fully(filter_->file.get(), chosen);
}

}  // namespace phalanx
