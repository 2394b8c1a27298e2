// Copies what a rank writes, line by line, with a prefix such as "[rank] " in front, so that the ranks' lines do not
// mix; on request also, as it is, into a log file. On a terminal a line first clears what a progress bar has left
// there. While the target stands still nothing more is taken in: the rank waits when its pipe is full.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "phalanx/launch/supervisor/background_writer.h"
#include "phalanx/store/tcp_store_socket.h"

namespace phalanx {

/// Lines that hold one of `needles` are written to `file` too.
struct LineFilter {
  std::vector<std::string> needles;
  UniqueFd file;
};

class OutputRelay {
 public:
  /// Makes a pipe whose lines go to `target`, which outlives this; null: nowhere.
  OutputRelay(std::string prefix, BackgroundWriter* target);
  /// Every byte goes to `log` too, and the lines that `filter` (may be null) chooses, prefixed, to its file.
  void copy_to(UniqueFd log, std::shared_ptr<LineFilter> filter);
  int write_end() const { return write_end_.get(); }
  void close_write_end() { write_end_.reset(); }  // once the child has it
  /// Readable when pump() has something to do.
  int poll_fd() const { return target_ == nullptr || target_->has_room() ? read_end_.get() : target_->fd(); }
  bool is_open() const { return static_cast<bool>(read_end_); }

  /// Takes what is there without waiting, if there is room for it; closes at the end of the stream.
  void pump();
  /// Takes what is there, writes an unfinished line too, closes.
  void finish();

 private:
  void take();
  void write_lines(bool also_unfinished);
  std::string prefix_;
  BackgroundWriter* target_;
  std::string_view clear_;
  UniqueFd read_end_, write_end_, log_;
  std::shared_ptr<LineFilter> filter_;
  std::string pending_;
};

}  // namespace phalanx
