#include <algorithm>
#include <cstring>

#include "phalanx/base/error.h"
#include "phalanx/comm/backends/local_shm/collective_parts.h"
#include "phalanx/comm/backends/local_shm/collective_rounds.h"
#include "phalanx/comm/reduce.h"
#include "phalanx/comm/signature.h"
#include "phalanx/comm/stream_copy.h"

namespace phalanx {
namespace {

constexpr std::size_t kPiece = 1U << 20;  // bytes copied or reduced by one step
constexpr std::size_t kTile = 1U << 14;   // reduced, then copied to the peers while in the L1 cache

class DirectRounds final : public CollectiveRounds {
 public:
  DirectRounds(const OperationDescription& description, int rank, std::vector<RankBuffers> ranks)
      : d_(description), rank_(rank), ranks_(std::move(ranks)), width_(element_size(description.dtype)) {
    count_ = 2;
    if (reduces(d_.verb))
      plan_reduction();
    else if (d_.verb == Verb::broadcast)
      plan_broadcast();
    else
      plan_parts();
    const auto output_bytes = static_cast<std::size_t>(d_.output_count) * width_;
    if (!copies_.empty())
      streamed_left_ =
          streamed_part(output_bytes, static_cast<std::size_t>(d_.input_count) * width_ + output_bytes, size());
  }

  bool write(std::size_t) override {
    if (next_copy_ < copies_.size())
      copy_piece();
    else if (range_.size() > 0)
      reduce_piece();
    return next_copy_ == copies_.size() && range_.size() == 0;
  }

  void read(std::size_t round) override {
    if (round == 1 && !error_.empty()) throw CommError(error_);
  }

 private:
  struct Copy {
    std::byte* to;
    const std::byte* from;
    std::size_t bytes;
  };

  int size() const { return static_cast<int>(ranks_.size()); }
  const RankBuffers& of(int rank) const { return ranks_[static_cast<std::size_t>(rank)]; }

  void plan_reduction() {
    sources_.reserve(ranks_.size());
    inputs_.resize(ranks_.size());
    auto* const output = static_cast<std::byte*>(d_.output);
    if (d_.verb == Verb::reduce_scatter) {
      range_ = part_of(d_.counts, d_.output_count, rank_);
      target_ = output;
      for (const RankBuffers& one : ranks_) sources_.push_back(one.input);
      return;
    }
    range_ = slice_of(static_cast<std::size_t>(d_.output_count), size(), rank_);
    const bool to_all = d_.verb == Verb::all_reduce;
    target_ = (to_all ? output : of(d_.root).output) + range_.begin * width_;
    for (int k = 0; k < size(); ++k) {
      sources_.push_back(of(k).output);
      // Starts with the next rank, so that not all write to the same one at once.
      if (to_all && k > 0) also_.push_back(of((rank_ + k) % size()).output);
    }
  }

  void plan_broadcast() {
    const auto bytes = static_cast<std::size_t>(d_.output_count) * width_;
    const std::size_t fetched = slice_of(static_cast<std::size_t>(d_.output_count), size(), size() - 1).begin * width_;
    const std::byte* const from = of(d_.root).output;
    if (rank_ != d_.root) return plan_copy(static_cast<std::byte*>(d_.output), from, fetched);
    for (int k = 1; k < size(); ++k)
      plan_copy(of((rank_ + k) % size()).output + fetched, from + fetched, bytes - fetched);
  }

  void plan_parts() {
    if (!d_.input_counts.empty()) {
      std::vector<const std::int64_t*> inputs;
      std::vector<const std::int64_t*> outputs;
      for (const RankBuffers& one : ranks_) {
        inputs.push_back(one.input_counts->data());
        outputs.push_back(one.output_counts->data());
      }
      error_ = all_to_all_mismatch(inputs, outputs);
      if (!error_.empty()) return;
    }
    const CollectiveParts parts(d_, size());
    if (!parts.is_destination(rank_)) return;
    for (int k = 1; k <= size(); ++k) {  // starts with the next rank, ends with this one
      const int source = (rank_ + k) % size();
      if (!parts.is_source(source)) continue;
      const Range from =
          d_.input_counts.empty() ? parts.given_to(rank_) : parts.in_bytes(part_of(*of(source).input_counts, 0, rank_));
      const Range to = parts.taken_from(source);
      plan_copy(parts.output() + to.begin, of(source).input + from.begin, to.size());
    }
  }

  void plan_copy(std::byte* to, const std::byte* from, std::size_t bytes) {
    if (to != from && bytes > 0) copies_.push_back({to, from, bytes});
  }

  void copy_piece() {
    Copy& copy = copies_[next_copy_];
    const std::size_t bytes = std::min(copy.bytes, kPiece);
    if (streamed_left_ > 0)
      stream_copy(copy.to, copy.from, bytes);
    else
      std::memcpy(copy.to, copy.from, bytes);
    streamed_left_ -= std::min(streamed_left_, bytes);
    copy = {copy.to + bytes, copy.from + bytes, copy.bytes - bytes};
    if (copy.bytes == 0) ++next_copy_;
  }

  void reduce_piece() {
    const ReduceKernel kernel = reduce_kernel(d_.dtype, d_.op);
    const std::size_t tile = kTile / width_;
    const std::size_t piece_end = std::min(range_.end, range_.begin + kPiece / width_);
    while (range_.begin < piece_end) {
      const std::size_t count = std::min(tile, piece_end - range_.begin);
      const std::size_t at = range_.begin * width_;
      for (std::size_t r = 0; r < sources_.size(); ++r) inputs_[r] = sources_[r] + at;
      kernel(target_, inputs_.data(), size(), count);
      for (std::byte* const also : also_) std::memcpy(also + at, target_, count * width_);
      range_.begin += count;
      target_ += count * width_;
    }
  }

  const OperationDescription& d_;
  const int rank_;
  const std::vector<RankBuffers> ranks_;
  const std::size_t width_;
  std::string error_;
  std::vector<Copy> copies_;
  std::size_t next_copy_ = 0;
  std::size_t streamed_left_ = 0;  // bytes
  // Elements `range_` of sources_ are reduced into target_, and copied to `also_`.
  Range range_;
  std::vector<const std::byte*> sources_;  // of element 0
  std::byte* target_ = nullptr;            // of element range_.begin
  std::vector<std::byte*> also_;           // of element 0
  std::vector<const void*> inputs_;
};

}  // namespace

void make_direct_rounds(RoundsHolder& rounds, const OperationDescription& description, int rank,
                        std::vector<RankBuffers> ranks) {
  rounds.emplace<DirectRounds>(description, rank, std::move(ranks));
}

}  // namespace phalanx
