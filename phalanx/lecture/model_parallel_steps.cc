#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "phalanx/base/human.h"
#include "phalanx/lecture/small_net.h"
#include "phalanx/lecture/steps.h"
#include "phalanx/mesh/device_mesh.h"
#include "phalanx/parallel/fsdp/fully_shard.h"
#include "phalanx/parallel/pipeline/pipeline_runtime.h"
#include "phalanx/parallel/tensor/styles.h"
#include "phalanx/schedule/generators.h"
#include "phalanx/schedule/schedule_text.h"
#include "phalanx/schedule/simulate.h"

namespace phalanx::lecture {
namespace {

DeviceMesh mesh_of(Rank& rank, std::vector<MeshAxis> axes) {
  return {rank.world(), std::move(axes), rank.device().is_cuda() ? "cuda" : "cpu"};
}

/// Pairs of columns and rows: one all-reduce for two layers.
const std::vector<ParallelStyle> kPairs = {
    {"0", ColwiseParallel{}}, {"1", RowwiseParallel{}}, {"2", ColwiseParallel{}}, {"3", RowwiseParallel{}}};

}  // namespace

namespace {

/// A row of boxes and arrows for each of two ranks; their last boxes meet in an all-reduce.
Picture picture_of_pair(const std::string& title, const std::vector<std::vector<std::string>>& boxes,
                        const std::string& sum) {
  constexpr double kLeft = 52, kWidth = 58, kStep = 78, kRow = 46;
  const double end = kLeft + kStep * static_cast<double>(boxes.front().size());
  Picture picture(end + 96, 2 * kRow, title);
  for (std::size_t rank = 0; rank < boxes.size(); ++rank) {
    const double y = kRow * static_cast<double>(rank);
    picture.text(0, y + 15, fmt::format("rank {}", rank));
    for (std::size_t i = 0; i < boxes[rank].size(); ++i) {
      const double x = kLeft + kStep * static_cast<double>(i);
      picture.box({x, y, kWidth, 22}, boxes[rank][i], i == 0 ? "sum" : fmt::format("t{}", rank));
      if (i > 0) picture.arrow(x - kStep + kWidth, y + 11, x - 3, y + 11);
    }
    picture.arrow(end - kStep + kWidth, y + 11, end + 6, rank == 0 ? kRow / 2 + 4 : kRow / 2 + 18);
  }
  picture.box({end + 10, kRow / 2, kWidth, 22}, sum, "sum");
  picture.text(end + 10, kRow / 2 - 8, "all-reduce");
  return picture;
}

}  // namespace

void draw_tensor_parallel(Stage& stage) {
  stage.print("columns, then rows: Z = s(X A) B = s(X A0) B0 + s(X A1) B1");
  stage.print("");
  stage.print("             forward                                     backward");
  stage.print("rank 0  X -- [X A0] -- s -- [ . B0] -- Z0 \\         dZ -- [dZ B0'] -- s' -- [ . A0'] -- dX0 \\");
  stage.print("                                          + = Z                                            + = dX");
  stage.print("rank 1  X -- [X A1] -- s -- [ . B1] -- Z1 /         dZ -- [dZ B1'] -- s' -- [ . A1'] -- dX1 /");
  stage.print("                                     all-reduce                                     all-reduce");
  stage.show({picture_of_pair("forward", {{"X", "X A0", "s", ". B0", "Z0"}, {"X", "X A1", "s", ". B1", "Z1"}}, "Z"),
              picture_of_pair("backward",
                              {{"dZ", "dZ B0'", "s'", ". A0'", "dX0"}, {"dZ", "dZ B1'", "s'", ". A1'", "dX1"}}, "dX")});
}

void columns_and_rows(Stage& stage) {
  const int n = std::min(stage.ranks(), 2);
  stage.on_ranks(n, [n](Rank& rank) {
    const auto options = rank.floats();
    const at::Tensor x = at::tensor({1.0, 2.0}).to(options).reshape({1, 2});
    const at::Tensor a = at::tensor({1.0, -1.0, 2.0, 0.0, 1.0, 1.0, -1.0, 3.0}).to(options).reshape({2, 4});
    const at::Tensor b = at::tensor({1.0, 0.0, 2.0, 1.0, 0.0, 1.0, 1.0, 1.0}).to(options).reshape({4, 2});
    const std::int64_t width = 4 / n, first = rank.number() * width;
    const at::Tensor mine = at::relu(at::mm(x, a.narrow(1, first, width)));
    rank.say("X, the same on all ranks", tensor_text(x[0]));
    rank.say("relu(X A_i): this rank's columns of A", tensor_text(mine[0]));
    const at::Tensor z = at::mm(mine, b.narrow(0, first, width));
    rank.say("relu(X A_i) B_i: this rank's rows of B, a part of the sum", tensor_text(z[0]));
    rank.comm().all_reduce(z);
    rank.say("all_reduce: Z", tensor_text(z[0]));
    const at::Tensor whole = at::mm(at::relu(at::mm(x, a)), b);
    rank.check(at::equal(z, whole), "Z is what one rank computes from the whole matrices");
  });
}

void tensor_parallel_training(Stage& stage) {
  const std::vector<double> alone = losses_of_one_rank(stage.device());
  for (const int n : stage.worlds()) {
    stage.on_ranks(n, [&](Rank& rank) {
      SmallNet net(rank.device());
      parallelize_module(net, mesh_of(rank, {{"tp", n}}), kPairs);
      nn::initialise(net, kSeed);
      const at::Tensor x = batch_rows(rank.device());
      const auto shape = [&](int layer) {
        return fmt::format("{}", fmt::join(net.layers[static_cast<std::size_t>(layer)]->weight.sizes(), "x"));
      };
      const std::vector<double> losses = train(nn::named_parameters(net), [&] { return loss_of(nn::call(net, x)); });
      rank.say(fmt::format("world size {}", n), fmt::format("layer 0 {}, layer 1 {}; loss {:.5f}->{:.5f}", shape(0),
                                                            shape(1), losses.front(), losses.back()));
      rank.check(same_losses(losses, alone), "the losses are those of one rank, forward and backward");
    });
  }
}

namespace {

/// The moments of a pass, and what of the activation each rank holds in each: "[0-7,all]" are rows 0 to 7, all columns.
class Moments {
 public:
  explicit Moments(int ranks) : of_rank_(static_cast<std::size_t>(ranks)) {}
  void add(const Rank& rank, const std::string& label, const at::Tensor& tensor) {
    const auto part = [&](std::int64_t size, std::int64_t whole) {
      const std::int64_t first = rank.number() * size;
      return size == whole ? std::string("all") : fmt::format("{}-{}", first, first + size - 1);
    };
    of_rank_[static_cast<std::size_t>(rank.number())].emplace_back(
        label, fmt::format("[{},{}]", part(tensor.size(0), kBatch), part(tensor.size(1), kDim)));
  }
  void draw(Stage& stage, const std::string& title) const {
    std::vector<std::string> heads;
    std::vector<GridRow> rows;
    std::string head(19, ' ');
    for (std::size_t rank = 0; rank < of_rank_.size(); ++rank) {
      heads.push_back(fmt::format("rank {}", rank));
      head += fmt::format("{:<14}", heads.back());
    }
    stage.print(head.substr(0, head.find_last_not_of(' ') + 1));
    for (std::size_t moment = 0; moment < of_rank_.front().size(); ++moment) {
      rows.push_back({of_rank_.front()[moment].first, {}});
      for (const auto& moments : of_rank_) rows.back().cells.push_back(moments[moment].second);
      rows.back().is_equal = rows.back().cells.front() == "[all,all]";
      std::string line = fmt::format("{:<19}", rows.back().label);
      for (const std::string& cell : rows.back().cells) line += fmt::format("{:<14}", cell);
      stage.print(line.substr(0, line.find_last_not_of(' ') + 1));
    }
    stage.show({picture_of_grid(title, heads, rows)});
  }

 private:
  std::vector<std::vector<std::pair<std::string, std::string>>> of_rank_;
};

/// Gradients of the inputs of a pair of layers, on one rank.
at::Tensor input_gradient_of_pair(SmallNet& net, const at::Tensor& batch) {
  const at::Tensor x = batch.clone().requires_grad_();
  loss_of(at::gelu(at::mm(x, net.layers[0]->weight.t())).mm(net.layers[1]->weight.t())).backward();
  return x.grad();
}

}  // namespace

void sequence_moments(Stage& stage) {
  const int n = stage.ranks();
  Moments moments(n);
  stage.on_ranks(n, [&](Rank& rank) {
    const std::int64_t rows = kBatch / n, columns = kDim / n, first = rank.number() * columns;
    SmallNet net(rank.device());
    nn::initialise(net, kSeed);
    const at::Tensor a = net.layers[0]->weight.detach().narrow(0, first, columns).t();  // columns of A
    const at::Tensor b = net.layers[1]->weight.detach().narrow(1, first, columns).t();  // rows of B
    const auto note = [&](const char* label, const at::Tensor& tensor) { moments.add(rank, label, tensor); };
    const auto gather = [&](const at::Tensor& part) {
      at::Tensor all = at::zeros({kBatch, kDim}, rank.floats());
      return rank.comm().all_gather(all, part), all;
    };
    const auto scatter = [&](const at::Tensor& addend) {
      at::Tensor part = at::zeros({rows, kDim}, rank.floats());
      return rank.comm().reduce_scatter(part, addend), part;
    };
    const at::Tensor x = batch_rows(rank.device(), rank.number() * rows, rows);
    note("norm, residual: X", x);
    const at::Tensor all = gather(x);
    note("all-gather", all);
    const at::Tensor sums = at::mm(all, a), inner = at::gelu(sums);
    note("columns: s(X A)", inner);
    const at::Tensor addend = at::mm(inner, b);
    note("rows: addend of Z", addend);
    const at::Tensor z = scatter(addend);
    note("reduce-scatter: Z", z);
    const at::Tensor dz = gather(z * (2.0 / static_cast<double>(kBatch * kDim)));
    note("all-gather: dZ", dz);
    const at::Tensor dsums = at::gelu_backward(at::mm(dz, b.t()), sums);
    note("rows: dS", dsums);
    const at::Tensor dx_addend = at::mm(dsums, a.t());
    note("columns: addend", dx_addend);
    const at::Tensor dx = scatter(dx_addend);
    note("reduce-scatter: dX", dx);
    const at::Tensor expected = input_gradient_of_pair(net, batch_rows(rank.device()));
    rank.check(are_close(dx, expected.narrow(0, rank.number() * rows, rows)), "dX is that of one rank");
  });
  moments.draw(stage, "sequence parallelism: [rows,columns] of the activation on each rank");
}

void sequence_parallel(Stage& stage) {
  const std::vector<double> alone = losses_of_one_rank(stage.device());
  const int n = stage.ranks();
  stage.on_ranks(n, [&](Rank& rank) {
    const auto split = ActivationLayout::split(0);
    SmallNet net(rank.device());
    parallelize_module(net, mesh_of(rank, {{"tp", n}}),
                       {{"0", ColwiseParallel{.input = split}},
                        {"1", RowwiseParallel{.output = split}},
                        {"2", ColwiseParallel{.input = split}},
                        {"3", RowwiseParallel{.output = split}}});
    nn::initialise(net, kSeed);
    const at::Tensor x = batch_rows(rank.device(), rank.number() * kBatch / n, kBatch / n);
    at::Tensor y;
    std::vector<double> losses = train(nn::named_parameters(net), [&] {
      y = nn::call(net, x);
      return loss_of(y) / n;  // this rank's share of the mean over all rows
    });
    for (double& loss : losses) {
      at::Tensor sum = at::full({1}, loss, rank.floats().dtype(at::kDouble));
      rank.comm().all_reduce(sum);
      loss = sum.item<double>();
    }
    rank.say("between the pairs a rank keeps",
             fmt::format("{} of {} rows, {} of {}", y.size(0), kBatch, human_bytes(y.nbytes()),
                         human_bytes(y.nbytes() * static_cast<std::size_t>(n))));
    rank.check(same_losses(losses, alone), "the losses are those of one rank");
  });
}

namespace {

std::string title_of(const schedule::Schedule& schedule, const schedule::Simulation& simulated) {
  return fmt::format("{}, {} micro-batch(es): a rank waits {:.0f} % of the step", schedule.name, schedule.micro_batches,
                     100 * simulated.bubble);
}

Picture picture_of(const schedule::Schedule& schedule, const schedule::Simulation& simulated) {
  constexpr double kLeft = 52, kUnit = 25, kRow = 26;
  const double right = kLeft + kUnit * simulated.makespan;
  Picture picture(right + 60, kRow * static_cast<double>(schedule.actions.size()), title_of(schedule, simulated));
  for (std::size_t rank = 0; rank < schedule.actions.size(); ++rank) {
    const double y = kRow * static_cast<double>(rank);
    picture.text(0, y + 15, fmt::format("rank {}", rank));
    picture.box({kLeft, y, kUnit * simulated.makespan, 22}, "", "wait");
    for (std::size_t i = 0; i < schedule.actions[rank].size(); ++i) {
      const schedule::Action& action = schedule.actions[rank][i];
      const bool forward = action.kind == schedule::ActionKind::forward;
      const auto& span = simulated.spans[rank][i];
      picture.box({kLeft + kUnit * span.start, y, kUnit * (span.end - span.start), 22},
                  fmt::format("{}{}", forward ? 'F' : 'B', action.micro_batch), forward ? "t0" : "t1");
    }
    picture.text(right + 8, y + 15, fmt::format("{} alive", simulated.peak_live_activations[rank]));
  }
  return picture;
}

/// Two characters a unit of time: F0 and its backward pass B0 of twice the length.
void print_schedule(Stage& stage, const schedule::Schedule& schedule, const schedule::Simulation& simulated) {
  stage.print(title_of(schedule, simulated));
  const auto length = static_cast<std::size_t>(std::lround(simulated.makespan));
  for (std::size_t rank = 0; rank < schedule.actions.size(); ++rank) {
    std::string line;
    for (std::size_t unit = 0; unit < length; ++unit) line += "..";
    for (std::size_t i = 0; i < schedule.actions[rank].size(); ++i) {
      const schedule::Action& action = schedule.actions[rank][i];
      const auto begin = static_cast<std::size_t>(std::lround(simulated.spans[rank][i].start));
      const bool forward = action.kind == schedule::ActionKind::forward;
      const std::string cell =
          forward ? fmt::format("F{}", action.micro_batch) : fmt::format("B{}--", action.micro_batch);
      line.replace(2 * begin, cell.size(), cell);
    }
    stage.print(fmt::format("  rank {} |{}|{}", rank, line, simulated.peak_live_activations[rank]));
  }
}

}  // namespace

void draw_schedules(Stage& stage) {
  std::vector<Picture> pictures;
  for (const auto& [name, micro_batches] :
       {std::pair("GPipe", 1), std::pair("GPipe", 4), std::pair("1F1B", 4), std::pair("1F1B", 8)}) {
    const auto schedule = schedule::make_schedule({.name = name, .ranks = 4, .micro_batches = micro_batches});
    const schedule::Simulation simulated = schedule::simulate(schedule);
    print_schedule(stage, schedule, simulated);
    pictures.push_back(picture_of(schedule, simulated));
    const double expected = 3.0 / (micro_batches + 3);
    stage.check(std::abs(simulated.bubble - expected) < 1e-9, "ranks wait (p - 1) / (m + p - 1) of the step");
  }
  stage.show(std::move(pictures));
}

namespace {

/// One rank's stage of the small net, and the runtime over all ranks.
struct Pipeline {
  Pipeline(Rank& rank, const std::string& name, int micro_batches, std::int64_t repeat = 1) {
    const int each = kLayers / rank.ranks(), begin = rank.number() * each;
    part = std::make_shared<SmallNet>(rank.device(), begin, begin + each);
    nn::initialise(*part, kSeed);
    PipelineStage stage{.index = rank.number(), .module = part};
    stage.forward = [net = part.get(), repeat](at::Tensor x) {
      for (std::int64_t i = 0; i < repeat; ++i) x = nn::call(*net, x);
      return x;
    };
    if (rank.number() + 1 == rank.ranks()) {
      stage.loss = [forward = stage.forward](const at::Tensor& x, const at::Tensor&) { return loss_of(forward(x)); };
    }
    runtime = std::make_unique<PipelineRuntime>(
        rank.world(), schedule::make_schedule({.name = name, .ranks = rank.ranks(), .micro_batches = micro_batches}),
        std::vector<PipelineStage>{stage});
  }
  std::shared_ptr<SmallNet> part;
  std::unique_ptr<PipelineRuntime> runtime;
};

}  // namespace

void naive_pipeline(Stage& stage) {
  const int n = stage.ranks();
  stage.on_ranks(n, [n](Rank& rank) {
    Pipeline pipeline(rank, "GPipe", 1, /*repeat=*/40);
    const at::Tensor x = batch_rows(rank.device()).repeat({8, 1});
    double busy = 0, longest = 0;
    for (int step = 0; step < 5; ++step) {
      rank.comm().barrier();
      pipeline.runtime->step(x, x);
      const auto& passes = pipeline.runtime->statistics().passes;
      double own = 0, last = 0;
      for (const auto& pass : passes) own += pass.end - pass.start, last = std::max(last, pass.end);
      at::Tensor end = at::full({1}, last, rank.floats().dtype(at::kDouble));
      rank.comm().all_reduce(end, {.op = ReduceOp::max});
      busy += own, longest += end.item<double>();
    }
    at::Tensor share = at::full({1}, 100 * (1 - busy / longest), rank.floats().dtype(at::kDouble));
    rank.say("idle share of 5 steps", fmt::format("{} %", measured(share.item<double>())));
    rank.comm().all_reduce(share, {.op = ReduceOp::avg});
    if (rank.number() == 0) {
      rank.say("mean of the ranks",
               fmt::format("{} %; (p - 1) / p = {:.0f} %", measured(share.item<double>()), 100.0 * (n - 1) / n));
    }
    rank.check(share.item<double>() >= 100.0 * (n - 1) / n - 2,
               "on average the ranks idle at least (p - 1) / p of the time");
  });
}

void pipeline_training(Stage& stage) {
  const std::vector<double> alone = losses_of_one_rank(stage.device());
  for (const int n : stage.worlds()) {
    for (const char* name : {"GPipe", "1F1B"}) {
      stage.on_ranks(n, [&](Rank& rank) {
        Pipeline pipeline(rank, name, 4);
        const at::Tensor x = batch_rows(rank.device());
        AdamW optimizer(nn::named_parameters(*pipeline.part), {.weight_decay = 0.01});
        std::vector<double> losses;
        for (int step = 0; step < kTrainingSteps; ++step) {
          losses.push_back(pipeline.runtime->step(x, x).loss());
          optimizer.step(1e-3);
          optimizer.zero_grad();
        }
        const auto& statistics = pipeline.runtime->statistics();
        std::string order;
        for (const auto& pass : statistics.passes)
          order += (order.empty() ? " " : ",") + schedule::to_text(pass.action);
        if (n == stage.ranks()) {
          rank.say(fmt::format("world size {}, {}: micro-batches alive, and passes", n, name),
                   fmt::format("{}{}", statistics.peak_live_activations, order));
        }
        rank.check(same_losses(losses, alone), "the losses are those of one rank");
        const int expected = name[0] == 'G' ? 4 : std::min(4, n - rank.number());
        rank.check(statistics.peak_live_activations == expected, "GPipe keeps 4 micro-batches alive, 1F1B p - rank");
      });
    }
  }
}

namespace {

/// Layers down, column blocks across: which rank keeps a block.
Picture picture_of_strategy(const std::string& name, const std::string& batch, const std::vector<std::string>& layers) {
  constexpr double kLeft = 64, kBlock = 34, kRow = 26;
  Picture picture(kLeft + 4 * kBlock, kRow * 5, name);
  for (std::size_t layer = 0; layer < layers.size(); ++layer) {
    const double y = kRow * static_cast<double>(layer);
    picture.text(0, y + 15, fmt::format("layer {}", layer));
    if (layers[layer].size() != 4 || layers[layer] == "rows") {
      const std::string text = layers[layer] == "rows" ? "rows on all" : "all ranks";
      picture.box({kLeft, y, 4 * kBlock - 2, 22}, text, layers[layer] == "rows" ? "plain" : "sum");
      continue;
    }
    for (std::size_t block = 0; block < 4; ++block) {
      const std::string rank(1, layers[layer][block]);
      picture.box({kLeft + kBlock * static_cast<double>(block), y, kBlock - 2, 22}, rank, "t" + rank);
    }
  }
  picture.text(0, kRow * 4 + 15, "batch");
  picture.text(kLeft, kRow * 4 + 15, batch);
  return picture;
}

}  // namespace

void draw_strategies(Stage& stage) {
  struct Strategy {
    std::string name, batch;
    std::vector<std::string> layers;
  };
  const std::vector<Strategy> all = {{"data", "split", {"all", "all", "all", "all"}},
                                     {"ZeRO-3", "split", {"rows", "rows", "rows", "rows"}},
                                     {"tensor", "whole", {"0123", "0123", "0123", "0123"}},
                                     {"pipeline", "in parts", {"0000", "1111", "2222", "3333"}},
                                     {"tensor 2 x pipeline 2", "in parts", {"0011", "0011", "2233", "2233"}}};
  const auto print_line = [&](const std::string& label, const auto& of) {
    std::string line = fmt::format("{:<10}", label);
    for (const Strategy& strategy : all) line += fmt::format("{:<10}", of(strategy));
    stage.print(line.substr(0, line.find_last_not_of(' ') + 1));
  };
  std::vector<Picture> pictures;
  for (const Strategy& strategy : all) {
    pictures.push_back(picture_of_strategy(strategy.name, strategy.batch, strategy.layers));
  }
  print_line("", [](const Strategy& strategy) { return strategy.name; });
  for (std::size_t layer = 0; layer < 4; ++layer) {
    print_line(fmt::format("layer {}", layer), [&](const Strategy& strategy) { return strategy.layers[layer]; });
  }
  print_line("batch", [](const Strategy& strategy) { return strategy.batch; });
  stage.show(std::move(pictures));
}

void mesh_training(Stage& stage) {
  const int n = stage.ranks(), tp = std::min(n, 2), dp = n / tp;
  const std::vector<double> alone = losses_of_one_rank(stage.device());
  stage.on_ranks(n, [&](Rank& rank) {
    const DeviceMesh mesh = mesh_of(rank, {{"dp_shard", dp}, {"tp", tp}});
    SmallNet net(rank.device());
    parallelize_module(net, mesh, kPairs);
    FullyShardedDataParallel sharded(net, mesh);
    sharded.initialise(kSeed);
    const int group = mesh.coordinate("dp_shard");
    const at::Tensor x = batch_rows(rank.device(), group * kBatch / dp, kBatch / dp);
    std::vector<double> losses = train(sharded.parameters(), [&] { return loss_of(nn::call(net, x)); });
    std::int64_t kept = 0;
    for (const NamedTensor& parameter : sharded.parameters()) kept += parameter.tensor.numel();
    rank.say(mesh.text(), fmt::format("dp_shard {}, tp {}: rows {} to {} of the batch, {} of {} parameters", group,
                                      mesh.coordinate("tp"), group * kBatch / dp, (group + 1) * kBatch / dp - 1, kept,
                                      kLayers * kDim * kDim));
    for (double& loss : losses) {
      at::Tensor mean = at::full({1}, loss, rank.floats().dtype(at::kDouble));
      rank.comm().all_reduce(mean, {.op = ReduceOp::avg});
      loss = mean.item<double>();
    }
    rank.check(same_losses(losses, alone), "sharded inside tensor parallel: the losses are those of one rank");
  });
}

namespace {

/// Five times: the largest of the outputs is the next token, which becomes the next input. [prompts, 5]
template <class Forward>
at::Tensor generate(const Forward& forward, at::Tensor x) {
  std::vector<at::Tensor> tokens;
  for (int i = 0; i < 5; ++i) {
    const at::Tensor y = forward(x);
    tokens.push_back(y.argmax(1));
    x = x.roll(1, 1) + y;
  }
  return at::stack(tokens, 1);
}

}  // namespace

void split_inference(Stage& stage) {
  constexpr std::int64_t kPrompts = 10;
  const int n = stage.ranks();
  at::Tensor alone;
  {
    const at::NoGradGuard no_grad;
    SmallNet net(stage.device());
    nn::initialise(net, kSeed);
    alone =
        generate([&](const at::Tensor& x) { return nn::call(net, x); }, batch_rows(stage.device(), 0, kPrompts)).cpu();
  }
  stage.on_ranks(n, [&](Rank& rank) {
    const at::NoGradGuard no_grad;
    SmallNet copy(rank.device());
    nn::initialise(copy, kSeed);
    const std::int64_t first = kPrompts * rank.number() / n, end = kPrompts * (rank.number() + 1) / n;
    const at::Tensor mine =
        generate([&](const at::Tensor& x) { return nn::call(copy, x); }, batch_rows(rank.device(), first, end - first));
    rank.say("a copy each, a share of the prompts",
             fmt::format("prompts {} to {}, tokens of the first: {}", first, end - 1, tensor_text(mine[0])));
    std::vector<std::int64_t> counts;
    for (int r = 0; r < n; ++r) counts.push_back(5 * (kPrompts * (r + 1) / n - kPrompts * r / n));
    const at::Tensor all = at::zeros({kPrompts, 5}, mine.options());
    rank.comm().all_gather_uneven(all, mine, counts);
    rank.check(at::equal(all.cpu(), alone), "shares joined in order: the tokens of one rank");
    SmallNet split(rank.device());
    parallelize_module(split, mesh_of(rank, {{"tp", n}}), kPairs);
    nn::initialise(split, kSeed);
    const at::Tensor prompts = batch_rows(rank.device(), 0, kPrompts);
    const at::Tensor tokens = generate([&](const at::Tensor& x) { return nn::call(split, x); }, prompts);
    rank.check(at::equal(tokens.cpu(), alone), "split by tensor parallelism: the tokens of one rank");
    const int each = kLayers / n;
    SmallNet part(rank.device(), rank.number() * each, (rank.number() + 1) * each);
    nn::initialise(part, kSeed);
    const at::Tensor by_layers = generate(
        [&](at::Tensor x) {
          if (rank.number() > 0) rank.comm().recv(x = at::empty_like(x), rank.number() - 1);
          x = nn::call(part, x);
          if (rank.number() + 1 < n) rank.comm().send(x, rank.number() + 1);
          rank.comm().broadcast(x, {.root = n - 1});
          return x;
        },
        prompts);
    rank.say("split by layers", fmt::format("layers {} to {}", rank.number() * each, (rank.number() + 1) * each - 1));
    rank.check(at::equal(by_layers.cpu(), alone), "split by layers: the tokens of one rank");
  });
}

}  // namespace phalanx::lecture
