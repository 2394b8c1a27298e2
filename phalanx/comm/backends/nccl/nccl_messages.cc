#include <fmt/format.h>

#include <algorithm>

#include "phalanx/base/error.h"
#include "phalanx/comm/backends/nccl/nccl_operation.h"

namespace phalanx {
namespace {

class NcclMessages final : public NcclOperation {
 public:
  NcclMessages(NcclBackend& backend, const OperationDescription& description) : NcclOperation(backend, description) {
    for (const Transfer& one : d_.transfers) {
      if (one.peer != backend_.rank())
        remote_.push_back(&one);
      else if (one.is_send)
        send_to_self(one);
      else
        self_receives_.push_back(&one);
    }
    if (!remote_.empty()) take_turn();
    is_agreed_ = remote_.empty();
  }

  void launch() override {
    if (!backend_.strict() || is_agreed_) launch_briefly([this] { return launch_what_can_be(); });
  }

  Progress advance() override {
    backend_.throw_if_aborted();
    if (!completion_->event()) launch_what_can_be();
    if (!is_agreed_) {
      if (!headers_operation_) begin_headers();
      const Progress progress = headers_operation_->advance();
      if (progress != Progress::done) return progress;
      headers_operation_.reset();
      compare_headers();
      is_agreed_ = true;
      return Progress::moved;
    }
    return poll_completion();
  }

  std::optional<Doorbell> doorbell() override {
    return headers_operation_ && (completion_->event() || backend_.strict()) ? headers_operation_->doorbell()
                                                                             : std::nullopt;
  }
  void check_peers() override { headers_operation_ ? headers_operation_->check_peers() : check_device_peers(); }
  std::vector<int> missing_ranks() override {
    if (headers_operation_) return headers_operation_->missing_ranks();
    std::vector<int> peers;
    for (const Transfer& one : d_.transfers)
      if (std::find(peers.begin(), peers.end(), one.peer) == peers.end()) peers.push_back(one.peer);
    return peers;
  }
  bool retire() noexcept override {
    if (headers_operation_ && !headers_operation_->retire()) return false;
    // A message to this rank itself that has not been received, and will not be, is given up.
    const std::lock_guard lock(backend_.self_mutex());
    std::erase_if(backend_.self_messages(), [this](const auto& message) {
      return std::find(self_sends_.begin(), self_sends_.end(), message.consumed) != self_sends_.end();
    });
    for (const auto& consumed : self_sends_)
      if (consumed->event() && !consumed->is_done()) return false;
    return NcclOperation::retire();
  }

 private:
  struct Header {
    std::int64_t count = 0;
    std::int32_t tag = 0;
    DataType dtype = DataType::u8;
    std::uint8_t unused[3] = {};
  };
  static_assert(sizeof(Header) == 16);

  static std::string text_of(DataType dtype, std::int64_t count) {
    return fmt::format("{}[{}]", name_of(dtype), count);
  }

  // Once all its device work is in the stream, the operation's end can be marked.
  bool launch_what_can_be() {
    if (!backend_.strict() || is_agreed_) launch_remote();
    std::erase_if(self_receives_, [this](const Transfer* one) { return receive_from_self(*one); });
    const bool all_taken = std::all_of(self_sends_.begin(), self_sends_.end(),
                                       [](const auto& consumed) { return consumed->event() != nullptr; });
    if (!(remote_.empty() || is_launched()) || !self_receives_.empty() || !all_taken) return false;
    in_stream([] {});
    mark_end();
    return true;
  }

  void launch_remote() {
    if (remote_.empty() || is_launched()) return;
    launch_step(
        [this] {
          backend_.group().begin_group(name_of(d_.verb).data(), [&](NcclComm* comm) { return move_remote(comm); });
        },
        [] {});
  }
  NcclResult move_remote(NcclComm* comm) const {
    const NcclTable& nccl = backend_.table();
    for (const Transfer* one : remote_) {
      if (one->count == 0) continue;
      const auto count = static_cast<std::size_t>(one->count);
      const NcclType type = nccl_type_of(one->dtype);
      const NcclResult result = one->is_send ? nccl.send(one->data, count, type, one->peer, comm, backend_.stream())
                                             : nccl.recv(one->data, count, type, one->peer, comm, backend_.stream());
      if (result != NcclResult::success && result != NcclResult::in_progress) return result;
    }
    return NcclResult::success;
  }

  void send_to_self(const Transfer& one) {
    self_sends_.push_back(std::make_shared<DeviceCompletion>(backend_.shared_streams()));
    const std::lock_guard lock(backend_.self_mutex());
    backend_.self_messages().push_back({one.tag, one.dtype, one.count, one.data, ready_, self_sends_.back()});
  }

  bool receive_from_self(const Transfer& one) {
    const std::lock_guard lock(backend_.self_mutex());
    auto& messages = backend_.self_messages();
    const auto found =
        std::find_if(messages.begin(), messages.end(), [&](const auto& message) { return message.tag == one.tag; });
    if (found == messages.end()) return false;
    if (found->dtype != one.dtype || found->count != one.count)
      throw CommError(fmt::format("rank {} sends itself {} under tag {} and receives {}",
                                  backend_.name_of(backend_.rank()), text_of(found->dtype, found->count), one.tag,
                                  text_of(one.dtype, one.count)));
    in_stream([&] {
      backend_.streams().wait(backend_.stream(), *found->ready);
      backend_.streams().copy(backend_.stream(), one.data, found->data,
                              static_cast<std::size_t>(one.count) * element_size(one.dtype));
    });
    found->consumed->set(backend_.streams().record(backend_.stream()));
    messages.erase(found);
    return true;
  }

  // Type, length and tag of each message go over the control plane.
  void begin_headers() {
    headers_.resize(remote_.size());
    headers_description_.verb = Verb::batch_isend_irecv;
    headers_description_.sequence = d_.sequence;
    for (std::size_t i = 0; i < remote_.size(); ++i) {
      const Transfer& one = *remote_[i];
      if (one.is_send) headers_[i] = {one.count, one.tag, one.dtype};
      headers_description_.transfers.push_back(
          {one.is_send, &headers_[i], static_cast<std::int64_t>(sizeof(Header)), DataType::u8, one.peer, 0});
    }
    headers_operation_ = backend_.control().start(headers_description_);
  }
  void compare_headers() const {
    for (std::size_t i = 0; i < remote_.size(); ++i) {
      const Transfer& mine = *remote_[i];
      const Header& theirs = headers_[i];
      if (mine.is_send || (theirs.count == mine.count && theirs.dtype == mine.dtype && theirs.tag == mine.tag))
        continue;
      std::string text = fmt::format("rank {} sends {} under tag {} and rank {} receives {}",
                                     backend_.name_of(mine.peer), text_of(theirs.dtype, theirs.count), theirs.tag,
                                     backend_.name_of(backend_.rank()), text_of(mine.dtype, mine.count));
      if (theirs.tag != mine.tag)
        text +=
            fmt::format(" under tag {}: nccl matches the messages between two ranks in the order of issue", mine.tag);
      throw CommError(text);
    }
  }

  std::vector<const Transfer*> remote_, self_receives_;
  std::vector<std::shared_ptr<DeviceCompletion>> self_sends_;
  bool is_agreed_ = false;
  std::vector<Header> headers_;
  OperationDescription headers_description_;
  std::unique_ptr<Operation> headers_operation_;
};

}  // namespace

std::unique_ptr<Operation> make_nccl_messages(NcclBackend& backend, const OperationDescription& description) {
  return std::make_unique<NcclMessages>(backend, description);
}

}  // namespace phalanx
