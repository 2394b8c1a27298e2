// Pipeline parallelism written out, forward and backward, and the same through the library.
//
//   phalanx launch --nproc-per-node 2 -- pipeline_by_hand                 also with 1 and 4
//
// By hand: the layers of the deep MLP are divided over the ranks, the batch into 4 micro-batches. Activations go to the
// next rank while the next micro-batch is computed, and gradients come back in the same way. The receive of the next
// micro-batch is posted before the current one is computed. Through the library: two schedules, GPipe, which is the one
// written out here, and 1F1B, which saves fewer activations. All give the losses of one rank.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>

#include <array>

#include "phalanx/launch/process_context.h"
#include "phalanx/launch/supervisor/worker_report.h"
#include "phalanx/nn/init.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/parallel/pipeline/pipeline_runtime.h"
#include "phalanx/schedule/generators.h"
#include "recipes/deep_mlp.h"

namespace {

constexpr int kMicroBatches = 4;
constexpr std::int64_t kRows = deep_mlp::kBatch / kMicroBatches;

// Some layers of the deep MLP, under their numbers in the whole model.
struct Part : phalanx::nn::Module {
  Part(int begin, int end) : Module("Part") {
    for (int i = begin; i < end; ++i) {
      layers.push_back(register_module(std::to_string(i), std::make_shared<deep_mlp::Layer>()));
    }
    phalanx::nn::initialise(*this, deep_mlp::kSeed);
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& layer : layers) x = phalanx::nn::call(layer, x);
    return x;
  }
  std::vector<std::shared_ptr<deep_mlp::Layer>> layers;
};

// A receive in flight.
using Incoming = std::pair<at::Tensor, phalanx::Work>;
Incoming receive(phalanx::Communicator& world, int from) {
  const at::Tensor room = at::empty({kRows, deep_mlp::kDim});
  return {room, world.recv(room, from, {.async = true})};
}

double step_by_hand(phalanx::Communicator& world, Part& part, const at::Tensor& batch) {
  const int rank = world.rank();
  const bool is_first = rank == 0, is_last = rank + 1 == world.size();
  std::array<at::Tensor, kMicroBatches> inputs, outputs;
  std::vector<phalanx::Work> sends;
  Incoming next;
  double loss = 0;
  if (!is_first) next = receive(world, rank - 1);
  for (std::size_t m = 0; m < kMicroBatches; ++m) {
    at::Tensor x = batch.narrow(0, static_cast<std::int64_t>(m) * kRows, kRows);
    if (!is_first) {
      const auto [tensor, arrival] = next;
      if (m + 1 < kMicroBatches) next = receive(world, rank - 1);  // it may arrive while the current one is computed
      arrival.wait();
      x = tensor.detach().requires_grad_();
    }
    inputs[m] = x;
    outputs[m] = part.forward(x);
    if (is_last) {
      outputs[m] = deep_mlp::loss_of(outputs[m]);
      loss += outputs[m].item<double>() / kMicroBatches;
    } else {
      sends.push_back(
          world.send(outputs[m].detach(), rank + 1, {.async = true}));  // in flight while the next one is computed
    }
  }
  if (!is_last) next = receive(world, rank + 1);
  for (std::size_t m = 0; m < kMicroBatches; ++m) {
    at::Tensor dy = at::full({}, 1.0 / kMicroBatches);  // of the mean of the micro-batches' losses
    if (!is_last) {
      const auto [tensor, arrival] = next;
      if (m + 1 < kMicroBatches) next = receive(world, rank + 1);
      arrival.wait();
      dy = tensor;
    }
    torch::autograd::backward({outputs[m]}, {dy});
    if (!is_first) sends.push_back(world.send(inputs[m].grad(), rank - 1, {.async = true}));
    outputs[m].reset();  // the graph, and with it the activations
  }
  for (const auto& send : sends) send.wait();
  at::Tensor shared = at::full({}, loss, at::kDouble);
  world.broadcast(shared, {.root = world.size() - 1});
  return shared.item<double>();
}

std::vector<double> losses_of(Part& part, const auto& step) {
  phalanx::AdamW optimizer(phalanx::nn::named_parameters(part), {.beta2 = 0.999, .weight_decay = 0.01});
  std::vector<double> losses;
  for (int i = 0; i < deep_mlp::kSteps; ++i) {
    losses.push_back(step());
    optimizer.step(1e-3);
    optimizer.zero_grad();
  }
  return losses;
}

}  // namespace

int main() try {
  const phalanx::ProcessContext context = phalanx::init_from_environment({.device = "cpu"});
  const int ranks = context.world_size, each = deep_mlp::kLayers / ranks, begin = context.rank * each;
  if (each * ranks != deep_mlp::kLayers) throw phalanx::UsageError("the net has 4 layers: start 1, 2 or 4 ranks");
  const at::Tensor batch = deep_mlp::rows_of(0, 1);
  Part by_hand(begin, begin + each);
  std::vector<std::vector<double>> found = {
      losses_of(by_hand, [&] { return step_by_hand(*context.world, by_hand, batch); })};
  std::vector<int> live;
  for (const char* name : {"GPipe", "1F1B"}) {
    const auto part = std::make_shared<Part>(begin, begin + each);
    const auto loss_of = [](const at::Tensor& y, const at::Tensor&) { return deep_mlp::loss_of(y); };
    phalanx::PipelineRuntime pipeline(
        context.world, phalanx::schedule::make_schedule({.name = name, .ranks = ranks, .micro_batches = kMicroBatches}),
        {phalanx::make_stage(context.rank, part, loss_of)});
    found.push_back(losses_of(*part, [&] { return pipeline.step(batch, batch).loss(); }));
    live.push_back(pipeline.statistics().peak_live_activations);
  }
  if (context.rank != 0) return 0;
  Part whole(0, deep_mlp::kLayers);
  const auto alone = losses_of(whole, [&] {
    const at::Tensor loss = deep_mlp::loss_of(whole.forward(batch));
    return loss.backward(), loss.item<double>();
  });
  auto [worst, same] = std::pair(0.0, true);
  for (std::size_t step = 0; step < alone.size(); ++step) {
    for (const auto& losses : found) {
      const double difference = std::abs(losses[step] - alone[step]) / alone[step];
      worst = std::max(worst, difference);
      same = same && difference <= 1e-5;  // not so for NaN
    }
    fmt::print("step {}: by hand {:.7f}, GPipe {:.7f}, 1F1B {:.7f}, one rank {:.7f}\n", step + 1, found[0][step],
               found[1][step], found[2][step], alone[step]);
  }
  fmt::print("{} rank(s): micro-batches alive on rank 0: GPipe {}, 1F1B {}; losses differ by {:.1e}: {}\n", ranks,
             live[0], live[1], worst, same ? "the same" : "NOT the same");
  return same ? 0 : 1;
} catch (const phalanx::Error& error) {
  if (!phalanx::report_error_to_launcher(error)) fmt::print(stderr, "pipeline_by_hand: {}\n", error.what());
  return error.exit_status();
}
