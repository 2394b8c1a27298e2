#include "phalanx/store/hash_store.h"

#include <fmt/format.h>

#include <algorithm>

#include "phalanx/base/error.h"
#include "phalanx/store/store_table.h"

namespace phalanx {

std::shared_ptr<Store> HashStore::clone() const {
  return std::shared_ptr<Store>(new HashStore(timeout(), table_));  // the constructor is private
}

void HashStore::do_interrupt(Clock::time_point at) noexcept {
  {
    const std::lock_guard lock(table_->mutex);
    ends_at_ = std::min(ends_at_, at);
  }
  table_->changed.notify_all();
}

void HashStore::require_uninterrupted(const std::string& key) const {
  if (Clock::now() >= ends_at_)
    throw CommError(store_detail::interrupted_message(describe(), fmt::format("key '{}'", key)));
}

std::unique_lock<std::mutex> HashStore::enter(const std::string& key) const {
  std::unique_lock lock(table_->mutex);
  require_uninterrupted(key);
  return lock;
}

void HashStore::do_set(const std::string& key, const std::string& value) {
  {
    const auto lock = enter(key);
    table_->values[key] = value;
  }
  table_->changed.notify_all();
}

std::optional<std::string> HashStore::do_try_get(const std::string& key) {
  const auto lock = enter(key);
  const auto found = table_->values.find(key);
  if (found == table_->values.end()) return std::nullopt;
  return found->second;
}

std::int64_t HashStore::do_add(const std::string& key, std::int64_t amount) {
  std::int64_t sum = 0;
  {
    const auto lock = enter(key);
    const auto found = table_->values.find(key);
    sum = store_detail::add_to_counter(key, found == table_->values.end() ? "0" : found->second, amount);
    table_->values[key] = std::to_string(sum);
  }
  table_->changed.notify_all();
  return sum;
}

std::vector<std::string> HashStore::do_wait(const std::vector<std::string>& keys, WaitFor mode, Milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  auto lock = enter(keys.front());
  for (bool late = false;;) {
    std::vector<std::string> values, missing;
    for (const auto& key : keys) {
      const auto found = table_->values.find(key);
      if (found == table_->values.end()) {
        missing.push_back(key);
      } else if (mode == WaitFor::any) {
        return {key};
      } else if (mode == WaitFor::values && missing.empty()) {
        values.push_back(found->second);
      }
    }
    if (missing.empty()) return values;
    require_uninterrupted(missing.front());
    if (late)
      throw StoreTimeout(
          store_detail::timeout_message(describe(), timeout, keys.size(), missing, mode == WaitFor::any));
    // Check once more after the deadline: the key may have arrived with it.
    table_->changed.wait_until(lock, std::min(deadline, ends_at_));
    late = Clock::now() >= deadline;
  }
}

std::optional<std::string> HashStore::do_compare_and_set(const std::string& key,
                                                         const std::optional<std::string>& expected,
                                                         const std::string& desired) {
  {
    const auto lock = enter(key);
    const auto found = table_->values.find(key);
    const bool absent = found == table_->values.end();
    if (absent ? expected.has_value() : expected != found->second)
      return absent ? std::nullopt : std::optional<std::string>(found->second);
    table_->values[key] = desired;
  }
  table_->changed.notify_all();
  return desired;
}

bool HashStore::do_delete(const std::string& key) {
  const auto lock = enter(key);
  return table_->values.erase(key) > 0;
}

}  // namespace phalanx
