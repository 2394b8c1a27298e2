// HostWaits: how often the host waited for a simulated device, by cause and call site.
//
//   const HostWaitLabel label("clip_grad_norm");
//   total.item<float>();                        // "item in clip_grad_norm, called by phalanx::train(...)"
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace phalanx::sim_device {

/// Names this thread's host waits for its lifetime. The innermost label counts.
class [[nodiscard]] HostWaitLabel {
 public:
  explicit HostWaitLabel(const char* label);
  ~HostWaitLabel();
  HostWaitLabel(const HostWaitLabel&) = delete;
  HostWaitLabel& operator=(const HostWaitLabel&) = delete;

 private:
  const char* before_;
};

/// Any thread may call.
class HostWaits {
 public:
  void add(const std::string& cause);
  std::uint64_t total() const;
  std::map<std::string, std::uint64_t> by_site() const;
  void clear();

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::uint64_t> by_site_;
};

}  // namespace phalanx::sim_device
