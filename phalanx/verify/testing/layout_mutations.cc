#include "phalanx/verify/testing/layout_mutations.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

namespace phalanx::verify {
namespace {

std::vector<float> values_of(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.detach().contiguous();
  return {flat.const_data_ptr<float>(), flat.const_data_ptr<float>() + flat.numel()};
}

bool lies_in(const float* at, std::int64_t count, const float* begin, std::int64_t length) {
  return at != nullptr && count > 0 && at >= begin && at + count <= begin + length;
}

}  // namespace

std::string name_of(Mutation mutation) {
  static const char* const kNames[] = {"dropped",  "doubled",        "halved",        "negated",    "stale",
                                       "swapped",  "zeroed",         "one_element",   "not_finite", "wrong_group",
                                       "previous", "doubled_on_one", "zeroed_on_one", "once",       "initial_value"};
  return kNames[static_cast<std::size_t>(mutation)];
}

const std::vector<Mutation>& all_mutations() {
  static const std::vector<Mutation> all = [] {
    std::vector<Mutation> list;
    for (int i = 0; i <= static_cast<int>(Mutation::initial_value); ++i) list.push_back(static_cast<Mutation>(i));
    return list;
  }();
  return all;
}

std::shared_ptr<Communicator> LayoutProbe::recording(const std::shared_ptr<Communicator>& world) {
  const auto rank = static_cast<std::size_t>(world->rank());
  return tapped(world, [this, rank, mutex = std::make_shared<std::mutex>()](const Delivery& d) {
    const std::lock_guard lock(*mutex);
    DeliveryKey key{d.group, d.verb, 0};
    key.place = places_[rank][key]++;
    const std::vector<float> values(d.output, d.output + d.output_count);
    if (steps_[rank] == 1) {
      records_[rank].first[key] = values;
    } else {
      records_[rank].delivered.push_back(
          {key, d.members, d.rank, d.input, d.input_count, d.output, d.output_count, values});
    }
  });
}

void LayoutProbe::observe(int rank, std::int64_t step, const std::vector<NamedTensor>& parameters) {
  const auto at = static_cast<std::size_t>(rank);
  RankRecord& record = records_[at];
  for (const auto& [name, tensor, shard] : parameters) {
    auto& p = record.parameters[name];
    p.count = tensor.numel();
    if (p.count == 0) continue;
    p.values_at = tensor.const_data_ptr<float>();
    if (step == 0) p.first_values = values_of(tensor);
    if (step == 1) p.first_gradient = values_of(tensor.grad());
    if (step != 2) continue;
    p.gradient_at = tensor.grad().const_data_ptr<float>();
    const std::vector<float> gradient = values_of(tensor.grad());
    const auto largest = std::ranges::max_element(gradient, {}, [](float x) { return std::abs(x); });
    p.striking = largest - gradient.begin();
  }
  places_[at].clear();
  if (step == 0) record.delivered.clear();  // deliveries during construction
  steps_[at] = step + 1;
}

std::vector<Site> LayoutProbe::sites_of(const std::string& parameter, const std::set<std::string>& groups) const {
  std::map<DeliveryKey, Site> sites;
  for (int rank = 0; rank < ranks(); ++rank) {
    const auto& p = record(rank).parameters.at(parameter);
    for (const auto& d : record(rank).delivered) {
      if (!groups.contains(d.key.group)) continue;
      const bool reduces = d.key.verb == Verb::all_reduce || d.key.verb == Verb::reduce_scatter;
      if (reduces && lies_in(p.gradient_at, p.count, d.output, d.output_count)) {
        Site& site = sites[d.key];
        site.kind = Site::Kind::gradient;
        site.pieces[rank].push_back({p.gradient_at - d.output, p.count, p.striking, p.first_gradient});
      }
      if (d.key.verb != Verb::all_gather) continue;
      // The rows of all ranks of the group, in the order of the group.
      std::vector<Piece> pieces;
      for (std::size_t member = 0; member < d.members.size(); ++member) {
        const auto& theirs = record(d.members[member]).parameters.at(parameter);
        for (const auto& sent : record(d.members[member]).delivered) {
          if (sent.key != d.key || !lies_in(theirs.values_at, theirs.count, sent.input, sent.input_count)) continue;
          pieces.push_back({static_cast<std::int64_t>(member) * sent.input_count + (theirs.values_at - sent.input),
                            theirs.count, theirs.striking, theirs.first_values});
        }
      }
      if (pieces.empty()) continue;
      Site& site = sites[d.key];
      site.kind = Site::Kind::weight;
      site.pieces[rank] = pieces;
    }
  }
  std::vector<Site> result;
  for (auto& [key, site] : sites) {
    site.key = key;
    result.push_back(site);
  }
  // An average over replicas comes after the one over shards. A second all-gather is for the backward pass.
  const bool has_replicas = std::ranges::any_of(result, [](const Site& s) { return s.key.group == "dp_replicate"; });
  bool is_gathered = false;
  for (Site& site : result) {
    site.is_final = site.kind == Site::Kind::gradient && (!has_replicas || site.key.group == "dp_replicate");
    site.is_for_backward = site.kind == Site::Kind::weight && is_gathered;
    is_gathered = is_gathered || site.kind == Site::Kind::weight;
  }
  return result;
}

std::vector<DeliveryKey> LayoutProbe::keys_of(const std::string& group, std::initializer_list<Verb> verbs,
                                              std::int64_t count) const {
  for (int rank = 0; rank < ranks(); ++rank) {
    std::vector<DeliveryKey> keys;
    for (const auto& d : record(rank).delivered) {
      if (d.key.group != group || std::ranges::find(verbs, d.key.verb) == verbs.end()) continue;
      if (count == 0 || d.output_count == count) keys.push_back(d.key);
    }
    if (!keys.empty()) return keys;
  }
  return {};
}

Spoiler::Spoiler(const LayoutProbe& probe, Site site, Mutation mutation, int one_rank)
    : probe_(probe),
      site_(std::move(site)),
      mutation_(mutation),
      one_rank_(one_rank),
      steps_(static_cast<std::size_t>(probe.ranks())),
      places_(steps_.size()),
      previous_(steps_.size()) {}

std::shared_ptr<Communicator> Spoiler::spoiling(const std::shared_ptr<Communicator>& world) {
  const int rank = world->rank();
  return tapped(world, [this, rank, mutex = std::make_shared<std::mutex>()](const Delivery& d) {
    const std::lock_guard lock(*mutex);
    DeliveryKey key{d.group, d.verb, 0};
    key.place = places_[static_cast<std::size_t>(rank)][key]++;
    const bool is_meant = key.group == site_.key.group && key.verb == site_.key.verb &&
                          (site_.key.place < 0 || key.place == site_.key.place);
    if (is_meant) spoil(rank, key, d);
  });
}

void Spoiler::observe(int rank, std::int64_t step) {
  places_[static_cast<std::size_t>(rank)].clear();
  steps_[static_cast<std::size_t>(rank)] = step + 1;
}

void Spoiler::spoil(int rank, const DeliveryKey& key, const Delivery& delivery) {
  const std::vector<float> right(delivery.output, delivery.output + delivery.output_count);
  const bool on_one = mutation_ == Mutation::doubled_on_one || mutation_ == Mutation::zeroed_on_one;
  // If every group had another group's values, a later average over the groups would be right again.
  const bool in_one_group = mutation_ == Mutation::wrong_group;
  const bool is_elsewhere = (on_one && rank != one_rank_) ||
                            (in_one_group && std::ranges::find(delivery.members, one_rank_) == delivery.members.end());
  const std::int64_t steps = steps_[static_cast<std::size_t>(rank)];
  if (steps > 1 && !is_elsewhere && (mutation_ != Mutation::once || steps == 2)) {
    if (site_.kind == Site::Kind::activation) {
      spoil_piece(rank, key, delivery, {.count = delivery.output_count, .striking = delivery.output_count / 2});
    } else if (const auto pieces = site_.pieces.find(rank); pieces != site_.pieces.end()) {
      for (const Piece& piece : pieces->second) {
        // A rank's own rows are in its gather buffer already, and are not written.
        const float* const at = delivery.output + piece.offset;
        if (key.verb == Verb::all_gather && lies_in(at, piece.count, delivery.input, delivery.input_count)) continue;
        spoil_piece(rank, key, delivery, piece);
        if (mutation_ == Mutation::one_element) break;
      }
    }
    const auto count = static_cast<std::size_t>(delivery.output_count) * sizeof(float);
    if (std::memcmp(right.data(), delivery.output, count) != 0) has_changed_ = true;
  }
  previous_[static_cast<std::size_t>(rank)][DeliveryKey{key.group, key.verb, 0}] = right;
}

void Spoiler::spoil_piece(int rank, const DeliveryKey& key, const Delivery& delivery, const Piece& piece) {
  float* const begin = delivery.output + piece.offset;
  const auto count = static_cast<std::size_t>(piece.count);
  const auto each = [&](auto change) { std::for_each(begin, begin + count, change); };
  const auto take = [&](const float* whole) {
    if (whole != nullptr) std::copy(whole + piece.offset, whole + piece.offset + piece.count, begin);
  };
  switch (mutation_) {
    case Mutation::dropped:
      return take(delivery.before.data());
    case Mutation::doubled:
    case Mutation::doubled_on_one:
    case Mutation::once:
      return each([](float& x) { x *= 2; });
    case Mutation::halved:
      return each([](float& x) { x /= 2; });
    case Mutation::negated:
      return each([](float& x) { x = -x; });
    case Mutation::stale: {
      if (!piece.stale.empty()) {
        std::ranges::copy(piece.stale, begin);
        return;
      }
      const auto& first = probe_.record(rank).first;
      const auto found = first.find(key);
      if (found != first.end() && std::ssize(found->second) == delivery.output_count) take(found->second.data());
      return;
    }
    case Mutation::swapped:
      std::swap_ranges(begin, begin + count / 2, begin + (count - count / 2));
      return;
    case Mutation::zeroed:
    case Mutation::zeroed_on_one:
      return each([](float& x) { x = 0; });
    case Mutation::one_element:
      begin[piece.striking] += 1;
      return;
    case Mutation::not_finite:
      begin[piece.striking] = std::numeric_limits<float>::quiet_NaN();
      return;
    case Mutation::wrong_group:
      return take(of_another_group(rank, key, delivery));
    case Mutation::previous: {
      const auto& kept = previous_[static_cast<std::size_t>(rank)];
      const auto found = kept.find(DeliveryKey{key.group, key.verb, 0});
      if (found != kept.end() && std::ssize(found->second) == delivery.output_count) take(found->second.data());
      return;
    }
    case Mutation::initial_value:
      return;
  }
}

const float* Spoiler::of_another_group(int rank, const DeliveryKey& key, const Delivery& delivery) const {
  for (int other = 0; other < probe_.ranks(); ++other) {
    if (std::ranges::find(delivery.members, other) != delivery.members.end() || other == rank) continue;
    for (const auto& d : probe_.record(other).delivered) {
      if (d.key == key && d.output_count == delivery.output_count) return d.values.data();
    }
  }
  return nullptr;
}

}  // namespace phalanx::verify
