// What the examples of documentation and headers may name without saying so: a rank's usual objects, and stand-ins for
// a user's own code. scripts/snippets.py compiles the examples below this header; nothing is linked.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/phalanx.h"

namespace snippets {

/// Any net of a user.
struct Net : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x);
};

/// A net of Phalanx's layers, and a part of it.
struct Gpt : phalanx::nn::Module {
  at::Tensor forward(const at::Tensor& ids);
};
struct Block : phalanx::nn::Module {
  at::Tensor forward(const at::Tensor& x);
};

#define EXPECT_EQ(found, expected) print((found) == (expected))
template <class... Values>
void print(const Values&...);

// A rank: where it is, and with whom.
extern phalanx::ProcessContext context;
extern int rank, world_size;
extern std::shared_ptr<phalanx::Communicator> world, comm;
extern phalanx::DeviceMesh mesh;
extern std::uint64_t seed;

// What it trains.
extern std::shared_ptr<Net> model, net;
extern phalanx::models::LlamaConfig config;
extern phalanx::AdamW optimizer;
extern phalanx::TrainState state;
extern std::vector<phalanx::NamedTensor> parameters;
extern double lr;
extern std::int64_t step, seq;

// Data.
extern at::Tensor x, y, batch, tokens, labels, loss;

}  // namespace snippets
