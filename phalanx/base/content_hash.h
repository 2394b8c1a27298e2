// ContentHash: a 128-bit hash of content (XXH3), to find out whether two things have the same content.
//
// It detects accidental differences. It does not protect against somebody who constructs a collision. Each added item
// is framed: ("ab", "c") and ("a", "bc") give different hashes.
//
//   ContentHash hash;
//   hash.add("vocabulary").add(std::int64_t{4096}).add_bytes(file.bytes());
//   std::string text = hash.hex();  // 32 hexadecimal digits
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace phalanx {

class ContentHash {
 public:
  ContentHash();
  ~ContentHash();
  ContentHash(ContentHash&&) noexcept;
  ContentHash& operator=(ContentHash&&) noexcept;

  ContentHash& add_bytes(std::span<const std::byte> bytes);
  ContentHash& add(std::string_view text);
  ContentHash& add(std::int64_t number);
  std::string hex() const;  // of what has been added so far

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace phalanx
