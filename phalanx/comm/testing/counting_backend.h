// CountingBackend: a backend that counts the bytes of its operations, for tests of which rank carries which traffic.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "phalanx/comm/backend.h"
#include "phalanx/comm/testing/forwarding_backend.h"

namespace phalanx {

class CountingBackend final : public ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;

  /// The bytes that this rank has contributed in the operations begun so far, including its own part:
  /// - all_reduce and reduce: the whole tensor; broadcast: the whole tensor, on the root
  /// - the other collectives: the input (for scatter, on the root)
  /// - point-to-point: the messages that it sends
  /// Operations that only compare the calls of the ranks move no data and are not counted.
  std::uint64_t bytes() const { return bytes_.load(); }

  std::unique_ptr<Operation> start(const OperationDescription& description) override {
    bytes_.fetch_add(bytes_of(description));
    return ForwardingBackend::start(description);
  }
  std::shared_ptr<std::byte> make_symmetric(std::size_t bytes, SymmetricOptions options,
                                            const SymmetricExchange& exchange) override {
    return below().make_symmetric(bytes, options, exchange);
  }

 private:
  std::uint64_t bytes_of(const OperationDescription& d) const {
    if (d.compare_only) return 0;
    const auto of = [](std::int64_t count, DataType dtype) {
      return static_cast<std::uint64_t>(count) * element_size(dtype);
    };
    const bool is_root = d.root == rank();
    switch (d.verb) {
      case Verb::broadcast:
        return is_root ? of(d.output_count, d.dtype) : 0;
      case Verb::all_reduce:
      case Verb::reduce:
        return of(d.output_count, d.dtype);
      case Verb::all_gather:
      case Verb::reduce_scatter:
      case Verb::gather:
      case Verb::all_to_all:
        return of(d.input_count, d.dtype);
      case Verb::scatter:
        return is_root ? of(d.input_count, d.dtype) : 0;
      case Verb::send:
      case Verb::recv:
      case Verb::batch_isend_irecv:
        break;
      case Verb::barrier:
        return 0;
    }
    std::uint64_t sent = 0;
    for (const Transfer& transfer : d.transfers)
      if (transfer.is_send) sent += of(transfer.count, transfer.dtype);
    return sent;
  }

  std::atomic<std::uint64_t> bytes_{0};
};

}  // namespace phalanx
