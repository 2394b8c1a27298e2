// OutputRelay: copies the output of a rank line by line, with a prefix such as "[rank] ", so that the lines of several
// ranks do not mix. On request it also copies the unchanged bytes into a log file. On a terminal each line first clears
// the remains of a progress bar. While the target is blocked the relay reads nothing, so the rank blocks when its pipe
// is full.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "phalanx/base/unique_fd.h"
#include "phalanx/launch/supervisor/background_writer.h"

namespace phalanx {

/// Lines that contain one of `needles` are also written to `file`.
struct LineFilter {
  std::vector<std::string> needles;
  UniqueFd file;
};

class OutputRelay {
 public:
  /// Makes a pipe whose lines go to `target`; null: nowhere.
  /// REQUIRES: `target` outlives this object.
  OutputRelay(std::string prefix, BackgroundWriter* target);
  /// Also copies every byte to `log`, and the lines that match `filter` (may be null), with the prefix, to its file.
  void copy_to(UniqueFd log, std::shared_ptr<LineFilter> filter);
  int write_end() const { return write_end_.get(); }
  void close_write_end() { write_end_.reset(); }  // call it after the child was started
  /// Readable when pump() has something to do.
  int poll_fd() const { return target_ == nullptr || target_->has_room() ? read_end_.get() : target_->fd(); }
  bool is_open() const { return static_cast<bool>(read_end_); }

  /// Reads what is available without waiting, if the target has room. Closes the pipe at the end of the stream.
  void pump();
  /// Reads what is available, writes an unfinished line too, and closes the pipe.
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
