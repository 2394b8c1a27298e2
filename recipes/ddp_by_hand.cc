// Data parallelism written out, and the one line that does the same.
//
//   phalanx launch --nproc-per-node 2 -- ddp_by_hand                      also with 1 and 4
//
// By hand: after backward(), all_reduce each gradient, divide by the number of ranks, step. A deep MLP is trained in
// that way, then with DistributedDataParallel, then by rank 0 alone on the whole batch. All three print the same
// losses, and the weights end up the same on all ranks.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <optional>

#include "phalanx/launch/process_context.h"
#include "phalanx/launch/supervisor/worker_report.h"
#include "phalanx/nn/init.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/parallel/ddp/ddp.h"
#include "recipes/deep_mlp.h"

namespace {

struct Run {
  std::vector<double> losses;  // of the global batch
  std::vector<at::Tensor> weights;
};

Run train(const at::Tensor& x, const std::shared_ptr<phalanx::Communicator>& world, bool wrapped,
          const std::function<void(const std::vector<at::Tensor>&)>& after_backward) {
  deep_mlp::Net net;
  phalanx::nn::initialise(net, deep_mlp::kSeed);
  std::optional<phalanx::DistributedDataParallel> ddp;
  if (wrapped) ddp.emplace(net, world);
  phalanx::AdamW optimizer(phalanx::nn::named_parameters(net), {.beta2 = 0.999, .weight_decay = 0.01});
  Run run;
  for (int step = 0; step < deep_mlp::kSteps; ++step) {
    const at::Tensor loss = deep_mlp::loss_of(phalanx::nn::call(net, x));
    loss.backward();
    if (after_backward) after_backward(net.parameters());
    optimizer.step(1e-3);
    optimizer.zero_grad();
    run.losses.push_back(deep_mlp::mean_over_ranks(loss, world.get()));
  }
  run.weights = net.parameters();
  return run;
}

}  // namespace

int main() try {
  const phalanx::ProcessContext context = phalanx::init_from_environment({.device = "cpu"});
  auto& world = *context.world;
  const at::Tensor mine = deep_mlp::rows_of(context.rank, context.world_size);
  const Run by_hand = train(mine, context.world, false, [&](const std::vector<at::Tensor>& parameters) {
    for (const auto& parameter : parameters) {
      world.all_reduce(parameter.grad());
      parameter.mutable_grad().div_(context.world_size);
    }
  });
  const Run wrapped = train(mine, context.world, true, nullptr);
  const Run alone = context.rank == 0 ? train(deep_mlp::rows_of(0, 1), nullptr, false, nullptr) : Run();

  const at::NoGradGuard no_grad;
  bool equal = true, close = true;
  double from_wrapped = 0, from_alone = 0;
  for (std::size_t i = 0; i < by_hand.weights.size(); ++i) {
    at::Tensor of_rank_0 = by_hand.weights[i].clone();
    world.broadcast(of_rank_0);
    equal = equal && at::equal(of_rank_0, by_hand.weights[i]);
    const double difference = by_hand.weights[i].sub(wrapped.weights[i]).abs().max().item<double>();
    from_wrapped = std::max(from_wrapped, difference);
    close = close && difference <= 1e-5;
  }
  for (std::size_t step = 0; step < alone.losses.size(); ++step) {
    const double expected = alone.losses[step];
    for (const double loss : {by_hand.losses[step], wrapped.losses[step]}) {
      const double difference = std::abs(loss - expected) / expected;
      from_alone = std::max(from_alone, difference);
      close = close && difference <= 1e-5;  // not so for NaN
    }
    fmt::print("step {}: by hand {:.7f}, wrapped {:.7f}, one rank {:.7f}\n", step + 1, by_hand.losses[step],
               wrapped.losses[step], expected);
  }
  at::Tensor all_equal = at::full({1}, equal ? 1.0 : 0.0);
  world.all_reduce(all_equal, {.op = phalanx::ReduceOp::min});
  equal = all_equal.item<double>() == 1.0;
  const bool good = equal && close;
  if (context.rank == 0) {
    fmt::print(
        "{} rank(s): parameters {} on all ranks; by hand and wrapped differ by {:.1e}, losses from one rank's by "
        "{:.1e}: {}\n",
        context.world_size, equal ? "equal" : "NOT equal", from_wrapped, from_alone,
        good ? "the same" : "NOT the same");
  }
  return good ? 0 : 1;
} catch (const phalanx::Error& error) {
  if (!phalanx::report_error_to_launcher(error)) fmt::print(stderr, "ddp_by_hand: {}\n", error.what());
  return error.exit_status();
}
