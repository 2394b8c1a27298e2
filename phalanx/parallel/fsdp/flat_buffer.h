// FlatBuffer: a tensor whose memory can be attached and detached. MemoryPool: the pieces of memory that such tensors
// share.
//
// A FlatBuffer is one flat tensor. Views of it (a module's parameters, the buffers of their gradients) are made once
// and stay the same TensorImpl, at the same place in the autograd graph. They have bytes behind them only while memory
// is attached. Reading a view without memory throws c10::Error with the text of set_missing_text().
//
//   MemoryPool pool(2, bytes, allocate);
//   FlatBuffer flat(elements, at::TensorOptions(at::kFloat));
//   const at::Tensor weight = flat.view({64, 64}, /*offset=*/0);
//   flat.attach(*pool.acquire());      // contents undefined
//   ...
//   pool.release(flat.detach());
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/tensor/copy_stream.h"

namespace phalanx::fsdp {

class FlatBuffer {
 public:
  FlatBuffer() = default;
  FlatBuffer(std::int64_t elements, at::TensorOptions options);

  const at::Tensor& tensor() const noexcept { return flat_; }
  at::Tensor view(at::IntArrayRef sizes, std::int64_t offset) const;  // contiguous; not a view for autograd
  /// What an access to the data without memory says.
  void set_missing_text(std::string text);
  /// `memory` is a tensor of bytes. It is kept alive until detach().
  /// REQUIRES: `memory` has at least as many bytes as the buffer needs.
  void attach(const at::Tensor& memory);
  at::Tensor detach();
  bool is_attached() const noexcept { return memory_.defined(); }

 private:
  void forbid_access();

  at::Tensor flat_, memory_;
  std::string missing_text_ = "the tensor has no memory at this time";
};

/// A fixed number of equal pieces of memory. A piece that a copy still reads is given out with the current stream
/// waiting for the copy.
class MemoryPool {
 public:
  MemoryPool() = default;
  MemoryPool(int count, std::int64_t bytes, const std::function<at::Tensor(std::int64_t bytes)>& allocate);
  std::optional<at::Tensor> acquire();
  void release(at::Tensor memory, CopyStream::Mark last_use = nullptr);
  std::int64_t bytes() const noexcept { return bytes_; }  // of all pieces

 private:
  struct Piece {
    at::Tensor memory;
    CopyStream::Mark last_use;
  };
  std::vector<Piece> free_;
  std::int64_t bytes_ = 0;
};

}  // namespace phalanx::fsdp
