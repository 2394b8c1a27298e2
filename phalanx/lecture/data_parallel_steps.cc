#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <functional>
#include <numeric>
#include <string_view>

#include "phalanx/lecture/flow.h"
#include "phalanx/lecture/small_net.h"
#include "phalanx/lecture/steps.h"
#include "phalanx/mesh/device_mesh.h"
#include "phalanx/optim/sgd.h"
#include "phalanx/parallel/ddp/data_parallel.h"
#include "phalanx/parallel/ddp/ddp.h"
#include "phalanx/parallel/fsdp/fully_shard.h"
#include "phalanx/tensor/grad_ready.h"

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

void one_step_by_hand(Stage& stage) {
  const int n = stage.ranks();
  Flow flow(n);
  stage.on_ranks(n, [&](Rank& rank) {
    // y = w x over 8 rows, of which this rank has its share; loss mean (y - target)^2, target 3 x.
    const std::int64_t rows = 8 / n;
    const at::Tensor x = at::arange(1, 9, rank.floats()).narrow(0, rank.number() * rows, rows) / 4;
    const at::Tensor w = at::full({1}, 1.0, rank.floats()).requires_grad_();
    flow.add(rank, "batch: x", tensor_text(x));
    flow.add(rank, "weight w", tensor_text(w));
    const at::Tensor loss = (w * x - 3 * x).square().mean();
    flow.add(rank, "forward: loss", fmt::format("{:.5g}", loss.item<double>()));
    loss.backward();
    flow.add(rank, "backward: g", tensor_text(w.grad(), 5));
    rank.comm().all_reduce(w.grad());
    w.mutable_grad().div_(n);
    flow.add(rank, "all_reduce: mean g", tensor_text(w.grad(), 5));
    const at::Tensor updated = w.detach() - 0.05 * w.grad();
    flow.add(rank, "optimizer: w - lr g", tensor_text(updated));
    const at::Tensor all = at::arange(1, 9, rank.floats()) / 4;
    const double whole = (-4 * all.square()).mean().item<double>();  // d/dw mean (w x - 3 x)^2 at w = 1
    rank.check(std::abs(w.grad().item<double>() - whole) < 1e-5 * std::abs(whole),
               "the mean gradient is that of the whole batch");
    rank.check(equal_on_all_ranks(rank, updated), "weights are equal on all ranks");
    const bool differ = n == 1 || std::abs(mean_over(rank, loss.item<double>()) - loss.item<double>()) > 1e-3;
    rank.check(differ, n == 1 ? "with one rank there is nothing to average" : "losses differ");
  });
  flow.show(stage, "one step of data parallelism", /*compares=*/true);
}

void three_ways(Stage& stage) {
  const std::vector<double> alone = losses_of_one_rank(stage.device());
  stage.print(fmt::format("{:<28}", "one rank, the whole batch:") + losses_text(alone));
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
        rank.check(same_losses(losses, alone), "the mean loss is that of one rank");
        if (rank.number() == 0) (uses_ddp ? wrapped : by_hand) = losses;
      }
    });
    const bool same = losses_text(by_hand) == losses_text(wrapped);
    const auto print = [&](const char* how, const std::vector<double>& losses) {
      stage.print(fmt::format("{:<28}", fmt::format("{} rank(s), {}:", n, how)) + losses_text(losses));
    };
    print(same ? "by hand and DDP" : "by hand", by_hand);
    if (!same) print("DDP", wrapped);
  }
}

void data_parallel_traffic(Stage& stage) {
  const int n = stage.ranks();
  const at::Tensor x = batch_rows(stage.device());
  const auto net = std::make_shared<SmallNet>(stage.device());
  nn::initialise(*net, kSeed);
  std::vector<at::Device> devices;
  for (int r = 0; r < n; ++r) devices.push_back(stage.device(r));
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
    rank.check(same, "DataParallel and DDP have the same gradients");
  });
  const std::int64_t others = n - 1, batch = static_cast<std::int64_t>(x.nbytes());
  stage.print(fmt::format("{} devices; bytes of one step", n));
  stage.print(fmt::format("{:<48} {:>12} {:>12}", "", "device 0", "each other"));
  const auto row = [&](const char* what, std::int64_t first, std::int64_t other) {
    stage.print(fmt::format("{:<48} {:>12} {:>12}", what, first, other));
  };
  row("DataParallel  1 scatter batch: sends", batch / n * others, 0);
  row("              2 copy parameters: sends", parameters * others, 0);
  row("              4 gather outputs: receives", static_cast<std::int64_t>(y.nbytes()) / n * others, 0);
  row("              5 scatter output gradients: sends", static_cast<std::int64_t>(y.nbytes()) / n * others, 0);
  row("                add up gradients: receives", parameters * others, 0);
  const std::int64_t ring = 2 * parameters * others / n;
  row("DDP           2 all_reduce as a ring: sends", ring, ring);
}

namespace {

/// Bytes that stay on a device from the forward pass to the end of the step, counted.
struct KeptBytes {
  std::int64_t parameters = 0, gradients = 0, optimizer = 0, outputs = 0;
  std::int64_t total() const { return parameters + gradients + optimizer + outputs; }
};

std::int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.defined() && has_memory(tensor) ? static_cast<std::int64_t>(tensor.nbytes()) : 0;
}

/// The gradient of a whole weight. ZeRO-1 keeps it in a buffer; ZeRO-2 and -3 have none.
at::Tensor gradient_of(const at::Tensor& weight) {
  return weight.grad().defined() ? weight.grad() : grad_buffer(weight);
}

/// After an optimizer's step. `own`: of each layer what this device updates, of which the whole may not be there.
KeptBytes kept_by(const SmallNet& net, const std::vector<NamedTensor>& own, const AdamW& optimizer,
                  const at::Tensor& outputs = {}) {
  KeptBytes kept{.outputs = bytes_of(outputs)};
  for (std::size_t i = 0; i < net.layers.size(); ++i) {
    const at::Tensor &weight = net.layers[i]->weight, &part = own[i].tensor;  // which may be a view of the whole
    kept.parameters += std::max(bytes_of(weight), bytes_of(part));
    kept.gradients += std::max(bytes_of(gradient_of(weight)), bytes_of(part.grad()));
  }
  TrainState state;
  optimizer.collect_state(state);
  for (const auto& [name, tensor, shard] : state.tensors) kept.optimizer += bytes_of(tensor);
  return kept;
}

void print_kept(Stage& stage, const char* where, const KeptBytes& kept) {
  stage.print(fmt::format("{:<26} {:>10} {:>10} {:>10} {:>10} {:>10}", where, kept.parameters, kept.gradients,
                          kept.optimizer, kept.outputs, kept.total()));
}

}  // namespace

void data_parallel_memory(Stage& stage) {
  const int n = stage.ranks();
  std::vector<at::Device> devices;
  for (int r = 0; r < n; ++r) devices.push_back(stage.device(r));
  const auto net = std::make_shared<SmallNet>(stage.device());
  nn::initialise(*net, kSeed);
  std::vector<std::shared_ptr<SmallNet>> replicas;
  DataParallel parallel(*net, devices,
                        [&] { return replicas.emplace_back(std::make_shared<SmallNet>(stage.device())); });
  AdamW optimizer(nn::named_parameters(*net));
  const at::Tensor y = parallel.forward(batch_rows(stage.device()));
  loss_of(y).backward();
  optimizer.step(1e-3);
  const KeptBytes first = kept_by(*net, nn::named_parameters(*net), optimizer, y);
  KeptBytes ddp_rank;
  stage.on_ranks(n, [&](Rank& rank) {
    SmallNet mine(rank.device());
    nn::initialise(mine, kSeed);
    const DistributedDataParallel ddp(mine, rank.world());
    AdamW own(ddp.parameters());
    const at::Tensor outputs = nn::call(mine, batch_rows(rank.device(), rank.number() * kBatch / n, kBatch / n));
    loss_of(outputs).backward();
    own.step(1e-3);
    const KeptBytes kept = kept_by(mine, ddp.parameters(), own, outputs);
    rank.check(kept.total() <= first.total(), "no rank of DDP keeps more than device 0");
    if (rank.number() == 0) ddp_rank = kept;
  });
  stage.print(fmt::format("{:<26} {:>10} {:>10} {:>10} {:>10} {:>10}", "bytes counted after a step", "parameters",
                          "gradients", "optimizer", "outputs", "together"));
  print_kept(stage, "DataParallel, device 0", first);
  if (n > 1) {
    KeptBytes other{.outputs = static_cast<std::int64_t>(y.nbytes()) / n};
    for (const at::Tensor& parameter : replicas.front()->parameters()) other.parameters += bytes_of(parameter);
    print_kept(stage, "DataParallel, each other", other);
    stage.check(first.total() > 3 * other.total(), "device 0 keeps more than three times what another keeps");
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
  stage.check(of_means != whole && weighted == whole, "weighted by rows it is that of the batch");
}

namespace {

/// Which of n parts of its rows a rank keeps: "#..." is the first of four.
std::string kept_parts(const NamedTensor& parameter, int n) {
  std::string parts(static_cast<std::size_t>(n), '#');
  if (!parameter.shard) return parts;
  const std::int64_t rows = parameter.global_shape()[0];
  const Box box = parameter.shard->box();
  for (int i = 0; i < n; ++i) {
    const bool is_kept = box.offsets[0] < rows * (i + 1) / n && box.offsets[0] + box.shape[0] > rows * i / n;
    if (!is_kept) parts[static_cast<std::size_t>(i)] = '.';
  }
  return parts;
}

/// All of them if the rank has memory for all.
std::string parts_of(const at::Tensor& whole, const std::string& kept) {
  return whole.defined() && has_memory(whole) ? std::string(kept.size(), '#') : kept;
}

}  // namespace

void zero3_moments(Stage& stage) {
  const int n = stage.ranks();
  std::vector<std::string> moments;                  // of rank 0
  std::vector<std::vector<std::string>> at_moments;  // each layer
  stage.on_ranks(n, [&](Rank& rank) {
    SmallNet net(rank.device());
    FullyShardedDataParallel sharded(net, mesh_of(rank, {{"dp_shard", n}}));
    sharded.initialise(kSeed);
    std::vector<std::string> names;
    std::vector<std::vector<std::string>> states;
    const auto note = [&](char pass, std::size_t used) {
      names.push_back(fmt::format("{}{}", pass, used));
      states.emplace_back();
      std::size_t whole = 0;
      for (std::size_t i = 0; i < net.layers.size(); ++i) {
        const at::Tensor& weight = net.layers[i]->weight;
        states.back().push_back(parts_of(weight, kept_parts(sharded.parameters()[i], n)));
        whole += has_memory(weight) ? 1 : 0;
      }
      rank.check(has_memory(net.layers[used]->weight), "a layer is whole when it is used");
      rank.check(n == 1 || whole <= 2, "never more than two are");
    };
    for (std::size_t i = 0; i < net.layers.size(); ++i) {
      net.layers[i]->add_pre_forward_hook([&note, i](nn::Module&) { note('F', i); });
    }
    net.with_output = [&](std::size_t layer, const at::Tensor& output) {
      output.register_hook([&note, layer](const at::Tensor&) { note('B', layer); });
    };
    loss_of(nn::call(net, batch_rows(rank.device(), rank.number() * kBatch / n, kBatch / n))).backward();
    rank.check(names.size() == 2 * static_cast<std::size_t>(kLayers), "all layers are used twice");
    if (rank.number() == 0) moments = names, at_moments = states;
  });
  const std::string title = fmt::format("ZeRO-3 on rank 0 of {}: what it has of each layer", n);
  stage.print(title);
  std::string head = "           ";
  std::vector<GridRow> rows(static_cast<std::size_t>(kLayers));
  for (const std::string& moment : moments) head += fmt::format("{:<{}}", moment, n + 1);
  stage.print(head.substr(0, head.find_last_not_of(' ') + 1));
  for (std::size_t layer = 0; layer < rows.size(); ++layer) {
    rows[layer].label = fmt::format("layer {}", layer);
    for (const auto& state : at_moments) rows[layer].cells.push_back(state[layer]);
    stage.print(fmt::format("{}    {}", rows[layer].label, fmt::join(rows[layer].cells, " ")));
  }
  stage.show({picture_of_grid(title, moments, rows)});
}

namespace {

/// A net under DDP (stage 0) or a stage of ZeRO.
struct ZeroNet {
  ZeroNet(Rank& rank, SmallNet& net, int zero) {
    if (zero == 0) {
      nn::initialise(net, kSeed);
      ddp = std::make_unique<DistributedDataParallel>(net, rank.world());
    } else {
      sharded = std::make_unique<FullyShardedDataParallel>(net, mesh_of(rank, {{"dp_shard", rank.ranks()}}),
                                                           FullyShardOptions{.stage = zero});
      sharded->initialise(kSeed);
    }
  }
  const std::vector<NamedTensor>& parameters() const { return sharded ? sharded->parameters() : ddp->parameters(); }
  std::unique_ptr<DistributedDataParallel> ddp;
  std::unique_ptr<FullyShardedDataParallel> sharded;
};

/// After the last step.
KeptBytes train_sharded(Rank& rank, int zero, std::vector<double>& losses) {
  const int n = rank.ranks();
  const at::Tensor x = batch_rows(rank.device(), rank.number() * kBatch / n, kBatch / n);
  SmallNet net(rank.device());
  const ZeroNet wrapped(rank, net, zero);
  AdamW optimizer(wrapped.parameters(), {.weight_decay = 0.01});
  for (int step = 0; step < kTrainingSteps; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss = loss_of(nn::call(net, x));
    loss.backward();
    optimizer.step(1e-3);
    losses.push_back(loss.item<double>());
  }
  return kept_by(net, wrapped.parameters(), optimizer);
}

/// Values of layer 0.
struct LayerValues {
  at::Tensor weight, gradient, moment;
};

at::Tensor first_moment_of(const AdamW& optimizer, const std::string& parameter) {
  TrainState state;
  optimizer.collect_state(state);
  for (const auto& [name, tensor, shard] : state.tensors) {
    if (name == fmt::format("optimizer.{}.exp_avg", parameter)) return tensor;
  }
  return {};
}

/// On one rank with the whole batch: before the second step's update, and after it. On the host.
std::array<LayerValues, 2> second_step_of_one_rank(at::Device device) {
  SmallNet net(device);
  nn::initialise(net, kSeed);
  const std::vector<NamedTensor> parameters = nn::named_parameters(net);
  AdamW optimizer(parameters, {.weight_decay = 0.01});
  const at::Tensor& weight = parameters.front().tensor;
  std::array<LayerValues, 2> values;
  for (LayerValues& after : values) {
    loss_of(nn::call(net, batch_rows(device))).backward();
    after.gradient = weight.grad().cpu().clone();
    optimizer.step(1e-3);
    after.weight = weight.detach().cpu().clone();
    after.moment = first_moment_of(optimizer, parameters.front().name).cpu().clone();
    optimizer.zero_grad();
  }
  values[0].gradient = values[1].gradient;
  return values;
}

/// A mark for each of n parts of the rows, of which `held` has some, from row `first` on: # if their values are the
/// expected ones, o if they are others, . if they are not there.
std::string marks_of(const at::Tensor& held, std::int64_t first, const at::Tensor& expected, int n) {
  std::string marks(static_cast<std::size_t>(n), '.');
  if (!held.defined() || !has_memory(held)) return marks;
  const std::int64_t rows = expected.size(0) / n;
  for (int i = 0; i < n; ++i) {
    const std::int64_t begin = i * rows - first;
    if (begin < 0 || begin + rows > held.size(0)) continue;
    const bool same = are_close(held.detach().narrow(0, begin, rows), expected.narrow(0, i * rows, rows), 1e-4);
    marks[static_cast<std::size_t>(i)] = same ? '#' : 'o';
  }
  return marks;
}

/// What rank r of n has at a moment of a step, by the definition of the stages.
std::string marks_by_definition(int zero, std::string_view moment, int r, int n) {
  const auto size = static_cast<std::size_t>(n), own = static_cast<std::size_t>(r);
  const std::string all(size, '#'), old(size, 'o'), none(size, '.');
  std::string part = none, updated = old;
  part[own] = updated[own] = '#';
  const bool is_used = moment == "all-gather" || moment == "backward";
  const bool is_reduced = moment != "before" && !is_used;
  const std::string& weight = zero == 0 || is_used         ? all
                              : zero == 3                  ? part
                              : moment == "reduce-scatter" ? all
                                                           : updated;
  const std::string& reduced = zero == 0 ? all : zero == 1 ? updated : part;
  const std::string& gradient = is_reduced ? reduced : zero <= 1 || moment == "backward" ? old : none;
  return fmt::format("{}|{}|{}", weight, gradient, zero == 0 ? all : part);
}

/// Takes two steps of AdamW, and notes at the moments of the second one what this rank has of layer 0.
void note_moments(Rank& rank, int zero, const std::string& name, const std::array<LayerValues, 2>& one_rank,
                  Flow& flow) {
  const int n = rank.ranks();
  const at::Tensor x = batch_rows(rank.device(), rank.number() * kBatch / n, kBatch / n);
  SmallNet net(rank.device());
  const at::Tensor weight = net.layers.front()->weight;
  std::function<void(const std::string&, const LayerValues&)> note;     // unset in the first step
  const auto listener = on_grad_ready(weight, [&](const at::Tensor&) {  // before it is reduced
    if (note) note("backward", one_rank[0]);
  });
  const ZeroNet wrapped(rank, net, zero);
  if (zero > 0) {
    net.layers.front()->add_pre_forward_hook([&](nn::Module&) {
      if (note) note("all-gather", one_rank[0]);
    });
  }
  AdamW optimizer(wrapped.parameters(), {.weight_decay = 0.01});
  const auto step = [&] {
    loss_of(nn::call(net, x)).backward();
    if (note) note(zero == 0 ? "all-reduce" : "reduce-scatter", one_rank[0]);
    optimizer.step(1e-3);
    if (note) note("step", one_rank[1]);
    optimizer.zero_grad();
  };
  step();
  note = [&](const std::string& moment, const LayerValues& values) {
    const NamedTensor& own = wrapped.parameters().front();
    const std::int64_t first = own.shard ? own.shard->box().offsets[0] : 0;
    const auto marks = [&](const at::Tensor& whole, const at::Tensor& rows, const at::Tensor& expected) {
      return whole.defined() && has_memory(whole) ? marks_of(whole, 0, expected, n)
                                                  : marks_of(rows, first, expected, n);
    };
    const std::string cell = fmt::format("{}|{}|{}", marks(weight, own.tensor, values.weight),
                                         marks(gradient_of(weight), own.tensor.grad(), values.gradient),
                                         marks({}, first_moment_of(optimizer, own.name), values.moment));
    flow.add(rank, fmt::format("{} {}", name, moment), cell);
    rank.check(n == 1 || cell == marks_by_definition(zero, moment, rank.number(), n),
               "each moment is as the stage says");
  };
  note("before", one_rank[0]);
  step();
}

}  // namespace

void zero_stages(Stage& stage) {
  const int n = stage.ranks();
  const std::vector<double> alone = losses_of_one_rank(stage.device());
  const std::array<LayerValues, 2> one_rank = second_step_of_one_rank(stage.device());
  Flow flow(n);
  stage.print(fmt::format("{:<8}{:>12}{:>12}{:>12}", "bytes", "parameters", "gradients", "optimizer"));
  for (int zero = 0; zero <= 3; ++zero) {
    const std::string name = zero == 0 ? "DDP" : fmt::format("ZeRO-{}", zero);
    KeptBytes of_rank_0;
    stage.on_ranks(n, [&](Rank& rank) {
      std::vector<double> losses;
      const KeptBytes found = train_sharded(rank, zero, losses);
      if (rank.number() == 0) of_rank_0 = found;
      const std::int64_t size = kLayers * kDim * kDim, shared_out = zero == 0 ? 0 : 4 * (zero + 1);  // of 16 bytes each
      const std::int64_t counts = 4 * kLayers;  // the optimizer's count of steps, of each weight
      rank.check(found.total() == size * (16 - shared_out) + size * shared_out / n + counts,
                 "bytes are 16P, 8P + 8P/n, 4P + 12P/n and 16P/n, and 16 for counts of steps");
      for (double& value : losses) value = mean_over(rank, value);
      rank.check(same_losses(losses, alone), "every stage has the losses of one rank");
      note_moments(rank, zero, name, one_rank, flow);
    });
    stage.print(
        fmt::format("{:<8}{:>12}{:>12}{:>12}", name, of_rank_0.parameters, of_rank_0.gradients, of_rank_0.optimizer));
  }
  stage.show({});
  flow.show(stage, "weight, gradient, exp_avg of layer 0: coloured what counts, plain other values, dashed nothing");
}

}  // namespace phalanx::lecture
