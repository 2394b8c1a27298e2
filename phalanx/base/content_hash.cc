#include "phalanx/base/content_hash.h"

#include <fmt/format.h>

#define XXH_INLINE_ALL  // header-only: nothing to link or ship
#include <xxhash.h>

namespace phalanx {

struct ContentHash::State {
  XXH3_state_t value;
};

ContentHash::ContentHash() : state_(std::make_unique<State>()) { XXH3_128bits_reset(&state_->value); }
ContentHash::~ContentHash() = default;
ContentHash::ContentHash(ContentHash&&) noexcept = default;
ContentHash& ContentHash::operator=(ContentHash&&) noexcept = default;

ContentHash& ContentHash::add_bytes(std::span<const std::byte> bytes) {
  add(static_cast<std::int64_t>(bytes.size()));
  XXH3_128bits_update(&state_->value, bytes.data(), bytes.size());
  return *this;
}

ContentHash& ContentHash::add(std::string_view text) {
  return add_bytes(std::as_bytes(std::span(text.data(), text.size())));
}

ContentHash& ContentHash::add(std::int64_t number) {
  unsigned char bytes[8];
  for (int i = 0; i < 8; ++i) bytes[i] = static_cast<unsigned char>(static_cast<std::uint64_t>(number) >> (8 * i));
  XXH3_128bits_update(&state_->value, bytes, sizeof bytes);
  return *this;
}

std::string ContentHash::hex() const {
  const XXH128_hash_t hash = XXH3_128bits_digest(&state_->value);
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

}  // namespace phalanx
