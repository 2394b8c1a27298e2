// A mesh and a net for tests of FullyShardedDataParallel.
#pragma once

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <memory>

#include "phalanx/mesh/device_mesh.h"
#include "phalanx/nn/init.h"

namespace phalanx::fully_shard_testing {

inline constexpr std::int64_t kWidth = 12;

inline DeviceMesh sharding_mesh(const std::shared_ptr<Communicator>& world, int replicas = 1) {
  return {world, {{"dp_replicate", replicas}, {"dp_shard", world->size() / replicas}}};
}

/// `count` units of width x width and a bias.
inline torch::nn::Sequential linears(int count, std::int64_t width = kWidth) {
  torch::nn::Sequential net;
  for (int i = 0; i < count; ++i) {
    net->push_back(torch::nn::Linear(width, width));
    net->push_back(torch::nn::Tanh());
  }
  nn::initialise(*net, 3);
  return net;
}

}  // namespace phalanx::fully_shard_testing
