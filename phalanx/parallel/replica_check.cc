#include "phalanx/parallel/replica_check.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <sstream>
#include <utility>

#include "phalanx/base/error.h"

namespace phalanx {
namespace {

// Elements per chunk; each takes two int64 at a time. On the host that is 512 KiB in all, which fits in caches and need
// not appear in memory predictions. A device is faster with fewer kernels, and takes 16 MiB beside the tensors.
constexpr std::int64_t kHashedAtOnceOnHost = 1 << 15, kHashedAtOnceOnDevice = 1 << 20;
constexpr auto kOddOfPlace = static_cast<std::int64_t>(0x9e3779b97f4a7c15U);  // golden ratio
constexpr std::size_t kNamedTensors = 10;

at::ScalarType integer_of(const at::Tensor& tensor) {
  switch (tensor.element_size()) {
    case 1:
      return at::kByte;
    case 2:
      return at::kShort;
    case 4:
    case 8:  // as two words: the highest bits of two int64 would cancel each other
      return at::kInt;
    default:
      throw Error(fmt::format("replica check: no hash of tensors of {}", c10::toString(tensor.scalar_type())));
  }
}

/// The key that identifies tensors of several ranks as the same thing.
std::string identity_of(const NamedTensor& named) {
  const std::string dtype = c10::toString(named.tensor.scalar_type());
  if (!named.shard) {
    const std::vector<std::int64_t> from(static_cast<std::size_t>(named.tensor.dim()), 0);
    return fmt::format("{} {} {} {}", named.name, dtype, from, named.tensor.sizes().vec());
  }
  const Box box = named.shard->box();
  return fmt::format("{} {} {} {}", named.name, dtype, box.offsets, box.shape);
}

std::uint64_t fnv1a(const std::string& text) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  return hash;
}

struct Entry {
  std::uint64_t identity = 0, hash = 0;
};

/// The keys of `tensors`, in their order.
std::vector<std::uint64_t> hashes_of(const std::vector<NamedTensor>& tensors) {
  std::map<std::string, std::vector<std::size_t>> by_device;
  for (std::size_t i = 0; i < tensors.size(); ++i) by_device[tensors[i].tensor.device().str()].push_back(i);
  std::vector<std::uint64_t> hashes(tensors.size());
  for (const auto& [device, indices] : by_device) {
    std::vector<at::Tensor> all;
    for (const std::size_t i : indices) all.push_back(hash_of_bits(tensors[i].tensor));
    const at::Tensor here = at::stack(all).to(at::kCPU);
    for (std::size_t i = 0; i < indices.size(); ++i) {
      hashes[indices[i]] = static_cast<std::uint64_t>(here.const_data_ptr<std::int64_t>()[i]);
    }
  }
  return hashes;
}

std::vector<Entry> entries_in(const std::string& bytes) {
  std::vector<Entry> entries(bytes.size() / sizeof(Entry));
  std::memcpy(entries.data(), bytes.data(), entries.size() * sizeof(Entry));
  return entries;
}

using Holders = std::map<std::uint64_t, std::vector<int>>;  // ranks by hash

/// "ranks 0, 2 and 3 hold ..., rank 1 holds ...", the largest group first.
std::string text_of(const Holders& holders) {
  std::vector<std::pair<std::uint64_t, std::vector<int>>> groups(holders.begin(), holders.end());
  std::ranges::stable_sort(groups, [](const auto& a, const auto& b) {
    return a.second.size() != b.second.size() ? a.second.size() > b.second.size() : a.second < b.second;
  });
  std::vector<std::string> parts;
  for (const auto& [hash, ranks] : groups) {
    const bool is_one = ranks.size() == 1;
    parts.push_back(fmt::format("{} {} {} {:016x}", is_one ? "rank" : "ranks", fmt::join(ranks, ", "),
                                is_one ? "has" : "have", hash));
  }
  return fmt::format("{}", fmt::join(parts, "; "));
}

}  // namespace

at::Tensor hash_of_bits(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  const at::Tensor words = tensor.detach().contiguous().view({-1}).view(integer_of(tensor));
  const at::TensorOptions options = words.options().dtype(at::kLong);
  at::Tensor hash = at::zeros({}, options);
  if (words.numel() == 0) return hash;
  // The sum of words times odd numbers, modulo 2^64. A flipped bit always changes it: an odd multiple of a power of two
  // is not 0.
  const std::int64_t most = words.is_cpu() ? kHashedAtOnceOnHost : kHashedAtOnceOnDevice;
  for (std::int64_t begin = 0; begin < words.numel(); begin += most) {
    const std::int64_t count = std::min(most, words.numel() - begin);
    const at::Tensor odd = at::arange(begin + 1, begin + count + 1, options).mul_(kOddOfPlace).bitwise_or_(1);
    hash.add_(odd.mul_(words.narrow(0, begin, count)).sum());
  }
  return hash;
}

std::size_t check_replicas(const std::vector<NamedTensor>& tensors, Communicator& comm, const std::string& when) {
  const std::vector<std::uint64_t> hashes = hashes_of(tensors);
  std::vector<Entry> mine;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].tensor.numel() > 0) mine.push_back({fnv1a(identity_of(tensors[i])), hashes[i]});
  }
  const std::string bytes(reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(Entry));
  std::map<std::uint64_t, Holders> all;
  std::map<std::uint64_t, std::set<int>> ranks_of;
  std::vector<std::uint64_t> order;
  const std::vector<std::string> told = comm.all_gather_bytes(bytes);
  for (std::size_t rank = 0; rank < told.size(); ++rank) {
    for (const Entry& entry : entries_in(told[rank])) {
      const auto [found, is_new] = all.try_emplace(entry.identity);
      if (is_new) order.push_back(entry.identity);
      ranks_of[entry.identity].insert(static_cast<int>(rank));
      std::vector<int>& ranks = found->second[entry.hash];
      if (ranks.empty() || ranks.back() != static_cast<int>(rank)) ranks.push_back(static_cast<int>(rank));
    }
  }
  std::erase_if(order, [&](std::uint64_t identity) { return all[identity].size() < 2; });
  const auto compared = std::ranges::count_if(tensors, [&](const NamedTensor& named) {
    return named.tensor.numel() > 1 && ranks_of[fnv1a(identity_of(named))].size() > 1;
  });
  if (order.empty()) return static_cast<std::size_t>(compared);

  // All ranks reach this point; ranks that hold none of the tensors do not know their names.
  std::string names;
  for (const auto& named : tensors) {
    const auto place = std::ranges::find(order, fnv1a(identity_of(named)));
    if (place - order.begin() < static_cast<std::ptrdiff_t>(kNamedTensors) && place != order.end()) {
      names += fmt::format("{} {}\n", *place, named.name);
    }
  }
  std::map<std::uint64_t, std::string> name_of;
  for (const std::string& text : comm.all_gather_bytes(names)) {
    std::istringstream lines(text);
    std::uint64_t identity = 0;
    for (std::string name; lines >> identity >> name;) name_of[identity] = name;
  }
  std::string list;
  for (std::size_t i = 0; i < std::min(order.size(), kNamedTensors); ++i) {
    list += fmt::format("\n  '{}': {}", name_of[order[i]], text_of(all[order[i]]));
  }
  if (order.size() > kNamedTensors) list += fmt::format("\n  and {} more", order.size() - kNamedTensors);
  throw Error(fmt::format(
      "replica check {}: of {} tensors, {} differ{} between ranks that should hold the same bits (hashes):{}\n"
      "  the replicas have drifted apart: go on from a checkpoint of before; where it is one rank again, suspect its "
      "machine's memory or device",
      when, all.size(), order.size(), order.size() == 1 ? "s" : "", list));
}

}  // namespace phalanx
