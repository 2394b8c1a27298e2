#include "phalanx/checkpoint/files/compare_states.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "phalanx/checkpoint/files/box_copy.h"
#include "phalanx/checkpoint/files/element_values.h"

namespace phalanx {
namespace {

constexpr std::int64_t kComparedElements = 1 << 18;

double distance(double a, double b) {
  if (a == b || (std::isnan(a) && std::isnan(b))) return 0;
  const double difference = std::abs(a - b);
  return std::isnan(difference) ? std::numeric_limits<double>::infinity() : difference;
}

std::vector<std::int64_t> place_of(std::int64_t element, const Box& box) {
  std::vector<std::int64_t> place(box.shape.size());
  for (std::size_t d = place.size(); d-- > 0; element /= box.shape[d])
    place[d] = box.offsets[d] + element % box.shape[d];
  return place;
}

class Comparison {
 public:
  Comparison(SavedState& a, SavedState& b) : a_(a), b_(b) {}

  /// Returns nothing if all bits are the same.
  std::optional<TensorDifference> compare(const SavedTensor& a, const SavedTensor& b,
                                          const std::function<void(std::uint64_t)>& progress) {
    TensorDifference difference{&a, &b, 0, 0, {}};
    a_.check_complete(a);
    b_.check_complete(b);
    if (!difference.same_shape()) {
      progress(static_cast<std::uint64_t>(a.whole().numel()));
      return difference;
    }
    for_each_chunk(a.whole(), kComparedElements, [&](const Box& piece) {
      compare_piece(piece, difference);
      progress(static_cast<std::uint64_t>(piece.numel()));
    });
    if (difference.elements == 0 && difference.same_dtype()) return std::nullopt;
    return difference;
  }

 private:
  void compare_piece(const Box& piece, TensorDifference& difference) {
    const auto elements = static_cast<std::size_t>(piece.numel());
    const SavedTensor &a = *difference.a, &b = *difference.b;
    bytes_a_.resize(elements * safetensors::element_size(a.dtype));
    bytes_b_.resize(elements * safetensors::element_size(b.dtype));
    a_.read(a, piece, bytes_a_);
    b_.read(b, piece, bytes_b_);
    const bool same_dtype = a.dtype == b.dtype;
    if (same_dtype && bytes_a_ == bytes_b_) return;
    const std::size_t numbers_a = a.dtype == safetensors::Dtype::c64 ? 2 : 1;
    const std::size_t numbers_b = b.dtype == safetensors::Dtype::c64 ? 2 : 1;
    values_a_.resize(elements * numbers_a);
    values_b_.resize(elements * numbers_b);
    decode_elements(a.dtype, bytes_a_, values_a_);
    decode_elements(b.dtype, bytes_b_, values_b_);
    const std::size_t size = bytes_a_.size() / elements;
    for (std::size_t i = 0; i < elements; ++i) {
      double apart = distance(values_a_[i * numbers_a], values_b_[i * numbers_b]);
      if (numbers_a == 2 || numbers_b == 2)
        apart = std::max(
            apart, distance(numbers_a == 2 ? values_a_[2 * i + 1] : 0, numbers_b == 2 ? values_b_[2 * i + 1] : 0));
      // Zeros of two signs, or two NaNs, have no distance and still differ in their bits.
      if (apart == 0 && !(same_dtype && std::memcmp(&bytes_a_[i * size], &bytes_b_[i * size], size) != 0)) continue;
      ++difference.elements;
      if (apart > difference.largest || difference.largest_at.empty()) {
        difference.largest = apart;
        difference.largest_at = place_of(static_cast<std::int64_t>(i), piece);
      }
    }
  }

  SavedState &a_, &b_;
  std::vector<std::byte> bytes_a_, bytes_b_;
  std::vector<double> values_a_, values_b_;
};

std::vector<std::string> compare_integers(const Manifest& a, const Manifest& b) {
  std::vector<std::string> lines;
  const auto text = [](const auto& integers, const std::string& name) {
    const auto found = integers.find(name);
    return found == integers.end() ? std::string("missing") : fmt::format("{}", found->second);
  };
  auto names = a.integers;
  names.insert(b.integers.begin(), b.integers.end());
  for (const auto& [name, value] : names) {
    const auto in_a = text(a.integers, name), in_b = text(b.integers, name);
    if (in_a != in_b) lines.push_back(fmt::format("{}: {} and {}", name, in_a, in_b));
  }
  return lines;
}

}  // namespace

StateDifference compare_states(SavedState& a, SavedState& b, const std::function<void(std::uint64_t)>& progress) {
  StateDifference difference;
  difference.integers = compare_integers(a.manifest(), b.manifest());
  Comparison comparison(a, b);
  for (const auto& tensor : a.tensors()) {
    const auto* other = b.find(tensor.name);
    if (other == nullptr) {
      difference.only_in_a.push_back(&tensor);
      progress(static_cast<std::uint64_t>(tensor.whole().numel()));
      continue;
    }
    ++difference.compared;
    if (auto found = comparison.compare(tensor, *other, progress)) difference.tensors.push_back(std::move(*found));
  }
  for (const auto& tensor : b.tensors())
    if (a.find(tensor.name) == nullptr) difference.only_in_b.push_back(&tensor);
  return difference;
}

}  // namespace phalanx
