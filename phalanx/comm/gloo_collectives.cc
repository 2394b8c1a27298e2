#include <ATen/core/ivalue.h>
#include <fmt/format.h>

#include <algorithm>

#include "phalanx/base/error.h"
#include "phalanx/comm/futex.h"
#include "phalanx/comm/gloo_operation.h"
#include "phalanx/comm/reduce.h"
#include "phalanx/comm/signature.h"
#include "phalanx/comm/slices.h"

namespace phalanx {
namespace {

constexpr std::size_t kSmallReduction = 64 * 1024;  // bytes in all, below which everybody gathers everything

class GlooCollective final : public GlooOperation {
 public:
  GlooCollective(GlooBackend& backend, const OperationDescription& description)
      : GlooOperation(backend),
        d_(description),
        size_(static_cast<std::size_t>(backend.size())),
        rank_(static_cast<std::size_t>(backend.rank())),
        element_(element_size(description.dtype)),
        index_(backend.begin_collective()) {}

  Progress advance() override {
    if (!can_go_on()) return Progress::blocked;
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

  void check_peers() override {
    GlooOperation::check_peers();
    if (failure_) return;
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
    for (std::size_t r = 0; r < size_; ++r) inputs.push_back(gloo_bytes(blocks) + r * stride);
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
    if (d_.input != nullptr && d_.output != nullptr) gloo_copy(d_.output, d_.input, bytes(d_.output_count));
  }

  // Signature, then the counts of all_to_all: the same length whatever is asked for.
  std::size_t header_bytes() const { return sizeof(Signature) + 2 * size_ * sizeof(std::int64_t); }

  void exchange_signatures() {
    const Signature mine = signature_of(d_);
    const at::Tensor own = gloo_buffer(header_bytes());
    std::memset(gloo_bytes(own), 0, header_bytes());
    std::memcpy(gloo_bytes(own), &mine, sizeof mine);
    if (d_.verb == Verb::all_to_all && !d_.input_counts.empty()) {
      std::memcpy(gloo_bytes(own) + sizeof mine, d_.input_counts.data(), size_ * sizeof(std::int64_t));
      std::memcpy(gloo_bytes(own) + sizeof mine + size_ * sizeof(std::int64_t), d_.output_counts.data(),
                  size_ * sizeof(std::int64_t));
    }
    a_ = gloo_buffer(header_bytes() * size_);
    all_gather(a_, own);
  }

  void compare_signatures() {
    std::vector<Signature> signatures(size_);
    std::vector<const std::int64_t*> inputs, outputs;
    for (std::size_t r = 0; r < size_; ++r) {
      const std::byte* header = gloo_bytes(a_) + r * header_bytes();
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
      if (is_root) gloo_copy(gloo_bytes(a_), d_.output, total);
      std::vector<at::Tensor> tensors{a_};
      c10d::BroadcastOptions options;
      options.rootRank = d_.root;
      wait_for(backend_.group().broadcast(tensors, options));
      return true;
    }
    if (!is_root) gloo_copy(d_.output, gloo_bytes(a_), total);
    return false;
  }

  bool reduce(int step) {
    const std::size_t total = bytes(d_.output_count);
    const auto count = static_cast<std::size_t>(d_.output_count);
    const bool wants_result = d_.verb == Verb::all_reduce || backend_.rank() == d_.root;
    if (total * size_ <= kSmallReduction) {
      if (step == 1) {
        const at::Tensor own = gloo_buffer(total);
        gloo_copy(gloo_bytes(own), d_.output, total);
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
      gloo_copy(gloo_bytes(own), d_.output, total);
      a_ = gloo_buffer(mine.size() * element_ * size_);
      std::vector<std::int64_t> in, out(size_, static_cast<std::int64_t>(mine.size() * element_));
      for (int r = 0; r < backend_.size(); ++r)
        in.push_back(static_cast<std::int64_t>(slice_of(count, backend_.size(), r).size() * element_));
      all_to_all(a_, own, std::move(out), std::move(in));
      return true;
    }
    if (step == 2) {
      const at::Tensor own = gloo_buffer(share);
      reduce_blocks(gloo_bytes(own), a_, mine.size() * element_, mine.size());
      a_ = gloo_buffer(share * size_);
      all_gather(a_, own);
      return true;
    }
    if (!wants_result) return false;
    for (int r = 0; r < backend_.size(); ++r) {
      const Range slice = slice_of(count, backend_.size(), r);
      gloo_copy(static_cast<std::byte*>(d_.output) + slice.begin * element_,
                gloo_bytes(a_) + static_cast<std::size_t>(r) * share, slice.size() * element_);
    }
    return false;
  }

  bool gather_all(int step) {
    const std::int64_t longest =
        d_.counts.empty() ? d_.input_count : *std::max_element(d_.counts.begin(), d_.counts.end());
    if (step == 1) {
      const at::Tensor own = gloo_buffer(bytes(longest));
      gloo_copy(gloo_bytes(own), d_.input, bytes(d_.input_count));
      a_ = gloo_buffer(bytes(longest) * size_);
      all_gather(a_, own);
      return true;
    }
    for (std::size_t r = 0; r < size_; ++r) {
      const Range part = part_of(d_.counts, longest, static_cast<int>(r));
      gloo_copy(static_cast<std::byte*>(d_.output) + part.begin * element_, gloo_bytes(a_) + r * bytes(longest),
                part.size() * element_);
    }
    return false;
  }

  bool reduce_scatter(int step) {
    const std::size_t own = bytes(d_.output_count);
    if (step == 1) {
      const at::Tensor in = gloo_buffer(bytes(d_.input_count));
      gloo_copy(gloo_bytes(in), d_.input, bytes(d_.input_count));
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
      gloo_copy(gloo_bytes(input[0]), d_.input, own);
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
      gloo_copy(static_cast<std::byte*>(d_.output) + r * own, gloo_bytes(parts_[r]), own);
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
          gloo_copy(gloo_bytes(inputs[0][r]), static_cast<const std::byte*>(d_.input) + r * own, own);
        }
      }
      c10d::ScatterOptions options;
      options.rootRank = d_.root;
      wait_for(backend_.group().scatter(output, inputs, options));
      return true;
    }
    gloo_copy(d_.output, gloo_bytes(a_), own);
    return false;
  }

  bool exchange_all(int step) {
    if (step == 1) {
      const at::Tensor in = gloo_buffer(bytes(d_.input_count));
      gloo_copy(gloo_bytes(in), d_.input, bytes(d_.input_count));
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
    gloo_copy(d_.output, gloo_bytes(a_), bytes(d_.output_count));
    return false;
  }

  const OperationDescription& d_;
  const std::size_t size_, rank_, element_;
  const std::uint64_t index_;  // among the group's collectives
  int step_ = 0;
  bool any_uneven_ = false;
  at::Tensor a_;
  std::vector<at::Tensor> parts_;
  c10::intrusive_ptr<c10d::Work> work_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace

std::unique_ptr<Operation> make_gloo_collective(GlooBackend& backend, const OperationDescription& description) {
  return std::make_unique<GlooCollective>(backend, description);
}

}  // namespace phalanx
