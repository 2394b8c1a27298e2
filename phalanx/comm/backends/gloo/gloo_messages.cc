#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "phalanx/base/error.h"
#include "phalanx/base/start_thread.h"
#include "phalanx/comm/backends/gloo/gloo_operation.h"
#include "phalanx/comm/futex.h"

namespace phalanx {
namespace {

constexpr std::chrono::milliseconds kLeavePatience{200};
constexpr int kMaxPeerTag = (1 << 29) - 1;

struct MessageHeader {
  std::int64_t count = 0;
  std::int32_t data_tag = 0;
  DataType dtype = DataType::u8;
};

class GlooMessages final : public GlooOperation {
 public:
  GlooMessages(GlooBackend& backend, const OperationDescription& description)
      : GlooOperation(backend), d_(description) {
    for (const Transfer& transfer : d_.transfers) {
      if (transfer.tag < 0 || transfer.tag > kMaxPeerTag)
        throw CommError(fmt::format("tag {}: the gloo backend takes tags from 0 to {}", transfer.tag, kMaxPeerTag));
    }
    for (const Transfer& transfer : d_.transfers) parts_.push_back(begin(transfer));
  }
  ~GlooMessages() override {
    const bool complete =
        std::all_of(parts_.begin(), parts_.end(), [](const auto& part) { return part->ended.load(); });
    if (!complete) backend_.abort("a message was given up before it was through");
    // A gloo write to a stopped rank does not end: its thread is abandoned, together with everything that it uses.
    const auto patience = std::chrono::steady_clock::now() + kLeavePatience;
    for (auto& part : parts_) {
      if (!part->thread.joinable()) continue;
      for (;;) {
        const std::uint32_t seen = backend_.bell()->word.load(std::memory_order_seq_cst);
        if (part->ended.load() || std::chrono::steady_clock::now() > patience) break;
        futex_wait(&backend_.bell()->word, seen, std::chrono::milliseconds(10), false);
      }
      if (part->ended.load())
        part->thread.join();
      else
        part->thread.detach();
    }
  }

  Progress advance() override {
    if (!can_go_on()) return Progress::blocked;
    bool moved = false, all = true;
    for (auto& part : parts_) {
      if (part->delivered) continue;
      if (part->transfer->peer == backend_.rank()) {
        part->delivered = with_self(*part->transfer);
        moved |= part->delivered;
        all &= part->delivered;
        continue;
      }
      if (!part->ended.load(std::memory_order_acquire)) {
        all = false;
        continue;
      }
      if (!part->mismatch.empty()) throw CommError(part->mismatch);
      if (!part->error.empty()) {
        failure_.set(part->error);
        return Progress::blocked;
      }
      if (!part->transfer->is_send) gloo_copy(part->transfer->data, gloo_bytes(part->data), bytes(*part->transfer));
      part->delivered = moved = true;
      GlooBackend::MessageCounts& with = backend_.messages_with(part->transfer->peer);
      ++(part->transfer->is_send ? with.sends_done : with.receives_done);
    }
    return all ? Progress::done : moved ? Progress::moved : Progress::blocked;
  }
  std::vector<int> missing_ranks() override {
    std::vector<int> ranks;
    for (const auto& part : parts_)
      if (!part->delivered && std::find(ranks.begin(), ranks.end(), part->transfer->peer) == ranks.end())
        ranks.push_back(part->transfer->peer);
    return ranks;
  }

 private:
  struct Part {
    Transfer asked;
    const Transfer* transfer = &asked;
    at::Tensor header, data;
    c10::intrusive_ptr<c10d::Work> header_work, data_work;
    std::string error, mismatch;  // written before `ended`
    std::atomic<bool> ended{false};
    bool delivered = false;
    std::thread thread;
  };

  static std::size_t bytes(const Transfer& transfer) {
    return static_cast<std::size_t>(transfer.count) * element_size(transfer.dtype);
  }

  std::shared_ptr<Part> begin(const Transfer& transfer) {
    auto part = std::make_shared<Part>();
    part->asked = transfer;
    if (transfer.peer == backend_.rank()) {
      part->ended = true;
      return part;
    }
    GlooBackend::MessageCounts& with = backend_.messages_with(transfer.peer);
    ++(transfer.is_send ? with.sends : with.receives);
    part->header = gloo_buffer(sizeof(MessageHeader));
    std::vector<at::Tensor> header{part->header};
    try {
      // Posted here, in issue order: the order in which messages of one tag match.
      if (transfer.is_send) {
        const MessageHeader head{transfer.count, backend_.next_message_tag(transfer.peer), transfer.dtype};
        std::memcpy(gloo_bytes(part->header), &head, sizeof head);
        part->header_work = backend_.group().send(header, transfer.peer, transfer.tag * 2);
        if (transfer.count > 0) {
          part->data = gloo_buffer(bytes(transfer));
          gloo_copy(gloo_bytes(part->data), transfer.data, bytes(transfer));
          std::vector<at::Tensor> data{part->data};
          part->data_work = backend_.group().send(data, transfer.peer, head.data_tag);
        }
      } else {
        part->header_work = backend_.group().recv(header, transfer.peer, transfer.tag * 2);
      }
    } catch (const std::exception&) {
      part->error = gloo_error_text(std::current_exception());
      part->ended = true;
      return part;
    }
    try {
      part->thread = start_thread("a message of gloo", [part, group = backend_.group_pointer(), bell = backend_.bell(),
                                                        rank = backend_.rank()] {
        wait_through(*part, *group, rank);
        part->ended.store(true, std::memory_order_release);
        ring(bell->word, bell->sleepers, false);
      });
    } catch (const Error& error) {
      part->error = error.what();
      part->ended = true;
    }
    return part;
  }

  // May continue long after the operation has ended.
  static void wait_through(Part& part, c10d::Backend& group, int rank) {
    try {
      const Transfer& transfer = *part.transfer;
      part.header_work->wait();
      if (!transfer.is_send) {
        MessageHeader head;
        std::memcpy(&head, gloo_bytes(part.header), sizeof head);
        if (head.count != transfer.count || head.dtype != transfer.dtype) {
          part.mismatch =
              fmt::format("rank {} sends {}[{}] under tag {} and rank {} receives {}[{}]", transfer.peer,
                          name_of(head.dtype), head.count, transfer.tag, rank, name_of(transfer.dtype), transfer.count);
        } else {
          part.data = gloo_buffer(bytes(transfer));
          if (transfer.count > 0) {
            std::vector<at::Tensor> data{part.data};
            part.data_work = group.recv(data, transfer.peer, head.data_tag);
          }
        }
      }
      if (part.data_work) part.data_work->wait();
    } catch (...) {
      part.error = gloo_error_text(std::current_exception());
    }
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

  const OperationDescription& d_;
  std::vector<std::shared_ptr<Part>> parts_;
};

}  // namespace

std::unique_ptr<Operation> make_gloo_messages(GlooBackend& backend, const OperationDescription& description) {
  return std::make_unique<GlooMessages>(backend, description);
}

}  // namespace phalanx
