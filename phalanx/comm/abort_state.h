// AbortState: whether a group was aborted, and why.
//
// Threads: any thread may call anything. The first abort wins; the reason never changes after it.
//
//   if (!abort_.set(reason)) return;   // somebody aborted already
//   ...
//   abort_.throw_if_set();             // CommError: the group was aborted: <reason>
#pragma once

#include <atomic>
#include <mutex>
#include <string>

namespace phalanx {

class AbortState {
 public:
  /// True for the first call, whose reason is kept.
  bool set(const std::string& reason) noexcept;
  bool is_set() const noexcept { return is_set_.load(std::memory_order_acquire); }
  /// Empty until it is set.
  std::string reason() const;
  /// CommError with the reason; `prefix` opens its text.
  void throw_if_set(const char* prefix = "") const;

 private:
  mutable std::mutex mutex_;
  std::string reason_;
  std::atomic<bool> is_set_{false};
};

}  // namespace phalanx
