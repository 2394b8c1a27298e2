// Writes to a stream that may stand still - a terminal that is paused, a pipe that nobody reads - without ever making
// its caller wait. Torch-free.
//
// A thread does the writing, in order. What it has not written yet is held in memory; has_room() says when that is
// enough for now, and whoever feeds the writer then stops taking in more, so that those who wait are the ranks that
// write, and never the one who watches over them. fd() becomes readable when there is room again or all is written.
// After an error (nobody reads any more) everything is thrown away.
//
// A writer that goes leaves its thread behind if that is stuck in a write; what was not written is lost. Whoever cares
// waits for is_idle() first.
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>

#include "phalanx/store/tcp_store_socket.h"

namespace phalanx {

class BackgroundWriter {
 public:
  static constexpr std::size_t kEnough = std::size_t{1} << 20;

  explicit BackgroundWriter(int target_fd);
  ~BackgroundWriter();
  BackgroundWriter(const BackgroundWriter&) = delete;
  BackgroundWriter& operator=(const BackgroundWriter&) = delete;

  void write(std::string_view text);
  bool has_room() const;
  bool is_idle() const;
  bool is_terminal() const { return is_terminal_; }
  int fd() const;
  void acknowledge() const;  // fd() is not readable then, until there is news

 private:
  struct Shared;
  static void run(const std::shared_ptr<Shared>& shared);
  std::shared_ptr<Shared> shared_;
  bool is_terminal_;
};

}  // namespace phalanx
