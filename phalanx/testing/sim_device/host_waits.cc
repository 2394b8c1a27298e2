#include "phalanx/testing/sim_device/host_waits.h"

#include <utility>

#include "phalanx/testing/sim_device/symbol_table.h"

namespace phalanx::sim_device {
namespace {

thread_local const char* current_label = nullptr;

}  // namespace

HostWaitLabel::HostWaitLabel(const char* label) : before_(std::exchange(current_label, label)) {}
HostWaitLabel::~HostWaitLabel() { current_label = before_; }

void HostWaits::add(const std::string& cause) {
  std::string site = cause;
  if (current_label != nullptr) site.append(" in ").append(current_label);
  if (const std::string caller = calling_function(); !caller.empty()) site.append(", called by ").append(caller);
  const std::lock_guard lock(mutex_);
  ++by_site_[site];
}

std::uint64_t HostWaits::total() const {
  const std::lock_guard lock(mutex_);
  std::uint64_t sum = 0;
  for (const auto& [site, count] : by_site_) sum += count;
  return sum;
}

std::map<std::string, std::uint64_t> HostWaits::by_site() const {
  const std::lock_guard lock(mutex_);
  return by_site_;
}

void HostWaits::clear() {
  const std::lock_guard lock(mutex_);
  by_site_.clear();
}

}  // namespace phalanx::sim_device
