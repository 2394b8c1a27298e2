// Records what a layout sends, by running it once, and corrupts it in many ways, to test the layout check.
//
// A probe runs the layout for two steps. It records what each rank receives in the second step, and where the
// parameters and their gradients are in memory then. From that follow the sites: deliveries that carry values of a
// parameter.
//
//   gradient    the part of an all_reduce or reduce_scatter that is a parameter's gradient
//   weight      the parts of an all_gather that are a sharded parameter's rows
//   activation  what tensor parallelism or a pipeline sends between ranks of a layer's output or its gradient
//
// A mutation corrupts one site in one way on its way to one rank or to all ranks, from the second step on.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "phalanx/comm/testing/tapped_backend.h"
#include "phalanx/verify/layout_check.h"

namespace phalanx::verify {

enum class Mutation : std::uint8_t {
  dropped,  // the output keeps its old contents
  doubled,
  halved,
  negated,
  stale,    // the value of the previous step
  swapped,  // the two halves are swapped
  zeroed,
  one_element,
  not_finite,
  wrong_group,     // in one group, the delivery that another group of that name has at this position
  previous,        // the delivery of the previous operation of its kind: another micro-batch's
  doubled_on_one,  // on one rank only
  zeroed_on_one,
  once,          // doubled, but right when the step is run again
  initial_value  // of one rank: all deliveries are right, but its generator differs
};
std::string name_of(Mutation mutation);
const std::vector<Mutation>& all_mutations();

/// Identifies corresponding deliveries on all ranks of a group: by their position among those of their kind in a step.
struct DeliveryKey {
  std::string group;
  Verb verb = Verb::all_reduce;
  int place = 0;  // -1: all of them
  auto operator<=>(const DeliveryKey&) const = default;
};

struct Piece {
  std::int64_t offset = 0, count = 0;
  std::int64_t striking = 0;      // an element that matters, counted from the start of the piece
  std::vector<float> stale = {};  // empty: the whole delivery of the first step
};

struct Site {
  enum class Kind : std::uint8_t { gradient, weight, activation };
  Kind kind = Kind::gradient;
  DeliveryKey key;
  std::map<int, std::vector<Piece>> pieces;  // by rank of the world; of an activation none: all of it
  bool is_final = false;                     // the optimizer will use what is delivered
  bool is_for_backward = false;              // unsharded a second time
};

/// What a rank received and held.
struct RankRecord {
  struct Delivered {
    DeliveryKey key;
    std::vector<int> members;
    int rank = 0;
    const float* input = nullptr;
    std::int64_t input_count = 0;
    const float* output = nullptr;
    std::int64_t output_count = 0;
    std::vector<float> values;
  };
  struct Parameter {
    const float* values_at = nullptr;
    const float* gradient_at = nullptr;
    std::int64_t count = 0, striking = 0;
    std::vector<float> first_values, first_gradient;
  };
  std::vector<Delivered> delivered;                 // in the second step
  std::map<DeliveryKey, std::vector<float>> first;  // in the first one
  std::map<std::string, Parameter> parameters;
};

/// Records what is delivered. All ranks, which are threads, share one object.
class LayoutProbe {
 public:
  explicit LayoutProbe(int ranks) : records_(static_cast<std::size_t>(ranks)) {}
  std::shared_ptr<Communicator> recording(const std::shared_ptr<Communicator>& world);
  /// For LayoutCheckContext::observer: it ends a step.
  void observe(int rank, std::int64_t step, const std::vector<NamedTensor>& parameters);

  const RankRecord& record(int rank) const { return records_[static_cast<std::size_t>(rank)]; }
  int ranks() const noexcept { return static_cast<int>(records_.size()); }
  /// The sites that carry gradients and weights of a parameter over groups of these names.
  std::vector<Site> sites_of(const std::string& parameter, const std::set<std::string>& groups) const;
  /// Deliveries of one kind in the order of the second step, from the first rank that has any.
  std::vector<DeliveryKey> keys_of(const std::string& group, std::initializer_list<Verb> verbs,
                                   std::int64_t count = 0) const;

 private:
  std::vector<RankRecord> records_;
  std::vector<std::int64_t> steps_ = std::vector<std::int64_t>(records_.size());
  std::vector<std::map<DeliveryKey, int>> places_ = std::vector<std::map<DeliveryKey, int>>(records_.size());
};

class Spoiler {
 public:
  Spoiler(const LayoutProbe& probe, Site site, Mutation mutation, int one_rank);
  std::shared_ptr<Communicator> spoiling(const std::shared_ptr<Communicator>& world);
  void observe(int rank, std::int64_t step);
  /// Whether any value was changed.
  bool has_changed() const noexcept { return has_changed_; }

 private:
  void spoil(int rank, const DeliveryKey& key, const Delivery& delivery);
  void spoil_piece(int rank, const DeliveryKey& key, const Delivery& delivery, const Piece& piece);
  const float* of_another_group(int rank, const DeliveryKey& key, const Delivery& delivery) const;

  const LayoutProbe& probe_;
  Site site_;
  Mutation mutation_;
  int one_rank_;
  std::vector<std::int64_t> steps_;
  std::vector<std::map<DeliveryKey, int>> places_;
  std::vector<std::map<DeliveryKey, std::vector<float>>> previous_;
  std::atomic<bool> has_changed_ = false;
};

}  // namespace phalanx::verify
