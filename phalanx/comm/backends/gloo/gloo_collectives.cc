#include <ATen/core/ivalue.h>
#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "phalanx/base/error.h"
#include "phalanx/comm/backends/gloo/gloo_operation.h"
#include "phalanx/comm/futex.h"
#include "phalanx/comm/reduce.h"
#include "phalanx/comm/signature.h"
#include "phalanx/comm/slices.h"

namespace phalanx {
namespace {

constexpr std::size_t kSmallReduction = 64 * 1024;  // bytes in all; below this, every rank gathers everything

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
      if (!future_->completed()) return fail_if_in_vain(), Progress::blocked;
      if (future_->hasError()) {
        failure_.set(gloo_error_text(future_->exception_ptr()));
        return Progress::blocked;
      }
      future_.reset();
      work_.reset();
    }
    try {
      if (next()) return Progress::moved;
      backend_.collective_done();
      return Progress::done;
    } catch (const CommError&) {
      throw;
    } catch (const std::exception&) {
      failure_.set(gloo_error_text(std::current_exception()));  // gloo fails at once on a connection known as broken
      return Progress::blocked;
    }
  }

  void check_peers() override {
    GlooOperation::check_peers();
    if (failure_) return;
    if (const std::string stuck = backend_.stall_reason(); !stuck.empty())
      throw CommError(fmt::format("the ranks do not call the same operation: {}", stuck));
  }
  std::vector<int> missing_ranks() override { return backend_.behind(index_); }

 private:
  std::size_t bytes(std::int64_t count) const { return static_cast<std::size_t>(count) * element_; }

  // gloo waits on for a rank that has given up.
  void fail_if_in_vain() {
    const int rank = size_ == 1 ? -1 : backend_.transport().gave_up_before(index_);
    if (rank >= 0) failure_.set(fmt::format("rank {} has given up the group", rank));
  }

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
  // Every rank sends to_bytes[r] bytes, which begin at place(r), to every other rank r. Its part for itself stays where
  // it is: gloo would copy it. Afterwards a_ holds the received parts, concatenated in rank order.
  template <class Place>
  void exchange(std::vector<std::int64_t> from_bytes, std::vector<std::int64_t> to_bytes, Place place) {
    from_bytes[rank_] = to_bytes[rank_] = 0;
    const at::Tensor parts = gloo_buffer(sum_of(to_bytes));
    std::byte* to = gloo_bytes(parts);
    for (std::size_t r = 0; r < size_; ++r) {
      const auto part_bytes = static_cast<std::size_t>(to_bytes[r]);
      if (part_bytes > 0) gloo_copy(to, place(r), part_bytes);
      to += part_bytes;
    }
    a_ = gloo_buffer(sum_of(from_bytes));
    all_to_all(a_, parts, std::move(from_bytes), std::move(to_bytes));
  }
  static std::size_t sum_of(const std::vector<std::int64_t>& bytes) {
    return static_cast<std::size_t>(std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0}));
  }

  // out = the reduction of `count` elements of each rank: the others' are in a_ after an exchange; `own` is this
  // rank's.
  void reduce_parts(void* out, const std::byte* own, std::size_t count) const {
    if (count == 0) return;
    std::vector<const void*> inputs;
    const std::byte* next = gloo_bytes(a_);
    for (std::size_t r = 0; r < size_; ++r) {
      inputs.push_back(r == rank_ ? own : next);
      if (r != rank_) next += count * element_;
    }
    reduce_kernel(d_.dtype, d_.op)(out, inputs.data(), static_cast<int>(size_), count);
  }

  // All-gathers parts of at most `longest` bytes; part_of_rank(rank) gives the elements of the output. c10d's
  // all_gather receives into its own memory and copies that, so two ranks exchange their parts instead.
  template <class PartOf>
  void gather_parts(const std::byte* own, std::size_t longest, PartOf part_of_rank) {
    if (size_ == 2) {
      const std::size_t peer = 1 - rank_;
      std::vector<std::int64_t> from(2), to(2);
      const bool is_for_all = d_.verb != Verb::reduce, is_root = backend_.rank() == d_.root;
      if (is_for_all || is_root) from[peer] = static_cast<std::int64_t>(part_of_rank(peer).size() * element_);
      if (is_for_all || !is_root) to[peer] = static_cast<std::int64_t>(part_of_rank(rank_).size() * element_);
      return exchange(std::move(from), std::move(to), [&](std::size_t) { return own; });
    }
    const at::Tensor padded = gloo_buffer(longest);
    gloo_copy(gloo_bytes(padded), own, part_of_rank(rank_).size() * element_);
    a_ = gloo_buffer(longest * size_);
    all_gather(a_, padded);
  }
  // Copies out what gather_parts() received, except this rank's part.
  template <class PartOf>
  void deliver_parts(std::size_t longest, PartOf part_of_rank) const {
    for (std::size_t r = 0; r < size_; ++r) {
      const Range part = part_of_rank(r);
      if (r != rank_)
        gloo_copy(output() + part.begin * element_, gloo_bytes(a_) + (size_ == 2 ? 0 : r * longest),
                  part.size() * element_);
    }
  }
  std::byte* output() const { return static_cast<std::byte*>(d_.output); }
  const std::byte* input() const { return static_cast<const std::byte*>(d_.input); }

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
        return false;  // barrier: all ranks have arrived
    }
  }

  void alone() {
    // With one rank, reductions, broadcast and barrier change nothing.
    if (d_.input != nullptr && d_.output != nullptr) gloo_copy(d_.output, d_.input, bytes(d_.output_count));
  }

  // Signature, then the counts of all_to_all: the same length for every verb.
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

  // Depends only on what is the same on all ranks.
  bool nothing_to_move() const {
    switch (d_.verb) {
      case Verb::barrier:
        return true;
      case Verb::all_gather:
        return d_.output_count == 0;
      case Verb::reduce_scatter:
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
    const bool is_for_all = d_.verb == Verb::all_reduce;
    const bool wants_result = is_for_all || backend_.rank() == d_.root;
    if (total * size_ <= kSmallReduction) {
      if (step == 1) {
        const at::Tensor own = gloo_buffer(total);
        gloo_copy(gloo_bytes(own), d_.output, total);
        a_ = gloo_buffer(total * size_);
        all_gather(a_, own);
        return true;
      }
      if (!wants_result) return false;
      std::vector<const void*> inputs;
      for (std::size_t r = 0; r < size_; ++r) inputs.push_back(gloo_bytes(a_) + r * total);
      reduce_kernel(d_.dtype, d_.op)(d_.output, inputs.data(), static_cast<int>(size_), count);
      return false;
    }
    const auto slice = [&](std::size_t r) { return slice_of(count, backend_.size(), static_cast<int>(r)); };
    const auto slice_bytes = [&](std::size_t r) { return static_cast<std::int64_t>(slice(r).size() * element_); };
    const std::size_t longest = slice(0).size() * element_;
    const Range mine = slice(rank_);
    std::byte* const own = output() + mine.begin * element_;
    if (step == 1) {
      std::vector<std::int64_t> from(size_, slice_bytes(rank_)), to;
      for (std::size_t r = 0; r < size_; ++r) to.push_back(slice_bytes(r));
      exchange(std::move(from), std::move(to), [&](std::size_t r) { return output() + slice(r).begin * element_; });
      return true;
    }
    if (step == 2) {
      if (is_for_all || wants_result) {
        reduce_parts(own, own, mine.size());
        gather_parts(own, longest, slice);
      } else {
        // Only the root's tensor may change.
        const at::Tensor reduced = gloo_buffer(longest);
        reduce_parts(gloo_bytes(reduced), own, mine.size());
        gather_parts(gloo_bytes(reduced), longest, slice);
      }
      return true;
    }
    if (wants_result) deliver_parts(longest, slice);
    return false;
  }

  bool gather_all(int step) {
    const std::int64_t longest =
        d_.counts.empty() ? d_.input_count : *std::max_element(d_.counts.begin(), d_.counts.end());
    const auto part = [&](std::size_t r) { return part_of(d_.counts, longest, static_cast<int>(r)); };
    if (step == 1) {
      gather_parts(input(), bytes(longest), part);
      return true;
    }
    deliver_parts(bytes(longest), part);
    gloo_copy(output() + part(rank_).begin * element_, input(), bytes(d_.input_count));
    return false;
  }

  bool reduce_scatter(int step) {
    const auto part = [&](std::size_t r) { return part_of(d_.counts, d_.output_count, static_cast<int>(r)); };
    const auto place = [&](std::size_t r) { return input() + part(r).begin * element_; };
    if (step == 1) {
      std::vector<std::int64_t> from(size_, static_cast<std::int64_t>(bytes(d_.output_count))), to;
      for (std::size_t r = 0; r < size_; ++r) to.push_back(static_cast<std::int64_t>(part(r).size() * element_));
      exchange(std::move(from), std::move(to), place);
      return true;
    }
    reduce_parts(d_.output, place(rank_), static_cast<std::size_t>(d_.output_count));
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
    const auto part_bytes = [&](const std::vector<std::int64_t>& counts) {
      const auto even = d_.input_count / static_cast<std::int64_t>(size_);
      std::vector<std::int64_t> result;
      for (std::size_t r = 0; r < size_; ++r)
        result.push_back(static_cast<std::int64_t>(bytes(counts.empty() ? even : counts[r])));
      return result;
    };
    const std::vector<std::int64_t> from = part_bytes(d_.output_counts), to = part_bytes(d_.input_counts);
    const auto place = [&](std::size_t r) {
      return input() + sum_of({to.begin(), to.begin() + static_cast<std::ptrdiff_t>(r)});
    };
    if (step == 1) {
      exchange(from, to, place);
      return true;
    }
    std::byte* at = output();
    const std::byte* arrived = gloo_bytes(a_);
    for (std::size_t r = 0; r < size_; ++r) {
      const auto part = static_cast<std::size_t>(from[r]);
      gloo_copy(at, r == rank_ ? place(r) : arrived, part);
      if (r != rank_) arrived += part;
      at += part;
    }
    return false;
  }

  const OperationDescription& d_;
  const std::size_t size_, rank_, element_;
  const std::uint64_t index_;  // number of this collective in the group
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
