// send, recv and batch_isend_irecv over MPI; the protocol is in mpi_backend.h.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "phalanx/base/error.h"
#include "phalanx/comm/backends/mpi/mpi_backend.h"

namespace phalanx {
namespace {

constexpr std::size_t kInlineBytes = 8 * 1024;  // data that travel with the header

struct MpiHeader {
  std::int64_t count = 0;
  std::int32_t number = 0;  // of the message between the two, for the tags of answer and data
  DataType dtype = DataType::u8;
};

class MpiMessages final : public MpiOperation {
 public:
  MpiMessages(MpiBackend& backend, const OperationDescription& description) : MpiOperation(backend) {
    backend_.throw_if_aborted();
    const int largest = backend_.largest_tag_value();
    for (const Transfer& transfer : description.transfers)
      if (transfer.tag < 0 || transfer.tag > largest)
        throw CommError(fmt::format("tag {}: this MPI takes tags from 0 to {}", transfer.tag, largest));
    // All at once, because messages of equal tag match in the order in which they are posted.
    const auto inside = backend_.process().enter();
    for (const Transfer& transfer : description.transfers) {
      parts_.push_back(std::make_unique<Part>());
      parts_.back()->transfer = &transfer;
      begin(*parts_.back());
    }
  }

  Progress advance() override {
    backend_.throw_if_aborted();
    const auto inside = backend_.process().try_enter();
    if (!inside) return Progress::blocked;
    bool moved = false, all = true;
    for (auto& part : parts_) {
      if (!part->is_done && part->requests.are_done()) {
        next(*part);
        moved = true;
      }
      all &= part->is_done;
    }
    if (all) notices_.are_done();  // else they live a little longer
    return all ? Progress::done : moved ? Progress::moved : Progress::blocked;
  }

  // A peer that waits in a collective cannot know that this rank waits for a message. So it is notified, once.
  void check_peers() override {
    MpiOperation::check_peers();
    const auto inside = backend_.process().try_enter();
    if (!inside) return;
    for (auto& part : parts_) {
      const Transfer& transfer = *part->transfer;
      if (transfer.is_send || part->moves_data || part->is_done || part->has_noticed ||
          transfer.peer == backend_.rank())
        continue;
      part->has_noticed = true;
      const std::uint32_t received = backend_.received(transfer.peer);
      std::byte* notice = notices_.bytes(sizeof received);
      std::memcpy(notice, &received, sizeof received);
      notices_.call("MPI_Isend",
                    mpi().isend(notice, sizeof received, mpi().byte, transfer.peer,
                                backend_.tag(MpiTag::other, kMpiNotice), backend_.comm(), notices_.next()));
    }
  }

  std::vector<int> missing_ranks() override {
    std::vector<int> missing;
    for (const auto& part : parts_)
      if (!part->is_done) missing.push_back(part->transfer->peer);
    std::ranges::sort(missing);
    missing.erase(std::unique(missing.begin(), missing.end()), missing.end());
    return missing;
  }

 protected:
  bool are_requests_done() override {
    return std::ranges::all_of(parts_, [](const auto& part) { return part->requests.are_done(); });
  }
  bool is_callers_memory_in_use() const override {
    return std::ranges::any_of(parts_, [](const auto& part) { return part->moves_data && !part->requests.is_empty(); });
  }
  void leave_requests() noexcept override {
    for (auto& part : parts_) part->requests.leave();
  }

 private:
  struct Part {
    const Transfer* transfer = nullptr;
    int number = 0;
    std::byte* box = nullptr;  // header and data
    bool moves_data = false;   // from or to the caller's memory
    bool has_noticed = false;
    bool is_done = false;
    MpiRequests requests;
  };

  static std::size_t bytes(const Transfer& transfer) {
    return static_cast<std::size_t>(transfer.count) * element_size(transfer.dtype);
  }
  static bool is_inline(const Transfer& transfer) { return bytes(transfer) <= kInlineBytes; }

  void begin(Part& part) {
    const Transfer& transfer = *part.transfer;
    const MPI_Comm comm = backend_.comm();
    const std::size_t length = sizeof(MpiHeader) + (is_inline(transfer) ? bytes(transfer) : 0);
    const int tag = backend_.tag(MpiTag::header, transfer.tag);
    if (!transfer.is_send) {
      // The sender may send another length.
      part.box = part.requests.bytes(sizeof(MpiHeader) + kInlineBytes);
      part.requests.call("MPI_Irecv", mpi().irecv(part.box, sizeof(MpiHeader) + kInlineBytes, mpi().byte, transfer.peer,
                                                  tag, comm, part.requests.next()));
      return;
    }
    backend_.drop_notices(transfer.peer);
    part.number = static_cast<int>(backend_.next_message(transfer.peer) %
                                   static_cast<std::uint32_t>(backend_.largest_tag_value()));
    const MpiHeader header{transfer.count, part.number, transfer.dtype};
    part.box = part.requests.bytes(length);
    std::memcpy(part.box, &header, sizeof header);
    if (length > sizeof header) std::memcpy(part.box + sizeof header, transfer.data, bytes(transfer));
    part.requests.call("MPI_Irecv", mpi().irecv(nullptr, 0, mpi().byte, transfer.peer,
                                                backend_.tag(MpiTag::answer, part.number), comm, part.requests.next()));
    part.requests.call("MPI_Isend", mpi().isend(part.box, static_cast<int>(length), mpi().byte, transfer.peer, tag,
                                                comm, part.requests.next()));
  }

  // Called when MPI has completed the requests of this part.
  void next(Part& part) {
    const Transfer& transfer = *part.transfer;
    const bool is_last = part.moves_data || part.box == nullptr || (transfer.is_send && is_inline(transfer));
    if (is_last) {
      part.is_done = true;
      part.requests.clear();
    } else if (transfer.is_send) {
      move_data(part);
    } else {
      take_header(part);
    }
  }

  void take_header(Part& part) {
    const Transfer& transfer = *part.transfer;
    backend_.count_received(transfer.peer);
    MpiHeader header;
    std::memcpy(&header, part.box, sizeof header);
    if (header.dtype != transfer.dtype || header.count != transfer.count)
      throw CommError(fmt::format("the message does not match (tag {}): rank {} sends {}[{}]; rank {} receives {}[{}]",
                                  transfer.tag, transfer.peer, name_of(header.dtype), header.count, backend_.rank(),
                                  name_of(transfer.dtype), transfer.count));
    part.number = header.number;
    if (is_inline(transfer)) {
      if (transfer.count > 0) std::memcpy(transfer.data, part.box + sizeof header, bytes(transfer));
      part.box = nullptr;
    } else {
      move_data(part);
    }
    part.requests.call("MPI_Isend",
                       mpi().isend(nullptr, 0, mpi().byte, transfer.peer, backend_.tag(MpiTag::answer, part.number),
                                   backend_.comm(), part.requests.next()));
  }

  void move_data(Part& part) {
    const Transfer& transfer = *part.transfer;
    const std::int64_t limit = backend_.setup().largest_call;
    const int tag = backend_.tag(MpiTag::data, part.number);
    const MPI_Datatype mover = mover_of(transfer.dtype);
    part.moves_data = true;
    for (std::int64_t at = 0; at < transfer.count; at += limit) {
      const int count = static_cast<int>(std::min(limit, transfer.count - at));
      std::byte* data =
          static_cast<std::byte*>(transfer.data) + static_cast<std::size_t>(at) * element_size(transfer.dtype);
      if (transfer.is_send)
        part.requests.call("MPI_Isend",
                           mpi().isend(data, count, mover, transfer.peer, tag, backend_.comm(), part.requests.next()));
      else
        part.requests.call("MPI_Irecv",
                           mpi().irecv(data, count, mover, transfer.peer, tag, backend_.comm(), part.requests.next()));
    }
  }

  std::vector<std::unique_ptr<Part>> parts_;
  MpiRequests notices_;  // no operation waits for these
};

}  // namespace

std::unique_ptr<Operation> make_mpi_messages(MpiBackend& backend, const OperationDescription& description) {
  return std::make_unique<MpiMessages>(backend, description);
}

}  // namespace phalanx
