#include "phalanx/comm/local_store.h"

#include "phalanx/base/error.h"
#include "phalanx/comm/store_table.h"

namespace phalanx {

void LocalStore::do_set(const std::string& key, const std::string& value) {
  {
    std::lock_guard lock(mutex_);
    table_[key] = value;
  }
  changed_.notify_all();
}

std::optional<std::string> LocalStore::do_try_get(const std::string& key) {
  std::lock_guard lock(mutex_);
  const auto found = table_.find(key);
  if (found == table_.end()) return std::nullopt;
  return found->second;
}

std::int64_t LocalStore::do_add(const std::string& key, std::int64_t amount) {
  std::int64_t sum = 0;
  {
    std::lock_guard lock(mutex_);
    const auto found = table_.find(key);
    sum = store_detail::add_to_counter(key, found == table_.end() ? "0" : found->second, amount);
    table_[key] = std::to_string(sum);
  }
  changed_.notify_all();
  return sum;
}

std::vector<std::string> LocalStore::do_wait(const std::vector<std::string>& keys, WaitFor mode, Milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  std::unique_lock lock(mutex_);
  for (bool late = false;;) {
    std::vector<std::string> values, missing;
    for (const auto& key : keys) {
      const auto found = table_.find(key);
      if (found == table_.end()) {
        missing.push_back(key);
      } else if (mode == WaitFor::any) {
        return {key};
      } else if (mode == WaitFor::values && missing.empty()) {
        values.push_back(found->second);
      }
    }
    if (missing.empty()) return values;
    if (late)
      throw CommError(store_detail::timeout_message(describe(), timeout, keys.size(), missing, mode == WaitFor::any));
    // One more look after the deadline: the key may have come with it.
    late = changed_.wait_until(lock, deadline) == std::cv_status::timeout;
  }
}

std::optional<std::string> LocalStore::do_compare_and_set(const std::string& key,
                                                          const std::optional<std::string>& expected,
                                                          const std::string& desired) {
  {
    std::lock_guard lock(mutex_);
    const auto found = table_.find(key);
    const bool absent = found == table_.end();
    if (absent ? expected.has_value() : expected != found->second)
      return absent ? std::nullopt : std::optional<std::string>(found->second);
    table_[key] = desired;
  }
  changed_.notify_all();
  return desired;
}

bool LocalStore::do_delete(const std::string& key) {
  std::lock_guard lock(mutex_);
  return table_.erase(key) > 0;
}

}  // namespace phalanx
