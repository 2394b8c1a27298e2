// Copies what a rank writes, line by line, with "[rank] " in front, so that the ranks' lines do not mix.
#pragma once

#include <string>

#include "phalanx/comm/tcp_store_socket.h"

namespace phalanx {

class OutputRelay {
 public:
  /// Makes a pipe whose lines go to `target_fd`.
  OutputRelay(std::string prefix, int target_fd);
  int write_end() const { return write_end_.get(); }
  void close_write_end() { write_end_.reset(); }  // once the child has it
  int read_end() const { return read_end_.get(); }
  bool is_open() const { return static_cast<bool>(read_end_); }

  /// Takes what is there without waiting; closes at the end of the stream.
  void pump();
  /// Takes what is there, writes an unfinished line too, closes.
  void finish();

 private:
  void write_lines(bool also_unfinished);
  std::string prefix_;
  int target_fd_;
  UniqueFd read_end_, write_end_;
  std::string pending_;
};

}  // namespace phalanx
