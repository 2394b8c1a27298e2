#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

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
  for (const double loss : losses) text += fmt::format("{}{:.5f}", text.empty() ? " " : ",", loss);
  return text;
}

}  // namespace

void draw_data_parallel(Stage& stage) {
  const std::vector<GridRow> rows = {{"batch", {"rows 0-7", "rows 8-15", "rows 16-23", "rows 24-31"}, "different"},
                                     {"weights", {"W", "W", "W", "W"}, "equal", true},
                                     {"forward", {"loss 0", "loss 1", "loss 2", "loss 3"}, "different"},
                                     {"backward", {"g0", "g1", "g2", "g3"}, "different"},
                                     {"", {"+------------+---- all_reduce ---------+"}},
                                     {"gradient", {"mean g", "mean g", "mean g", "mean g"}, "equal", true},
                                     {"optimizer", {"W - lr g", "W - lr g", "W - lr g", "W - lr g"}, "equal", true}};
  const std::vector<std::string> ranks = {"rank 0", "rank 1", "rank 2", "rank 3"};
  stage.print("            rank 0       rank 1       rank 2       rank 3");
  for (const GridRow& row : rows) {
    std::string line = fmt::format("{:<12}", row.label);
    for (const std::string& cell : row.cells) line += fmt::format("{:<13}", cell);
    line += row.remark.empty() ? "" : "  " + row.remark;
    stage.print(line.substr(0, line.find_last_not_of(' ') + 1));
  }
  std::vector<GridRow> drawn = rows;
  drawn[4].cells = {"all_reduce"};
  stage.show({picture_of_grid("one step", ranks, drawn)});
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
  stage.print(fmt::format("{:<26}", "one rank, the whole batch:") + losses_text(alone));
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
    stage.print(fmt::format("{:<26}", fmt::format("{} rank(s), by hand:", n)) + losses_text(by_hand));
    stage.print(fmt::format("{:<26}", fmt::format("{} rank(s), DDP:", n)) + losses_text(wrapped));
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
  const std::int64_t others = n - 1, batch = static_cast<std::int64_t>(x.nbytes());
  stage.print(fmt::format("{} devices; bytes of one step", n));
  stage.print(fmt::format("{:<48} {:>12} {:>12}", "", "device 0", "each other"));
  const auto row = [&](const char* what, std::int64_t first, std::int64_t other) {
    stage.print(fmt::format("{:<48} {:>12} {:>12}", what, first, other));
  };
  row("DataParallel  1 scatter the batch: sends", batch / n * others, 0);
  row("              2 copy the parameters out: sends", parameters * others, 0);
  row("              4 gather the outputs: receives", static_cast<std::int64_t>(y.nbytes()) / n * others, 0);
  row("              5 gradients to device 0: receives", parameters * others, 0);
  const std::int64_t ring = 2 * parameters * others / n;
  row("DDP           2 all_reduce as a ring: sends", ring, ring);
}

namespace {

/// Bytes that stay on a device between the forward pass and the end of the step.
struct KeptBytes {
  std::int64_t parameters = 0, gradients = 0, optimizer = 0, outputs = 0;
  std::int64_t total() const { return parameters + gradients + optimizer + outputs; }
};

std::int64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  std::int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += tensor.defined() ? static_cast<std::int64_t>(tensor.nbytes()) : 0;
  return bytes;
}

/// After a step of AdamW.
KeptBytes kept_by(const SmallNet& net, const at::Tensor& outputs, const AdamW& optimizer) {
  KeptBytes kept{.parameters = bytes_of(net.parameters()), .outputs = bytes_of({outputs})};
  for (const at::Tensor& parameter : net.parameters()) kept.gradients += bytes_of({parameter.grad()});
  TrainState state;
  optimizer.collect_state(state);
  for (const auto& [name, tensor, shard] : state.tensors) kept.optimizer += static_cast<std::int64_t>(tensor.nbytes());
  return kept;
}

void print_kept(Stage& stage, const char* where, const KeptBytes& kept) {
  stage.print(fmt::format("{:<26} {:>10} {:>10} {:>10} {:>10} {:>10}", where, kept.parameters, kept.gradients,
                          kept.optimizer, kept.outputs, kept.total()));
}

}  // namespace

void data_parallel_memory(Stage& stage) {
  const int n = stage.ranks();
  const auto device_of = [&](int r) {
    return stage.device().is_cuda() ? at::Device(at::kCUDA, static_cast<at::DeviceIndex>(r)) : at::Device(at::kCPU);
  };
  std::vector<at::Device> devices;
  for (int r = 0; r < n; ++r) devices.push_back(device_of(r));
  const auto net = std::make_shared<SmallNet>(stage.device());
  nn::initialise(*net, kSeed);
  std::vector<std::shared_ptr<SmallNet>> replicas;
  DataParallel parallel(*net, devices,
                        [&] { return replicas.emplace_back(std::make_shared<SmallNet>(stage.device())); });
  AdamW optimizer(nn::named_parameters(*net));
  const at::Tensor y = parallel.forward(batch_rows(stage.device()));
  loss_of(y).backward();
  optimizer.step(1e-3);
  const KeptBytes first = kept_by(*net, y, optimizer);
  KeptBytes ddp_rank;
  stage.on_ranks(n, [&](Rank& rank) {
    SmallNet mine(rank.device());
    nn::initialise(mine, kSeed);
    const DistributedDataParallel ddp(mine, rank.world());
    AdamW own(ddp.parameters());
    const at::Tensor outputs = nn::call(mine, batch_rows(rank.device(), rank.number() * kBatch / n, kBatch / n));
    loss_of(outputs).backward();
    own.step(1e-3);
    const KeptBytes kept = kept_by(mine, outputs, own);
    rank.check(kept.total() <= first.total(), "no rank of DDP keeps more than DataParallel's device 0");
    if (rank.number() == 0) ddp_rank = kept;
  });
  stage.print(fmt::format("{:<26} {:>10} {:>10} {:>10} {:>10} {:>10}", "bytes counted after a step", "parameters",
                          "gradients", "optimizer", "outputs", "together"));
  print_kept(stage, "DataParallel, device 0", first);
  if (n > 1) {
    const KeptBytes other{.parameters = bytes_of(replicas.front()->parameters()),
                          .outputs = static_cast<std::int64_t>(y.nbytes()) / n};
    print_kept(stage, "DataParallel, each other", other);
    stage.check(first.total() > 3 * other.total(), "device 0 keeps more than three times what another device keeps");
  }
  print_kept(stage, "DDP, each rank", ddp_rank);
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
  const std::string title = "what rank 0 of 4 keeps, in quarters; the other ranks keep the other quarters";
  std::vector<GridRow> rows;
  stage.print(title);
  stage.print(fmt::format("{:<8} {:>11} {:>11} {:>11}", "", "parameters", "gradients", "optimizer"));
  for (int zero = 0; zero <= 3; ++zero) {
    const auto cell = [](bool whole) { return whole ? "####" : "#..."; };
    const std::string name = zero == 0 ? "DDP" : fmt::format("ZeRO-{}", zero);
    rows.push_back({name, {cell(zero < 3), cell(zero < 2), cell(zero < 1)}});
    stage.print(fmt::format("{:<8} {:>11} {:>11} {:>11}", name, rows.back().cells[0], rows.back().cells[1],
                            rows.back().cells[2]));
  }
  stage.show({picture_of_grid("what rank 0 of 4 keeps", {"parameters", "gradients", "optimizer"}, rows)});
}

void zero3_moments(Stage& stage) {
  constexpr int kMoments = 2 * kLayers;
  std::vector<std::string> moments;
  std::vector<GridRow> rows;
  stage.print("one rank of four, layer by layer; ####: gathered and in use, #...: its own quarter");
  std::string head = "           ";
  for (int moment = 0; moment < kMoments; ++moment) {
    moments.push_back(
        fmt::format("{}{}", moment < kLayers ? 'F' : 'B', moment < kLayers ? moment : kMoments - 1 - moment));
    head += fmt::format("   {}", moments.back());
  }
  stage.print(head);
  for (int layer = 0; layer < kLayers; ++layer) {
    rows.push_back({fmt::format("layer {}", layer), {}});
    for (int moment = 0; moment < kMoments; ++moment) {
      rows.back().cells.emplace_back(moment == layer || moment == kMoments - 1 - layer ? "####" : "#...");
    }
    stage.print(fmt::format("{}     {}", rows.back().label, fmt::join(rows.back().cells, " ")));
  }
  stage.show({picture_of_grid("ZeRO-3 on one rank of four: gathered layers are whole", moments, rows)});
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
        kept = fmt::format("parameters {:>5}, gradients {:>5}, optimizer {:>6}", parameters, gradients, optimizer);
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
