// What a rank keeps of a model in training, and the most memory that it has needed.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <vector>

#include "phalanx/base/human.h"
#include "phalanx/observe/memory_counters.h"
#include "phalanx/optim/optimizer.h"

namespace recipe {

/// Of this rank, after a backward pass: "parameters 2.29 MiB, gradients 2.29 MiB, optimizer state 4.58 MiB".
inline std::string kept_memory(const phalanx::Optimizer& optimizer) {
  std::size_t parameters = 0, gradients = 0, state = 0;
  for (const auto& [name, tensor, shard] : optimizer.parameters()) {
    parameters += tensor.nbytes();
    if (tensor.grad().defined()) gradients += tensor.grad().nbytes();
  }
  phalanx::TrainState all;
  optimizer.collect_state(all);
  for (const auto& [name, tensor, shard] : all.tensors) state += tensor.nbytes();
  return fmt::format("parameters {}, gradients {}, optimizer state {}", phalanx::human_bytes(parameters),
                     phalanx::human_bytes(gradients), phalanx::human_bytes(state));
}

/// Of the process on the host, after phalanx::install_counting_allocator(), or on the GPU.
inline void reset_peak_memory(c10::Device device) {
  device.is_cpu() ? phalanx::observe::reset_peak_memory_stats()
                  : at::getDeviceAllocator(device.type())->resetPeakStats(device.index());
}
inline std::string peak_memory(c10::Device device) {
  const std::int64_t bytes =
      device.is_cpu() ? phalanx::observe::max_memory_allocated().total()
                      : at::getDeviceAllocator(device.type())->getDeviceStats(device.index()).allocated_bytes[0].peak;
  return phalanx::human_bytes(static_cast<std::uint64_t>(bytes));
}

/// The modules of each unit of FullyShardedDataParallel: "conv1 + conv2 | fc1 | fc2".
inline std::string modules_of(const std::vector<std::vector<std::string>>& units) {
  std::vector<std::string> texts;
  for (const auto& unit : units) {
    std::vector<std::string> modules;
    for (const std::string& parameter : unit) modules.push_back(parameter.substr(0, parameter.rfind('.')));
    modules.erase(std::unique(modules.begin(), modules.end()), modules.end());
    texts.push_back(fmt::format("{}", fmt::join(modules, " + ")));
  }
  return fmt::format("{}", fmt::join(texts, " | "));
}

}  // namespace recipe
