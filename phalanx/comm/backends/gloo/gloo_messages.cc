#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/comm/backends/gloo/gloo_operation.h"

namespace phalanx {
namespace {

class GlooMessages final : public GlooOperation {
 public:
  GlooMessages(GlooBackend& backend, const OperationDescription& description) : GlooOperation(backend) {
    for (const Transfer& transfer : description.transfers)
      if (transfer.tag < 0) throw CommError(fmt::format("tag {}: the gloo backend takes tags from 0", transfer.tag));
    for (const Transfer& transfer : description.transfers) parts_.push_back({transfer, begin(transfer)});
  }
  ~GlooMessages() override {
    if (!is_through()) backend_.abort("a message was given up before it was through");
  }

  Progress advance() override {
    if (!can_go_on()) return Progress::blocked;
    bool moved = false;
    for (Part& part : parts_) {
      if (part.is_through || !is_over(part)) continue;
      if (part.message && !part.message->mismatch().empty()) throw CommError(part.message->mismatch());
      if (part.message && !part.message->error().empty()) {
        failure_.set(part.message->error());
        return Progress::blocked;
      }
      part.is_through = moved = true;
      if (part.message) count_done(part.transfer);
    }
    return is_through() ? Progress::done : moved ? Progress::moved : Progress::blocked;
  }
  std::vector<int> missing_ranks() override {
    std::vector<int> ranks;
    for (const Part& part : parts_)
      if (!part.is_through && std::find(ranks.begin(), ranks.end(), part.transfer.peer) == ranks.end())
        ranks.push_back(part.transfer.peer);
    return ranks;
  }

 private:
  struct Part {
    Transfer transfer;
    std::shared_ptr<Message> message;  // null: with this rank itself
    bool is_through = false;
  };

  bool is_through() const {
    return std::all_of(parts_.begin(), parts_.end(), [](const Part& part) { return part.is_through; });
  }
  bool is_over(const Part& part) { return part.message ? part.message->is_done() : with_self(part.transfer); }

  std::shared_ptr<Message> begin(const Transfer& transfer) {
    if (transfer.peer == backend_.rank()) return nullptr;
    GlooBackend::MessageCounts& with = backend_.messages_with(transfer.peer);
    ++(transfer.is_send ? with.sends : with.receives);
    return backend_.transport().post(transfer);
  }
  void count_done(const Transfer& transfer) {
    GlooBackend::MessageCounts& with = backend_.messages_with(transfer.peer);
    ++(transfer.is_send ? with.sends_done : with.receives_done);
  }

  static std::size_t bytes(const Transfer& transfer) {
    return static_cast<std::size_t>(transfer.count) * element_size(transfer.dtype);
  }

  // Messages to this rank itself are stored until they are received.
  bool with_self(const Transfer& transfer) {
    auto& messages = backend_.self_messages();
    if (transfer.is_send) {
      messages.push_back({transfer.tag, transfer.dtype, transfer.count,
                          std::string(static_cast<const char*>(transfer.data), bytes(transfer))});
      return true;
    }
    const auto found = std::find_if(messages.begin(), messages.end(),
                                    [&](const auto& message) { return message.tag == transfer.tag; });
    if (found == messages.end()) return false;
    if (found->dtype != transfer.dtype || found->count != transfer.count)
      throw CommError(fmt::format("rank {} sends itself {}[{}] under tag {} and receives {}[{}]", backend_.rank(),
                                  name_of(found->dtype), found->count, transfer.tag, name_of(transfer.dtype),
                                  transfer.count));
    gloo_copy(transfer.data, found->bytes.data(), found->bytes.size());
    messages.erase(found);
    return true;
  }

  std::vector<Part> parts_;
};

}  // namespace

std::unique_ptr<Operation> make_gloo_messages(GlooBackend& backend, const OperationDescription& description) {
  return std::make_unique<GlooMessages>(backend, description);
}

}  // namespace phalanx
