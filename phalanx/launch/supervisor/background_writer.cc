#include "phalanx/launch/supervisor/background_writer.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>

#include "phalanx/base/start_thread.h"
#include "phalanx/launch/supervisor/event_fd.h"

namespace phalanx {
namespace {

// The text for one write: whole lines, unless a line is too long.
std::string_view first_part_of(std::string_view text) {
  constexpr std::size_t kPart = 64 * 1024;
  if (text.size() <= kPart) return text;
  const std::size_t newline = text.rfind('\n', kPart - 1);
  return text.substr(0, newline == std::string_view::npos ? kPart : newline + 1);
}

}  // namespace

// Shared with the thread, which may outlive the writer.
struct BackgroundWriter::Shared {
  explicit Shared(int fd) : target_fd(fd), news(new_event_fd()) {}
  bool has_room() const { return waiting.size() + in_hand < kEnough; }

  const int target_fd;
  const UniqueFd news;
  mutable std::mutex mutex;
  std::condition_variable changed;
  std::string waiting;
  std::size_t in_hand = 0;  // bytes that the thread is writing
  bool is_broken = false, ends = false;
};

BackgroundWriter::BackgroundWriter(int target_fd)
    : shared_(std::make_shared<Shared>(target_fd)), is_terminal_(isatty(target_fd) != 0) {
  start_thread("the output", [shared = shared_] { run(shared); }).detach();
}

BackgroundWriter::~BackgroundWriter() {
  const std::lock_guard lock(shared_->mutex);
  shared_->ends = true;
  shared_->changed.notify_one();
}

void BackgroundWriter::write(std::string_view text) {
  if (text.empty()) return;
  const std::lock_guard lock(shared_->mutex);
  if (shared_->is_broken) return;
  shared_->waiting.append(text);
  shared_->changed.notify_one();
}

bool BackgroundWriter::has_room() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->has_room();
}

bool BackgroundWriter::is_idle() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->waiting.empty() && shared_->in_hand == 0;
}

int BackgroundWriter::fd() const { return shared_->news.get(); }

void BackgroundWriter::acknowledge() const {
  eventfd_t count = 0;
  eventfd_read(shared_->news.get(), &count);
}

void BackgroundWriter::run(const std::shared_ptr<Shared>& shared) {
  std::string text;
  std::size_t done = 0;
  std::unique_lock lock(shared->mutex);
  for (;;) {
    if (done == text.size()) {
      shared->changed.wait(lock, [&] { return shared->ends || !shared->waiting.empty(); });
      if (shared->ends) return;
      text.clear();
      text.swap(shared->waiting);
      shared->in_hand = text.size();
      done = 0;
    }
    lock.unlock();
    const std::string_view part = first_part_of(std::string_view(text).substr(done));
    const ssize_t written = ::write(shared->target_fd, part.data(), part.size());
    const int error = written < 0 ? errno : 0;
    if (error == EAGAIN) {
      pollfd writable{shared->target_fd, POLLOUT, 0};
      poll(&writable, 1, -1);
    }
    lock.lock();
    if (shared->ends) return;
    const bool had_room = shared->has_room();
    if (written >= 0) {
      done += static_cast<std::size_t>(written);
    } else if (error != EINTR && error != EAGAIN) {  // nobody reads our output any more; the ranks go on
      shared->is_broken = true;
      shared->waiting.clear();
      done = text.size();
    }
    shared->in_hand = text.size() - done;
    const bool is_idle = shared->in_hand == 0 && shared->waiting.empty();
    if (is_idle || (!had_room && shared->has_room())) eventfd_write(shared->news.get(), 1);
  }
}

}  // namespace phalanx
