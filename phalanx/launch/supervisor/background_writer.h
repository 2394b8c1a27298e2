// BackgroundWriter: writes to a stream that may block, such as a paused terminal or a pipe that nobody reads, without
// blocking the caller. Torch-free.
//
// A thread writes the text in order. Unwritten text is held in memory. has_room() becomes false when enough is held;
// the caller then stops reading new output. So the ranks that write are blocked, and the launcher that watches them is
// not. fd() becomes readable when there is room again or everything is written. After a write error (nobody reads any
// more) all text is discarded.
//
// The destructor does not wait. If the thread is blocked in a write it is left behind, and unwritten text is lost. A
// caller that needs the text waits for is_idle() first.
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>

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
  void acknowledge() const;  // clears fd() until the next event

 private:
  struct Shared;
  static void run(const std::shared_ptr<Shared>& shared);
  std::shared_ptr<Shared> shared_;
  bool is_terminal_;
};

}  // namespace phalanx
