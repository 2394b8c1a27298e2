// What a sharded training step costs if plain modules are gathered on use, next to the same modules with hooks (as the
// children of a Sequential), in one run. Both nets are of Llama's blocks, without rotary embeddings, in torch::nn
// modules. The ranks are threads.
//
//   OMP_NUM_THREADS=1 gather_on_use [blocks=8] [width=256] [tokens=128] [ranks=2] [steps=30]
//
// The medians of alternating steps: CPU time of the process, in ms, and their ratio (below 1: on use is cheaper).
#include <ATen/Parallel.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

#include "phalanx/base/process_stats.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/comm/communicator.h"
#include "phalanx/mesh/device_mesh.h"
#include "phalanx/optim/sgd.h"
#include "phalanx/parallel/fsdp/fully_shard.h"

namespace {

namespace nn = torch::nn;

struct Sizes {
  std::int64_t blocks = 8, width = 256, tokens = 128;
  int ranks = 2, steps = 30;
};
constexpr std::int64_t kHeadWidth = 64, kVocabulary = 4096, kBatch = 2;

struct RmsNorm : nn::Module {
  explicit RmsNorm(std::int64_t width) : weight(register_parameter("weight", at::ones({width}))) {}
  at::Tensor forward(const at::Tensor& x) {
    return x * at::rsqrt(x.square().mean(-1, /*keepdim=*/true) + 1e-5) * weight;
  }
  at::Tensor weight;
};

nn::Linear linear(std::int64_t in, std::int64_t out) { return nn::Linear(nn::LinearOptions(in, out).bias(false)); }

struct Block : nn::Module {
  explicit Block(std::int64_t width)
      : attention_norm(register_module("attention_norm", std::make_shared<RmsNorm>(width))),
        ffn_norm(register_module("ffn_norm", std::make_shared<RmsNorm>(width))),
        wq(register_module("wq", linear(width, width))),
        wk(register_module("wk", linear(width, width))),
        wv(register_module("wv", linear(width, width))),
        wo(register_module("wo", linear(width, width))),
        w1(register_module("w1", linear(width, width * 8 / 3))),
        w2(register_module("w2", linear(width * 8 / 3, width))),
        w3(register_module("w3", linear(width, width * 8 / 3))) {}
  at::Tensor forward(at::Tensor x) {  // [batch, seq, width]
    x = x + attention(attention_norm->forward(x));
    const at::Tensor h = ffn_norm->forward(x);
    return x + w2->forward(at::silu(w1->forward(h)) * w3->forward(h));
  }
  at::Tensor attention(const at::Tensor& x) {
    const auto heads = [&](const at::Tensor& all) { return all.unflatten(-1, {-1, kHeadWidth}).transpose(1, 2); };
    const at::Tensor out =
        at::scaled_dot_product_attention(heads(wq->forward(x)), heads(wk->forward(x)), heads(wv->forward(x)),
                                         /*attn_mask=*/{}, /*dropout_p=*/0, /*is_causal=*/true);
    return wo->forward(out.transpose(1, 2).flatten(2));
  }
  std::shared_ptr<RmsNorm> attention_norm, ffn_norm;
  nn::Linear wq, wk, wv, wo, w1, w2, w3;
};

struct Plain : nn::Module {
  explicit Plain(const Sizes& sizes)
      : embedding(register_module("embedding", nn::Embedding(kVocabulary, sizes.width))),
        blocks(register_module("blocks", nn::ModuleList())),
        norm(register_module("norm", std::make_shared<RmsNorm>(sizes.width))),
        head(register_module("head", linear(sizes.width, kVocabulary))) {
    for (std::int64_t i = 0; i < sizes.blocks; ++i) blocks->push_back(std::make_shared<Block>(sizes.width));
  }
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor x = embedding->forward(tokens);
    for (const auto& block : *blocks) x = static_cast<Block&>(*block).forward(x);
    return head->forward(norm->forward(x));
  }
  nn::Embedding embedding;
  nn::ModuleList blocks;
  std::shared_ptr<RmsNorm> norm;
  nn::Linear head;
};

nn::Sequential in_sequence(const Sizes& sizes) {
  nn::Sequential net(nn::Embedding(kVocabulary, sizes.width));
  for (std::int64_t i = 0; i < sizes.blocks; ++i) net->push_back(std::make_shared<Block>(sizes.width));
  net->push_back(std::make_shared<RmsNorm>(sizes.width));
  net->push_back(linear(sizes.width, kVocabulary));
  return net;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// CPU time of a step of all ranks together, in ms. The same on all ranks.
double step_time(phalanx::Communicator& world, const std::function<void()>& step) {
  world.barrier();
  const double begin = phalanx::process_cpu_seconds();
  world.barrier();
  step();
  world.barrier();
  return 1e3 * (phalanx::process_cpu_seconds() - begin);
}

void compare(const std::shared_ptr<phalanx::Communicator>& world, const Sizes& sizes) {
  Plain plain(sizes);
  nn::Sequential hooked = in_sequence(sizes);
  const phalanx::DeviceMesh mesh(world, {{"dp_shard", world->size()}});
  phalanx::FullyShardedDataParallel on_use(plain, mesh, {.gather_on_use = true}), hooks(*hooked, mesh);
  phalanx::Sgd first(on_use.parameters()), second(hooks.parameters());
  const at::Tensor tokens = at::randint(kVocabulary, {kBatch, sizes.tokens}, at::kLong);
  const auto step = [&](auto& net, phalanx::Sgd& optimizer) {
    at::cross_entropy_loss(net.forward(tokens).flatten(0, 1), tokens.flatten()).backward();
    optimizer.step(1e-3);
    optimizer.zero_grad();
  };
  std::vector<double> own, other;
  for (int i = 0; i < sizes.steps + 3; ++i) {  // the first three warm up
    own.push_back(step_time(*world, [&] { step(plain, first); }));
    other.push_back(step_time(*world, [&] { step(*hooked, second); }));
  }
  own.erase(own.begin(), own.begin() + 3);
  other.erase(other.begin(), other.begin() + 3);
  if (world->rank() > 0) return;
  std::printf("%lld blocks, width %lld, %lld tokens a rank, %d ranks\n%10s %10s %7s\n%10.2f %10.2f %7.3f\n",
              static_cast<long long>(sizes.blocks), static_cast<long long>(sizes.width),
              static_cast<long long>(kBatch * sizes.tokens), world->size(), "on use ms", "hooks ms", "ratio",
              median(own), median(other), median(own) / median(other));
}

}  // namespace

int main(int argc, char** argv) {
  const auto argument = [&](int index, std::int64_t otherwise) {
    return argc > index ? std::atoll(argv[index]) : otherwise;
  };
  const Sizes sizes{.blocks = argument(1, 8),
                    .width = argument(2, 256),
                    .tokens = argument(3, 128),
                    .ranks = static_cast<int>(argument(4, 2)),
                    .steps = static_cast<int>(argument(5, 30))};
  phalanx::run_local_ranks(sizes.ranks,
                           [&](const std::shared_ptr<phalanx::Communicator>& world) { compare(world, sizes); });
}
