// What operations over gloo share: buffers for its calls, waiting, and the search for who is to blame once it has
// failed. Collectives are in gloo_collectives.cc, messages between two ranks in gloo_messages.cc.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "phalanx/comm/backend.h"
#include "phalanx/comm/backends/gloo/gloo_backend.h"

namespace phalanx {

/// Bytes for gloo to read or write; never a null pointer, which an empty tensor would have.
at::Tensor gloo_buffer(std::size_t bytes);
std::byte* gloo_bytes(const at::Tensor& buffer);
/// memmove() that takes null pointers for no bytes, and nothing where both are the same.
void gloo_copy(void* to, const void* from, std::size_t bytes);

/// Why gloo has failed, until it is known whose fault it was: gloo notices a broken connection at once, the store tells
/// whose it was a little later.
class GlooFailure {
 public:
  explicit operator bool() const { return !text_.empty(); }
  void set(std::string text);  // the first one stays
  /// Throws CommError once it can say who, or has waited long enough.
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
  /// What advance() begins with: false where nothing can be done until the failure's cause is known. Throws then, or
  /// where the group has been aborted.
  bool can_go_on();

  GlooBackend& backend_;
  GlooFailure failure_;

 private:
  std::uint32_t seen_ = 0;  // of the bell, before this operation looked
  bool has_waited_ = false;
};

}  // namespace phalanx
