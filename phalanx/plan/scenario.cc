#include "phalanx/plan/scenario.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "phalanx/plan/activation_memory.h"
#include "phalanx/plan/bytes_text.h"
#include "phalanx/plan/layout.h"
#include "phalanx/plan/model_partition.h"

namespace phalanx::plan {
namespace {

LayerNeed largest_layer(const TrainingShape& base) {
  // As with sharding over very many ranks: in the unsharded type, recomputed from each block's input.
  TrainingShape shape = apply_layout(base, {.parallel = {.dp_shard = 2}, .recompute_every = 1});
  const ModelPartition model(shape);
  const ActivationBytes bytes = activation_sizes(shape);
  const std::int64_t of_matrices = shape.matrix_copies.value_or(shape.optimizer_copies);
  const auto layer = [&](const char* name, std::int64_t parameters, std::int64_t activations, std::int64_t numbers) {
    const std::int64_t copies = numbers + (shape.has_masters() ? 1 : 0);
    return LayerNeed{.name = name,
                     .parameters = parameters,
                     .weights = parameters * shape.gather_bytes,
                     .gradients = parameters * shape.reduce_bytes,
                     .activations = activations,
                     .optimizer = parameters * (kFloatBytes * copies - 2 * shape.narrow_copies)};
  };
  const std::vector<LayerNeed> layers = {
      layer("block", model.attention() + model.feed_forward(), bytes.input + bytes.block() + bytes.backward,
            of_matrices),
      layer("output and loss", model.table() + model.norm, std::max(bytes.loss, bytes.loss_backward),
            shape.optimizer_copies),
      layer("embedding", model.table() + model.positions, bytes.input, shape.optimizer_copies)};
  return *std::ranges::max_element(layers, {}, &LayerNeed::total);
}

}  // namespace

std::int64_t usable(std::int64_t bytes, double headroom) {
  return static_cast<std::int64_t>(static_cast<double>(bytes) * (1.0 - headroom));
}

Scenario find_scenario(const TrainingShape& base, const Devices& devices, double headroom) {
  const std::int64_t count = devices.count();
  Layout layout{.parallel = {.dp_replicate = count}};
  Scenario found;
  found.whole = predict_memory(apply_layout(base, layout));
  layout.recompute_every = 1;
  found.whole_recomputed = predict_memory(apply_layout(base, layout));
  found.layer = largest_layer(base);

  const std::int64_t least = std::min(found.whole.total(), found.whole_recomputed.total());
  const std::string needs =
      fmt::format("the whole model needs {} with one sequence at a time, {} where activations are computed again",
                  bytes_text(found.whole.total()), bytes_text(found.whole_recomputed.total()));
  const std::int64_t smallest = usable(devices.smallest(), headroom), largest = usable(devices.largest(), headroom);
  const std::string layer =
      fmt::format("its largest layer ({}) needs {}", found.layer.name, bytes_text(found.layer.total()));
  if (least <= smallest) {
    found.number = 1;
    found.methods = "data parallelism, ZeRO";
    found.reason = fmt::format("{}; every device has {} for it", needs, bytes_text(smallest));
  } else if (found.layer.total() > largest) {
    found.number = 3;
    found.methods = "tensor parallelism";
    found.reason = fmt::format("{}, and even {}; a device has {} at most", needs, layer, bytes_text(largest));
  } else {
    found.number = 2;
    found.methods = "pipeline, sharding (ZeRO, FSDP), tensor parallelism";
    found.reason =
        fmt::format("{}; {}; {}", needs,
                    least <= largest ? fmt::format("only the largest devices have that much, {}, the smallest {}",
                                                   bytes_text(largest), bytes_text(smallest))
                                     : fmt::format("no device has that much, {} at most", bytes_text(largest)),
                    layer);
  }
  return found;
}

}  // namespace phalanx::plan
