#include "phalanx/train/ranks/rank_agreement.h"

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <span>

#include "phalanx/base/error.h"
#include "phalanx/base/json_difference.h"
#include "phalanx/checkpoint/files/block_hash.h"
#include "phalanx/observe/flight_analysis.h"

namespace phalanx::train {
namespace {

constexpr std::size_t kMaxLines = 16, kMaxTensors = 4;

bool are_all_equal(const std::vector<std::string>& texts) {
  return std::ranges::all_of(texts, [&](const std::string& text) { return text == texts[0]; });
}

/// "0.001 on ranks 0, 2 to 4; 0.002 on rank 1": the value of most ranks first.
std::string values_on_ranks(const std::map<std::string, std::vector<int>>& ranks_by_value) {
  std::vector<std::pair<std::string, std::vector<int>>> values(ranks_by_value.begin(), ranks_by_value.end());
  std::ranges::sort(values, [](const auto& a, const auto& b) {
    return a.second.size() != b.second.size() ? a.second.size() > b.second.size() : a.second[0] < b.second[0];
  });
  std::string text;
  for (const auto& [value, ranks] : values) {
    text += fmt::format("{}{} on {}", text.empty() ? "" : "; ", value, observe::ranks_text(ranks));
  }
  return text;
}

/// Lines for keys that differ among the ranks that have them. With `all_must_have` a missing key also counts as a
/// value.
std::string differences_between(const std::vector<nlohmann::json>& documents, bool all_must_have,
                                std::size_t max_lines = kMaxLines) {
  std::vector<std::map<std::string, nlohmann::json>> flat;
  std::map<std::string, bool> keys;
  for (const auto& document : documents) {
    flat.push_back(flat_json(document));
    for (const auto& [key, value] : flat.back()) keys[key] = true;
  }
  std::string lines;
  std::size_t count = 0;
  for (const auto& [key, known] : keys) {
    std::map<std::string, std::vector<int>> ranks_by_value;
    for (std::size_t rank = 0; rank < flat.size(); ++rank) {
      const auto found = flat[rank].find(key);
      if (found == flat[rank].end() && !all_must_have) continue;
      const auto value = found == flat[rank].end() ? std::nullopt : std::optional(found->second);
      ranks_by_value[json_value_text(value)].push_back(static_cast<int>(rank));
    }
    if (ranks_by_value.size() < 2) continue;
    if (++count <= max_lines) lines += fmt::format("\n  {}: {}", key, values_on_ranks(ranks_by_value));
  }
  if (count > max_lines) lines += fmt::format("\n  and {} more", count - max_lines);
  return lines;
}

/// A path in the document may not be valid UTF-8.
std::string text_of_document(const nlohmann::json& document) {
  return document.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::vector<nlohmann::json> gather_documents(Communicator& world, const nlohmann::json& mine) {
  std::vector<nlohmann::json> documents;
  for (const std::string& text : world.all_gather_bytes(text_of_document(mine))) {
    documents.push_back(nlohmann::json::parse(text));
  }
  return documents;
}

std::string hash_of_values(const at::Tensor& tensor) {
  constexpr std::int64_t kSampled = 4096;
  const at::NoGradGuard no_grad;
  const at::Tensor values = tensor.detach().reshape({-1});
  // With an odd stride every column of a matrix of even width is sampled.
  const std::int64_t stride = values.numel() <= kSampled ? 1 : (values.numel() / kSampled) | 1;
  const at::Tensor sample = values.slice(0, 0, values.numel(), stride).contiguous().cpu();
  return format_hash(hash_block(std::as_bytes(
      std::span(static_cast<const char*>(sample.const_data_ptr()), static_cast<std::size_t>(sample.nbytes())))));
}

}  // namespace

void require_same_on_ranks(Communicator& world, const std::string& what, const nlohmann::json& mine,
                           const std::string& advice) {
  if (world.size() == 1 || are_all_equal(world.all_gather_bytes(hash_of_text(text_of_document(mine))))) return;
  throw ConfigError(fmt::format("the ranks do not have the same {}:{}\n{}", what,
                                differences_between(gather_documents(world, mine), /*all_must_have=*/true), advice));
}

void require_same_weights(Communicator& world, const std::vector<NamedTensor>& weights) {
  if (world.size() == 1) return;
  // Ranks with different parts have different names; those with the same names must have the same hashes. Full tensors
  // are separate, because ranks that cut matrices in different places hold the same norms.
  nlohmann::json whole = nlohmann::json::object(), parts = nlohmann::json::object();
  for (const auto& [name, tensor, shard] : weights) {
    const bool is_whole = !shard || shard->box().shape == shard->spec.shape();
    (is_whole ? whole : parts)[is_whole ? name : name + shard->box().text()] = hash_of_values(tensor);
  }
  nlohmann::json mine = nlohmann::json::object();
  for (const auto* group : {&whole, &parts}) {
    std::string names;
    for (const auto& [name, hash] : group->items()) names += name + '\n';
    mine[hash_of_text(names)] = hash_of_text(group->dump());
  }
  const auto documents = gather_documents(world, mine);
  if (differences_between(documents, /*all_must_have=*/false).empty()) return;
  whole.update(parts);
  throw Error(fmt::format(
      "the ranks do not begin with the same weights:{}\nthe lines show hashes of what each rank holds; give every rank "
      "the same files, and the same build of Phalanx and libtorch",
      differences_between(gather_documents(world, whole), /*all_must_have=*/false, kMaxTensors)));
}

}  // namespace phalanx::train
