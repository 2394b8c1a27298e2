#include "phalanx/store/store.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "phalanx/base/error.h"
#include "phalanx/store/store_table.h"

namespace phalanx {

namespace store_detail {

std::int64_t add_to_counter(const std::string& key, const std::string& current, std::int64_t amount) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(current.data(), current.data() + current.size(), value);
  if (error != std::errc{} || end != current.data() + current.size())
    throw StoreRequestError(
        fmt::format("store: add to key '{}': it holds {} bytes that are not an integer", key, current.size()));
  std::int64_t sum = 0;
  if (__builtin_add_overflow(value, amount, &sum))
    throw StoreRequestError(fmt::format("store: add to key '{}': {} + {} overflows 64 bits", key, value, amount));
  return sum;
}

void check_key(const std::string& key) {
  if (key.empty()) throw StoreRequestError("store: a key must not be empty");
  if (key.size() > Store::kMaxKeyBytes)
    throw StoreRequestError(fmt::format("store: key '{}...' has {} bytes: expected at most {}", key.substr(0, 40),
                                        key.size(), Store::kMaxKeyBytes));
}

void check_value(const std::string& key, std::size_t bytes) {
  if (bytes > Store::kMaxValueBytes)
    throw StoreRequestError(fmt::format("store: the value of key '{}' has {} bytes: expected at most {}", key, bytes,
                                        Store::kMaxValueBytes));
}

std::string timeout_message(const std::string& store, std::chrono::milliseconds timeout, std::size_t key_count,
                            const std::vector<std::string>& missing, bool any) {
  constexpr std::size_t kShown = 16;
  std::string names;
  for (std::size_t i = 0; i < missing.size() && i < kShown; ++i) names += (i ? ", " : "") + missing[i];
  if (missing.size() > kShown) names += fmt::format(" and {} more", missing.size() - kShown);
  const auto ms = timeout.count();
  const std::string waited = ms % 1000 == 0 ? fmt::format("{} s", ms / 1000) : fmt::format("{} ms", ms);
  if (any) return fmt::format("{}: waited {} for any of the keys {}: none was set", store, waited, names);
  if (key_count == 1) return fmt::format("{}: waited {} for the key {}: it was never set", store, waited, names);
  return fmt::format("{}: waited {} for {} keys: still missing {}: {}", store, waited, key_count, missing.size(),
                     names);
}

std::string interrupted_message(const std::string& store, const std::string& what) {
  return fmt::format("{}: {}: interrupted, because this process asks the store no more", store, what);
}

}  // namespace store_detail

namespace {
void check_store_keys(const std::vector<std::string>& keys) {
  if (keys.size() > Store::kMaxKeysPerCall)
    throw StoreRequestError(
        fmt::format("store: {} keys in one call: expected at most {}", keys.size(), Store::kMaxKeysPerCall));
  for (const auto& key : keys) store_detail::check_key(key);
}
}  // namespace

void Store::set(const std::string& key, const std::string& value) {
  store_detail::check_key(key);
  store_detail::check_value(key, value.size());
  do_set(key, value);
}

std::string Store::get(const std::string& key, std::optional<Milliseconds> timeout) {
  store_detail::check_key(key);
  return std::move(do_wait({key}, WaitFor::values, timeout.value_or(timeout_)).front());
}

std::vector<std::string> Store::get_all(const std::vector<std::string>& keys, std::optional<Milliseconds> timeout) {
  check_store_keys(keys);
  if (keys.empty()) return {};
  return do_wait(keys, WaitFor::values, timeout.value_or(timeout_));
}

std::optional<std::string> Store::try_get(const std::string& key) {
  store_detail::check_key(key);
  return do_try_get(key);
}

std::int64_t Store::add(const std::string& key, std::int64_t amount) {
  store_detail::check_key(key);
  return do_add(key, amount);
}

void Store::wait(const std::vector<std::string>& keys, std::optional<Milliseconds> timeout) {
  check_store_keys(keys);
  if (!keys.empty()) do_wait(keys, WaitFor::all, timeout.value_or(timeout_));
}

std::string Store::wait_any(const std::vector<std::string>& keys, std::optional<Milliseconds> timeout) {
  check_store_keys(keys);
  if (keys.empty()) throw StoreRequestError("store: wait_any needs at least one key");
  return std::move(do_wait(keys, WaitFor::any, timeout.value_or(timeout_)).front());
}

std::optional<std::string> Store::compare_and_set(const std::string& key, const std::optional<std::string>& expected,
                                                  const std::string& desired) {
  store_detail::check_key(key);
  if (expected) store_detail::check_value(key, expected->size());
  store_detail::check_value(key, desired.size());
  return do_compare_and_set(key, expected, desired);
}

bool Store::delete_key(const std::string& key) {
  store_detail::check_key(key);
  return do_delete(key);
}

void Store::set_when_lost(const std::string& key, const std::string& value) {
  store_detail::check_key(key);
  store_detail::check_value(key, value.size());
  do_set_when_lost(key, value);
}

void Store::cancel_when_lost(const std::string& key) {
  store_detail::check_key(key);
  do_set_when_lost(key, std::nullopt);
}

void Store::interrupt(Milliseconds after) noexcept {
  constexpr Milliseconds kLongest = std::chrono::hours(24 * 365);
  do_interrupt(std::chrono::steady_clock::now() + std::clamp(after, Milliseconds(0), kLongest));
}

PrefixStore::PrefixStore(std::shared_ptr<Store> base, std::string prefix)
    : Store(base->timeout()), base_(std::move(base)), prefix_(std::move(prefix) + "/") {}

std::shared_ptr<Store> PrefixStore::clone() const {
  auto result = std::make_shared<PrefixStore>(base_->clone(), prefix_.substr(0, prefix_.size() - 1));
  result->set_timeout(timeout());
  return result;
}

void PrefixStore::do_set(const std::string& key, const std::string& value) { base_->set(prefix_ + key, value); }

std::optional<std::string> PrefixStore::do_try_get(const std::string& key) { return base_->try_get(prefix_ + key); }

std::int64_t PrefixStore::do_add(const std::string& key, std::int64_t amount) {
  return base_->add(prefix_ + key, amount);
}

std::vector<std::string> PrefixStore::do_wait(const std::vector<std::string>& keys, WaitFor mode,
                                              Milliseconds timeout) {
  std::vector<std::string> full;
  full.reserve(keys.size());
  for (const auto& key : keys) full.push_back(prefix_ + key);
  check_store_keys(full);
  auto result = base_->do_wait(full, mode, timeout);
  if (mode == WaitFor::any) result.front().erase(0, prefix_.size());
  return result;
}

std::optional<std::string> PrefixStore::do_compare_and_set(const std::string& key,
                                                           const std::optional<std::string>& expected,
                                                           const std::string& desired) {
  return base_->compare_and_set(prefix_ + key, expected, desired);
}

bool PrefixStore::do_delete(const std::string& key) { return base_->delete_key(prefix_ + key); }

void PrefixStore::do_set_when_lost(const std::string& key, const std::optional<std::string>& value) {
  if (value)
    base_->set_when_lost(prefix_ + key, *value);
  else
    base_->cancel_when_lost(prefix_ + key);
}

}  // namespace phalanx
