#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "phalanx/base/error.h"
#include "phalanx/comm/futex.h"
#include "phalanx/comm/gloo_backend.h"
#include "phalanx/comm/reduce.h"
#include "phalanx/comm/signature.h"
#include "phalanx/comm/slices.h"

namespace phalanx {
namespace {

using GlooClock = std::chrono::steady_clock;

// gloo notices a broken connection at once; the store tells whose it was a little later.
constexpr std::chrono::milliseconds kBlamePatience{700};
// A death is an error only when what the dead rank had sent must have arrived.
constexpr std::chrono::milliseconds kDeathAge{300};
constexpr std::chrono::milliseconds kLeavePatience{200};
constexpr std::size_t kSmallReduction = 64 * 1024;  // bytes in all, below which everybody gathers everything
constexpr int kMaxPeerTag = (1 << 29) - 1;

at::Tensor gloo_buffer(std::size_t bytes) {
  // Never a null pointer, which an empty tensor would have.
  return at::empty({static_cast<std::int64_t>(std::max<std::size_t>(bytes, 1))}, at::kByte)
      .narrow(0, 0, static_cast<std::int64_t>(bytes));
}

std::byte* bytes_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.mutable_data_ptr()); }

void copy_bytes(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0 && to != from) std::memmove(to, from, bytes);
}

// What both kinds of operation share: the wait for the culprit's name after gloo has failed.
class GlooFailure {
 public:
  explicit operator bool() const { return !text_.empty(); }
  void set(std::string text) {
    if (!text_.empty()) return;
    text_ = std::move(text);
    since_ = GlooClock::now();
  }
  /// Throws once it can say who, or has waited long enough.
  void throw_when_known(const GlooBackend& backend) const {
    backend.throw_if_aborted();
    if (const std::string trouble = backend.announced_trouble(); !trouble.empty()) throw CommError(trouble);
    if (GlooClock::now() - since_ < kBlamePatience) return;
    std::string trouble = backend.trouble();
    if (trouble.empty()) trouble = backend.who_left();
    throw CommError(trouble.empty() ? "gloo: " + text_ : fmt::format("{} (gloo: {})", trouble, text_));
  }

 private:
  std::string text_;
  GlooClock::time_point since_{};
};

class GlooCollective final : public Operation {
 public:
  GlooCollective(GlooBackend& backend, const OperationDescription& description)
      : backend_(backend),
        d_(description),
        size_(static_cast<std::size_t>(backend.size())),
        rank_(static_cast<std::size_t>(backend.rank())),
        element_(element_size(description.dtype)),
        index_(backend.begin_collective()) {}
  ~GlooCollective() override {
    if (has_waited_) backend_.end_wait();
  }

  Progress advance() override {
    if (failure_) {
      failure_.throw_when_known(backend_);
      return Progress::blocked;
    }
    seen_ = backend_.bell()->word.load(std::memory_order_seq_cst);
    backend_.throw_if_aborted();
    if (future_) {
      if (!future_->completed()) return Progress::blocked;
      if (future_->hasError()) {
        failure_.set(gloo_error_text(future_->exception_ptr()));
        return Progress::blocked;
      }
      future_.reset();
      work_.reset();
    }
    try {
      return next() ? Progress::moved : Progress::done;
    } catch (const CommError&) {
      throw;
    } catch (const std::exception&) {
      failure_.set(gloo_error_text(std::current_exception()));  // gloo refuses at once what it knows to be broken
      return Progress::blocked;
    }
  }

  std::optional<Doorbell> doorbell() override {
    if (failure_) return std::nullopt;
    return Doorbell{&backend_.bell()->word, seen_, &backend_.bell()->sleepers, false};
  }
  void check_peers() override {
    if (failure_) return;
    has_waited_ = true;
    backend_.look_after_wait(kDeathAge);
    if (const std::string stuck = backend_.why_stuck(); !stuck.empty())
      throw CommError(fmt::format("the ranks do not call the same operation: {}", stuck));
  }
  std::vector<int> missing_ranks() override { return backend_.behind(index_); }

 private:
  std::size_t bytes(std::int64_t count) const { return static_cast<std::size_t>(count) * element_; }

  void wait_for(c10::intrusive_ptr<c10d::Work> work) {
    work_ = std::move(work);
    future_ = work_->getFuture();
    future_->addCallback([bell = backend_.bell()](c10::ivalue::Future&) { ring(bell->word, bell->sleepers, false); },
                         /*uses_future=*/false);
  }
  void all_gather(const at::Tensor& output, const at::Tensor& input) {
    at::Tensor out = output, in = input;
    wait_for(backend_.group()._allgather_base(out, in));
  }
  void all_to_all(const at::Tensor& output, const at::Tensor& input, std::vector<std::int64_t> output_bytes,
                  std::vector<std::int64_t> input_bytes) {
    at::Tensor out = output, in = input;
    wait_for(backend_.group().alltoall_base(out, in, output_bytes, input_bytes));
  }
  // out = the reduction of S blocks that lie `stride` bytes apart.
  void reduce_blocks(void* out, const at::Tensor& blocks, std::size_t stride, std::size_t count) const {
    if (count == 0) return;
    std::vector<const void*> inputs;
    for (std::size_t r = 0; r < size_; ++r) inputs.push_back(bytes_of(blocks) + r * stride);
    reduce_kernel(d_.dtype, d_.op)(out, inputs.data(), static_cast<int>(size_), count);
  }

  // Does one step. False when all is done.
  bool next() {
    const int step = step_++;
    if (size_ == 1) return d_.compare_only ? false : (alone(), false);
    if (step == 0) return exchange_signatures(), true;
    if (step == 1) {
      compare_signatures();
      if (d_.compare_only || nothing_to_move()) return false;
    }
    switch (d_.verb) {
      case Verb::broadcast:
        return broadcast(step);
      case Verb::all_reduce:
      case Verb::reduce:
        return reduce(step);
      case Verb::all_gather:
        return gather_all(step);
      case Verb::reduce_scatter:
        return reduce_scatter(step);
      case Verb::gather:
        return gather(step);
      case Verb::scatter:
        return scatter(step);
      case Verb::all_to_all:
        return exchange_all(step);
      default:
        return false;  // barrier: all have come
    }
  }

  void alone() {
    // Reductions of one rank, broadcast and barrier leave everything in its place.
    if (d_.input != nullptr && d_.output != nullptr) copy_bytes(d_.output, d_.input, bytes(d_.output_count));
  }

  // Signature, then the counts of all_to_all: the same length whatever is asked for.
  std::size_t header_bytes() const { return sizeof(Signature) + 2 * size_ * sizeof(std::int64_t); }

  void exchange_signatures() {
    const Signature mine = signature_of(d_);
    const at::Tensor own = gloo_buffer(header_bytes());
    std::memset(bytes_of(own), 0, header_bytes());
    std::memcpy(bytes_of(own), &mine, sizeof mine);
    if (d_.verb == Verb::all_to_all && !d_.input_counts.empty()) {
      std::memcpy(bytes_of(own) + sizeof mine, d_.input_counts.data(), size_ * sizeof(std::int64_t));
      std::memcpy(bytes_of(own) + sizeof mine + size_ * sizeof(std::int64_t), d_.output_counts.data(),
                  size_ * sizeof(std::int64_t));
    }
    a_ = gloo_buffer(header_bytes() * size_);
    all_gather(a_, own);
  }

  void compare_signatures() {
    std::vector<Signature> signatures(size_);
    std::vector<const std::int64_t*> inputs, outputs;
    for (std::size_t r = 0; r < size_; ++r) {
      const std::byte* header = bytes_of(a_) + r * header_bytes();
      std::memcpy(&signatures[r], header, sizeof(Signature));
      inputs.push_back(reinterpret_cast<const std::int64_t*>(header + sizeof(Signature)));
      outputs.push_back(inputs.back() + size_);
    }
    require_equal_signatures(signatures);
    if (d_.verb != Verb::all_to_all || d_.input_counts.empty()) return;
    if (const std::string text = all_to_all_mismatch(inputs, outputs); !text.empty()) throw CommError(text);
    for (const std::int64_t* counts : inputs)
      any_uneven_ = any_uneven_ || std::any_of(counts, counts + size_, [](std::int64_t count) { return count > 0; });
  }

  // Of what all ranks know alike.
  bool nothing_to_move() const {
    switch (d_.verb) {
      case Verb::barrier:
        return true;
      case Verb::all_gather:
        return d_.output_count == 0;
      case Verb::reduce_scatter:
        return d_.input_count == 0;
      case Verb::gather:
        return d_.input_count == 0;
      case Verb::all_to_all:
        return d_.input_counts.empty() ? d_.input_count == 0 : !any_uneven_;
      default:
        return d_.output_count == 0;
    }
  }

  bool broadcast(int step) {
    const std::size_t total = bytes(d_.output_count);
    const bool is_root = backend_.rank() == d_.root;
    if (step == 1) {
      a_ = gloo_buffer(total);
      if (is_root) copy_bytes(bytes_of(a_), d_.output, total);
      std::vector<at::Tensor> tensors{a_};
      c10d::BroadcastOptions options;
      options.rootRank = d_.root;
      wait_for(backend_.group().broadcast(tensors, options));
      return true;
    }
    if (!is_root) copy_bytes(d_.output, bytes_of(a_), total);
    return false;
  }

  bool reduce(int step) {
    const std::size_t total = bytes(d_.output_count);
    const auto count = static_cast<std::size_t>(d_.output_count);
    const bool wants_result = d_.verb == Verb::all_reduce || backend_.rank() == d_.root;
    if (total * size_ <= kSmallReduction) {
      if (step == 1) {
        const at::Tensor own = gloo_buffer(total);
        copy_bytes(bytes_of(own), d_.output, total);
        a_ = gloo_buffer(total * size_);
        all_gather(a_, own);
        return true;
      }
      if (wants_result) reduce_blocks(d_.output, a_, total, count);
      return false;
    }
    const Range mine = slice_of(count, backend_.size(), backend_.rank());
    const std::size_t share = slice_of(count, backend_.size(), 0).size() * element_;  // the longest slice
    if (step == 1) {
      const at::Tensor own = gloo_buffer(total);
      copy_bytes(bytes_of(own), d_.output, total);
      a_ = gloo_buffer(mine.size() * element_ * size_);
      std::vector<std::int64_t> in, out(size_, static_cast<std::int64_t>(mine.size() * element_));
      for (int r = 0; r < backend_.size(); ++r)
        in.push_back(static_cast<std::int64_t>(slice_of(count, backend_.size(), r).size() * element_));
      all_to_all(a_, own, std::move(out), std::move(in));
      return true;
    }
    if (step == 2) {
      const at::Tensor own = gloo_buffer(share);
      reduce_blocks(bytes_of(own), a_, mine.size() * element_, mine.size());
      a_ = gloo_buffer(share * size_);
      all_gather(a_, own);
      return true;
    }
    if (!wants_result) return false;
    for (int r = 0; r < backend_.size(); ++r) {
      const Range slice = slice_of(count, backend_.size(), r);
      copy_bytes(static_cast<std::byte*>(d_.output) + slice.begin * element_,
                 bytes_of(a_) + static_cast<std::size_t>(r) * share, slice.size() * element_);
    }
    return false;
  }

  bool gather_all(int step) {
    const std::int64_t longest =
        d_.counts.empty() ? d_.input_count : *std::max_element(d_.counts.begin(), d_.counts.end());
    if (step == 1) {
      const at::Tensor own = gloo_buffer(bytes(longest));
      copy_bytes(bytes_of(own), d_.input, bytes(d_.input_count));
      a_ = gloo_buffer(bytes(longest) * size_);
      all_gather(a_, own);
      return true;
    }
    for (std::size_t r = 0; r < size_; ++r) {
      const Range part = part_of(d_.counts, longest, static_cast<int>(r));
      copy_bytes(static_cast<std::byte*>(d_.output) + part.begin * element_, bytes_of(a_) + r * bytes(longest),
                 part.size() * element_);
    }
    return false;
  }

  bool reduce_scatter(int step) {
    const std::size_t own = bytes(d_.output_count);
    if (step == 1) {
      const at::Tensor in = gloo_buffer(bytes(d_.input_count));
      copy_bytes(bytes_of(in), d_.input, bytes(d_.input_count));
      a_ = gloo_buffer(own * size_);
      std::vector<std::int64_t> in_bytes, out_bytes(size_, static_cast<std::int64_t>(own));
      for (std::size_t r = 0; r < size_; ++r)
        in_bytes.push_back(static_cast<std::int64_t>(d_.counts.empty() ? own : bytes(d_.counts[r])));
      all_to_all(a_, in, std::move(out_bytes), std::move(in_bytes));
      return true;
    }
    reduce_blocks(d_.output, a_, own, static_cast<std::size_t>(d_.output_count));
    return false;
  }

  bool gather(int step) {
    const std::size_t own = bytes(d_.input_count);
    const bool is_root = backend_.rank() == d_.root;
    if (step == 1) {
      std::vector<at::Tensor> input{gloo_buffer(own)};
      copy_bytes(bytes_of(input[0]), d_.input, own);
      std::vector<std::vector<at::Tensor>> outputs;
      if (is_root) {
        outputs.emplace_back();
        for (std::size_t r = 0; r < size_; ++r) outputs[0].push_back(gloo_buffer(own));
        parts_ = outputs[0];
      }
      c10d::GatherOptions options;
      options.rootRank = d_.root;
      wait_for(backend_.group().gather(outputs, input, options));
      return true;
    }
    for (std::size_t r = 0; r < parts_.size(); ++r)
      copy_bytes(static_cast<std::byte*>(d_.output) + r * own, bytes_of(parts_[r]), own);
    return false;
  }

  bool scatter(int step) {
    const std::size_t own = bytes(d_.output_count);
    if (step == 1) {
      std::vector<at::Tensor> output{a_ = gloo_buffer(own)};
      std::vector<std::vector<at::Tensor>> inputs;
      if (backend_.rank() == d_.root) {
        inputs.emplace_back();
        for (std::size_t r = 0; r < size_; ++r) {
          inputs[0].push_back(gloo_buffer(own));
          copy_bytes(bytes_of(inputs[0][r]), static_cast<const std::byte*>(d_.input) + r * own, own);
        }
      }
      c10d::ScatterOptions options;
      options.rootRank = d_.root;
      wait_for(backend_.group().scatter(output, inputs, options));
      return true;
    }
    copy_bytes(d_.output, bytes_of(a_), own);
    return false;
  }

  bool exchange_all(int step) {
    if (step == 1) {
      const at::Tensor in = gloo_buffer(bytes(d_.input_count));
      copy_bytes(bytes_of(in), d_.input, bytes(d_.input_count));
      a_ = gloo_buffer(bytes(d_.output_count));
      std::vector<std::int64_t> in_bytes(size_), out_bytes(size_);
      for (std::size_t r = 0; r < size_; ++r) {
        const auto even = d_.input_count / static_cast<std::int64_t>(size_);
        in_bytes[r] = static_cast<std::int64_t>(bytes(d_.input_counts.empty() ? even : d_.input_counts[r]));
        out_bytes[r] = static_cast<std::int64_t>(bytes(d_.output_counts.empty() ? even : d_.output_counts[r]));
      }
      all_to_all(a_, in, std::move(out_bytes), std::move(in_bytes));
      return true;
    }
    copy_bytes(d_.output, bytes_of(a_), bytes(d_.output_count));
    return false;
  }

  GlooBackend& backend_;
  const OperationDescription& d_;
  const std::size_t size_, rank_, element_;
  const std::uint64_t index_;  // among the group's collectives
  int step_ = 0;
  bool any_uneven_ = false;
  at::Tensor a_;
  std::vector<at::Tensor> parts_;
  c10::intrusive_ptr<c10d::Work> work_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::uint32_t seen_ = 0;
  bool has_waited_ = false;
  GlooFailure failure_;
};

struct MessageHeader {
  std::int64_t count = 0;
  std::int32_t data_tag = 0;
  DataType dtype = DataType::u8;
};

class GlooTransfers final : public Operation {
 public:
  GlooTransfers(GlooBackend& backend, const OperationDescription& description) : backend_(backend), d_(description) {
    for (const Transfer& transfer : d_.transfers) {
      if (transfer.tag < 0 || transfer.tag > kMaxPeerTag)
        throw CommError(fmt::format("tag {}: the gloo backend takes tags from 0 to {}", transfer.tag, kMaxPeerTag));
    }
    for (const Transfer& transfer : d_.transfers) parts_.push_back(begin(transfer));
  }
  ~GlooTransfers() override {
    const bool complete =
        std::all_of(parts_.begin(), parts_.end(), [](const auto& part) { return part->ended.load(); });
    if (!complete) backend_.abort("a message was given up before it was through");
    // What gloo has begun to write to a rank that is stopped does not end: its thread is left to itself, with all it
    // uses.
    const auto patience = GlooClock::now() + kLeavePatience;
    for (auto& part : parts_) {
      if (!part->thread.joinable()) continue;
      for (;;) {
        const std::uint32_t seen = backend_.bell()->word.load(std::memory_order_seq_cst);
        if (part->ended.load() || GlooClock::now() > patience) break;
        futex_wait(&backend_.bell()->word, seen, std::chrono::milliseconds(10), false);
      }
      if (part->ended.load())
        part->thread.join();
      else
        part->thread.detach();
    }
    if (has_waited_) backend_.end_wait();
  }

  Progress advance() override {
    if (failure_) {
      failure_.throw_when_known(backend_);
      return Progress::blocked;
    }
    seen_ = backend_.bell()->word.load(std::memory_order_seq_cst);
    backend_.throw_if_aborted();
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
      if (!part->transfer->is_send) copy_bytes(part->transfer->data, bytes_of(part->data), bytes(*part->transfer));
      part->delivered = moved = true;
      GlooBackend::MessageCounts& with = backend_.messages_with(part->transfer->peer);
      ++(part->transfer->is_send ? with.sends_done : with.receives_done);
    }
    return all ? Progress::done : moved ? Progress::moved : Progress::blocked;
  }
  std::optional<Doorbell> doorbell() override {
    if (failure_) return std::nullopt;
    return Doorbell{&backend_.bell()->word, seen_, &backend_.bell()->sleepers, false};
  }
  void check_peers() override {
    if (failure_) return;
    has_waited_ = true;
    backend_.look_after_wait(kDeathAge);
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
      // Posted here, in the order of issue, which is the order in which messages of one tag match.
      if (transfer.is_send) {
        const MessageHeader head{transfer.count, backend_.next_message_tag(transfer.peer), transfer.dtype};
        std::memcpy(bytes_of(part->header), &head, sizeof head);
        part->header_work = backend_.group().send(header, transfer.peer, transfer.tag * 2);
        if (transfer.count > 0) {
          part->data = gloo_buffer(bytes(transfer));
          copy_bytes(bytes_of(part->data), transfer.data, bytes(transfer));
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
    part->thread =
        std::thread([part, group = backend_.group_pointer(), bell = backend_.bell(), rank = backend_.rank()] {
          wait_through(*part, *group, rank);
          part->ended.store(true, std::memory_order_release);
          ring(bell->word, bell->sleepers, false);
        });
    return part;
  }

  // May go on when the operation has long ended.
  static void wait_through(Part& part, c10d::Backend& group, int rank) {
    try {
      const Transfer& transfer = *part.transfer;
      part.header_work->wait();
      if (!transfer.is_send) {
        MessageHeader head;
        std::memcpy(&head, bytes_of(part.header), sizeof head);
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

  // Messages to oneself are kept until they are asked for.
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
    copy_bytes(transfer.data, found->bytes.data(), found->bytes.size());
    messages.erase(found);
    return true;
  }

  GlooBackend& backend_;
  const OperationDescription& d_;
  std::vector<std::shared_ptr<Part>> parts_;
  std::uint32_t seen_ = 0;
  bool has_waited_ = false;
  GlooFailure failure_;
};

}  // namespace

std::unique_ptr<Operation> make_gloo_collective(GlooBackend& backend, const OperationDescription& description) {
  return std::make_unique<GlooCollective>(backend, description);
}

std::unique_ptr<Operation> make_gloo_transfers(GlooBackend& backend, const OperationDescription& description) {
  return std::make_unique<GlooTransfers>(backend, description);
}

}  // namespace phalanx
