#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "phalanx/base/human.h"
#include "phalanx/lecture/small_net.h"
#include "phalanx/lecture/steps.h"
#include "phalanx/mesh/device_mesh.h"
#include "phalanx/optim/sgd.h"
#include "phalanx/parallel/ddp/data_parallel.h"
#include "phalanx/parallel/ddp/ddp.h"
#include "phalanx/parallel/fsdp/fully_shard.h"

namespace phalanx::lecture {
namespace {

/// The mean over the ranks of a number.
double mean_over(Rank& rank, double value) {
  const at::Tensor mean = at::full({1}, value, rank.floats().dtype(at::kDouble));
  rank.comm().all_reduce(mean, {.op = ReduceOp::avg});
  return mean.item<double>();
}

/// Whether all ranks hold the same bits.
bool equal_on_all_ranks(Rank& rank, const at::Tensor& tensor) {
  const at::Tensor of_rank_0 = tensor.detach().clone();
  rank.comm().broadcast(of_rank_0, {.root = 0});
  return at::equal(of_rank_0, tensor.detach());
}

std::string losses_text(const std::vector<double>& losses) {
  std::string text;
  for (const double loss : losses) text += fmt::format(" {:.5f}", loss);
  return text;
}

}  // namespace

void draw_data_parallel(Stage& stage) {
  stage.print("            rank 0       rank 1       rank 2       rank 3");
  stage.print("batch       rows 0-7     rows 8-15    rows 16-23   rows 24-31     different");
  stage.print("weights     W            W            W            W              equal");
  stage.print("forward     loss 0       loss 1       loss 2       loss 3         different");
  stage.print("backward    g0           g1           g2           g3             different");
  stage.print("            +------------+---- all_reduce ---------+");
  stage.print("gradient    mean g       mean g       mean g       mean g         equal");
  stage.print("optimizer   W - lr g     W - lr g     W - lr g     W - lr g       equal");
}

void one_step_by_hand(Stage& stage) {
  const int n = stage.ranks();
  stage.on_ranks(n, [n](Rank& rank) {
    // y = w x over 8 rows, of which this rank has its share; loss mean (y - target)^2, target 3 x.
    const std::int64_t rows = 8 / n;
    const at::Tensor x = at::arange(1, 9, rank.floats()).narrow(0, rank.number() * rows, rows) / 4;
    const at::Tensor w = at::full({1}, 1.0, rank.floats()).requires_grad_();
    const at::Tensor loss = (w * x - 3 * x).square().mean();
    loss.backward();
    rank.say("its rows", tensor_text(x));
    rank.say("forward: loss", fmt::format("{:.5g}", loss.item<double>()));
    rank.say("backward: its gradient", tensor_text(w.grad(), 5));
    rank.comm().all_reduce(w.grad());
    w.mutable_grad().div_(n);
    rank.say("all_reduce, divided by the ranks: the mean gradient", tensor_text(w.grad(), 5));
    const at::Tensor updated = w.detach() - 0.05 * w.grad();
    rank.say("optimizer: w = 1 - 0.05 g", tensor_text(updated));
    const at::Tensor all = at::arange(1, 9, rank.floats()) / 4;
    const double whole = (-4 * all.square()).mean().item<double>();  // d/dw mean (w x - 3 x)^2 at w = 1
    rank.check(std::abs(w.grad().item<double>() - whole) < 1e-5 * std::abs(whole),
               "the mean gradient is that of the whole batch");
    rank.check(equal_on_all_ranks(rank, updated), "weights are equal on all ranks");
    const bool differ = n == 1 || std::abs(mean_over(rank, loss.item<double>()) - loss.item<double>()) > 1e-3;
    rank.check(differ, n == 1 ? "with one rank there is nothing to average" : "losses differ");
  });
}

void three_ways(Stage& stage) {
  const std::vector<double> alone = losses_of_one_rank(stage.device());
  stage.print(fmt::format("{:<36}", "one rank, the whole batch:") + losses_text(alone));
  for (const int n : stage.worlds()) {
    std::vector<double> by_hand, wrapped;
    stage.on_ranks(n, [&](Rank& rank) {
      const at::Tensor x = batch_rows(rank.device(), rank.number() * kBatch / n, kBatch / n);
      for (const bool uses_ddp : {false, true}) {
        SmallNet net(rank.device());
        nn::initialise(net, kSeed);
        std::unique_ptr<DistributedDataParallel> ddp;
        if (uses_ddp) ddp = std::make_unique<DistributedDataParallel>(net, rank.world());
        AdamW optimizer(nn::named_parameters(net), {.weight_decay = 0.01});
        std::vector<double> losses;
        for (int step = 0; step < kTrainingSteps; ++step) {
          const at::Tensor loss = loss_of(nn::call(net, x));
          loss.backward();
          if (!uses_ddp) {
            for (const at::Tensor& parameter : net.parameters()) {
              rank.comm().all_reduce(parameter.grad());
              parameter.mutable_grad().div_(n);
            }
          }
          optimizer.step(1e-3);
          optimizer.zero_grad();
          losses.push_back(mean_over(rank, loss.item<double>()));
        }
        rank.check(equal_on_all_ranks(rank, net.layers.back()->weight), "parameters are equal on all ranks");
        rank.check(same_losses(losses, alone), "the mean of the ranks' losses is the loss of one rank");
        if (rank.number() == 0) (uses_ddp ? wrapped : by_hand) = losses;
      }
    });
    stage.print(fmt::format("{:<36}", fmt::format("{} rank(s), gradients by hand:", n)) + losses_text(by_hand));
    stage.print(fmt::format("{:<36}", fmt::format("{} rank(s), DistributedDataParallel:", n)) + losses_text(wrapped));
  }
}

void data_parallel_traffic(Stage& stage) {
  const int n = stage.ranks();
  const at::Tensor x = batch_rows(stage.device());
  const auto net = std::make_shared<SmallNet>(stage.device());
  nn::initialise(*net, kSeed);
  std::vector<at::Device> devices;
  for (int r = 0; r < n; ++r) {
    devices.push_back(stage.device().is_cuda() ? at::Device(at::kCUDA, static_cast<at::DeviceIndex>(r))
                                               : at::Device(at::kCPU));
  }
  DataParallel parallel(*net, devices, [&] { return std::make_shared<SmallNet>(stage.device()); });
  const at::Tensor y = parallel.forward(x);
  loss_of(y).backward();
  const std::vector<at::Tensor> gradients = net->parameters();
  std::int64_t parameters = 0;
  for (const at::Tensor& parameter : gradients) parameters += parameter.nbytes();
  stage.on_ranks(n, [&](Rank& rank) {
    SmallNet mine(rank.device());
    nn::initialise(mine, kSeed);
    const DistributedDataParallel ddp(mine, rank.world());
    loss_of(nn::call(mine, batch_rows(rank.device(), rank.number() * kBatch / n, kBatch / n))).backward();
    bool same = true;
    for (std::size_t i = 0; i < gradients.size(); ++i)
      same = same && are_close(mine.parameters()[i].grad(), gradients[i].grad());
    rank.check(same, "DataParallel in one process and DDP have the same gradients");
  });
  const auto bytes = [](std::int64_t count) { return human_bytes(static_cast<std::uint64_t>(count)); };
  const std::int64_t others = n - 1, batch = static_cast<std::int64_t>(x.nbytes());
  stage.print(
      fmt::format("{} devices, parameters {}, batch {}; bytes of one step", n, bytes(parameters), bytes(batch)));
  stage.print(fmt::format("{:<48} {:>12} {:>12}", "", "device 0", "each other"));
  const auto row = [&](const char* what, std::int64_t first, std::int64_t other) {
    stage.print(fmt::format("{:<48} {:>12} {:>12}", what, bytes(first), bytes(other)));
  };
  row("DataParallel  1 scatter the batch: sends", batch / n * others, 0);
  row("              2 copy the parameters out: sends", parameters * others, 0);
  row("              4 gather the outputs: receives", static_cast<std::int64_t>(y.nbytes()) / n * others, 0);
  row("              5 gradients to device 0: receives", parameters * others, 0);
  const std::int64_t ring = 2 * parameters * others / n;
  row("DDP           2 all_reduce as a ring: sends", ring, ring);
}

void uneven_means(Stage& stage) {
  const at::Tensor losses = at::tensor({1.0, 2.0, 3.0, 4.0, 10.0}, at::kDouble);
  const at::Tensor first = losses.narrow(0, 0, 3), second = losses.narrow(0, 3, 2);
  const double of_means = (first.mean().item<double>() + second.mean().item<double>()) / 2;
  const double whole = losses.mean().item<double>();
  const double weighted = (3 * first.mean().item<double>() + 2 * second.mean().item<double>()) / 5;
  stage.print(fmt::format("losses of 5 rows {}, 3 on rank 0 and 2 on rank 1", tensor_text(losses)));
  stage.print(fmt::format("mean of the whole batch {:g}; mean of the ranks' means {:g}; weighted by rows {:g}", whole,
                          of_means, weighted));
  stage.check(of_means != whole && weighted == whole,
              "with uneven parts the mean of means is another number; weighted by rows it is not");
}

void draw_zero(Stage& stage) {
  stage.print("what rank 0 of 4 keeps, in quarters; the other ranks keep the other quarters");
  stage.print(fmt::format("{:<8} {:>11} {:>11} {:>11}", "", "parameters", "gradients", "optimizer"));
  for (int zero = 0; zero <= 3; ++zero) {
    const auto cell = [](bool whole) { return whole ? "####" : "#..."; };
    stage.print(fmt::format("{:<8} {:>11} {:>11} {:>11}", zero == 0 ? "DDP" : fmt::format("ZeRO-{}", zero),
                            cell(zero < 3), cell(zero < 2), cell(zero < 1)));
  }
}

void zero3_moments(Stage& stage) {
  constexpr int kMoments = 2 * kLayers;
  stage.print("one rank of four, layer by layer; ####: gathered and in use, #...: its own quarter");
  std::string head = "           ";
  for (int moment = 0; moment < kMoments; ++moment) {
    head += fmt::format("   {}{}", moment < kLayers ? 'F' : 'B', moment < kLayers ? moment : kMoments - 1 - moment);
  }
  stage.print(head);
  for (int layer = 0; layer < kLayers; ++layer) {
    std::string line = fmt::format("layer {}    ", layer);
    for (int moment = 0; moment < kMoments; ++moment) {
      line += moment == layer || moment == kMoments - 1 - layer ? " ####" : " #...";
    }
    stage.print(line);
  }
  stage.print("before F and B of a layer: all-gather; after B: reduce-scatter of its gradient");
}

void zero_stages(Stage& stage) {
  const int n = stage.ranks();
  const std::vector<double> alone = losses_of_one_rank(stage.device());
  for (int zero = 0; zero <= 3; ++zero) {
    const std::string name = zero == 0 ? "DDP" : fmt::format("ZeRO-{}", zero);
    stage.on_ranks(n, [&](Rank& rank) {
      const at::Tensor x = batch_rows(rank.device(), rank.number() * kBatch / n, kBatch / n);
      SmallNet net(rank.device());
      const auto loss = [&] { return loss_of(nn::call(net, x)); };
      std::vector<double> losses;
      std::string kept;
      const auto describe = [&](std::int64_t parameters, std::int64_t gradients, std::int64_t optimizer) {
        const auto bytes = [](std::int64_t count) { return human_bytes(static_cast<std::uint64_t>(count)); };
        kept = fmt::format("parameters {:>8}, gradients {:>8}, optimizer {:>8}", bytes(parameters), bytes(gradients),
                           bytes(optimizer));
        return parameters + gradients + optimizer;
      };
      std::int64_t total = 0;
      const std::int64_t size = kLayers * kDim * kDim * 4;
      if (zero == 0) {
        nn::initialise(net, kSeed);
        const DistributedDataParallel ddp(net, rank.world());
        losses = train(ddp.parameters(), loss);
        total = describe(size, size, 2 * size);
      } else {
        const DeviceMesh mesh(rank.world(), {{"dp_shard", n}}, rank.device().is_cuda() ? "cuda" : "cpu");
        FullyShardedDataParallel sharded(net, mesh, {.stage = zero});
        sharded.initialise(kSeed);
        losses = train(sharded.parameters(), loss);
        std::int64_t rows = 0;  // of which the optimizer has the moments
        for (const NamedTensor& parameter : sharded.parameters())
          rows += static_cast<std::int64_t>(parameter.tensor.nbytes());
        const FullyShardStatistics kept_here = sharded.statistics();
        std::int64_t gradients = zero == 1 ? kept_here.gradient_bytes : kept_here.sharded_grad_bytes;
        if (n == 1) gradients = size;  // they stay where autograd puts them
        total = describe(kept_here.shard_bytes, gradients, 2 * rows);
      }
      const std::int64_t shared_out = zero == 0 ? 0 : 4 * (zero + 1);  // of 16 bytes a parameter
      rank.check(total == size / 4 * (16 - shared_out) + size / 4 * shared_out / n,
                 "bytes are 16 P, 8 P + 8 P / n, 4 P + 12 P / n and 16 P / n");
      rank.say(name, kept);
      for (double& value : losses) value = mean_over(rank, value);
      rank.check(same_losses(losses, alone), "every stage has the losses of one rank");
    });
  }
}

}  // namespace phalanx::lecture
