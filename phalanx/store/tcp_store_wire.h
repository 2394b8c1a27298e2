// The bytes between TcpStore and TcpStoreServer. All integers are little-endian.
//
//   client hello   "PHXSTORE" u16 version u8 secret (0 I have none, 1 I have one) u8 0
//   server hello   "PHXSTORE" u16 version u8 verdict u8 authentication (0 none, 1 HMAC-SHA256), and with 1, if the
//                  verdict is welcome, 32 random bytes
//   client proof   32 random bytes, 32 bytes HMAC                 } only with authentication 1; store_proof.h defines
//   server proof   u8 verdict, 32 bytes HMAC (zeros: refused)     } the HMAC
//   frame          u32 payload length, payload; the server answers each of the client's requests once, in order
//   request        u8 operation, fields        string = u32 length, bytes        optional = u8 present, string
//   answer         u8 status (0 ok, 1 timed out, 2 error), fields; an error carries its text, a timeout the missing
//                  keys
//
// The client sends its proof first. A client with a secret leaves a server that does not ask for it. Nothing is
// encrypted, and nothing after the handshake is authenticated: an attacker who can change packets in transit can take
// over a connection. Both sides reject a frame above kMaxFrame, or with fields that do not fill it exactly.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

#include "phalanx/store/store.h"

namespace phalanx::store_wire {

inline constexpr std::string_view kMagic = "PHXSTORE";
inline constexpr std::uint16_t kVersion = 2;
inline constexpr std::size_t kHelloBytes = 12;
inline constexpr std::size_t kMaxFrame = Store::kMaxValueBytes * 2 + (std::size_t{1} << 20);
inline constexpr std::uint64_t kMaxTimeoutMs = 1000ULL * 3600 * 24 * 365;

enum class Verdict : std::uint8_t {
  welcome = 0,  // or: continue
  other_version,
  secret_needed,
  no_secret_here,
  wrong_secret
};

enum class Operation : std::uint8_t {
  set = 1,
  try_get,
  add,
  wait_values,
  wait_all,
  wait_any,
  compare_and_set,
  erase,
  set_when_lost
};
enum class Status : std::uint8_t { ok = 0, timed_out = 1, error = 2 };

class Writer {
 public:
  Writer() : bytes_(4, '\0') {}  // room for the length
  Writer& u8(std::uint8_t value) { return raw(&value, 1); }
  Writer& u32(std::uint32_t value) { return raw(&value, 4); }
  Writer& u64(std::uint64_t value) { return raw(&value, 8); }
  Writer& string(std::string_view value) {
    u32(static_cast<std::uint32_t>(value.size()));
    return raw(value.data(), value.size());
  }
  Writer& optional(const std::optional<std::string>& value) {
    u8(value.has_value());
    return value ? string(*value) : *this;
  }
  std::size_t payload_size() const { return bytes_.size() - 4; }
  /// Returns the frame, with its length filled in.
  std::string take() {
    const auto length = static_cast<std::uint32_t>(payload_size());
    std::memcpy(bytes_.data(), &length, 4);
    return std::move(bytes_);
  }

 private:
  Writer& raw(const void* data, std::size_t size) {
    bytes_.append(static_cast<const char*>(data), size);
    return *this;
  }
  std::string bytes_;
};

/// Reads fields from a payload. After any field that does not fit, good() is false and every field reads as empty.
class Reader {
 public:
  explicit Reader(std::string_view payload) : rest_(payload) {}
  std::uint8_t u8() { return number<std::uint8_t>(); }
  std::uint32_t u32() { return number<std::uint32_t>(); }
  std::uint64_t u64() { return number<std::uint64_t>(); }
  std::string string(std::size_t limit) {
    const std::uint32_t size = u32();
    if (!good_ || size > limit || size > rest_.size()) return fail(), std::string();
    std::string value(rest_.substr(0, size));
    rest_.remove_prefix(size);
    return value;
  }
  std::string key() {
    std::string value = string(Store::kMaxKeyBytes);
    if (value.empty()) fail();
    return value;
  }
  std::string value() { return string(Store::kMaxValueBytes); }
  std::optional<std::string> optional() {
    const std::uint8_t present = u8();
    if (present > 1) fail();
    if (present != 1) return std::nullopt;
    return value();
  }
  std::size_t remaining() const { return rest_.size(); }
  bool good() const { return good_; }
  bool finished() const { return good_ && rest_.empty(); }

 private:
  template <class T>
  T number() {
    T value{};
    if (!good_ || rest_.size() < sizeof value) return fail(), T{};
    std::memcpy(&value, rest_.data(), sizeof value);
    rest_.remove_prefix(sizeof value);
    return value;
  }
  void fail() {
    good_ = false;
    rest_ = {};
  }
  std::string_view rest_;
  bool good_ = true;
};

}  // namespace phalanx::store_wire
