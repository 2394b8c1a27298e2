#include "phalanx/comm/hierarchical/reduction_chunks.h"

#include <algorithm>
#include <array>

#include "phalanx/comm/reduce.h"

namespace phalanx {
namespace {

constexpr std::size_t kWideTile = 4096;  // 16-bit floats that are widened to float32 at a time

bool is_16_bit_float(DataType dtype) { return dtype == DataType::f16 || dtype == DataType::bf16; }

template <class T>
void divide_all(void* values, std::size_t count, int by) {
  auto* data = static_cast<T*>(values);
  for (std::size_t i = 0; i < count; ++i) data[i] = data[i] / static_cast<T>(by);
}

}  // namespace

ReductionChunks::ReductionChunks(HierarchicalBackend& backend, const OperationDescription& description,
                                 std::size_t piece_bytes)
    : layout_(backend.layout()),
      d_(description),
      width_(element_size(d_.dtype)),
      rank_(backend.rank()),
      node_(backend.node()),
      local_rank_(layout_.local_rank_of(rank_)),
      local_size_(static_cast<int>(backend.local_members().size())),
      lanes_(layout_.lanes()) {
  const std::size_t acc_width = element_size(accumulator_of(d_.dtype));
  const std::size_t most =
      std::max<std::size_t>(piece_bytes / acc_width / 64 * 64, 64) * static_cast<std::size_t>(lanes_);
  struct Part {
    std::size_t begin, end;
    int owner_node;
  };
  std::vector<Part> parts;
  for (int node = 0; d_.verb == Verb::reduce_scatter && node < layout_.nodes(); ++node)
    parts.push_back(
        {slice_for(layout_.members(node).front()).begin, slice_for(layout_.members(node).back()).end, node});
  if (d_.verb != Verb::reduce_scatter)
    parts.push_back(
        {0, static_cast<std::size_t>(d_.output_count), d_.verb == Verb::reduce ? layout_.node_of(d_.root) : -1});
  // A chunk of every part in turn, so that the wires of all nodes are busy.
  for (bool is_left = true; is_left;) {
    is_left = false;
    for (Part& part : parts) {
      if (part.begin >= part.end) continue;
      const std::size_t count = std::min(most, part.end - part.begin);
      chunks_.push_back({part.begin, count, part.owner_node});
      part.begin += count;
      is_left = true;
    }
  }
}

const std::byte* ReductionChunks::source(std::size_t element) const {
  return static_cast<const std::byte*>(d_.verb == Verb::reduce_scatter ? d_.input : d_.output) + element * width_;
}

std::size_t ReductionChunks::longest_piece() const {
  std::size_t longest = 0;
  for (const Chunk& chunk : chunks_) longest = std::max(longest, own_piece(chunk).size());
  return longest;
}

std::byte* ReductionChunks::output_of(const Chunk& chunk) const {
  if (d_.verb != Verb::reduce_scatter) return output(chunk.begin);
  const std::size_t begin = slice_for(rank_).begin;
  return output(std::max(chunk.begin, begin) - begin);
}

// Elements of the chunk that a lane has and the rank at `local_rank` of this node wants.
std::int64_t ReductionChunks::share(const Chunk& chunk, int lane, int local_rank) const {
  if (lane >= lanes_) return 0;
  const int rank = layout_.members(node_)[static_cast<std::size_t>(local_rank)];
  const Range has{chunk.begin + piece(chunk, lane).begin, chunk.begin + piece(chunk, lane).end};
  if (d_.verb == Verb::reduce) return rank == d_.root ? static_cast<std::int64_t>(has.size()) : 0;
  const Range wanted = slice_for(rank);
  const std::size_t begin = std::max(has.begin, wanted.begin), end = std::min(has.end, wanted.end);
  return end > begin ? static_cast<std::int64_t>(end - begin) : 0;
}

bool ReductionChunks::is_dealt(const Chunk& chunk) const {
  if (d_.verb == Verb::all_reduce || local_size_ != lanes_) return local_size_ == 1;
  for (int lane = 0; lane < lanes_; ++lane)
    if (share(chunk, lane, lane) != static_cast<std::int64_t>(piece(chunk, lane).size())) return false;
  return true;
}

OperationDescription ReductionChunks::deal(const Chunk& chunk, const std::byte* result) const {
  OperationDescription d;
  d.dtype = d_.dtype;
  if (d_.verb == Verb::all_reduce) {
    d.verb = Verb::all_gather;
    for (int local_rank = 0; local_rank < local_size_; ++local_rank)
      d.counts.push_back(local_rank < lanes_ ? static_cast<std::int64_t>(piece(chunk, local_rank).size()) : 0);
    d.output = output(chunk.begin);
    d.output_count = static_cast<std::int64_t>(chunk.count);
    d.input_count = d.counts[static_cast<std::size_t>(local_rank_)];
    d.input = output(chunk.begin + own_piece(chunk).begin);
    if (std::ranges::all_of(d.counts, [&](std::int64_t count) { return count == d.input_count; })) d.counts.clear();
    return d;
  }
  d.verb = Verb::all_to_all;
  for (int local_rank = 0; local_rank < local_size_; ++local_rank) {
    d.input_counts.push_back(share(chunk, local_rank_, local_rank));
    d.output_counts.push_back(share(chunk, local_rank, local_rank_));
    d.input_count += d.input_counts.back();
    d.output_count += d.output_counts.back();
  }
  d.input = result;
  d.output = output_of(chunk);
  return d;
}

DataType accumulator_of(DataType dtype) { return is_16_bit_float(dtype) ? DataType::f32 : dtype; }

void accumulate(DataType dtype, ReduceOp op, void* acc, bool is_first, const std::vector<const std::byte*>& inputs,
                std::size_t count) {
  const ReduceOp by = op == ReduceOp::avg ? ReduceOp::sum : op;
  if (!is_16_bit_float(dtype)) {
    std::vector<const void*> sources;
    if (!is_first) sources.push_back(acc);
    sources.insert(sources.end(), inputs.begin(), inputs.end());
    reduce_kernel(dtype, by)(acc, sources.data(), static_cast<int>(sources.size()), count);
    return;
  }
  const ReduceKernel kernel = reduce_kernel(DataType::f32, by);
  std::array<float, kWideTile> wide;
  for (std::size_t at = 0; at < count; at += kWideTile) {
    const std::size_t length = std::min(kWideTile, count - at);
    float* sum = static_cast<float*>(acc) + at;
    for (std::size_t k = 0; k < inputs.size(); ++k) {
      const bool opens = is_first && k == 0;
      widen_floats(dtype, opens ? sum : wide.data(), inputs[k] + at * element_size(dtype), length);
      if (opens) continue;
      const std::array<const void*, 2> both{sum, wide.data()};
      kernel(sum, both.data(), 2, length);
    }
  }
}

void add_weighted(DataType dtype, void* acc, const std::vector<const std::byte*>& inputs,
                  const std::vector<int>& weights, std::size_t count) {
  const auto add = [&](auto* sum, const auto* values, std::size_t length, std::size_t input) {
    using T = std::remove_pointer_t<decltype(sum)>;
    const T weight = static_cast<T>(weights[input]);
    for (std::size_t i = 0; i < length; ++i) sum[i] = (input == 0 ? T{} : sum[i]) + weight * values[i];
  };
  std::array<float, kWideTile> wide;
  for (std::size_t at = 0; at < count; at += kWideTile) {
    const std::size_t length = std::min(kWideTile, count - at);
    for (std::size_t k = 0; k < inputs.size(); ++k) {
      const std::byte* const values = inputs[k] + at * element_size(dtype);
      if (dtype == DataType::f64) {
        add(static_cast<double*>(acc) + at, reinterpret_cast<const double*>(values), length, k);
      } else if (dtype == DataType::f32) {
        add(static_cast<float*>(acc) + at, reinterpret_cast<const float*>(values), length, k);
      } else {
        widen_floats(dtype, wide.data(), values, length);
        add(static_cast<float*>(acc) + at, wide.data(), length, k);
      }
    }
  }
}

void finish_sum(DataType dtype, ReduceOp op, void* result, void* acc, std::size_t count, int divisor) {
  if (op == ReduceOp::avg) {
    if (dtype == DataType::f64)
      divide_all<double>(acc, count, divisor);
    else
      divide_all<float>(acc, count, divisor);
  }
  if (is_16_bit_float(dtype))
    narrow_floats(dtype, result, static_cast<const float*>(acc), count);
  else if (result != acc)
    std::copy_n(static_cast<const std::byte*>(acc), count * element_size(dtype), static_cast<std::byte*>(result));
}

}  // namespace phalanx
