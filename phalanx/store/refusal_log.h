// Formats the refusals of a server and limits their rate, so that a client that retries in
// a loop does not fill the log.
#pragma once

#include <fmt/format.h>

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>

namespace phalanx {

class RefusalLog {
 public:
  /// The line to log, or nullopt if this minute's limit is reached. `server`: "store at 127.0.0.1:4000".
  std::optional<std::string> line(const std::string& server, const std::string& peer, const std::string& reason) {
    constexpr int kPerMinute = 10;
    const auto now = std::chrono::steady_clock::now();
    if (count_ == 0 || now - since_ > std::chrono::minutes(1)) {
      since_ = now;
      count_ = 0;
    }
    if (++count_ > kPerMinute) {
      ++unlogged_;
      return std::nullopt;
    }
    std::string text = fmt::format("{}: refused {}: {}", server, peer, reason);
    if (unlogged_ > 0) text += fmt::format(" ({} more were refused before it)", unlogged_);
    if (count_ == kPerMinute) text += "; further ones are not logged for a minute";
    unlogged_ = 0;
    return text;
  }

 private:
  std::chrono::steady_clock::time_point since_{};
  int count_ = 0;
  std::size_t unlogged_ = 0;
};

}  // namespace phalanx
