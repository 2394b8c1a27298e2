// Placement: how a tensor is laid out over the axes of a mesh. Torch-free; needs no communicator.
//
// Each axis of the mesh does one of three things:
//   splits     cuts a dimension of the tensor; the ranks along the axis hold consecutive parts of it;
//   partial    every rank along the axis holds an addend of the whole extent; the value is their sum;
//   otherwise  replicates: every rank along the axis holds the same.
// Splits are ordered, and a later split cuts the parts of the earlier ones: tensor parallel first, then FSDP. With
// {{"tp", 0}, {"dp_shard", 0}} the rows are split over tp, and each of these blocks over dp_shard, whatever the order
// of the axes in the mesh.
//
// The even rule applies to a split without sizes: of n elements over r ranks, the first n % r ranks get n / r + 1 (n /
// r rounded down), the others n / r, as torch.tensor_split does. The largest part is as small as under torch.chunk.
// torch.chunk makes all parts but the last ones equal and may leave ranks without any: 9 rows over 8 ranks are 2 2 2 2
// 1 0 0 0 there and 2 1 1 1 1 1 1 1 here. Equal parts have no advantage here: every collective used takes parts of
// unequal sizes, and files state where each part belongs.
//
// Other boundaries are given as sizes. FSDP's flat units, for example, cut a parameter wherever a rank's part of the
// flat buffer ends: {"dp_shard", 0, {0, 0, 100, 156}} gives ranks 2 and 3 their rows and the first two none. A list
// with as many sizes as the axis has ranks applies to every block that the earlier splits of this dimension made. These
// blocks must then have equal length. Otherwise give the lists of all blocks one after the other, in their order.
//
//   Placement p{.splits = {{"tp", 0}, {"dp_shard", 0}}, .partial = {"cp"}};
//   p.text();        // tp:S(0), dp_shard:S(0), cp:P
//   Placement{};     // replicated
//
// A placement alone is not checked. ShardSpec (shard_spec.h) checks it against a tensor and a mesh.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace phalanx {

struct Split {
  std::string axis;                 // of the mesh
  int dim = 0;                      // of the tensor, 0 the outermost
  std::vector<std::int64_t> sizes;  // of the parts; empty: by the even rule
  std::string text() const;         // tp:S(0), or dp_shard:S(0){0, 0, 100, 156}
  bool operator==(const Split&) const = default;
};

struct Placement {
  std::vector<Split> splits;         // in order: outer first
  std::vector<std::string> partial;  // axes along which ranks hold addends

  std::string text() const;  // "replicated", or as above: splits in order, then partial axes
  /// Parses text()'s output. Throws a ConfigError that shows the position of the fault.
  static Placement parse(std::string_view text);
  bool operator==(const Placement&) const = default;
};

/// Where part i of `count` begins when `length` elements are cut by the even rule; i == count gives the end.
constexpr std::int64_t even_begin(std::int64_t length, std::int64_t count, std::int64_t i) {
  const std::int64_t rest = length % count;
  return length / count * i + (i < rest ? i : rest);
}

}  // namespace phalanx
