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
#include "phalanx/lecture/flow.h"
#include "phalanx/lecture/small_net.h"
#include "phalanx/lecture/steps.h"
#include "phalanx/mesh/device_mesh.h"
#include "phalanx/parallel/ddp/ddp.h"
#include "phalanx/parallel/fsdp/fully_shard.h"
#include "phalanx/parallel/tensor/styles.h"

namespace phalanx::lecture {
namespace {

/// Pairs of columns and rows: one all-reduce for two layers.
const std::vector<ParallelStyle> kPairs = {
    {"0", ColwiseParallel{}}, {"1", RowwiseParallel{}}, {"2", ColwiseParallel{}}, {"3", RowwiseParallel{}}};

}  // namespace

void columns_and_rows(Stage& stage) {
  const int n = std::min(stage.ranks(), 2);
  Flow flow(n);
  stage.on_ranks(n, [&](Rank& rank) {
    const auto options = rank.floats();
    const at::Tensor x = at::tensor({1.0, 2.0}).to(options).reshape({1, 2});
    const at::Tensor a = at::tensor({1.0, -1.0, 2.0, 0.0, 1.0, 1.0, -1.0, 3.0}).to(options).reshape({2, 4});
    const at::Tensor b = at::tensor({1.0, 0.0, 2.0, 1.0, 0.0, 1.0, 1.0, 1.0}).to(options).reshape({4, 2});
    const std::int64_t width = 4 / n, first = rank.number() * width;
    const at::Tensor mine = at::relu(at::mm(x, a.narrow(1, first, width)));
    flow.add(rank, "X", tensor_text(x[0]));
    flow.add(rank, "relu(X A_i), by columns", tensor_text(mine[0]));
    const at::Tensor z = at::mm(mine, b.narrow(0, first, width));
    flow.add(rank, "relu(X A_i) B_i, by rows", tensor_text(z[0]));
    rank.comm().all_reduce(z);
    flow.add(rank, "all_reduce: Z", tensor_text(z[0]));
    const at::Tensor whole = at::mm(at::relu(at::mm(x, a)), b);
    rank.check(at::equal(z, whole), "Z is that of one rank");
  });
  flow.show(stage, "columns, then rows");
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
      rank.check(same_losses(losses, alone), "the losses are those of one rank");
    });
  }
}

namespace {

/// Gradients of the inputs of a pair of layers, on one rank.
at::Tensor input_gradient_of_pair(SmallNet& net, const at::Tensor& batch) {
  const at::Tensor x = batch.clone().requires_grad_();
  loss_of(at::gelu(at::mm(x, net.layers[0]->weight.t())).mm(net.layers[1]->weight.t())).backward();
  return x.grad();
}

/// A pair of layers, forward and backward, and what of the activation each rank holds at each moment. Outside of the
/// pair it is whole on all ranks, or (`by_rows`) split by rows.
void pair_moments(Stage& stage, const char* title, bool by_rows) {
  const int n = stage.ranks();
  Flow flow(n);
  stage.on_ranks(n, [&](Rank& rank) {
    const std::int64_t rows = kBatch / n, columns = kDim / n, first = rank.number() * columns;
    SmallNet net(rank.device());
    nn::initialise(net, kSeed);
    const at::Tensor a = net.layers[0]->weight.detach().narrow(0, first, columns).t();  // columns of A
    const at::Tensor b = net.layers[1]->weight.detach().narrow(1, first, columns).t();  // rows of B
    const auto note = [&](const std::string& moment, const at::Tensor& tensor) {
      flow.add(rank, moment, part_text(rank, tensor, kBatch, kDim), tensor);
      return tensor;
    };
    const auto enter = [&](const std::string& name, const at::Tensor& part) {
      if (!by_rows) return part;
      at::Tensor all = at::zeros({kBatch, kDim}, rank.floats());
      rank.comm().all_gather(all, part);
      return note("all-gather: " + name, all);
    };
    const auto leave = [&](const std::string& name, const at::Tensor& addend) {
      at::Tensor sum = by_rows ? at::zeros({rows, kDim}, rank.floats()) : addend;
      by_rows ? rank.comm().reduce_scatter(sum, addend) : rank.comm().all_reduce(sum);
      return note((by_rows ? "reduce-scatter: " : "all-reduce: ") + name, sum);
    };
    const at::Tensor batch = batch_rows(rank.device());
    const at::Tensor x = note("X", by_rows ? batch.narrow(0, rank.number() * rows, rows) : batch);
    const at::Tensor sums = at::mm(enter("X", x), a), inner = note("columns: s(X A)", at::gelu(sums));
    const at::Tensor z = leave("Z", note("rows: addend of Z", at::mm(inner, b)));
    const at::Tensor dz = enter("dZ", z * (2.0 / static_cast<double>(kBatch * kDim)));
    const at::Tensor dsums = note("rows: dS", at::gelu_backward(at::mm(dz, b.t()), sums));
    const at::Tensor dx = leave("dX", note("columns: addend of dX", at::mm(dsums, a.t())));
    const at::Tensor expected = input_gradient_of_pair(net, batch);
    rank.check(are_close(dx, by_rows ? expected.narrow(0, rank.number() * rows, rows) : expected),
               "dX is that of one rank");
  });
  flow.show(stage, title);
}

}  // namespace

void tensor_moments(Stage& stage) {
  pair_moments(stage, "tensor parallelism: [rows,columns] of the activation on each rank", /*by_rows=*/false);
}

void sequence_moments(Stage& stage) {
  pair_moments(stage, "sequence parallelism: [rows,columns] of the activation on each rank", /*by_rows=*/true);
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

/// Which part of each layer's matrix A (of X A) each rank keeps; nothing of layers that it has not.
class KeptParts {
 public:
  explicit KeptParts(int ranks) : of_rank_(static_cast<std::size_t>(ranks), std::vector<Box>(kLayers)) {}
  void add(const Rank& rank, const std::vector<NamedTensor>& parameters) {
    for (const NamedTensor& parameter : parameters) {
      const Box whole{{0, 0}, {kDim, kDim}};
      const std::size_t layer = std::stoul(parameter.name);              // "2.weight"
      const Box box = parameter.shard ? parameter.shard->box() : whole;  // of the weight W = A'
      of_rank_[static_cast<std::size_t>(rank.number())].at(layer) = {{box.offsets[1], box.offsets[0]},
                                                                     {box.shape[1], box.shape[0]}};
    }
  }
  /// "all", or by columns or rows of A: the ranks that keep them, in order.
  std::string text(std::size_t layer) const {
    std::vector<std::pair<Box, std::string>> parts;
    for (std::size_t rank = 0; rank < of_rank_.size(); ++rank) {
      const Box& box = of_rank_[rank][layer];
      if (box.shape.empty()) continue;
      const auto found = std::ranges::find(parts, box, [](const auto& part) { return part.first; });
      found == parts.end() ? void(parts.emplace_back(box, std::to_string(rank)))
                           : void(found->second += std::to_string(rank));
    }
    if (parts.size() == 1) return parts[0].second.size() == of_rank_.size() ? "all" : "all:" + parts[0].second;
    std::string ranks;
    for (const auto& [box, of_box] : parts) ranks += of_box;
    return (parts.front().first.shape[0] == kDim ? "columns:" : "rows:") + ranks;
  }
  Picture picture(const std::string& name, const std::string& batch) const {
    constexpr double kLeft = 64, kSize = 68, kRow = 76;
    Picture picture(kLeft + kSize + 20, kRow * kLayers + 22, name);
    for (std::size_t layer = 0; layer < kLayers; ++layer) {
      const double y = kRow * static_cast<double>(layer);
      picture.text(0, y + kSize / 2 + 4, fmt::format("layer {}", layer));
      if (text(layer) == "all") {
        picture.box({kLeft, y, kSize, kSize}, "all", "sum");
        continue;
      }
      for (std::size_t rank = 0; rank < of_rank_.size(); ++rank) {
        const Box& box = of_rank_[rank][layer];
        if (box.shape.empty()) continue;
        const auto scaled = [](std::int64_t elements) { return kSize * static_cast<double>(elements) / kDim; };
        picture.box({kLeft + scaled(box.offsets[1]), y + scaled(box.offsets[0]), scaled(box.shape[1]) - 1,
                     scaled(box.shape[0]) - 1},
                    std::to_string(rank), fmt::format("t{}", rank));
      }
    }
    picture.text(0, kRow * kLayers + 14, "batch");
    picture.text(kLeft, kRow * kLayers + 14, batch);
    return picture;
  }

 private:
  std::vector<std::vector<Box>> of_rank_;  // by layer
};

/// A net of the layers of a stage of a pipeline, with this rank's part of each matrix.
void add_split(Rank& rank, int stages, int tp, KeptParts& kept) {
  const DeviceMesh mesh = mesh_of(rank, {{"pp", stages}, {"tp", tp}});
  const int each = kLayers / stages, first = mesh.coordinate("pp") * each;
  SmallNet net(rank.device(), first, first + each);
  if (tp > 1) parallelize_module(net, mesh, {kPairs.begin() + first, kPairs.begin() + first + each});
  kept.add(rank, nn::named_parameters(net));
}

}  // namespace

void draw_strategies(Stage& stage) {
  const int n = stage.ranks(), tp = std::min(n, 2);
  const KeptParts none(n);
  struct Strategy {
    std::string name, batch, computes_with;
    KeptParts kept;
  };
  std::vector<Strategy> all = {{"data", "split", "all", none},
                               {"ZeRO-3", "split", "gathered", none},
                               {"tensor", "whole", "its part", none},
                               {"pipeline", "in parts", "all", none},
                               {fmt::format("tensor {} x pipeline {}", tp, n / tp), "in parts", "its part", none}};
  stage.on_ranks(n, [&](Rank& rank) {
    SmallNet net(rank.device()), to_shard(rank.device());
    const DistributedDataParallel ddp(net, rank.world());
    all[0].kept.add(rank, ddp.parameters());
    const FullyShardedDataParallel sharded(to_shard, mesh_of(rank, {{"dp_shard", n}}));
    all[1].kept.add(rank, sharded.parameters());
    add_split(rank, 1, n, all[2].kept);
    add_split(rank, n, 1, all[3].kept);
    add_split(rank, n / tp, tp, all[4].kept);
  });
  std::vector<Picture> pictures;
  for (const Strategy& strategy : all) pictures.push_back(strategy.kept.picture(strategy.name, strategy.batch));
  const auto print_line = [&](const std::string& label, const auto& of) {
    std::string line = fmt::format("{:<10}", label);
    for (const Strategy& strategy : all) line += fmt::format("{:<14}", of(strategy));
    stage.print(line.substr(0, line.find_last_not_of(' ') + 1));
  };
  print_line("", [](const Strategy& strategy) { return strategy.name; });
  for (std::size_t layer = 0; layer < kLayers; ++layer) {
    print_line(fmt::format("layer {}", layer), [&](const Strategy& strategy) { return strategy.kept.text(layer); });
  }
  print_line("batch", [](const Strategy& strategy) { return strategy.batch; });
  print_line("used", [](const Strategy& strategy) { return strategy.computes_with; });
  stage.show(std::move(pictures));
}

void mesh_training(Stage& stage) {
  const int n = stage.ranks(), tp = std::min(n, 2), dp = n / tp;
  const std::vector<double> alone = losses_of_one_rank(stage.device());
  Flow flow(n);
  std::string text;
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
    flow.add(rank, "dp_shard,tp", fmt::format("{},{}", group, mesh.coordinate("tp")));
    flow.add(rank, "rows of the batch", fmt::format("{}-{}", group * kBatch / dp, (group + 1) * kBatch / dp - 1));
    flow.add(rank, "parameters", fmt::format("{}/{}", kept, kLayers * kDim * kDim));
    if (rank.number() == 0) text = mesh.text();
    for (double& loss : losses) {
      at::Tensor mean = at::full({1}, loss, rank.floats().dtype(at::kDouble));
      rank.comm().all_reduce(mean, {.op = ReduceOp::avg});
      loss = mean.item<double>();
    }
    rank.check(same_losses(losses, alone), "the losses are those of one rank");
  });
  stage.print(text);
  flow.show(stage, text);
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
  Flow flow(n);
  stage.on_ranks(n, [&](Rank& rank) {
    const at::NoGradGuard no_grad;
    SmallNet copy(rank.device());
    nn::initialise(copy, kSeed);
    const std::int64_t first = kPrompts * rank.number() / n, end = kPrompts * (rank.number() + 1) / n;
    const at::Tensor mine =
        generate([&](const at::Tensor& x) { return nn::call(copy, x); }, batch_rows(rank.device(), first, end - first));
    flow.add(rank, "copies: prompts", fmt::format("{}-{}", first, end - 1));
    flow.add(rank, "tokens of the first", tensor_text(mine[0]));
    std::vector<std::int64_t> counts;
    for (int r = 0; r < n; ++r) counts.push_back(5 * (kPrompts * (r + 1) / n - kPrompts * r / n));
    const at::Tensor all = at::zeros({kPrompts, 5}, mine.options());
    rank.comm().all_gather_uneven(all, mine, counts);
    rank.check(at::equal(all.cpu(), alone), "copies give the tokens of one rank");
    SmallNet split(rank.device());
    parallelize_module(split, mesh_of(rank, {{"tp", n}}), kPairs);
    nn::initialise(split, kSeed);
    const at::Tensor prompts = batch_rows(rank.device(), 0, kPrompts);
    const at::Tensor tokens = generate([&](const at::Tensor& x) { return nn::call(split, x); }, prompts);
    rank.check(at::equal(tokens.cpu(), alone), "tensor parallelism gives them");
    flow.add(rank, "tensor: of layer 0", part_text(rank, split.layers[0]->weight.t(), kDim, kDim));
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
    flow.add(rank, "pipeline: layers", range_text(rank.number() * each, each));
    rank.check(at::equal(by_layers.cpu(), alone), "stages give them");
  });
  flow.show(stage, "what each rank has: the copies' prompts, columns of a matrix, layers");
}

}  // namespace phalanx::lecture
