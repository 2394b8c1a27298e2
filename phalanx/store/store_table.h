// What the implementations of Store share: the rules of counters and of bounds, and the texts of errors.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace phalanx::store_detail {

/// The counter's value after the addition. Throws CommError if `current` is not a decimal integer or the sum overflows.
std::int64_t add_to_counter(const std::string& key, const std::string& current, std::int64_t amount);

/// Throws CommError if the key is empty or too long, or the value too large.
void check_key(const std::string& key);
void check_value(const std::string& key, std::size_t bytes);

/// "store at 127.0.0.1:4000: waited 30 s for 4 keys: still missing 2: a, b" (at most 16 names are written out).
std::string timeout_message(const std::string& store, std::chrono::milliseconds timeout, std::size_t key_count,
                            const std::vector<std::string>& missing, bool any);

/// "store at 127.0.0.1:4000: waiting for key 'a': interrupted, ..."
std::string interrupted_message(const std::string& store, const std::string& what);

}  // namespace phalanx::store_detail
