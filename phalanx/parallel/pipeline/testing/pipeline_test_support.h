// Pipeline stages of small models, and the same models on one rank, for the tests of pipelines.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/tanh.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/comm/testing/nccl_ranks.h"
#include "phalanx/nn/init.h"
#include "phalanx/nn/linear.h"
#include "phalanx/parallel/pipeline/pipeline_runtime.h"
#include "phalanx/parallel/pipeline/split_sequential.h"
#include "phalanx/schedule/actions.h"
#include "phalanx/tensor/weight_gradient_queue.h"

namespace phalanx::pipeline_testing {

constexpr std::int64_t kWidth = 12;
constexpr int kLayers = 8;  // 4 ranks with 2 stages each: one layer per stage

inline at::Tensor random_rows(std::int64_t rows, const std::string& name) {
  at::Tensor x = at::empty({rows, kWidth}, at::kFloat);
  fill(x, Init::normal(0.0, 1.0), 11, name);
  return x;
}

inline at::Tensor squared_error(const at::Tensor& y, const at::Tensor& target) { return at::mse_loss(y, target); }

/// tanh(W x + b), eight times: torch's layers.
inline torch::nn::Sequential torch_layers() {
  torch::nn::Sequential net;
  for (int i = 0; i < kLayers; ++i) {
    net->push_back(torch::nn::Linear(kWidth, kWidth));
    net->push_back(torch::nn::Tanh());
  }
  nn::initialise(*net, 4);
  return net;
}

/// The same from Phalanx layers: layers [first, last), under their numbers.
struct OwnLayers : nn::Module {
  OwnLayers(int first, int last) : nn::Module("OwnLayers") {
    for (int i = first; i < last; ++i) {
      layers.push_back(
          register_module(std::to_string(i), std::make_shared<nn::Linear>(nn::LinearOptions{kWidth, kWidth, true})));
    }
    nn::initialise(*this, 4);
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& layer : layers) x = at::tanh(nn::call(layer, x));
    return x;
  }
  std::vector<std::shared_ptr<nn::Linear>> layers;
};

/// Two such layers, the second inside a nested module.
struct NestedPair : nn::Module {
  struct Inner : nn::Module {
    Inner() : nn::Module("Inner") {
      layer = register_module("layer", std::make_shared<nn::Linear>(nn::LinearOptions{kWidth, kWidth, true}));
    }
    at::Tensor forward(const at::Tensor& x) { return at::tanh(nn::call(layer, x)); }
    std::shared_ptr<nn::Linear> layer;
  };
  NestedPair() : nn::Module("NestedPair") {
    layer = register_module("layer", std::make_shared<nn::Linear>(nn::LinearOptions{kWidth, kWidth, true}));
    inner = register_module("inner", std::make_shared<Inner>());
  }
  at::Tensor forward(const at::Tensor& x) { return nn::call(inner, at::tanh(nn::call(layer, x))); }
  std::shared_ptr<nn::Linear> layer;
  std::shared_ptr<Inner> inner;
};

/// The eight layers as pairs, [first, last) of the layers. Sharded, they are nested units.
struct NestedLayers : nn::Module {
  NestedLayers(int first, int last) : nn::Module("NestedLayers") {
    for (int i = first / 2; i < last / 2; ++i)
      pairs.push_back(register_module(std::to_string(i), std::make_shared<NestedPair>()));
    nn::initialise(*this, 4);
  }
  std::vector<std::vector<nn::Module*>> shard_units() override {
    std::vector<std::vector<nn::Module*>> units;
    for (const auto& pair : pairs) {
      units.push_back({pair.get()});
      units.push_back({pair->inner.get()});
    }
    return units;
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& pair : pairs) x = nn::call(pair, x);
    return x;
  }
  std::vector<std::shared_ptr<NestedPair>> pairs;
};

enum class Layers { own, nested, foreign };

/// The stages of a rank, all with the same number of layers.
inline std::vector<PipelineStage> stages_of(const schedule::Schedule& schedule, int rank, Layers whose) {
  const int each = kLayers / schedule.stages();
  std::vector<PipelineStage> stages;
  for (const int s : schedule.stages_of(rank)) {
    const bool is_last = s + 1 == schedule.stages();
    if (whose == Layers::own) {
      const auto part = std::make_shared<OwnLayers>(s * each, (s + 1) * each);
      stages.push_back(is_last ? make_stage(s, part, squared_error) : make_stage(s, part));
    } else if (whose == Layers::nested) {
      const auto part = std::make_shared<NestedLayers>(s * each, (s + 1) * each);
      stages.push_back(is_last ? make_stage(s, part, squared_error) : make_stage(s, part));
    } else {
      const std::vector<int> counts(static_cast<std::size_t>(schedule.stages()), 2 * each);
      const auto part = split_sequential(torch_layers(), counts)[static_cast<std::size_t>(s)];
      stages.push_back(is_last ? make_stage(s, part, squared_error) : make_stage(s, part));
    }
  }
  return stages;
}

inline std::map<std::string, at::Tensor> parameters_of(const std::vector<PipelineStage>& stages) {
  std::map<std::string, at::Tensor> found;
  for (const auto& stage : stages) {
    for (const auto& p : nn::named_parameters(*stage.module)) found[p.name] = p.tensor;
  }
  return found;
}

inline void descend(const std::map<std::string, at::Tensor>& parameters, double rate) {
  const at::NoGradGuard no_grad;
  for (const auto& [name, p] : parameters) {
    p.sub_(p.grad(), rate);
    p.mutable_grad().reset();
  }
}

/// The whole model on one rank, micro-batch after micro-batch.
struct OneRank {
  PipelineStage stage;
  int micro_batches;

  std::vector<double> step(const at::Tensor& x, const at::Tensor& y) const {
    std::vector<double> losses;
    const auto queue = std::make_shared<WeightGradientQueue>();
    queue->set_deferring(false);
    for (int i = 0; i < micro_batches; ++i) {
      const WeightGradientQueue::Scope scope(queue, {});  // the formula that layers use when they may defer
      const auto at = static_cast<std::size_t>(i);
      const at::Tensor loss = stage.loss(x.chunk(micro_batches)[at], y.chunk(micro_batches)[at]);
      losses.push_back(loss.item<double>());
      loss.backward(at::full({}, 1.0 / micro_batches));
    }
    return losses;
  }
  std::map<std::string, at::Tensor> parameters() const { return parameters_of({stage}); }
};

inline OneRank one_rank(Layers whose, int micro_batches) {
  if (whose == Layers::own)
    return {make_stage(0, std::make_shared<OwnLayers>(0, kLayers), squared_error), micro_batches};
  if (whose == Layers::nested)
    return {make_stage(0, std::make_shared<NestedLayers>(0, kLayers), squared_error), micro_batches};
  return {make_stage(0, split_sequential(torch_layers(), {2 * kLayers})[0], squared_error), micro_batches};
}

/// Whether every stage's weight gradients are added up in the order of the micro-batches, as on one rank.
inline bool adds_in_order(const schedule::Schedule& schedule) {
  std::map<int, int> next;
  bool in_order = true;
  for (const auto& row : schedule.actions) {
    for (const auto& action : row) {
      schedule::for_each_sub_action(action, [&](const schedule::Action& part) {
        if (schedule::ends_micro_batch(part.kind)) in_order = part.micro_batch == next[part.stage]++ && in_order;
      });
    }
  }
  return in_order;
}

inline double relative_difference(const at::Tensor& found, const at::Tensor& expected) {
  return (found - expected).norm().item<double>() / std::max(expected.norm().item<double>(), 1e-30);
}

/// The backend: messages with tags, or without them as over NCCL (comm/testing/nccl_ranks.h).
enum class Over { local, nccl };

inline void run_ranks(Over over, int ranks, const std::function<void(const std::shared_ptr<Communicator>&)>& body) {
  if (over == Over::local) return run_local_ranks(ranks, body);
  const auto on_one_thread = [&](const NcclRank& rank) {
    at::set_num_threads(1);
    body(rank.comm);
  };
  EXPECT_EQ(run_nccl_threads(ranks, on_one_thread), "");
}

/// The error message of each rank; empty if it throws none.
inline std::vector<std::string> errors_of(int ranks,
                                          const std::function<void(const std::shared_ptr<Communicator>&)>& body,
                                          Over over = Over::local) {
  std::vector<std::string> errors(static_cast<std::size_t>(ranks));
  run_ranks(over, ranks, [&](const std::shared_ptr<Communicator>& comm) {
    errors[static_cast<std::size_t>(comm->rank())] = error_text([&] { body(comm); });
  });
  return errors;
}

}  // namespace phalanx::pipeline_testing
