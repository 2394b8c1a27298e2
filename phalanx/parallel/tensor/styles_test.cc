// A small net split by each style against the same net on one rank: the same initial values to the bit, and the same
// outputs and gradients of every parameter's own part.
#include "phalanx/parallel/tensor/styles.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/kernels/fused_linear.h"
#include "phalanx/nn/dropout.h"
#include "phalanx/nn/embedding.h"
#include "phalanx/nn/feed_forward.h"
#include "phalanx/nn/fused_linear.h"
#include "phalanx/nn/init.h"
#include "phalanx/nn/linear.h"
#include "phalanx/nn/rms_norm.h"
#include "phalanx/parallel/tensor/functional_collectives.h"
#include "phalanx/tensor/grad_ready.h"
#include "phalanx/tensor/narrow_to_box.h"

namespace phalanx {
namespace {

using Comm = std::shared_ptr<Communicator>;

constexpr std::int64_t kRows = 4, kSeq = 8, kDim = 12, kHidden = 16, kVocab = 20;

/// ids [rows, seq] -> [rows, seq, dim]: embedding, then norm, in_proj, relu, out_proj, with biases.
struct StyledNet : nn::Module {
  explicit StyledNet(nn::TensorOptionsOfModule tensor = {}) : nn::Module("StyledNet") {
    embedding =
        register_module("embedding", std::make_shared<nn::Embedding>(nn::EmbeddingOptions{kVocab, kDim}, tensor));
    norm = register_module("norm", std::make_shared<nn::RMSNorm>(kDim, 1e-5, tensor));
    in_proj = register_module("in_proj", std::make_shared<nn::Linear>(nn::LinearOptions{kDim, kHidden, true}, tensor));
    out_proj =
        register_module("out_proj", std::make_shared<nn::Linear>(nn::LinearOptions{kHidden, kDim, true}, tensor));
    const Init wide = Init::normal(0.0, 0.5);  // biases that matter
    for (const auto& linear : {in_proj, out_proj}) {
      linear->set_init("bias", wide);
      linear->set_init("weight", wide);
    }
    embedding->set_init("weight", wide);
  }
  at::Tensor forward(const at::Tensor& ids) {
    return call(out_proj, at::relu(call(in_proj, call(norm, call(embedding, ids)))));
  }
  std::shared_ptr<nn::Embedding> embedding;
  std::shared_ptr<nn::RMSNorm> norm;
  std::shared_ptr<nn::Linear> in_proj, out_proj;
};

at::Tensor styled_ids() { return at::arange(kRows * kSeq, at::kLong).mul(7).remainder(kVocab).view({kRows, kSeq}); }
at::Tensor weights_of_outputs(at::IntArrayRef shape) {
  return at::sin(at::arange(kRows * kSeq * kDim, at::kFloat).mul(0.61)).view({kRows, kSeq, kDim}).view(shape);
}

struct Expected {
  at::Tensor output;
  std::map<std::string, at::Tensor> values, grads;
};

Expected on_one_rank() {
  StyledNet net;
  nn::initialise(net, 3);
  Expected result;
  result.output = nn::call(net, styled_ids());
  (result.output * weights_of_outputs({kRows, kSeq, kDim})).sum().backward();
  for (const auto& p : net.named_parameters()) {
    result.values[p.key()] = p.value().detach();
    result.grads[p.key()] = p.value().grad();
  }
  return result;
}

void expect_parts(const StyledNet& net, const Expected& one) {
  for (const auto& [name, tensor, shard] : nn::named_parameters(net)) {
    SCOPED_TRACE(name);
    ASSERT_TRUE(shard);
    EXPECT_EQ(shard->spec.shape(), one.values.at(name).sizes().vec());
    EXPECT_TRUE(at::equal(tensor, narrow_to_box(one.values.at(name), shard->box())));
    ASSERT_TRUE(tensor.grad().defined());
    EXPECT_TRUE(at::allclose(tensor.grad(), narrow_to_box(one.grads.at(name), shard->box()), 1e-5, 1e-5));
  }
}

// The output in layout `layout`, and each rank's share of the loss.
void expect_same_net(const Comm& comm, const Expected& one, const std::vector<ParallelStyle>& plan,
                     const ActivationLayout& output, bool without_memory = false) {
  const DeviceMesh mesh(comm, {{"tp", comm->size()}});
  StyledNet net({.without_memory = without_memory});
  if (!without_memory) nn::initialise(net, 3);
  std::map<std::string, int> ready;
  parallelize_module(net, mesh, plan);
  if (without_memory) nn::initialise(net, 3);
  std::vector<GradReadySubscription> subscriptions;
  std::map<std::string, at::Tensor> at_event;
  for (const auto& p : net.named_parameters()) {
    subscriptions.push_back(on_grad_ready(p.value(), [&, name = p.key()](const at::Tensor& w) {
      ++ready[name];
      at_event[name] = w.grad().clone();
    }));
  }
  const at::Tensor y = nn::call(net, styled_ids());
  const at::Tensor w = weights_of_outputs({kRows, kSeq, kDim});
  const bool is_split = output.kind == ActivationLayout::Kind::split;
  const at::Tensor expected = is_split ? scatter_to_group(one.output.detach(), output.dim, comm) : one.output;
  EXPECT_TRUE(at::allclose(y, expected, 1e-5, 1e-5));
  (y * (is_split ? scatter_to_group(w, output.dim, comm) : w)).sum().backward();
  expect_parts(net, one);
  for (const auto& p : net.named_parameters()) {  // once, and finished
    EXPECT_EQ(ready[p.key()], 1) << p.key();
    EXPECT_TRUE(at::equal(at_event[p.key()], p.value().grad())) << p.key();
  }
}

class Styles : public ::testing::TestWithParam<int> {};

TEST_P(Styles, EachFormEqualsOneRank) {
  const Expected one = on_one_rank();
  const ActivationLayout whole = ActivationLayout::replicated(), parts = ActivationLayout::split(1);
  run_local_ranks(GetParam(), [&](const Comm& comm) {
    expect_same_net(comm, one, {}, whole);
    expect_same_net(comm, one, {{"in_proj", ColwiseParallel{}}, {"out_proj", RowwiseParallel{}}}, whole);
    expect_same_net(comm, one, {{"in_proj", ColwiseParallel{}}, {"out_proj", RowwiseParallel{}}}, whole,
                    /*without_memory=*/true);
    expect_same_net(comm, one, {{"*_proj", ColwiseParallel{.output = whole}}}, whole);
    expect_same_net(comm, one, {{"*_proj", RowwiseParallel{.input = whole}}}, whole);
    expect_same_net(comm, one, {{"embedding", RowwiseParallel{}}}, whole);
    expect_same_net(comm, one, {{"embedding", ColwiseParallel{.output = whole}}}, whole);
    // Sequence-parallel: parts of the sequence between the layers.
    const std::vector<ParallelStyle> sequence = {{"embedding", RowwiseParallel{.output = parts}},
                                                 {"norm", SequenceParallel{}},
                                                 {"in_proj", ColwiseParallel{.input = parts}},
                                                 {"out_proj", RowwiseParallel{.output = parts}}};
    expect_same_net(comm, one, sequence, parts);
    expect_same_net(comm, one, sequence, parts, /*without_memory=*/true);
    // The same, prepared from outside, and gathered again at the end.
    expect_same_net(comm, one,
                    {{"embedding", ColwiseParallel{.output = whole}},
                     {"embedding", PrepareModuleOutput{.from = whole, .to = parts}},
                     {"norm", SequenceParallel{}},
                     {"in_proj", PrepareModuleInput{}},
                     {"in_proj", ColwiseParallel{.input = ActivationLayout::shared()}},
                     {"out_proj", RowwiseParallel{.output = parts}},
                     {"out_proj", PrepareModuleOutput{}}},
                    whole);
    // Parts of the batch work as well.
    const ActivationLayout rows = ActivationLayout::split(0);
    expect_same_net(comm, one,
                    {{"embedding", RowwiseParallel{.output = rows}},
                     {"norm", SequenceParallel{}},
                     {"in_proj", ColwiseParallel{.input = rows}},
                     {"out_proj", RowwiseParallel{.output = rows}}},
                    rows);
    // Products that overlap with the exchange, in both layers.
    for (const ActivationLayout& between : {rows, parts}) {
      expect_same_net(comm, one,
                      {{"embedding", RowwiseParallel{.output = between}},
                       {"norm", SequenceParallel{}},
                       {"in_proj", ColwiseParallel{.input = between, .overlap = true}},
                       {"out_proj", RowwiseParallel{.output = between, .overlap = true}}},
                      between);
    }
  });
}
INSTANTIATE_TEST_SUITE_P(Worlds, Styles, ::testing::Values(1, 2, 4));

// Rank 1 enters the collective of the input's gradient only after rank 0 has reported a weight's gradient, which rank 0
// computes while it waits in that collective.
TEST(StylesOverlap, WeightGradientsAreComputedWhileTheInputsIsUnderWay) {
  for (const bool sequence : {false, true}) {
    run_local_ranks(
        2,
        [&](const Comm& comm) {
          const auto aside = comm->split(0, comm->rank(), "aside");
          struct Net : nn::Module {
            Net() : nn::Module("Net") {
              fc = register_module("fc", std::make_shared<nn::Linear>(nn::LinearOptions{4, 6}));
            }
            std::shared_ptr<nn::Linear> fc;
          } net, one;
          const ActivationLayout between = sequence ? ActivationLayout::split(0) : ActivationLayout::replicated();
          parallelize_module(net, DeviceMesh(comm, {{"tp", 2}}), {{"fc", ColwiseParallel{.input = between}}});
          nn::initialise(net, 1);
          nn::initialise(one, 1);
          const at::Tensor all = at::sin(at::arange(32, at::kFloat)).view({8, 4});
          const at::Tensor x = (sequence ? scatter_to_group(all, 0, comm) : all.clone()).requires_grad_();
          const at::Tensor flag = at::zeros({1});
          const auto subscription = on_grad_ready(net.fc->weight, [&](const at::Tensor&) {
            if (comm->rank() == 0) aside->send(flag, 1);
          });
          const at::Tensor y = nn::call(net.fc, x);
          const at::Tensor waiting = y * 1.0;
          if (comm->rank() == 1)
            waiting.register_hook([&](const at::Tensor& grad) {
              aside->recv(flag, 0);
              return grad;
            });
          waiting.square().sum().backward();
          const at::Tensor whole = all.clone().requires_grad_();
          nn::call(one.fc, whole).square().sum().backward();
          EXPECT_TRUE(
              at::allclose(x.grad(), sequence ? scatter_to_group(whole.grad(), 0, comm) : whole.grad(), 1e-5, 1e-6));
          EXPECT_TRUE(at::allclose(net.fc->weight.grad(), one.fc->weight.grad().narrow(0, comm->rank() * 3, 3)));
        },
        {.first_timeout = std::chrono::seconds(60)});
  }
}

TEST(StylesWithCopies, NeighboursHoldTheSameRowsAndTheirGradientsAreSummed) {
  run_local_ranks(4, [](const Comm& comm) {
    const DeviceMesh mesh(comm, {{"tp", 4}});
    struct Net : nn::Module {
      Net() : nn::Module("Net") {
        k = register_module("k", std::make_shared<nn::Linear>(nn::LinearOptions{3, 4, true}));
      }
      std::shared_ptr<nn::Linear> k;
    } net, one;
    parallelize_module(net, mesh, {{"k", ColwiseParallel{.copies = 2}}});
    nn::initialise(net, 5);
    nn::initialise(one, 5);
    const auto parameters = nn::named_parameters(net);
    EXPECT_EQ(parameters[0].shard->spec.text(), "'k.weight' float32[4, 3] on (tp_part=2, tp_copy=2): tp_part:S(0)");
    const std::int64_t first = comm->rank() / 2 * 2;
    EXPECT_EQ(parameters[0].shard->box(), (Box{{first, 0}, {2, 3}}));
    EXPECT_EQ(parameters[0].shard->is_first_holder(), comm->rank() % 2 == 0);
    const at::Tensor x = at::sin(at::arange(15, at::kFloat)).view({5, 3});
    // Each rank multiplies its outputs with different weights; one rank uses all of them with all weights.
    nn::call(net.k, x).mul(comm->rank() + 1).sum().backward();
    const at::Tensor y = nn::call(one.k, x);
    (y.narrow(1, 0, 2).sum() * 3 + y.narrow(1, 2, 2).sum() * 7).backward();
    EXPECT_TRUE(at::allclose(net.k->weight.grad(), one.k->weight.grad().narrow(0, first, 2)));
    EXPECT_TRUE(at::allclose(net.k->bias.grad(), one.k->bias.grad().narrow(0, first, 2)));
  });
}

/// [gate; up] and a down projection; [q; k; v], where k and v have fewer rows.
struct FusedNet : nn::Module {
  explicit FusedNet(nn::TensorOptionsOfModule tensor = {}, bool bias = false) : nn::Module("FusedNet") {
    // Two of the three parts have a bias.
    const std::vector<nn::FusedPart> parts = {{"q", 8, bias}, {"k", 4, bias}, {"v", 4}};
    inner = register_module("inner", std::make_shared<nn::FusedLinear>(6, parts, tensor));
    for (const nn::FusedPart& part : parts) {
      if (part.bias) inner->set_init(part.bias_name(), Init::normal(0.0, 1.0));
    }
    down = register_module("down", std::make_shared<nn::Linear>(nn::LinearOptions{8, 6}, tensor));
  }
  // Each query row is combined with the key and value of its group of rows, wherever that is.
  at::Tensor forward(const at::Tensor& x) {
    const auto qkv = inner->parts(nn::call(inner, x));
    const auto grouped = [](const at::Tensor& t, std::int64_t size) { return t.unflatten(-1, {-1, size}); };
    const at::Tensor kv = at::sin(qkv[1]) * qkv[2];
    const std::int64_t share = qkv[0].size(-1) / kv.size(-1);
    return nn::call(down, (grouped(qkv[0], share) * kv.unsqueeze(-1)).flatten(-2));
  }
  std::shared_ptr<nn::FusedLinear> inner;
  std::shared_ptr<nn::Linear> down;
};

void expect_fused_parts(const Comm& comm, const std::vector<ParallelStyle>& plan, int split_dim, bool without_memory,
                        bool bias = false) {
  const at::Tensor all = at::sin(at::arange(4 * 4 * 6, at::kFloat).mul(0.7)).view({4, 4, 6});
  FusedNet one({}, bias);
  nn::initialise(one, 8);
  const at::Tensor expected = nn::call(one, all);
  const at::Tensor w = at::sin(at::arange(4 * 4 * 6, at::kFloat).mul(0.3)).view({4, 4, 6});
  (expected * w).sum().backward();
  FusedNet net({.without_memory = without_memory}, bias);
  if (!without_memory) nn::initialise(net, 8);
  parallelize_module(net, DeviceMesh(comm, {{"tp", comm->size()}}), plan);
  if (without_memory) nn::initialise(net, 8);
  EXPECT_TRUE(kernels::are_adjacent({net.inner->weight("q"), net.inner->weight("k"), net.inner->weight("v")}));
  const auto part = [&](const at::Tensor& t) { return split_dim < 0 ? t : scatter_to_group(t, split_dim, comm); };
  const at::Tensor y = nn::call(net, part(all));
  EXPECT_TRUE(at::allclose(y, part(expected), 1e-5, 1e-5));
  (y * part(w)).sum().backward();
  const auto whole = nn::named_parameters(one);
  const auto parts = nn::named_parameters(net);
  ASSERT_EQ(parts.size(), bias ? 6 : 4);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    SCOPED_TRACE(parts[i].name);
    EXPECT_EQ(parts[i].name, whole[i].name);
    const Box box = parts[i].shard->box();
    EXPECT_EQ(parts[i].shard->spec.shape(), whole[i].tensor.sizes().vec());
    EXPECT_TRUE(at::equal(parts[i].tensor, narrow_to_box(whole[i].tensor.detach(), box)));
    EXPECT_TRUE(at::allclose(parts[i].tensor.grad(), narrow_to_box(whole[i].tensor.grad(), box), 1e-5, 1e-5));
  }
}

TEST(StylesOfFusedWeights, TheProductIsThoseOfThePartsSideBySide) {
  FusedNet net({}, /*bias=*/true);
  nn::initialise(net, 8);
  const auto p = net.inner->named_parameters();
  const at::Tensor x = at::sin(at::arange(18, at::kFloat)).view({3, 6});
  const auto y = net.inner->parts(nn::call(net.inner, x));
  EXPECT_TRUE(at::allclose(y[0], at::linear(x, p["q"], p["q_bias"])));
  EXPECT_TRUE(at::allclose(y[1], at::linear(x, p["k"], p["k_bias"])));
  EXPECT_TRUE(at::allclose(y[2], at::linear(x, p["v"])));
}

TEST(StylesOfFusedWeights, EachPartIsSplitByRowsAndEqualsOneRank) {
  for (const int ranks : {1, 2, 4}) {
    run_local_ranks(ranks, [](const Comm& comm) {
      for (const bool without_memory : {false, true}) {
        for (const bool bias : {false, true}) {
          expect_fused_parts(comm, {{"inner", ColwiseParallel{}}, {"down", RowwiseParallel{}}}, -1, without_memory,
                             bias);
        }
      }
      for (const int dim : {0, 1}) {
        for (const bool overlap : {false, true}) {
          const ActivationLayout between = ActivationLayout::split(dim);
          expect_fused_parts(comm,
                             {{"inner", ColwiseParallel{.input = between, .overlap = overlap}},
                              {"down", RowwiseParallel{.output = between, .overlap = overlap}}},
                             comm->size() == 1 ? -1 : dim, true, overlap);
        }
      }
    });
  }
}

// Eight ranks: four rows of keys and of values, each held by two neighbouring ranks.
TEST(StylesOfFusedWeights, PartsOfFewerRowsThanRanksAreHeldByNeighbours) {
  run_local_ranks(8, [](const Comm& comm) {
    const ColwiseParallel inner{.part_copies = {{"k", 2}, {"v", 2}}};
    for (const bool bias : {false, true}) {
      expect_fused_parts(comm, {{"inner", inner}, {"down", RowwiseParallel{}}}, -1, true, bias);
    }
  });
}

TEST(StylesOfFusedWeights, RefusalsNameThePartAndTheNumbers) {
  run_local_ranks(8, [](const Comm& comm) {
    FusedNet net({.without_memory = true});
    const auto refusal = [&](const ColwiseParallel& style, const char* module = "inner") {
      return error_text<ConfigError>([&] {
        parallelize_module(net, DeviceMesh(comm, {{"tp", 8}}), {{module, style}});
      });
    };
    EXPECT_THAT(refusal({}), HasSubstr("'inner.k' [4, 6] cannot be split evenly along dimension 0 over 8 ranks of "
                                       "'tp': 4 % 8 = 4, expected 0"));
    EXPECT_THAT(refusal({.part_copies = {{"keys", 2}}}),
                HasSubstr("part_copies names 'keys', which is no part of it: expected one of q, k, v"));
    EXPECT_THAT(refusal({.part_copies = {{"k", 3}}}), HasSubstr("copies = 3: expected a divisor of the 8 ranks"));
    EXPECT_THAT(refusal({.part_copies = {{"k", 2}}}, "down"), HasSubstr("it is a Linear; expected a FusedLinear"));
    EXPECT_THAT(refusal({.output = ActivationLayout::replicated()}),
                HasSubstr("columns of each part are not one range of all columns, so the output stays split(-1)"));
    EXPECT_THROW(nn::FusedLinear(4, {}), ConfigError);
    EXPECT_THROW(nn::FusedLinear(4, {{"q", 0}}), ConfigError);
    EXPECT_THROW(nn::FusedLinear(4, {{"q", 4}, {"q", 4}}), ConfigError);
  });
}

TEST(StylesOnAMesh, SpecsAreOnTheWholeMesh) {
  run_local_ranks(4, [](const Comm& comm) {
    StyledNet net;
    parallelize_module(net, DeviceMesh(comm, {{"dp", 2}, {"tp", 2}}),
                       {{"in_proj", ColwiseParallel{}}, {"out_proj", RowwiseParallel{}}});
    std::map<std::string, std::string> text;
    for (const auto& p : nn::named_parameters(net)) text[p.name] = p.shard->spec.text();
    EXPECT_EQ(text["in_proj.weight"], "'in_proj.weight' float32[16, 12] on (dp=2, tp=2): tp:S(0)");
    EXPECT_EQ(text["out_proj.weight"], "'out_proj.weight' float32[12, 16] on (dp=2, tp=2): tp:S(1)");
    EXPECT_EQ(text["out_proj.bias"], "'out_proj.bias' float32[12] on (dp=2, tp=2): replicated");
    EXPECT_EQ(net.out_proj->weight.sizes().vec(), (std::vector<std::int64_t>{12, 8}));
  });
}

TEST(StylesOfDropout, PartsDropTheirPartOfTheWholeMask) {
  run_local_ranks(2, [](const Comm& comm) {
    const at::Tensor x = at::sin(at::arange(4 * 6 * 8, at::kFloat)).view({4, 6, 8});
    nn::Dropout whole(0.4);
    whole.rng_state("layer", {.seed = 1, .step = 2, .first_row = 3});
    const at::Tensor expected = nn::call(whole, x);
    for (const int dim : {0, 1}) {
      struct Net : nn::Module {
        Net() : nn::Module("Net") { drop = register_module("drop", std::make_shared<nn::Dropout>(0.4)); }
        std::shared_ptr<nn::Dropout> drop;
      } net;
      parallelize_module(net, DeviceMesh(comm, {{"tp", 2}}), {{"drop", SequenceParallel{.dim = dim}}});
      net.drop->rng_state("layer", {.seed = 1, .step = 2, .first_row = 3});
      EXPECT_TRUE(at::equal(nn::call(net.drop, scatter_to_group(x, dim, comm)), scatter_to_group(expected, dim, comm)))
          << dim;
    }
    for (const int dim : {0, 1, -1}) {
      nn::Dropout part(0.4);
      part.rng_state("layer", {.seed = 1, .step = 2, .first_row = 3});
      part.set_split({.dim = dim, .part = comm->rank(), .parts = 2});
      EXPECT_TRUE(at::equal(nn::call(part, scatter_to_group(x, dim, comm)), scatter_to_group(expected, dim, comm)))
          << dim;
    }
    // Replicated activations: the same mask everywhere, without communication.
    const at::Tensor other = expected.clone();
    comm->broadcast(other, {.root = 1});
    EXPECT_TRUE(at::equal(other, expected));
  });
}

std::string styles_refusal(const std::vector<ParallelStyle>& plan, int ranks = 2, const std::string& axis = "tp") {
  std::string message;
  run_local_ranks(ranks, [&](const Comm& comm) {
    StyledNet net({.without_memory = true});
    const DeviceMesh mesh(comm, {{axis, ranks}});
    try {
      parallelize_module(net, mesh, plan);
    } catch (const ConfigError& error) {
      if (comm->rank() == 0) message = error.what();
    }
    EXPECT_EQ(net.in_proj->weight.size(0), kHidden);  // nothing has changed
  });
  return message;
}

TEST(StylesErrors, SayWhatIsWrongAndWhatWouldDo) {
  EXPECT_THAT(styles_refusal({{"in_prj", ColwiseParallel{}}}), HasSubstr("in_proj"));
  EXPECT_THAT(styles_refusal({}, 2, "dp"), HasSubstr("no axis 'tp'"));
  const std::string uneven = styles_refusal({{"in_proj", ColwiseParallel{}}}, 3);
  EXPECT_THAT(uneven, HasSubstr("'in_proj.weight' [16, 12]"));
  EXPECT_THAT(uneven, HasSubstr("16 % 3 = 1, expected 0; the nearest sizes are 15 and 18"));
  EXPECT_THAT(styles_refusal({{"norm", ColwiseParallel{}}}),
              HasSubstr("it is a RMSNorm; expected a Linear or an Embedding"));
  EXPECT_THAT(styles_refusal({{"", SequenceParallel{}}}),
              HasSubstr("expected a norm, a Linear, an Embedding or a Dropout"));
  EXPECT_THAT(styles_refusal({{"*_proj", ColwiseParallel{}}, {"out_proj", RowwiseParallel{}}}),
              HasSubstr("'out_proj' (Rowwise): another entry of the plan has a style for its parameters"));
  EXPECT_THAT(styles_refusal({{"in_proj", ColwiseParallel{.copies = 3}}}),
              HasSubstr("copies = 3: expected a divisor of the 2 ranks"));
  EXPECT_THAT(styles_refusal({{"in_proj", ColwiseParallel{.output = ActivationLayout::replicated(), .copies = 2}}}),
              HasSubstr("the output stays split(-1), found replicated"));
  EXPECT_THAT(styles_refusal({{"in_proj", ColwiseParallel{.input = ActivationLayout::partial(),
                                                          .output = ActivationLayout::partial()}}}),
              HasSubstr("nothing turns split(-1) into partial"));
  EXPECT_THAT(styles_refusal({{"norm", SplitSinks{}}}), HasSubstr("it is a RMSNorm; expected an Attention with sinks"));
  EXPECT_THAT(styles_refusal(
                  {{"norm", PrepareModuleInput{.from = ActivationLayout::shared(), .to = ActivationLayout::split(1)}}}),
              HasSubstr("'norm' (PrepareInput): nothing turns shared into split(1)"));
  EXPECT_THAT(
      styles_refusal({{"in_proj", ColwiseParallel{.overlap = true}}}),
      HasSubstr("'in_proj' (Colwise): products can overlap the exchange of rows only: expected activations split "
                "along another than the last dimension, for example split(1), found replicated"));
  EXPECT_THAT(styles_refusal({{"out_proj", RowwiseParallel{.output = ActivationLayout::split(-1), .overlap = true}}}),
              HasSubstr("found split(-1)"));
  EXPECT_THAT(styles_refusal({{"norm", Overlapped{}}}), HasSubstr("expected an Attention or a FeedForward"));
}

TEST(StylesErrors, AnOverlappedModuleExchangesForItsProjections) {
  run_local_ranks(2, [](const Comm& comm) {
    struct Net : nn::Module {
      Net() : nn::Module("Net") { ffn = register_module("ffn", std::make_shared<nn::FeedForward>(4, 8)); }
      std::shared_ptr<nn::FeedForward> ffn;
    } net;
    const ColwiseParallel inner{.input = ActivationLayout::shared()};
    const auto refusal = [&](const std::vector<ParallelStyle>& plan) {
      return error_text<ConfigError>([&] { parallelize_module(net, DeviceMesh(comm, {{"tp", 2}}), plan); });
    };
    const char* const expected = "'ffn' (Overlapped): it exchanges what its projections take and give; expected";
    EXPECT_THAT(refusal({{"ffn", Overlapped{}}}), HasSubstr(expected));
    EXPECT_THAT(refusal({{"ffn", Overlapped{}}, {"ffn.w[13]", inner}, {"ffn.w2", RowwiseParallel{}}}),
                HasSubstr(expected));
    EXPECT_EQ(refusal({{"ffn", Overlapped{}},
                       {"ffn.w[13]", inner},
                       {"ffn.w2", RowwiseParallel{.output = ActivationLayout::partial()}}}),
              "");
  });
}

TEST(StylesErrors, PlainModulesHaveNoHooksAndAPlanIsSaidOnce) {
  run_local_ranks(2, [](const Comm& comm) {
    const DeviceMesh mesh(comm, {{"tp", 2}});
    struct Plain : torch::nn::Module {
      Plain() { register_module("fc", torch::nn::Linear(4, 4)); }
    } plain;
    EXPECT_THROW(parallelize_module(plain, mesh, {{"fc", ColwiseParallel{}}}), ConfigError);
    StyledNet net;
    parallelize_module(net, mesh, {{"in_proj", ColwiseParallel{}}, {"out_proj", RowwiseParallel{}}});
    EXPECT_THROW(parallelize_module(net, mesh, {{"embedding", RowwiseParallel{}}}), ConfigError);
  });
}

TEST(StylesErrors, AnIdOutsideOfTheVocabularyIsNamed) {
  run_local_ranks(2, [](const Comm& comm) {
    StyledNet net;
    parallelize_module(net, DeviceMesh(comm, {{"tp", 2}}), {{"embedding", RowwiseParallel{}}});
    nn::initialise(net, 1);
    EXPECT_THAT(error_text<DataError>([&] {
                  nn::call(net, at::zeros({1, 2}, at::kLong).fill_(kVocab));
                }),
                HasSubstr("id 20 is outside the vocabulary of 'embedding.weight': expected 0 to 19"));
  });
}

}  // namespace
}  // namespace phalanx
