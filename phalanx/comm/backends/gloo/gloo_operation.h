// What operations of the gloo backend share: buffers, waiting, and the search for the rank that caused a failure.
// Collectives are in gloo_collectives.cc, point-to-point messages in gloo_messages.cc.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "phalanx/comm/backend.h"
#include "phalanx/comm/backends/gloo/gloo_backend.h"

namespace phalanx {

/// memmove() that accepts null pointers for zero bytes, and does nothing if both pointers are equal.
void gloo_copy(void* to, const void* from, std::size_t bytes);

/// Holds an error until it is known which rank caused it. A broken connection is noticed at once; the store reports a
/// little later which rank has died.
class GlooFailure {
 public:
  explicit operator bool() const { return !text_.empty(); }
  void set(std::string text);  // the first one stays
  /// Throws CommError once it can name the rank, or has waited long enough.
  void throw_when_known(const GlooBackend& backend) const;

 private:
  std::string text_;
  std::chrono::steady_clock::time_point since_{};
};

class GlooOperation : public Operation {
 public:
  explicit GlooOperation(GlooBackend& backend) : backend_(backend) {}
  ~GlooOperation() override;

  std::optional<Doorbell> doorbell() override;
  void check_peers() override;

 protected:
  /// advance() calls it first. False: nothing can be done until the cause of the failure is known. Throws once it is
  /// known, or if the group has been aborted.
  bool can_go_on();

  GlooBackend& backend_;
  GlooFailure failure_;

 private:
  std::uint32_t seen_ = 0;  // value of the bell before this operation looked
  bool has_waited_ = false;
};

}  // namespace phalanx
