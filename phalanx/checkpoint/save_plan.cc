#include "phalanx/checkpoint/save_plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <charconv>
#include <span>
#include <unordered_map>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/checkpoint/files/block_hash.h"
#include "phalanx/checkpoint/files/block_writer.h"
#include "phalanx/checkpoint/files/box_copy.h"
#include "phalanx/checkpoint/files/mismatch.h"
#include "phalanx/checkpoint/files/shard_plan.h"
#include "phalanx/checkpoint/tensor_bytes.h"

namespace phalanx {
namespace {

/// As text: the digest, a colon, and for each tensor with a shard the rank's number in its mesh, in order.
struct LocalPlan {
  std::string digest;
  std::vector<int> places;
};

LocalPlan parse_local_plan(const std::string& text) {
  const auto colon = text.find(':');
  LocalPlan local_plan{text.substr(0, colon), {}};
  for (const char *at = text.data() + colon + 1, *end = text.data() + text.size(); at < end; ++at)
    at = std::from_chars(at, end, local_plan.places.emplace_back()).ptr;
  return local_plan;
}

/// The ranks of the world, the lowest of each, at the positions 0, 1, ... of a tensor's mesh. `sharded` counts the
/// tensors with a shard before it.
std::vector<int> ranks_at_places(const NamedTensor& named, const std::vector<LocalPlan>& local_plans,
                                 std::size_t sharded) {
  const auto& spec = named.shard->spec;
  std::vector<int> ranks(static_cast<std::size_t>(spec.mesh().size()), -1);
  for (std::size_t rank = local_plans.size(); rank-- > 0;)
    ranks.at(static_cast<std::size_t>(local_plans[rank].places.at(sharded))) = static_cast<int>(rank);
  for (std::size_t place = 0; place < ranks.size(); ++place) {
    if (ranks[place] < 0)
      throw CheckpointError(
          fmt::format("tensor {}: no rank is at place {} of its mesh, which holds {} of {}; {} {} saving",
                      safetensors::quote_name(named.name), place, spec.local_box(static_cast<int>(place)).text(),
                      spec.text(), local_plans.size(), local_plans.size() == 1 ? "rank is" : "ranks are"));
  }
  return ranks;
}

}  // namespace

std::string create_local_plan(const TrainState& state, std::int64_t step) {
  std::string text = fmt::format("{}\n", step);
  std::vector<int> places;
  for (const auto& named : state.tensors) {
    text += fmt::format("{} {}", named.name, describe_type(describe_tensor(named)));
    if (named.shard) {
      text += fmt::format(" {} {}", named.shard->spec.mesh().text(), named.shard->spec.placement().text());
      places.push_back(named.shard->rank);
    }
    text += '\n';
  }
  for (const auto& [name, value] : state.integers) text += fmt::format("{}={}\n", name, value);
  return fmt::format("{}:{}", hash_of_text(text), fmt::join(places, ","));
}

std::vector<WriteItem> plan_save(const std::vector<NamedTensor>& tensors, const std::vector<std::string>& texts,
                                 int rank) {
  std::vector<LocalPlan> local_plans;
  for (const auto& text : texts) {
    local_plans.push_back(parse_local_plan(text));
    if (local_plans.back().digest != local_plans[0].digest)
      throw CheckpointError(
          fmt::format("rank {} and rank 0 are saving different states: tensor names, global shapes, dtypes, placements "
                      "or integers differ",
                      local_plans.size() - 1));
  }
  std::vector<WriteItem> boxes;
  std::vector<safetensors::TensorInfo> replicated;
  std::vector<std::size_t> number_of;  // the replicated tensors' numbers among all tensors
  std::size_t sharded = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto& named = tensors[i];
    if (!named.shard) {
      replicated.push_back(describe_tensor(named));
      number_of.push_back(i);
      continue;
    }
    const int place = named.shard->rank;
    const auto ranks = ranks_at_places(named, local_plans, sharded++);
    if (ranks[static_cast<std::size_t>(place)] != rank) continue;
    const auto& spec = named.shard->spec;
    if (spec.numel() == 0) {
      if (place == 0) boxes.push_back({i, spec.global_box(), 0, 0});
    } else if (Box box = spec.local_box(place); !box.empty() && named.shard->is_first_holder()) {
      const auto rows = row_count(box);
      boxes.push_back({i, std::move(box), 0, rows});
    }
  }
  for (const auto& part : plan_shard(replicated, rank, static_cast<int>(local_plans.size()))) {
    const auto& shape = replicated[part.tensor].shape;
    const Box whole{std::vector<std::int64_t>(shape.size(), 0), shape};
    boxes.push_back(
        {number_of[part.tensor], rows_of_box(whole, part.row_begin, part.row_end), part.row_begin, part.row_end});
  }
  return boxes;
}

ManifestFile write_shard_file(FileSystem& fs, const std::filesystem::path& path,
                              const std::vector<NamedTensor>& tensors, const std::vector<WriteItem>& boxes) {
  std::vector<safetensors::TensorInfo> infos;
  std::unordered_map<std::string, const WriteItem*> box_of;
  SavedOffsets offsets;
  for (const auto& planned : boxes) {
    auto info = describe_tensor(tensors[planned.tensor]);
    info.shape = planned.box.shape;
    offsets[info.name] = planned.box.offsets;
    box_of[info.name] = &planned;
    infos.push_back(std::move(info));
  }
  const auto header = safetensors::make_header(std::move(infos), sharding_metadata(offsets));
  BlockWriter writer(fs, path);
  writer.append_header(safetensors::format_header(header));
  for (const auto& info : header.tensors) {
    const auto& planned = *box_of.at(info.name);
    read_tensor_rows(tensors[planned.tensor].tensor, planned.row_begin, planned.row_end,
                     [&](std::span<const std::byte> bytes) { writer.append(bytes); });
  }
  return writer.finish();
}

}  // namespace phalanx
