// CollectiveParts: who gives what to whom. This is the definition of each collective that moves data, whichever way the
// data go. In reduce_scatter a rank takes the sum of what all give it. all_reduce and reduce are not described so:
// their ranks agree on slices (slice_of) instead.
//
//                    a rank gives to rank d          a rank takes from rank s, at
//   broadcast        all of its output (root only)   all of its output
//   all_gather       all of its input                part s of its output
//   gather           all of its input, to root       part s of its output (root only)
//   scatter          part d of its input (root only) all of its output
//   reduce_scatter   part d of its input             all of its output
//   all_to_all       part d of its input             part s of its output
//   barrier          nothing                         nothing
#pragma once

#include <algorithm>
#include <cstddef>

#include "phalanx/comm/backend.h"
#include "phalanx/comm/slices.h"

namespace phalanx {

class CollectiveParts {
 public:
  /// REQUIRES: the description outlives this.
  CollectiveParts(const OperationDescription& description, int size)
      : d_(description),
        width_(element_size(description.dtype)),
        even_(d_.verb == Verb::all_gather || d_.verb == Verb::gather ? d_.input_count
              : d_.verb == Verb::all_to_all                          ? d_.input_count / size
                                                                     : d_.output_count) {}

  bool has_one_source() const { return d_.verb == Verb::broadcast || d_.verb == Verb::scatter; }
  bool is_source(int rank) const { return !has_one_source() || rank == d_.root; }
  bool is_destination(int rank) const { return d_.verb != Verb::gather || rank == d_.root; }
  /// A rank gives the same to every destination.
  bool gives_one_part() const {
    return d_.verb == Verb::broadcast || d_.verb == Verb::all_gather || d_.verb == Verb::gather;
  }

  /// What this rank gives away a part of.
  const std::byte* data() const {
    return static_cast<const std::byte*>(d_.verb == Verb::broadcast ? d_.output : d_.input);
  }
  std::byte* output() const { return static_cast<std::byte*>(d_.output); }
  /// The bytes of data() that this rank gives to `destination`.
  Range given_to(int destination) const {
    if (d_.verb == Verb::all_to_all) return in_bytes(part_of(d_.input_counts, even_, destination));
    if (!gives_one_part()) return in_bytes(part_of(d_.counts, even_, destination));
    return in_bytes({0, static_cast<std::size_t>(d_.verb == Verb::broadcast ? d_.output_count : d_.input_count)});
  }
  /// The bytes of output() that this rank takes from `source`.
  Range taken_from(int source) const {
    if (d_.verb == Verb::all_gather || d_.verb == Verb::gather) return in_bytes(part_of(d_.counts, even_, source));
    if (d_.verb == Verb::all_to_all) return in_bytes(part_of(d_.output_counts, even_, source));
    return in_bytes({0, static_cast<std::size_t>(d_.output_count)});
  }
  /// The bytes of the longest part: the same on all ranks, except in an uneven all_to_all, where no rank knows it.
  std::size_t longest() const {
    std::int64_t longest = even_;
    for (const std::int64_t count : d_.counts) longest = std::max(longest, count);
    return static_cast<std::size_t>(longest) * width_;
  }

  Range in_bytes(Range elements) const { return {elements.begin * width_, elements.end * width_}; }

 private:
  const OperationDescription& d_;
  std::size_t width_;
  std::int64_t even_;  // elements of a part, unless the parts are uneven
};

}  // namespace phalanx
